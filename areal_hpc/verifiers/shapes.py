"""Read what an answer is: a number, words, a formula, or a list, interval, matrix or equation made of such."""

from __future__ import annotations

import re
from functools import lru_cache

from areal_hpc.verifiers import units
from areal_hpc.verifiers.numerals import number
from areal_hpc.verifiers.tidy import match_brace, tidy
from areal_hpc.verifiers.values import Based, Equation, Formula, Group, Matrix, Value, Words, plain

MAX_ITEMS = 200
MAX_DEPTH = 12
MAX_NESTING = 40


class TooDeep(ValueError):
    """More brackets within brackets, or more items, than any honest answer has."""


_RELATIONS = re.compile(r"\\(?:le|ge|ne|approx|in)(?![a-zA-Z])|(?<![\\<>!])=|<|>")
_COMMAS = re.compile(r",(?: ?and )?|;| and | or |\\lor ?|\\vee ?")
_MATRIX = re.compile(r"\\begin ?\{([a-zA-Z]*matrix|array)\}(?:\{[^{}]*\})?(.*)\\end ?\{\1\}", re.DOTALL)
_BASED = re.compile(r"\(?([0-9A-Za-z]+(?:[ ,][0-9A-Za-z]{3,4})*)\)? ?_ ?\{?\(?(?:\\text\{)?(\w+)\}?\)?\}?")
_BASE_WORD = re.compile(r"(\w+) ?\(?(?:\\text\{)? ?\(?(?:in )?base[- ]?\}? ?(\w+) ?\)?\}?\)?")
_BASE_NAMES = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen"
_NAMED_BASES = {name: base for base, name in enumerate(_BASE_NAMES.split("|"))}
_NAME = re.compile(
    r"(?:m ?)?(?:\\(?:angle|triangle|overline|vec|hat|bar|mathbf)\s*)?\{?"
    r"(?:[a-zA-Z]|\\(?!frac|sqrt|sin|cos|tan|log|ln|pi|text|infty)[a-zA-Z]+ ?|[A-Z]{2,4})\}?'*"
    r"(?:_ ?(?:\w|\{[^{}]*\}))?(?:\^\{?-1\}?)?'*(?: ?\((?:[^()=]{1,12})\))?"
    r"|\([a-z](?:, ?[a-z])+\)|\|[A-Z]{2}\||\[[A-Z]{3,6}\]|\\frac\{d ?[a-z]\}\{d ?[a-z]\}|\\mathbb\{P\} ?\([^()]*\)"
)
_LABEL = re.compile(r"(?=.*[A-Za-z]{3})(?:(?:\\text ?\{[^{}]*\}|[A-Za-z]+(?![A-Za-z])) ?)+(?:\([^()]*\))?:?")
_CHOICE = re.compile(
    r"\\text ?\{ ?\(([A-Z])\)(?: ?\}|(?= ))|\{?\(([A-Z])\)\}?|(?:\\text ?\{)?([A-Z])(?:[.):]\}? |\)\}?$)"
)
_OTHER_CHOICE = re.compile(r"\([A-Z]\)|^\W*(?:\\text\W*)?[A-Z]\W*$")
_OPTION = re.compile(r"(?:\\text ?\{ ?)?(?:option|choice|answer) (?:\\text ?\{ ?)?\(?([A-Z])\)?[ }]*", re.IGNORECASE)
_NAMES_IN_TEXT = re.compile(r"\\text ?\{ ?([A-Z]\w+(?:(?:, and |, | and )[A-Z]\w+)+) ?\}")
_EVERYTHING = ("all real numbers", "all reals", "real numbers")
_NOTHING = ("no solution", "no solutions", "no real solution", "no real solutions", "empty set")
_WORDY = re.compile(r"[a-zA-Z]{3,}")


