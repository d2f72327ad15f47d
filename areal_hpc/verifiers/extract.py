"""Where in a completion the final answer stands."""

from __future__ import annotations

import re
from dataclasses import dataclass

from areal_hpc.verifiers.tidy import match_brace

MAX_BOX = 20_000
DENIED = ""
MAX_BOXES = 50
_TAIL = 4_000
_LONGEST_SENTENCE = 500
"""Characters at the end in which prose is searched."""

_GLUE = re.compile(
    r"(?:[\s$,;.*&~]|\\[,;: ()\[\]]|\\q?quad|\\text ?\{ ?(?:and|or) ?\}|\band\b|\bor\b|\b[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_JOINED = re.compile(r"\band\b|\bor\b|,|;|=")
_DENIED_BEFORE = re.compile(
    r"(?:(?:\bnot|n't|\bnever|\\neq?|≠)(?: be| equal(?: to)?)?|\brul(?:e|es|ed|ing) out|\breject(?:s|ed|ing)?"
    r"|\bexclud(?:e|es|ed|ing)|\b(?:instead of|(?:other|rather) than|different from|(?:anything|all) but))"
    r":?[\s$(\\\[]*$",
    re.IGNORECASE,
)
_WRONG = (
    r"(?:(?:(?:is|was|are|would be|looks|seems|must be)(?! not\b)(?: \w+)?|'s) (?:an? )?"
    r"(?:wrong|incorrect|false|impossible|invalid|mistaken|mistake|error|too (?:large|small|big|many|few))\b"
    r"|(?:(?:(?:is|was|are|would|could|may|must)(?: ?not|n't)|can ?not|can't|'s not)(?: be)?"
    r" (?:the |our |my |an? )?(?:\w+ )?(?:answer|solution|result|right|correct|valid|possible|true|it)\b"
    r"(?! to\b| that\b))"
    r"|(?:does|do)(?: ?not|n't) (?:work|hold|fit|satisfy|check out)\b|fails?\b)"
)
"""What is said of an answer to deny it, without the subject."""
_DENIED_AFTER = re.compile(  # in the sentence of the box
    rf"[\s$)\]\\*,]*{_WRONG}|.{{0,80}}(?:\b(?:but|however),? |- )(?:no, )?(?:that|this|it) ?{_WRONG}",
    re.IGNORECASE,
)
_DISPLAY = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$|\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)
_SENTENCE_END = re.compile(r"\n+|(?<=[.!?])(?<!\\!)(?<!\b[A-Za-z]\.)(?<!\.\.)\s+|(?<=[!?])$")
_CUE = re.compile(
    r"(?:final|correct|my|our|the)?\s*\b(?:answers?|results?|solutions?|(?:correct|right|best) (?:option|choice))\b"
    r"(?:\s+(?:to|of|for|here|then|therefore)\b[^:=]{0,80}?)?"
    r"[*_\s]*(?P<verb>:|=|\b(?:is|are|was|equals|comes to|will be|would be|must be|should be|becomes)\b(?:\s*:)?"
    r"|\b(?:isn't|aren't|wasn't|cannot be|can't be|won't be|is not|are not|was not)\b)[*_\s]*(?P<value>.*)",
    re.IGNORECASE | re.DOTALL,
)
_BACKWARDS = re.compile(
    r"\b(?:is|are|isn't|cannot be|can't be)\s+(?:not\s+)?(?:the|our|my|your)\s+(?:\w+ )?(?:answer|solution|result)\b",
    re.IGNORECASE,
)
_NEGATED_PREFIX = re.compile(
    r"\b(?:no|nobody|none|nothing|if|suppose|assume|assuming|unless|whether|doubt|deny|claims?|guess(?:es|ed)?)\b"
    r"|\b(?:previous|earlier|old|initial|naive|first|tempting|other)\s*$",
    re.IGNORECASE,
)
_IDIOMS = re.compile(
    r"\b(?:not (?:hard|difficult|only)|no (?:doubt|matter|need|other)|without doubt|n't (?:hard|difficult))\b",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"\b(?:not|never|no|neither|nor|less|more|greater|fewer|larger|smaller|bigger|above|below|under|over|least|most|between|but"
    r"|anything|different|other|except|than|wrong|incorrect|unknown|unclear|impossible|hardly|far)\b|n't\b|[<>≠≤≥]",
    re.IGNORECASE,
)
_OPTION = re.compile(r"^(?:option|choice|letter|answer)\s+(?=\(?[A-Z]\b)", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:is|was|are|were|be|looks|seems)\s+(?:\w+\s+)?(?:wrong|incorrect|false|not|impossible)\b", re.IGNORECASE
)
_NEGATION = re.compile(
    r"\b(?:not|never|cannot|no longer|neither|nor|\w+n't|wrong|incorrect|false|untrue|might|could|maybe|perhaps|may"
    r"|differs?|different|than|except|unlike|doubt)\b|≠|\\neq?",
    re.IGNORECASE,
)
_INSTEAD = re.compile(
    r"\b(?:but|rather|instead|it is|it's)\b(?:\s+(?:rather|it is|is))?\s+(?P<value>[^,;]*\S)\s*$", re.IGNORECASE
)
_RETRACTED = re.compile(
    rf"\b(?:that|this|it) ?{_WRONG}|\bi made (?:a|an) (?:mistake|error)\b(?! check)"
    r"|\bwait,|\bscratch that|\bignore that|\bcorrection:|\bno, (?:this|that|it)\b",
    re.IGNORECASE,
)
_GIVEN_UP = re.compile(
    r"\b(?:(?:do|does|did|can|could|will)(?: ?not|n't)|can't|unable to|impossible to|fail(?:ed)? to|no way to)\b"
    r"(?: \w+){0,2}? (?:know|find|determine|solve|compute|answer|figure|tell)\b"
    r"(?=\W*$|(?: out)? (?:how|what|it|this|that"
    r"|(?:the|this|an?) (?:\w+ )?(?:answer|solution|result|problem|question|value))\b)"
    r"|\bi (?:do not|don't) know\b|\b(?:i have )?no idea\b|\bi give up\b|\b(?:answer|result|solution) depends\b",
    re.IGNORECASE,
)
_APPLIED = re.compile(  # words that make another value of the number behind them
    r"\b(?:(?:hal(?:f|ves)|thirds?|fourths?|quarters?|fifths?|sixths?|eighths?|tenths?|roots?|multiples?|factors?"
    r"|divisors?|powers?|reciprocal|inverse|opposite|logarithm|remainder|digits?|complement|parts?|fraction|percent"
    r"|percentage|the (?:sum|product|difference|square|cube|factorial)) of|% of|twice|thrice|double|triple|half|times"
    r"|plus|nearly|almost|(?:divisible|divided|multiplied) by|at (?:least|most)|below|above|under|up to|mod|modulo)"
    r"[\s$(\\\[*]*$",
    re.IGNORECASE,
)
_SIGN_WORD = re.compile(r"(?<![\d$)}\w] )\b(?:minus|negative) +(\$?)(?=[\d.\\$])", re.IGNORECASE)
_CASES = re.compile(
    r"\b(?:if|when|unless|otherwise)\b.*\b(?:if|when|unless|otherwise)\b|\b(?:maybe|perhaps|possibly)\b", re.I
)
_ASIDE = re.compile(r", (?:which is|since|because)\b.*$", re.IGNORECASE | re.DOTALL)
_CONFIRMED = re.compile(r"\b(?:is|was|'s)\s+(?:right|correct)\b", re.IGNORECASE)
_POLITE = re.compile(r"hope|let me know|feel free|happy to|q\.?e\.?d|^\W*$|therefore,?$|thank", re.IGNORECASE)
_CUT = re.compile(
    r"[\s,;(]+(?:not|because|since|which|where|whereas|when|if|instead|rather|but|so|as|assuming|rounded|and not"
    r"|i (?:hope|think|believe))\b.*"
    r"|\s+\((?=[^()]*[a-z]{2,} [a-z]{2,})[^()\\]*\)$|\s+\([a-z]{3,}(?:-[a-z]+)*\)\.?$",
    re.IGNORECASE | re.DOTALL,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:\\.|[^$\n\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_VALUE = re.compile(
    r"(?:(?<![\w.])[-−+])?\s?[$€£¥₹]?\s?(?:\\frac\{[^{}]*\}\{[^{}]*\}"
    r"|(?:\d[\d,.'’_ ]*)?\.?\d+(?:\s?[eE][+-]?\d+)?"
    r"(?:\s*[/^:]\s*\d+)*(?:\s+\d+/\d+)?)"
    r"(?:\s?(?:\\?%|°[CF]?|[€£¢]|(?!(?:is|are|was|of|to|as|by|so|we)\b)[a-zA-Z²³]+(?:\s*/\s*[a-zA-Z]+)?(?:\^\d)?))?"
)
_NO_VALUE_WORD = re.compile(r"[a-zA-Z]{3,}|\b(?:is|it|we|he|so|to|of|at|as|by|be|if)\b", re.IGNORECASE)
_OPENING = re.compile(r"^(?:(?:so|thus|hence|therefore|then|and|now|finally|we (?:get|have))\b[\s,:]*)+", re.IGNORECASE)
_FUNCTION = re.compile(r"\\?(?:sqrt|sin|cos|tan|log|ln|exp|pi)\b")


@dataclass(frozen=True)
class Found:
    """What was given as the answer.

    Attributes:
        text: the last box, or what the prose says.
        several: all boxes side by side with the last one, in order.
        joined: whether words or signs between them say that they belong together (and, or, a comma).
    """

    text: str
    several: tuple[str, ...] = ()
    joined: bool = False


def final_answer(completion: str, prompt: str = "") -> Found | None:
    """The final answer, None if there is none; linear in the length of the completion.

    An unfinished thought, a box that is cut off or empty, and a denied or retracted answer are none.
    """
    spoken = _after_thinking(completion, prompt)
    if spoken is None:
        return None
    start = _last_box(spoken, len(spoken))
    if start >= 0:
        return _boxes(spoken, start)
    text = _prose(spoken[-_TAIL:])
    return Found(text) if text and text.strip(" .*$\\") else None


def _after_thinking(completion: str, prompt: str) -> str | None:
    end = max(completion.rfind(tag) + len(tag) if tag in completion else 0 for tag in ("</think>", "</thinking>"))
    completion = completion[end:]
    if "<think>" not in completion and end:
        return completion
    if "<think>" in completion or prompt.rstrip().endswith("<think>"):
        return None
    return completion


def _last_box(text: str, end: int) -> int:
    return max(text.rfind(name, 0, end) for name in ("\\boxed", "\\fbox", "\\framebox"))


def _box(text: str, start: int) -> tuple[str, int] | None:
    """Content of the box that starts there and the place behind it; None if it is cut off or empty."""
    opening = re.compile(r"\\(?:boxed|fbox|framebox)\s*").match(text, start)
    assert opening is not None
    place = opening.end()
    if text[place : place + 1] != "{":
        token = re.compile(r"-?[\w.,/]*\w").match(text, place)
        is_name = text[place - 1].isalpha() and text[place : place + 1].isalpha()  # of another command: \boxedfoo
        return (token[0], token.end()) if token and not is_name else None
    window = text[place : place + MAX_BOX + 2]
    end = match_brace(window, 0)
    content = window[1:end].strip() if end > 0 else ""
    return (content, place + end + 1) if content else None


def _boxes(text: str, start: int) -> Found | None:
    tail = text[box[1] :] if (box := _box(text, start)) else ""
    for _ in range(MAX_BOXES):
        if start < 0 or not _is_denied(text, start):
            break
        start = _last_box(text, start)
    else:
        start = -1
    if start < 0 or (box and _is_retracted(box[0], tail)):
        stated = _prose(tail[-_TAIL:], loose=False)
        return Found(stated) if stated else None
    last = _box(text, start)
    if last is None:
        return None
    several, joined = [last[0]], False
    while len(several) < MAX_BOXES and (before := _last_box(text, start)) >= 0:
        box = _box(text, before)
        if box is None or box[1] > start or start - box[1] > 40 or not _GLUE.fullmatch(text[box[1] : start]):
            break
        joined = joined or bool(_JOINED.search(text[box[1] : start]))
        several.append(box[0])
        start = before
    unique = list(dict.fromkeys(reversed(several)))
    return Found(last[0], tuple(unique), joined and len(unique) > 1)


def _is_denied(text: str, start: int) -> bool:
    """Whether the sentence around the box that starts there says that this is not the answer."""
    if _DENIED_BEFORE.search(text[max(0, start - 40) : start]):
        return True
    box = _box(text, start)
    sentence = (
        re.match(r"[\s$)\]\\*,]*\?\s+no\b|[^.!?\n]*", text[box[1] : box[1] + _LONGEST_SENTENCE], re.IGNORECASE)
        if box
        else None
    )
    return sentence is not None and ("?" in sentence[0] or bool(_DENIED_AFTER.match(sentence[0].replace("’", "'"))))


def _is_retracted(answer: str, tail: str) -> bool:
    """Whether the sentence behind the last box takes the answer back, and nothing later confirms it."""
    tail = tail.replace("’", "'")
    opening = re.match(r"[^.!?\n]*[.!?\s$)\]\\*]*", tail[:_LONGEST_SENTENCE])
    assert opening is not None
    following = re.match(r"[^.!?\n]*", tail[opening.end() : opening.end() + _LONGEST_SENTENCE])
    assert following is not None
    said = re.sub(r"\bwait,\s*", "", following[0], flags=re.IGNORECASE)
    later = tail[opening.end() + len(following[0]) :]
    if not _RETRACTED.search(said) or re.match(r"\W*if\b", said, re.IGNORECASE):
        return False
    subject = rf"(?:\b(?:it|that|answer|result)|(?<!\w){re.escape(answer)}\W*?)"
    return not re.search(rf"{subject} ?(?:is|was|'s) (?:indeed |actually |still )?(?:right|correct)\b", later)


def _prose(text: str, loose: bool = True) -> str | None:
    """The answer that prose states; if `loose`, also the value that ends it without being called the answer."""
    if "####" in text:
        line, _, rest = text.rpartition("####")[2].strip().partition("\n")
        if not rest.strip() or not re.search(r"[a-zA-Z]{3,}", line):  # else the heading of a section
            return line.strip() or None
        text = rest
    if text.rfind("<answer>") > text.rfind("</answer>"):  # cut off
        return None
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        if re.search(r"</answer>\s*(?:or|,)\s*<answer>", text):
            return ", ".join(tagged)
        text = tagged[-1]
        if not re.search(r"[a-zA-Z]{2,}\s+[a-zA-Z]{2,}", text):
            return text.strip()
    text = re.sub(r"<<[^<>\n]*>>|<\|[^|<>]{1,30}\|>|</s>|\$?\\(?:black)?square\$?", "", text).replace("’", "'")
    text = re.sub(r"\\(?:textbf|textit|emph|underline)\{([^{}]*)\}", r"\1", text)
    text = _DISPLAY.sub(lambda match: match[0].replace("\n", " "), text)
    sentences = [part.strip()[-_LONGEST_SENTENCE:] for part in _SENTENCE_END.split(text) if part and part.strip()]
    while sentences and _POLITE.search(sentences[-1]) and not re.search(r"\d", sentences[-1]):
        sentences.pop()
    for number in range(len(sentences) - 1, -1, -1):
        sentence = sentences[number].strip("*_# ")
        if _RETRACTED.search(sentence) and not _CUE.search(sentence) and not _is_confirmed(sentence):
            return None
        stated = _stated(sentence, sentences[number + 1 : number + 2])
        if stated:
            return stated
        if stated == DENIED:
            sentences[number] = ""
        elif _GIVEN_UP.search(sentence):
            return None
    return _last_value(sentences) if loose else None


def _is_confirmed(sentence: str) -> bool:
    return _CONFIRMED.search(sentence) is not None and not _NEGATION.search(sentence)


def _stated(sentence: str, following: list[str]) -> str | None:
    """What a sentence says the answer is, None if it says nothing about it, DENIED if only what it is not."""
    if sentence.endswith("?"):
        return DENIED
    match = None
    for match in _CUE.finditer(sentence):
        while (inner := _CUE.search(match["value"])) is not None:
            match = inner
    if match is None:
        match = _BACKWARDS.search(sentence)
        if match is None:
            return None
        if _NEGATION.search(sentence[: match.end()]):
            return DENIED
        return _pick(sentence[: match.start()].rstrip(" ,"))
    value = match["value"].strip()
    if not value and following and match["verb"].strip().lower() in (":", "is", "is:", "are", "="):
        value = following[0]
    clause = re.split(r"[,;:]", _IDIOMS.sub("", sentence[: sentence.rfind(match[0])]))[-1]
    if _NEGATION.search(clause) or _NEGATED_PREFIX.search(clause):
        return DENIED
    denied = re.search(r"n't|not", match["verb"], re.IGNORECASE) or re.match(
        r"\W*(?:not|never|neither)\b", value, re.IGNORECASE
    )
    if denied:
        instead = _INSTEAD.search(value)
        return _pick(instead["value"]) if instead else DENIED
    before = re.match(r"[^\d$\\]*", value)
    if _DENIED.search(value) or (before and _OTHER.search(before[0])):
        return DENIED
    return _pick(value)


def _pick(value: str) -> str | None:
    """The answer itself out of the words behind "the answer is"."""
    value = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", " ", value).strip().rstrip(".").strip("*_")
    value = _SIGN_WORD.sub(r"\1-", _OPENING.sub("", value).strip())
    first = re.search(r"\\\(|\\\[|[$\d\\]", value)
    if (first and _APPLIED.search(value[: first.start()])) or _CASES.search(value):
        return value
    pieces = [next(part for part in match.groups() if part) for match in _MATH.finditer(value)]
    if pieces:
        outside = _MATH.sub(" ", value)
        if not re.search(r"\d", _CUT.sub("", outside)):
            between = _CUT.sub("", _MATH.sub(" @ ", value))
            if between.count("@") == len(pieces) and not _NO_VALUE_WORD.search(between.partition("@")[0]):
                return _MATH.sub(lambda m: " " + next(part for part in m.groups() if part) + " ", _keep(value, between))
            return pieces[0]
    value = _OPTION.sub("", _CUT.sub("", value).strip().strip("*_!").strip())
    value = value[:-1] if value.endswith(")") and "(" not in value else value
    words = _NO_VALUE_WORD.findall(re.sub(r"\\[a-zA-Z]+|\\text\{[^{}]*\}", " ", value))
    starts = re.match(r"[-−+($€£¥₹\\\d.√π]|[a-zA-Z]\b", value) is not None
    starts = starts or _FUNCTION.match(value) is not None
    if words and not starts and (found := list(_VALUE.finditer(value))):
        return value[found[0].start() :].strip() if len(found) == 1 else found[-1][0].strip()
    return value or None


def _keep(value: str, between: str) -> str:
    """`value` as far as `between`, the same text with formulas replaced, was kept."""
    if len(between) >= len(_MATH.sub(" @ ", value)):
        return value
    return value[: [match.end() for match in _MATH.finditer(value)][-1]]


def _last_value(sentences: list[str]) -> str | None:
    """The formula or number that ends the last sentence that has one and denies nothing."""
    for sentence in reversed(sentences):
        sentence = sentence.strip("*_# ")
        if sentence.endswith("?"):
            continue
        sentence = _SIGN_WORD.sub(r"\1-", _OPENING.sub("", sentence))
        if _NEGATION.search(_MATH.sub(" ", sentence)):
            return None
        sentence = shorter if re.search(r"\d", shorter := _ASIDE.sub("", sentence)) else sentence
        if formulas := list(_MATH.finditer(sentence)):
            if _APPLIED.search(sentence[: formulas[-1].start()]):
                return None
            if said := re.match(r" (?:is|are|was|equals) (?=.*\d)", sentence[formulas[-1].end() :]):
                return _pick(sentence[formulas[-1].end() + said.end() :])
            return next(part for part in formulas[-1].groups() if part)
        if not _NO_VALUE_WORD.search(re.sub(r"\\[a-zA-Z]+", "", sentence)) or sentence.startswith("\\"):
            return sentence
        if found := list(_VALUE.finditer(sentence)):
            applied = _APPLIED.search(sentence[: found[-1].start()] + " ")
            return None if applied else found[-1][0].strip().rstrip(",.")
    whole = sentences[0] if len(sentences) == 1 else ""
    return whole if 0 < len(whole.split()) <= 3 and len(whole) <= 100 else None
