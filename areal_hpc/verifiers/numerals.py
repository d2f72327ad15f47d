"""Numbers as people write them, read exactly: separators, decimals, repeating decimals, fractions, E notation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_DIGITS = 20_000
MAX_EXPONENT = 5_000
ROUNDED_DIGITS = 6
"""With this many significant digits and places, a decimal may stand for the number that it is the rounding of."""


@dataclass(frozen=True)
class Number:
    """An exact rational.

    Attributes:
        value: what was written, in the unit 1 (50% has the value 50; the unit tells).
        places: digits after the point if it was written as a terminating decimal, else None.
        significant: significant digits of such a decimal, else 0.
    """

    value: Fraction
    places: int | None = None
    significant: int = 0


_SEPARATORS = (",", " ", "'", "_", ".")
_PLAIN = re.compile(r"\d+|\d+\.\d*|\.\d+")
_WHOLE = "|".join(
    [r"[1-9]\d{0,2}(?:" + re.escape(mark) + r"\d{3})+" for mark in _SEPARATORS[:-1]]
    + [r"[1-9]\d?(?:,\d{2})+,\d{3}"]  # lakh and crore
)
_GROUPED = re.compile(rf"({_WHOLE})(\.\d+)?")
_CONTINENTAL = re.compile(
    r"([1-9]\d{0,2}(?:\.\d{3})+),(\d+)|([1-9]\d{0,2}(?:\.\d{3}){2,})|([1-9]\d{0,2}(?:[ ']\d{3})+),(\d+)"
)
_COMMA = re.compile(r"(0|[1-9]\d*),(\d+)")
_SPACED_PLACES = re.compile(r"(\d+)\.(\d{3}(?: \d{3})* \d{1,3})")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overset\{\.\})\{?(\d+)\}?|\((\d+)\))(?:\\dot\{?(\d)\}?|(\d*)\\dot\{?(\d)\}?)?"
    r" ?(?:\\ldots|\.\.\.+)?"
)
_ELLIPSIS = re.compile(r"(\d*)\.(\d+) ?(?:\\ldots|\.\.\.+)")
_POWER_OF_TEN = re.compile(r"(?:(.+?) ?(?:\\times|\\cdot|\*|[xX]) ?)?10 ?\^ ?(?:\{([+-]?\d+)\}|([+-]?\d+))")
_E_NOTATION = re.compile(r"(\d+|\d+\.\d*|\.\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?) ?[eE] ?\{?([+-]?\d+)\}?")
_MIXED = re.compile(r"(\d+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (?:and )?(\d+) ?/ ?(\d+))")
_LATEX_FRACTION = re.compile(r"\\frac ?\{([^{}]+)\} ?\{([^{}]+)\}")


def number(text: str) -> Number | None:
    """The number that tidy `text` is, or None if it is anything else; never long work, whatever the length."""
    text = text.strip()
    sign = 1
    while text[:1] in ("+", "-") or (text[:1] in ("(", "{") and text[-1:] in (")", "}")):
        if text[0] in "+-":
            sign, text = (-sign if text[0] == "-" else sign), text[1:].lstrip()
            if text[:1] in ("+", "-"):
                return None
        elif (text[0], text[-1]) in (("(", ")"), ("{", "}")) and text.count(text[0]) == 1:
            if text[0] == "(" and "," in text:  # a pair
                return None
            text = text[1:-1].strip()
        else:
            return None
    if not text or len(text) > MAX_DIGITS or not any(char.isdigit() for char in text):
        return None
    for read in (_decimal, _fraction, _scientific, _repeating):
        if (found := read(text)) is not None:
            return Number(sign * found.value, found.places, found.significant)
    return None


def decimal_comma(text: str) -> Number | None:
    """`3,5` as 3.5 where the comma cannot group thousands; on its own it may as well be a list of two numbers."""
    match = _COMMA.fullmatch(text.strip().lstrip("+-").strip())
    if match is None or (len(match[2]) == 3 and match[1] != "0"):
        return None
    found = _digits(match[1], match[2])
    return Number(-found.value, found.places, found.significant) if text.strip().startswith("-") else found


def can_round(decimal: Number) -> bool:
    """Whether a number was written with digits enough to stand for one that has no end."""
    return decimal.places is not None and min(decimal.places, decimal.significant) >= ROUNDED_DIGITS


def is_rounding(decimal: Number, exact: Fraction) -> bool:
    """Whether `decimal` has ROUNDED_DIGITS and is what rounding `exact`, which has no end as a decimal, gives."""
    if not can_round(decimal) or terminates(exact):
        return False
    assert decimal.places is not None
    slack = 1 if decimal.significant < 15 else 4  # the last digit of a double need not be right
    return abs(decimal.value - exact) * 2 * 10**decimal.places <= slack


def terminates(value: Fraction) -> bool:
    """Whether a decimal of finite length is exactly `value`."""
    bottom = value.denominator
    while bottom % 10 == 0:
        bottom //= 10
    bottom //= 2 ** max(0, (bottom & -bottom).bit_length() - 1)
    while bottom % 5 == 0:
        bottom //= 5
    return bottom == 1


def _digits(whole: str, places: str) -> Number:
    if not places:
        return Number(Fraction(int(Decimal(whole or "0"))))
    digits = whole + places
    value = Fraction(int(Decimal(digits)), 10 ** len(places))
    return Number(value, len(places), len(digits.lstrip("0")))


def _decimal(text: str) -> Number | None:
    if _PLAIN.fullmatch(text):
        whole, _, places = text.partition(".")
        return _digits(whole, places)
    if len(text) > 1000 and not re.fullmatch(r"[\d,.' _]+", text):
        return None
    if match := _GROUPED.fullmatch(text):
        return _digits(re.sub(r"\D", "", match[1]), (match[2] or "")[1:])
    if match := _CONTINENTAL.fullmatch(text):
        whole = match[1] or match[3] or match[4]
        return _digits(re.sub(r"\D", "", whole), match[2] or match[5] or "")
    if match := _SPACED_PLACES.fullmatch(text):
        return _digits(match[1], match[2].replace(" ", ""))
    return None


def _fraction(text: str) -> Number | None:
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = (
            int(match[1][:4000]),
            int((match[2] or match[4])[:4000]),
            int((match[3] or match[5])[:4000]),
        )
        return Number(whole + Fraction(top, bottom)) if bottom else None
    if match := _LATEX_FRACTION.fullmatch(text):
        top_text, bottom_text = match[1], match[2]
    elif text.count("/") == 1:
        top_text, _, bottom_text = text.partition("/")
    else:
        return None
    if "/" in top_text or "/" in bottom_text or "frac" in top_text + bottom_text:
        return None
    above, below = number(top_text), number(bottom_text)
    if above is None or below is None or below.value == 0:
        return None
    return Number(above.value / below.value)


def _scientific(text: str) -> Number | None:
    if match := _E_NOTATION.fullmatch(text):
        mantissa, exponent = _decimal(match[1]), match[2]
    elif len(text) < 1000 and (match := _POWER_OF_TEN.fullmatch(text)):
        mantissa = number(match[1]) if match[1] else Number(Fraction(1))
        exponent = match[2] or match[3]
    else:
        return None
    if mantissa is None or len(exponent) > 8 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    places = None if mantissa.places is None else max(0, mantissa.places - int(exponent))
    return Number(mantissa.value * Fraction(10) ** int(exponent), places, mantissa.significant)


def _repeating(text: str) -> Number | None:
    if len(text) > 1000:
        return None
    if match := _REPEATING.fullmatch(text):
        block = (match[3] or match[4]) + (match[5] or "") + (match[6] or "") + (match[7] or "")
        return _series(match[1], match[2], block)
    if (match := _ELLIPSIS.fullmatch(text)) and (parts := _period(match[2])):
        return _series(match[1], *parts)
    return None


def _period(digits: str) -> tuple[str, str] | None:
    """(Head, block) of digits that repeat up to their end, the last time perhaps in part, with the shortest head: one
    digit three times, or more of them twice."""
    back = digits[::-1]
    borders = [0]  # of each beginning of `back`: the longest that is its end as well (Knuth, Morris and Pratt)
    for char in back[1:]:
        border = borders[-1]
        while border and back[border] != char:
            border = borders[border - 1]
        borders.append(border + (back[border] == char))
    for length in range(len(digits), 1, -1):
        size, start = length - borders[length - 1], len(digits) - length
        if length // size >= (3 if size == 1 else 2):
            return digits[:start], digits[start : start + size]
    return None


def _series(whole: str, head: str, block: str) -> Number:
    """whole.head(block): the block over 10^|block| - 1 is the sum of the geometric series."""
    start = Fraction(int(whole + head or "0"), 10 ** len(head))
    return Number(start + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(head)))