@lru_cache(maxsize=512)
def read(text: str, letters: frozenset[str] = frozenset()) -> Value:
    """Read an answer as it was written; `letters`: units of a single letter that may stand alone (units.split).

    Raises TooDeep.
    """
    if _nesting(text) > MAX_NESTING:
        raise TooDeep("brackets")
    return _read(tidy(text), letters, 0)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _read(text: str, letters: frozenset[str], depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise TooDeep("brackets")
    text = _bare(text.strip())
    key = plain(text)
    if (found := number(text)) is not None:
        return Value(key, found)
    core, unit, scale = units.split(text, letters)
    is_counted = unit or scale != 1 or (core != text and units.says_nothing(text[len(core) :]))  # 18 more
    if is_counted and (found := number(core)) is not None:
        return Value(key, found, unit, scale)
    for reader in (_based, _matrix, _builder, _ratio, _relation, _union, _bracketed, _list, _signs):
        if (value := reader(text, key, letters, depth + 1)) is not None:
            return value
    if choice := _OPTION.fullmatch(text):
        return Value(key, Words(choice[1].lower()))
    if (choice := _CHOICE.match(text)) and not _OTHER_CHOICE.search(text[choice.end() :]):
        return Value(key, Words(next(filter(None, choice.groups())).lower()))
    if names := _NAMES_IN_TEXT.fullmatch(text):
        return _read(names[1], letters, depth + 1)
    if _is_words(text):
        words = _clean_words(text)
        if words in _EVERYTHING:
            return _read(r"(-\infty, \infty)", letters, depth + 1)
        return Value(key, Group("{", (), "}") if words in _NOTHING else Words(words))
    if unit or scale != 1:
        inner = _read(core, letters, depth + 1)
        if not inner.unit:
            return Value(key, inner.body, unit, scale * inner.scale, inner.name, inner.claims, inner.rough)
    return Value(key, Formula(text))


def _bare(text: str) -> str:
    """Without braces, or parentheses that hold no list, around everything."""
    while text[:1] in ("{", "(") and text[0] and match_brace(text, 0) == len(text) - 1:
        inside = text[1:-1].strip()
        if not inside or (text[0] == "(" and len(split_top(inside, _COMMAS)) > 1):
            break
        if text[0] == "(" and re.fullmatch(r"[A-Za-z]", inside):
            return rf"\text{{{inside}}}"
        text = inside
    return text


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """Parts between separators that stand in no bracket, with the separators at odd places."""
    parts, start, depth, i = [], 0, 0, 0
    while i < len(text):
        if depth == 0 and (match := separators.match(text, i)):
            parts += [text[start:i].strip(), match[0].strip()]
            i = start = match.end()
            continue
        if text[i] == "\\":
            depth += text[i + 1 : i + 2] == "{" or text.startswith("begin", i + 1)
            depth -= text[i + 1 : i + 2] == "}" or text.startswith("end", i + 1)
            i += 2
            continue
        depth += text[i] in "([{"
        depth -= text[i] in ")]}"
        depth = max(depth, 0)
        i += 1
    if len(parts) > 2 * MAX_ITEMS:
        raise TooDeep("items")
    return [*parts, text[start:].strip()]


def _based(text: str, key: str, *_: object) -> Value | None:
    match = _BASED.fullmatch(text) or _BASE_WORD.fullmatch(text)
    if match is None:
        return None
    name = match[2].lower()
    base = int(name) if name.isdigit() and len(name) < 3 else _NAMED_BASES.get(name, 0)
    digits = re.sub(r"[ ,]", "", match[1]).upper()
    if not 2 <= base <= 36 or any(not char.isascii() or int(char, 36) >= base for char in digits):
        return None
    if base == 10 and digits.isdigit():
        return Value(key, number(digits) or Words(digits))
    return Value(key, Based(digits.lstrip("0") or "0", base))


def _matrix(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    inner = text
    if match := _MATRIX.fullmatch(text.strip("()[] ")):
        kind = "det" if match[1].startswith(("v", "V")) else "matrix"
        rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
        cells = [[cell.strip() for cell in row.split("&")] for row in rows]
    elif re.fullmatch(r"\[ ?\[.*\] ?\]", inner):
        kind = "matrix"
        rows = [row for row in split_top(inner[1:-1], re.compile(","))[::2] if row]
        if not all(row.startswith("[") and row.endswith("]") for row in rows):
            return None
        cells = [split_top(row[1:-1], re.compile(","))[::2] for row in rows]
    else:
        return None
    if sum(map(len, cells)) > MAX_ITEMS:
        raise TooDeep("items")
    return Value(key, Matrix(tuple(tuple(_read(cell, letters, depth) for cell in row) for row in cells), kind, text))


def _ratio(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    """3 : 4, or a time of day: only the same numbers are the same."""
    parts = [number(part) for part in text.split(":")] if ":" in text else []
    if len(parts) < 2 or None in parts:
        return None
    return Value(key, Group(":", tuple(Value("", part) for part in parts if part), ":"))


def _builder(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    match = re.fullmatch(r"\\\{ ?([a-z])(?: ?\\in ?\\mathbb\{R\})? ?(?:\||:) ?(.*)\\\}", text)
    return _read(match[2], letters, depth) if match else None


def _relation(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    parts = split_top(text, _RELATIONS)
    signs, sides = parts[1::2], parts[::2]
    if not signs or not all(sides):
        return None
    if any(len(split_top(side, _COMMAS)) > 1 for side in (sides[:-1] if signs[-1] == "=" else sides)):
        return None
    if signs == [r"\in"]:
        return _named(sides[0], _read(sides[1], letters, depth), key)
    if set(signs) <= {"=", r"\approx"}:
        if len(split_top(sides[-1], _COMMAS)) > 1 and _COMMAS.search(text) and "=" in text.split(",")[-1]:
            return None  # x = 1, y = 2
        return _chain(sides, key, letters, depth, rough=r"\approx" in signs)
    return _inequality(sides, signs, key, letters, depth)


def _chain(sides: list[str], key: str, letters: frozenset[str], depth: int, rough: bool) -> Value | None:
    first, last = sides[0], sides[-1]
    if _is_name(last) and not _is_name(first) and len(sides) == 2:
        first, last = last, first
        sides = [first, last]
    if _is_name(first) or _LABEL.fullmatch(first):
        value = _read(sides[1] if rough else last, letters, depth)
        claims = tuple(_read(side, letters, depth) for side in sides[1:] if side != last and not _is_name(side))
        if rough:
            claims = tuple(_read(side, letters, depth) for side in sides[2:])
        named = _named(first, value, key) if _is_name(first) else value
        return Value(key, named.body, named.unit, named.scale, named.name, claims, rough)
    if rough or not any(_has_letters(side) for side in sides):
        value = _read(sides[0] if rough else last, letters, depth)
        claims = tuple(_read(side, letters, depth) for side in (sides[1:] if rough else sides[:-1]))
        return Value(key, value.body, value.unit, value.scale, None, claims, rough)
    return Value(key, Equation(first, last)) if len(sides) == 2 else None


def _named(name: str, value: Value, key: str) -> Value:
    return Value(key, value.body, value.unit, value.scale, plain(name), value.claims, value.rough)


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and number(text) is None and text not in ("e", "i")


def _has_letters(text: str) -> bool:
    words = re.sub(r"\\text ?\{[^{}]*\}", "", text)
    words = re.sub(r"\\(?!alpha|beta|theta|lambda|mu|phi)[a-zA-Z]+", "", words)
    return re.search(r"[a-zA-Z]", re.sub(r"(?<![a-zA-Z])[ei](?![a-zA-Z])", "", words)) is not None


def _inequality(sides: list[str], signs: list[str], key: str, letters: frozenset[str], depth: int) -> Value | None:
    ups = [sign in ("<", r"\le") for sign in signs]
    if not set(signs) <= {"<", ">", r"\le", r"\ge"} or len(set(ups)) > 1:
        return None
    if not ups[0]:
        sides, signs = sides[::-1], signs[::-1]
    tight = ["]" if sign in (r"\le", r"\ge") else ")" for sign in signs]
    infinity = Value(r"\infty", Formula(r"\infty")), Value(r"-\infty", Formula(r"-\infty"))
    if len(sides) == 3 and _is_name(sides[1]):
        low, high = _read(sides[0], letters, depth), _read(sides[2], letters, depth)
        name, left, right = sides[1], "[" if tight[0] == "]" else "(", tight[1]
    elif len(sides) == 2 and _is_name(sides[0]) and not _has_letters(sides[1]):
        low, high = infinity[1], _read(sides[1], letters, depth)
        name, left, right = sides[0], "(", tight[0]
    elif len(sides) == 2 and _is_name(sides[1]) and not _has_letters(sides[0]):
        low, high = _read(sides[0], letters, depth), infinity[0]
        name, left, right = sides[1], "[" if tight[0] == "]" else "(", ")"
    else:
        return None
    return Value(key, Group(left, (low, high), right), name=plain(name))


def _union(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    parts = split_top(text, re.compile(r"\\cup(?![a-zA-Z]) ?|(?<=[\])]) ?U ?(?=[(\[])"))
    if len(parts) < 3 or not all(parts):
        return None
    return Value(key, Group("u", tuple(_read(part, letters, depth) for part in parts[::2]), "u"))


def _bracketed(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    opening = text[:2] if text.startswith("\\{") else text[:1]
    closing = text[-2:] if text.endswith("\\}") else text[-1:]
    inside = text[len(opening) : len(text) - len(closing)].strip()
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Value(key, Group("{", (), "}"))
    if text == r"\mathbb{R}":
        return _read(r"(-\infty, \infty)", letters, depth)
    if (opening, closing) not in (
        ("\\{", "\\}"),
        ("(", ")"),
        ("[", "]"),
        ("(", "]"),
        ("[", ")"),
        ("]", "["),
        ("]", "]"),
        ("[", "["),
    ):
        return None
    if opening == "]":
        opening = "("
    if closing == "[":
        closing = ")"
    if any(bracket in inside for bracket in ("\\cup", ")(")):
        return None
    parts = _items(inside)
    if not all(parts) or (len(parts) < 2 and opening != "\\{") or not _balanced(inside):
        return None
    items = _flat(parts, letters, depth)
    if opening == "\\{":
        items = list({item.text: item for item in items}.values())
    return Value(key, Group(opening.strip("\\"), tuple(items), closing.strip("\\")))


def _flat(parts: list[str], letters: frozenset[str], depth: int) -> list[Value]:
    """The parts, read; one that is several values by itself (plus-minus) counts as these."""
    items: list[Value] = []
    for part in parts:
        value = _read(part, letters, depth)
        body = value.body
        items += body.items if isinstance(body, Group) and body.opening == "" and value.name is None else [value]
    return items


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if depth < 0:
            return False
    return depth == 0


def _items(text: str) -> list[str]:
    """Parts at commas; where some commas are followed by a blank, only those, as others group thousands."""
    spaced = split_top(text, re.compile(r", (?:and |or )?|; ?| and | or |\\lor ?|\\vee ?"))[::2]
    if len(spaced) > 1:
        return spaced
    return split_top(text, _COMMAS)[::2]


def _list(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    parts = _items(text)
    if len(parts) < 2 or not all(parts):
        return None
    items = _flat(parts, letters, depth)
    if " and " in text and any(item.name and isinstance(item.body, Group) for item in items):
        return Value(key, Formula(text))  # both inequalities at once, no list of intervals
    last = items[-1]
    if last.unit and not any(item.unit for item in items[:-1]):  # 3 and 4 metres
        items = [Value(i.text, i.body, last.unit, last.scale, i.name, i.claims, i.rough) for i in items]
    return Value(key, Group("", tuple(items), ""))


def _signs(text: str, key: str, letters: frozenset[str], depth: int) -> Value | None:
    """Plus-minus is two values."""
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text) or text.count(r"\pm") + text.count(r"\mp") > 4:
        return None
    items = []
    for plus, minus in (("+", "-"), ("-", "+")):
        one = re.sub(r"\\pm(?![a-zA-Z]) ?", plus, text)
        items.append(_read(re.sub(r"\\mp(?![a-zA-Z]) ?", minus, one).removeprefix("+"), letters, depth))
    return Value(key, Group("", tuple(items), ""))


def _is_words(text: str) -> bool:
    if re.search(r"[\d+*/^_=<>|&]", text):
        return False
    bare = re.sub(r"\\text ?\{[^{}]*\}", "", text)
    if "\\" in bare:
        return False
    return r"\text" in text or _WORDY.search(bare) is not None


def _clean_words(text: str) -> str:
    text = re.sub(r"\(([A-Z])\)", r" option\1 ", text)  # (A) is no article
    words = re.sub(r"[^a-z' ]+", " ", text.replace(r"\text", " ").lower()).split()
    return " ".join(word for word in words if word not in ("the", "a", "an") or len(words) == 1)
