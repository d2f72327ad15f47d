"""Formulas: read and compared by math-verify, where sampling at random points cannot decide.

math-verify reads LaTeX (latex2sympy2_extended) into unevaluated trees. Both sides are then evaluated to 100 digits at
fixed points: differing values say no before any simplification can hang or round, agreeing ones say yes (two
different formulas that agree to 80 digits at all points are not met by chance). Everything that has no value, such as
sets and functions without a definition, is for `math_verify.verify`. Decimals are read as exact fractions.
"""

from __future__ import annotations

import logging
import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from areal_hpc.verifiers.numerals import Number, can_round, is_rounding

try:
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
    from math_verify import verify
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"the maths verifier needs math-verify ({error}); install it with: pip install 'areal-hpc[maths]'"
    ) from None

MAX_LATEX = 600
MAX_POWERS = 3
"""Exponents within exponents."""
LARGEST = 5e3
"""Largest exponent, factorial or number of terms that is computed."""

_DIGITS = 100
_SAME = sympy.Float("1e-80", _DIGITS)
_ZERO = sympy.Float("1e-100", _DIGITS)
_CONVERSION = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
_CLEANING = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_POINTS = [
    (Fraction(17, 13), Fraction(10, 7)),
    (Fraction(-29, 23), Fraction(-11, 17)),
    (Fraction(31, 11), Fraction(3, 19)),
    (Fraction(-53, 3), Fraction(-13, 11)),
]
_DECIMAL = re.compile(r"(?<![\w.])(\d+\.\d+|\.\d+)(?![\w.]*\.)|(?<![\d.])(\d*\.\d+)(?=[a-zA-Z\\])")
_MISREAD = re.compile(  # signs and words it leaves out, and numbers side by side, which it multiplies or adds
    r"['?:#]|\\ldots|\\prime|\\p?mod|(?<![_\w.])\d+ \d|\d ?_|(?<![_\w])\d+ ?\{|(?<![\w}^_\]])\{\d+\} ?\d"
    r"|\d[eE]\d|\.\d+\.|\^\{[^{}]*\} ?\^|\\(?:overline|hat|vec|dot|bar)\{\d"
)
_REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![\w.}^])(\d+) ?\\frac ?\{(\d+)\} ?\{(\d+)\}", r"(\1 + \\frac{\2}{\3})"),
        (r"(?<![_\w.])([\d.]+) ?\(", r"\1 \\cdot ("),
        (r"(\\binom ?\{[^{}]*\} ?\{[^{}]*\}) ?(?=[\d(])", r"\1 \\cdot "),
        (r"\) ?(?=[(\d])", r") \\cdot "),
        (r"(?<![\w.])(\d+)/(\d+) ?(?=\\pi)", r"\\frac{\1}{\2}"),
        (r"\\sqrt\[([3579])\]\{-", r"-\\sqrt[\1]{"),
    )
]
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off


class Unreadable(ValueError):
    """No formula that math-verify can read, or one that would take too long to compute."""


class Misread(Unreadable):
    """No formula: math-verify would leave signs out of it and read something else."""


def equal(gold: str, answer: str) -> bool:
    """Whether two tidy formulas are equal in value. Raises Unreadable."""
    left, right = _parsed(gold), _parsed(answer)
    left, right = _with_imaginary_unit(left, right)
    if left == right:
        return True
    if _is_expression(left) and _is_expression(right):
        if left.has(sympy.oo, sympy.zoo, sympy.nan) or right.has(sympy.oo, sympy.zoo, sympy.nan):
            return False
        if (verdict := _sampled(left, right)) is not None:
            return verdict
    return bool(verify(left, right, timeout_seconds=None))  # type: ignore[arg-type]


