"""Whether an answer is the gold answer: exactly where both are rationals, part by part in lists, else symbolically."""

from __future__ import annotations

import re
from fractions import Fraction

from areal_hpc.verifiers import symbolic, units
from areal_hpc.verifiers.numerals import Number, decimal_comma, is_rounding
from areal_hpc.verifiers.shapes import read
from areal_hpc.verifiers.values import Based, Body, Equation, Formula, Group, Matrix, Value, Words, plain


def same(gold: Value, answer: Value) -> bool:
    """Whether `answer` counts as `gold`. Not symmetric: units and names may be missing in the answer.

    Raises:
        symbolic.Unreadable: it depends on a formula that cannot be read.
    """
    if not _consistent(answer):
        return False
    if gold.text and gold.text == answer.text:
        return True
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if isinstance(gold.body, Equation) or isinstance(answer.body, Equation):
        return _same_equation(gold, answer)
    if not units.agree(gold.unit, answer.unit):
        return False
    if isinstance(gold.body, Number) and isinstance(answer.body, Number):
        return _same_numbers(gold, answer)
    if isinstance(gold.body, Number) and isinstance(answer.body, Group) and "," in answer.text:
        core, unit, scale = units.split(answer.text)
        if (found := decimal_comma(core)) is not None:
            return units.agree(gold.unit, unit) and _same_numbers(gold, Value("", found, unit, scale))
    if gold.unit.is_percent != answer.unit.is_percent:
        return gold.unit.is_percent and _same_bodies(gold.body, answer.body)
    return gold.scale == answer.scale and _same_bodies(gold.body, answer.body)


def _consistent(value: Value) -> bool:
    """Whether a = b = c says something true of a, b and c (6 = 5 does not)."""
    for claim in value.claims:
        if value.rough:
            if not _roughly(value, claim):
                return False
        elif not same(
            Value(claim.text, claim.body, claim.unit, claim.scale), Value("", value.body, value.unit, value.scale)
        ):
            return False
    return True


def _roughly(value: Value, claim: Value) -> bool:
    """Whether a = b as far as a person would write it with a wavy sign: to 1 %."""
    numbers = [symbolic.value_of(_latex(v.body)) for v in (value, claim) if isinstance(v.body, (Number, Formula))]
    if len(numbers) < 2 or numbers[0] is None or numbers[1] is None:
        return False
    return abs(numbers[0] - numbers[1]) <= 0.01 * max(abs(numbers[0]), abs(numbers[1]))


def _same_numbers(gold: Value, answer: Value) -> bool:
    assert isinstance(gold.body, Number) and isinstance(answer.body, Number)
    one, two = gold.body.value * gold.scale, answer.body.value * answer.scale
    if gold.unit.is_percent == answer.unit.is_percent:
        return _equal_or_rounded(gold, one, answer, two)
    percent, other = (one, two) if gold.unit.is_percent else (two, one)
    if (answer if gold.unit.is_percent else gold).unit:
        return False
    # 50% is 1/2; it also answers a question for a percentage, but 0.5% is not one half
    return percent == 100 * other or (percent == other and abs(percent) > 1)


def _equal_or_rounded(gold: Value, one: Fraction, answer: Value, two: Fraction) -> bool:
    assert isinstance(gold.body, Number) and isinstance(answer.body, Number)
    if one == two or gold.scale != 1 or answer.scale != 1:
        return one == two
    return is_rounding(gold.body, two) or is_rounding(answer.body, one)


def _same_bodies(gold: Body, answer: Body) -> bool:
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_groups(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrices(gold, answer)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return gold == answer
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _same_words(gold, answer)
    if isinstance(gold, Formula) and isinstance(answer, Number) and symbolic.rounds_to(answer, gold.latex):
        return True
    if isinstance(gold, Number) and isinstance(answer, Formula) and symbolic.rounds_to(gold, answer.latex):
        return True
    return symbolic.equal(_latex(gold), _latex(answer))


def _latex(body: Body) -> str:
    if isinstance(body, Number):
        return symbolic.latex(body.value)
    assert isinstance(body, Formula)
    return body.latex


def _same_words(gold: Body, answer: Body) -> bool:
    """Words without regard to case."""
    if isinstance(gold, Words) and isinstance(answer, Words):
        return gold.text == answer.text != ""
    words, other = (gold, answer) if isinstance(gold, Words) else (answer, gold)
    assert isinstance(words, Words)
    return isinstance(other, Formula) and words.text.replace(" ", "") == plain(other.latex).strip("().").lower() != ""


def _same_groups(gold: Body, answer: Body) -> bool:
    if not isinstance(gold, Group) or not isinstance(answer, Group):
        group, other = (gold, answer) if isinstance(gold, Group) else (answer, gold)
        assert isinstance(group, Group)
        if len(group.items) != 1 or group.opening not in ("{", ""):
            return False
        single = Value("", other)
        return same(group.items[0], single) if group is gold else same(single, group.items[0])
    if len(gold.items) != len(answer.items):
        return False
    if gold.unordered and answer.unordered:
        return _match(list(gold.items), list(answer.items))
    brackets = {(gold.opening, gold.closing), (answer.opening, answer.closing)}
    is_vector = len(gold.items) > 2 and brackets == {("(", ")"), ("[", "]")}
    if len(brackets) > 1 and brackets != {("(", ")"), ("", "")} and not is_vector:
        return False
    return all(same(one, two) for one, two in zip(gold.items, answer.items, strict=True))


def _match(gold: list[Value], answer: list[Value]) -> bool:
    """Whether the items can be paired. Greedy, after those in place: equality is nearly transitive."""
    left = list(answer)
    for value in gold:
        for i, other in enumerate(left):
            if same(value, other):
                del left[i]
                break
        else:
            return False
    return not left


def _same_matrices(gold: Body, answer: Body) -> bool:
    if isinstance(gold, Formula) or isinstance(answer, Formula):  # a product, say, of a matrix and a number
        texts = [body.latex for body in (gold, answer) if isinstance(body, (Formula, Matrix))]
        return all("\\begin" in text for text in texts) and symbolic.equal(*texts)
    if not isinstance(gold, Matrix) or not isinstance(answer, Matrix) or gold.kind != answer.kind:
        return False
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return False
    rows = zip(gold.rows, answer.rows, strict=True)
    return all(same(one, two) for above, below in rows for one, two in zip(above, below, strict=True))


def _same_equation(gold: Value, answer: Value) -> bool:
    """Two equations; or an equation about a quantity with several symbols, such as x + y = 5, for the value 5."""
    one, two = gold.body, answer.body
    if isinstance(one, Equation):
        if isinstance(two, Equation):
            return symbolic.same_equation((one.left, one.right), (two.left, two.right))
        if answer.name and isinstance(two, (Number, Formula)):
            return symbolic.same_equation((one.left, one.right), (answer.name, _latex(two)))
        return False
    assert isinstance(two, Equation)
    if gold.name and isinstance(one, (Number, Formula)):
        return symbolic.same_equation((gold.name, _latex(one)), (two.left, two.right))
    symbols = set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]", two.left))
    if len(symbols) < 2 or not isinstance(one, Number):
        return False
    return same(gold, read(two.right))
