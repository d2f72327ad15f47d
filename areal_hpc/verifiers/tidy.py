"""One spelling for every way to write the same mathematics: Unicode and decorated LaTeX become a small LaTeX."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **dict.fromkeys("×✕✖⨯", r" \times "),
    **dict.fromkeys("⋅·∙•∗", r" \cdot "),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("°º˚", r"^\circ "),
    **dict.fromkeys("’‘′`´", "'"),
    **dict.fromkeys("“”„", '"'),
    **{"÷": "/", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge "},
    **{"≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots "},
    **{"⟨": "(", "⟩": ")", "〈": "(", "〉": ")", "√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "∠": r"\angle "},
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "∣": "|", "ⅈ": "i", "ı": "i", "،": ",", "٫": ".", "，": ",", "．": "."},
    **{"℃": "°C", "∧": "^", "ˆ": "^", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil "},
}
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_GREEK = {char: f"\\{unicodedata.name(char).split()[-1].lower()} " for char in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"}
_GREEK |= {char: f"\\{name[1].upper()}{name[2:]}" for char, name in _GREEK.items() if char.isupper()}
_GREEK["λ"], _GREEK["Λ"] = r"\lambda ", r"\Lambda "

_NAMES = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac", "sfrac", "nicefrac"], r"\frac"),
    **dict.fromkeys(["dbinom", "tbinom"], r"\binom"),
    **dict.fromkeys(["leq", "leqslant"], r"\le"),
    **dict.fromkeys(["geq", "geqslant"], r"\ge"),
    **dict.fromkeys(["lt"], "<"),
    **dict.fromkeys(["gt"], ">"),
    **dict.fromkeys(["langle", "lparen", "rangle", "rparen"], ""),
    **dict.fromkeys(["dots", "cdots", "dotsc"], r"\ldots"),
    **dict.fromkeys(["varnothing"], r"\emptyset"),
    **dict.fromkeys(["lvert", "rvert", "vert", "mid"], "|"),
    **dict.fromkeys(["imath", "iota"], "i"),
    **{"neq": r"\ne", "div": "/", "degree": r"^\circ", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]"},
    **{"ast": "*", "colon": ":", "euro": "€", "pounds": "£", "cent": "¢", "percent": r"\%", "thickapprox": r"\approx"},
    **{"langle": "(", "rangle": ")", "lparen": "(", "rparen": ")", "infin": r"\infty", "simeq": r"\approx"},
}
_EMPTY = re.compile(
    "left|right|middle|big|Big|bigl|bigr|Bigl|Bigr|bigg|Bigg|biggl|biggr|Biggl|Biggr|displaystyle|"
    "textstyle|limits|nolimits|boldsymbol|bm|mathbf|mathit|mathsf|mathtt|mathnormal|rm|bf|it|mathop|"
    "protect|large|Large|normalsize|Longrightarrow|Rightarrow|implies|therefore|because|tt|hfill|boxed|"
    "fbox"
)
_TEXTS = re.compile(
    "text|textbf|textit|textrm|textsf|texttt|textnormal|textup|mbox|hbox|mathrm|operatorname|emph|underline"
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\(?:quad|qquad|enspace|thinspace|medspace|nobreakspace)(?![a-zA-Z])|~|\s+")
_FUNCTIONS = re.compile(
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty|alpha|beta|theta"
)
_BARE_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({_FUNCTIONS.pattern})(?![a-zA-Z])")
_WRAPPED = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(.*)\$\$", r"\$([^$]+)\$", r"\\\[(.*)\\\]", r"\\\((.*)\\\)", r"\*\*(.*)\*\*", r"__(.*)__", r'"(.*)"',
        r"`(.*)`", r"'(.*)'", r"\*([^*]*)\*",
    )
]  # fmt: skip
_LABEL = re.compile(
    r"\\text ?\{ ?[a-zA-Z ]*(?:answer|result|total|value)?(?: is|:) ?\}|(?:=|:|\\approx(?![a-zA-Z])) ?", re.IGNORECASE
)
_NO_LABEL = re.compile(r"\b(?:not|than|least|most|never)\b", re.IGNORECASE)
_CLOSES = {"{": "}", "(": ")", "[": "]"}


def match_brace(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, or -1. Escaped braces do not count."""
    opening, closing = text[start], _CLOSES[text[start]]
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        if text[i] == opening:
            depth += 1
        elif text[i] == closing:
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def unwrap(text: str) -> str:
    """Without the dollars, quotes, bold marks and full stops that stand around a whole answer."""
    while True:
        before = text
        text = text.strip().rstrip(".,;:").strip() if not text.endswith(r"\ldots") and not text.endswith("..") else text
        text = re.sub(r"\\[,;: ]?$", "", text) if text.endswith("\\") else text
        for pattern in _WRAPPED:
            if (match := pattern.fullmatch(text)) and not ("$" in pattern.pattern and "$" in match[1]):
                text = match[1]
        if text == before:
            return text