def same_equation(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Whether two equations say the same: their differences of sides are proportional, or math-verify solves both.

    Raises Unreadable.
    """
    sides = [_parsed(side) for side in (*gold, *answer)]
    if not all(_is_expression(side) for side in sides):
        return False
    left, right = sides[0] - sides[1], sides[2] - sides[3]
    if left.free_symbols != right.free_symbols:
        return False
    ratios = []
    for point in range(len(_POINTS)):
        above, below = _value(left, point), _value(right, point)
        if above is None or below is None or abs(below) < _ZERO:
            return False
        ratios.append(above / below)
    if abs(ratios[0]) < _ZERO:
        return False
    if all(abs(ratio - ratios[0]) <= _SAME * abs(ratios[0]) for ratio in ratios):
        return True
    return _same_solutions(left, right)


def _same_solutions(left: Any, right: Any) -> bool:
    """Whether each side, solved for one symbol in which both have exactly one solution, gives the same."""
    for symbol in sorted(left.free_symbols, key=str):
        try:
            one, other = sympy.solve(left, symbol), sympy.solve(right, symbol)
        except (NotImplementedError, ValueError, TypeError):
            continue
        if len(one) == len(other) == 1:
            return _sampled(one[0], other[0]) is True
    return False


def rounds_to(decimal: Number, formula: str) -> bool:
    """Whether a decimal is the rounding, to ROUNDED_DIGITS or more, of an irrational constant. Raises Unreadable."""
    if not can_round(decimal):
        return False
    exact = _parsed(formula)
    if not _is_expression(exact) or exact.free_symbols:
        return False
    value = _value(exact, 0)
    if value is None or not value.is_real:
        return False
    return is_rounding(decimal, Fraction(int(sympy.floor(value * 10**35)), 10**35 + 7))


def value_of(formula: str) -> float | None:
    """A constant as a float, None if it has symbols or no real value. Raises Unreadable."""
    parsed = _parsed(formula)
    value = None if not _is_expression(parsed) or parsed.free_symbols else _value(parsed, 0)
    return float(value) if value is not None and value.is_real else None


def forget() -> None:
    """Empty the cache of formulas."""
    _parsed.cache_clear()


def latex(number: Fraction) -> str:
    """A fraction as LaTeX."""
    top, bottom = str(Decimal(number.numerator)), str(Decimal(number.denominator))
    return top if bottom == "1" else rf"\frac{{{top}}}{{{bottom}}}"


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    if len(text) > MAX_LATEX or text.count("^") > 40 or _power_depth(text) > MAX_POWERS:
        raise Unreadable("too long or too deep")
    if _MISREAD.search(text):
        raise Misread(text[:80])
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    exact = _DECIMAL.sub(_as_fraction, text)
    exact = re.sub(r"((?:\d|\\frac ?\{\d+\} ?\{\d+\})+) ?\^\\circ", r"(\\frac{\\pi}{180} \\cdot \1)", exact)
    exact = re.sub(r"\\text ?\{([^{}]*)\}", r"\\text{\1}", exact).replace(r"\%", r"\cdot \frac{1}{100}")
    try:
        parsed = latex2sympy(
            exact, is_real=False, convert_degrees=False, normalization_config=_CLEANING, conversion_config=_CONVERSION
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # antlr and the converter raise anything, bare Exception above all
        raise Unreadable(str(error)[:200]) from None
    if parsed is None or not isinstance(parsed, (sympy.Basic, sympy.MatrixBase)):
        raise Unreadable(f"{text[:80]!r} has no value")
    _size(parsed)
    return parsed


def _as_fraction(match: re.Match[str]) -> str:
    value = Fraction(match[1] or match[2])
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _power_depth(text: str) -> int:
    """How deep exponents stand within exponents."""
    deepest, stack, run = 0, [0], 0
    for i, char in enumerate(text):
        if char == "^":
            run = run + 1 if text[i + 1 : i + 2] != "{" else run
            deepest = max(deepest, stack[-1] + 1 + run)
        elif char == "{":
            stack.append(stack[-1] + (text[:i].rstrip().endswith("^")))
            run = 0
        elif char == "}" and len(stack) > 1:
            stack.pop()
        elif not (char.isalnum() or char in "-"):
            run = 0
    return deepest


def _size(tree: Any) -> float:
    """A bound on |tree| with symbols taken as 1; raises Unreadable where computing it would be long work."""
    if isinstance(tree, sympy.MatrixBase):
        return max([_size(cell) for cell in tree] or [0.0])
    if tree.is_Number:
        return float(min(abs(tree), sympy.Integer(10) ** 300)) if tree.is_finite else math.inf
    sizes = [_size(part) for part in tree.args if isinstance(part, (sympy.Basic, sympy.MatrixBase))]
    if tree.is_Pow:
        base, power = sizes
        if tree.exp.is_number and (power > LARGEST or power * math.log10(max(base, 1) + 1) > LARGEST):
            raise Unreadable("a power too large to compute")
        return min(max(base, 1.0) ** min(power, 60.0), 1e300) if base < 1e5 else 1e300
    if isinstance(tree, (sympy.factorial, sympy.binomial, sympy.factorial2, sympy.gamma)):
        if max(sizes) > LARGEST:
            raise Unreadable("a factorial too large to compute")
        return 1e300 if sizes[0] > 150 else math.factorial(int(sizes[0]))
    if isinstance(tree, (sympy.Sum, sympy.Product)):
        if any(size > LARGEST and size != math.inf for size in sizes[1:]):
            raise Unreadable("too many terms")
        return 1e300
    if tree.is_Mul:
        return min(math.prod(min(max(size, 1e-3), 1e100) for size in sizes[:3]), 1e300) if len(sizes) < 4 else 1e300
    if isinstance(tree, sympy.exp):
        if sizes[0] > LARGEST:
            raise Unreadable("a power too large to compute")
        return math.exp(min(sizes[0], 600.0))
    return min(sum(sizes), 1e300) if sizes else 1.0


def _is_expression(tree: Any) -> bool:
    return isinstance(tree, sympy.Expr) and not isinstance(tree, sympy.MatrixExpr)


def _with_imaginary_unit(left: Any, right: Any) -> tuple[Any, Any]:
    """i is the imaginary unit where it counts nothing; j, too, if only one side has i and the other j."""
    trees, names = [left, right], [{str(s) for s in tree.free_symbols} for tree in (left, right)]
    for k in (0, 1):
        for symbol in trees[k].free_symbols:
            if str(symbol) == "i" or (str(symbol) == "j" and "i" in names[1 - k] and "i" not in names[k]):
                trees[k] = trees[k].subs(symbol, sympy.I)
    return trees[0], trees[1]


def _sampled(left: Any, right: Any) -> bool | None:
    """Equal or not at all points where both are real, or where both have any value; None if nowhere."""
    real: list[bool] = []
    other: list[bool] = []
    for point in range(len(_POINTS)):
        one, two = _value(left, point), _value(right, point)
        if one is None or two is None:
            continue
        (real if one.is_real and two.is_real else other).append(_close(one, two))
        if not left.free_symbols and not right.free_symbols:
            break
    verdicts = real if real and (len(real) > 1 or not other) else real + other
    return all(verdicts) if verdicts else None


def _close(one: Any, two: Any) -> bool:
    if one.is_Rational and two.is_Rational:
        return bool(one == two)
    scale = max(abs(one), abs(two))
    return bool(scale < _ZERO) or bool(abs(one - two) <= _SAME * scale)


def _value(tree: Any, point: int) -> Any:
    """`tree` exactly or to 100 digits at one of the points, None where it has no finite value."""
    start, step = _POINTS[point]
    at = {symbol: _place(symbol, start, step) for symbol in tree.free_symbols}
    try:
        value = tree.xreplace(at).doit()
        if value.is_Rational:
            return value
        value = value.evalf(_DIGITS, maxn=1000)
        value = sympy.re(value) if value.is_number and abs(sympy.im(value)) <= _SAME * abs(value) else value
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises anything for trees it cannot evaluate
        return None
    if not value.is_number or not value.is_finite or value.has(sympy.Integral, sympy.Sum, sympy.Limit):
        return None
    return value


def _place(symbol: Any, start: Fraction, step: Fraction) -> Any:
    """The value of a symbol at a point, by its name alone, as the two sides may have different symbols."""
    number = sum((k + 1) * ord(char) for k, char in enumerate(str(symbol)))
    value = start + step * Fraction(number % 101, 53)
    return sympy.Rational(value.numerator, value.denominator)