def tidy(text: str) -> str:
    """`text` in one spelling; words stay in `\\text{...}`, one blank between tokens that had any space."""
    text = unwrap(_from_unicode(text))
    text = re.sub(r"\\(?:text)?color ?\{[^{}]*\}|\\(?:checkmark|blacksquare|square|qed)(?![a-zA-Z])", " ", text)
    text = re.sub(r"\\!\s*|\\(?:left|right)\.|\\(?:phantom|hspace|vspace)\*?\{[^{}]*\}", "", text)
    text = text.replace("{,}", ",").replace("\\$", " $ ").replace("{.}", ".")
    text = (
        re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text) if "\\begin" not in text else re.sub(r"\\\\\[[^\]]*\]", r"\\\\", text)
    )
    text = re.sub(r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm) ?\{(\w)\}", r"\1", text)
    text = _SPACES.sub(" ", text)
    text = _COMMAND.sub(_command, text)
    text = _texts(text)
    text = re.sub(r"\\frac ?\{(\\text ?\{[^{}]*\})\} ?\{(\\text ?\{[^{}]*\}(?:\^\{?\d\}?)?)\}", r"\1/\2", text)
    text = text.strip()
    text = text[label.end() :] if (label := _LABEL.match(text)) and not _NO_LABEL.search(label[0]) else text
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ ", text)
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = re.sub(r"\bper cents?\b", "percent", text)
    text = re.sub(r"\b([ap])\.m\b\.?", r"\1m", text)
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    text = _BARE_FUNCTION.sub(r"\\\1", text)
    text = re.sub(r"\\log ?_ ?(?:e(?![a-zA-Z])|\{e\})", r"\\ln", re.sub(r"\\lg(?![a-zA-Z])", r"\\log_{10}", text))
    text = re.sub(r"(?<=\d) ?\\Omega(?![a-zA-Z])", r" \\text{ohm}", text)
    text = re.sub(r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty ", text)
    text = _roots(text)
    return re.sub(r" +", " ", unwrap(text))


def _from_unicode(text: str) -> str:
    text = re.sub(r"[\u00a0\u2000-\u200a\u202f\u205f\u3000]", " ", text)
    text = "".join(char for char in text if unicodedata.category(char) not in ("Cf", "Cc", "Cs") or char in "\n\t")
    if text.isascii():
        return text
    text = re.sub(r"(\d[\u0305]?)*\d\u0305", lambda m: _overlined(m[0]), text)
    for table, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        letters = str.maketrans(table)
        text = re.sub(f"([{re.escape(''.join(table))}]+)", rf"{mark}{{\1}}", text).translate(letters)
    out = []
    for char in text:
        if "FRACTION" in unicodedata.name(char, "") and (parts := unicodedata.normalize("NFKC", char)) != char:
            top, _, bottom = parts.partition("\u2044")
            out.append(rf"\frac{{{top}}}{{{bottom}}}" if bottom.isdigit() else parts)
        else:
            out.append(_SYMBOLS.get(char) or _GREEK.get(char) or char)
    plain = unicodedata.normalize("NFKC", "".join(out))
    plain = "".join(_SYMBOLS.get(char) or _GREEK.get(char) or char for char in plain)
    return "".join(str(unicodedata.digit(c)) if not c.isascii() and c.isdigit() else c for c in plain)


def _overlined(digits: str) -> str:
    """`16̅` (a combining overline after digits) with the repeating part in \\overline."""
    start = next(i for i in range(len(digits)) if digits[i + 1 : i + 2] == "\u0305")
    return f"{digits[:start]}\\overline{{{digits[start:].replace(chr(0x305), '')}}}"


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if _EMPTY.fullmatch(name):
        return ""
    if _TEXTS.fullmatch(name):
        return r"\text"
    return _NAMES.get(name, match[0])


def _texts(text: str) -> str:
    r"""\text of something that is no word, say \text{5} or \mathrm{i}, is the thing itself; nested ones are one."""
    out, i = [], 0
    while (start := text.find(r"\text", i)) >= 0:
        opening = start + 5
        while opening < len(text) and text[opening] == " ":
            opening += 1
        if opening >= len(text) or text[opening] != "{" or (end := match_brace(text, opening)) < 0:
            out.append(text[i:start])
            i = start + 5
            continue
        inside = text[opening + 1 : end].replace(r"\text", "")
        inside = inside.replace("{", "").replace("}", "") if re.search(r"[a-zA-Z]{2}", inside) else inside
        if re.match(r" ?[-$€£]? ?\d", inside) and "\\" not in inside:  # \text{15 cm}
            out.append(text[i:start] + inside)
            i = end + 1
            continue
        is_word = re.search(r"[a-zA-Z]", inside) and inside.strip() not in ("i", "e", "d", "and", "or", "j")
        out.append(text[i:start])
        if inside.strip() in ("and", "or"):
            out.append(f" {inside.strip()} ")
        elif is_word and not re.search(r"[\\=+<>]", inside):
            split = re.sub(r" ?\^ ?\{?(-?\d)\}?", r"}^\1\\text{", inside)  # cm^2
            out.append(rf"\text{{{split}}}".replace(r"\text{}", ""))
        else:
            out.append(inside)
        i = end + 1
    out.append(text[i:])
    return "".join(out)


def _roots(text: str) -> str:
    r"""\sqrt5, \sqrt(5), \sqrt[3](5), \frac12 and x^(1/2) with braces."""
    text = re.sub(r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?(\d) ?\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac ?\{[^{}]*\}) ?(\w)", r"\1{\2}", text)
    text = re.sub(r"\\frac ?([a-zA-Z]) ?(\w)", r"\\frac{\1}{\2}", text)
    out, i = [], 0
    for match in re.finditer(r"(\\sqrt ?(?:\[[^\[\]]*\])? ?|\^ ?)(?=\()", text):
        end = match_brace(text, match.end())
        if end < 0 or match.start() < i:
            continue
        out.append(f"{text[i : match.start()]}{match[1].strip()}{{{text[match.end() + 1 : end]}}}")
        i = end + 1
    text = "".join(out) + text[i:]
    text = re.sub(r"(\\sqrt(?:\[[^\[\]]*\])?) ?(\d+|[a-zA-Z])", r"\1{\2}", text)
    return re.sub(r"\^ ?([+-]?\d+)", r"^{\1}", text)
