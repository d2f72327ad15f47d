"""Units, currencies and nouns around a value, in one spelling each: `5 \\text{ square metres}` is 5 and m^2."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPELLINGS = """
$: dollar dollars usd us$ buck bucks
€: euro euros eur
£: gbp sterling quid
¥: yen jpy yuan cny rmb
₹: rupee rupees inr rs
₩: won krw
₽: rub ruble rubles rouble roubles
₱: peso pesos
¢: cent cents
pence: penny pennies p
%: percent percentage percents pct
‰: permille
deg: degree degrees
rad: radian radians
degC: celsius centigrade
degF: fahrenheit
m: meter meters metre metres
cm: centimeter centimeters centimetre centimetres cms
mm: millimeter millimeters millimetre millimetres
km: kilometer kilometers kilometre kilometres kms
dm: decimeter decimeters decimetre decimetres
nm: nanometer nanometers nanometre nanometres
in: inch inches
ft: foot feet
yd: yard yards yds
mi: mile miles
g: gram grams gramme grammes
kg: kilogram kilograms kgs kilo kilos
mg: milligram milligrams
t: ton tons tonne tonnes
lb: lbs
pounds: pound
oz: ounce ounces
l: liter liters litre litres
ml: milliliter milliliters millilitre millilitres
gal: gallon gallons
qt: quart quarts
pt: pint pints
cup: cups
s: sec secs second seconds
ms: millisecond milliseconds
min: mins minute minutes
h: hr hrs hour hours
day: days
week: weeks wk wks
month: months
year: years yr yrs
decade: decades
century: centuries
mph:
kph: kmph kmh
ha: hectare hectares
acre: acres
j: joule joules
kj: kilojoule kilojoules
cal: calorie calories
kcal: kilocalorie kilocalories
w: watt watts
kw: kilowatt kilowatts
kwh:
v: volt volts
a: amp amps ampere amperes
n: newton newtons
pa: pascal pascals
hz: hertz
mol: mole moles
CHF: francs franc
SEK:
NOK:
DKK:
PLN:
AUD:
CAD:
unit: units
dozen: dozens
ohm: ohms
am: a.m
pm: p.m
"""
_UNITS: dict[str, str] = {}
for _line in _SPELLINGS.strip().splitlines():
    _name, _, _others = _line.partition(":")
    _UNITS |= dict.fromkeys([_name.lower(), *_others.split()], _name)
_COMPOUND = {"mph": ("mi", "h"), "kph": ("km", "h")}
CURRENCIES = "$€£¥₹₩₽₱¢"
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SINGLE_LETTERS = frozenset("mgshlLJNVWA")
"""Units of one letter; as capitals where the small letter is rather a variable."""
_SMALL_LETTERS = frozenset("mgshltwvajn")
_POWER_WORDS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_PER = {"per", "/", "a", "an", "each", "every"}
_FILLERS = re.compile(
    "of|the|in|total|long|wide|tall|high|deep|old|more|away|left|and|to|for|at|on|by|is|was|will|his|her"
)
_TOKEN = re.compile(r"/|[a-zA-Z.]+|\^ ?-?\d|[$€£¥₹₩₽₱¢%‰]|\S")
_TRAILER = re.compile(
    r"(?:\\text ?\{[^{}]*\}|\\%|‰|\^\\circ ?[CF]?|\^ ?\{?(?:[23]|-[12])\}?(?!\d)|[/]"
    r"|[$€£¥₹₩₽₱¢]|\\cdot|[a-zA-Z]+(?![a-zA-Z])\.?|'|-|,| )+$"
)
_NO_UNIT = re.compile(
    r"\b(?:not|wrong|incorrect|false|never|or|nor|than|least|most|between|except|factorial|plus|minus"
    r"|halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|(?:ten|hundred|thousand|million)ths?)\b|n't",
    re.IGNORECASE,
)
_START = re.compile(r"[ ]?(?:\\text ?\{|\\%|‰|\^\\circ|[$€£¥₹₩₽₱¢]|[a-zA-Z]|-(?=[a-zA-Z]))")
_LEAD = re.compile(
    r"([+-]?) ?(?:\\text ?\{)? ?(US|USD|EUR|GBP|INR|JPY|CHF|SEK|NOK|DKK|PLN|AUD|CAD|Rs\.?)?"
    rf"(?![a-zA-Z]) ?\}}? ?([{CURRENCIES}])? ?([+-]?) ?(?=[\d.\\(])"
)
_CODES = {"US": "$", "Rs": "₹"}


@dataclass(frozen=True)
class Unit:
    """What a value counts.

    Attributes:
        main: canonical names with powers of known units, say ("m^2",); empty if only nouns were found.
        per: the same, of what stands behind `per` or a slash.
        nouns: other words in singular, in no order.
    """

    main: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    nouns: frozenset[str] = frozenset()

    @property
    def is_percent(self) -> bool:
        return self.main == ("%",)

    def __bool__(self) -> bool:
        return bool(self.main or self.per or self.nouns)


NONE = Unit()


def agree(gold: Unit, answer: Unit) -> bool:
    """Whether an answer in `answer` may stand for a gold in `gold`: a unit may be missing, never be another one."""
    if not gold or not answer:
        return True
    if gold.main or answer.main:
        if gold.main and answer.main and not _alike(gold.main, answer.main):
            return False
        if bool(gold.main) != bool(answer.main):
            return not gold.main and not gold.nouns
    elif not gold.nouns & answer.nouns:
        return False
    if gold.per and answer.per:
        return gold.per == answer.per
    if gold.per:
        return False
    return not answer.per or not gold.main or gold.main[0] in CURRENCIES


def _alike(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """The same names; pounds are money or weight."""
    if gold == answer:
        return True
    return {*gold, *answer} in ({"pounds", "£"}, {"pounds", "lb"})


def unit_of(words: str) -> tuple[Unit, int]:
    """The unit that `words` (tidy text) tell, and the scale (million, dozen: a factor)."""
    text = words.replace(r"\text", " ").replace("{", " { ").replace("}", " } ")
    text = re.sub(r"\^ \{ (-?\d) \}", r"^\1", text).replace("{", " ").replace("}", " ")
    text = re.sub(r"([a-zA-Z]+) *\^ *-(\d)", r"/ \1^\2", text)
    text = text.replace(r"\%", "%").replace(r"\cdot", " ").replace("-", " ")
    text = re.sub(r"\^ ?\\circ ?([CF](?![a-zA-Z]))", r" deg\1 ", text).replace(r"^\circ", " deg ")
    main: list[str] = []
    per: list[str] = []
    nouns: set[str] = set()
    scale, power, into, seen_per = 1, 1, main, False
    for token in _TOKEN.findall(text):
        word = token.lower().strip(".") or token
        if token.startswith("^"):
            if into and token[-1] != "1":
                into[-1] = into[-1].split("^")[0] + "^" + re.sub(r"\D", "", token)
        elif word in _SCALES and (word != "dozen" or scale == 1):
            scale *= _SCALES[word]
        elif word in _POWER_WORDS and word not in ("squared", "cubed"):
            power = _POWER_WORDS[word]
        elif word in _POWER_WORDS:
            if into:
                into[-1] += f"^{_POWER_WORDS[word]}"
        elif word in _PER and (main or nouns):
            into, seen_per = per, True
        elif word in ("in", *_SMALL_LETTERS) and (into or nouns) and not seen_per and not (token == "in" and power > 1):
            continue
        elif word in ("c", "f") and into and into[-1] == "deg":
            into[-1] = "deg" + word.upper()
        elif word in _UNITS:
            name = _UNITS[word]
            names = _COMPOUND.get(name, (name,))
            into.append(names[0] + (f"^{power}" if power > 1 else ""))
            per += names[1:]
            power = 1
        elif word.isalpha() and not _FILLERS.fullmatch(word) and not seen_per:
            nouns.add(_singular(word))
    if main == ["deg", "degC"] or main == ["deg", "degF"]:
        main = main[1:]
    return Unit(tuple(main[:3]), tuple(per[:2]), frozenset(nouns)), scale


def says_nothing(words: str) -> bool:
    """Whether no word names a unit or makes another value of the number before it."""
    return all(_FILLERS.fullmatch(word) for word in re.findall(r"[a-z]+", words.replace(r"\text", "").lower()))


def split(text: str, letters: frozenset[str] = frozenset()) -> tuple[str, Unit, int]:
    """Core, unit and scale of tidy `text`: `\\$1.5 \\text{ million}` is 1.5, $ and 10^6.

    A word behind a blank is a noun, a single letter is a variable, unless it is in `letters`: those are units.
    """
    lead = _LEAD.match(text)
    money, rest = None, text
    if lead and (lead[2] or lead[3]):
        money = lead[3] or _CODES.get(lead[2].strip(".")) or _UNITS[lead[2].lower()]
        rest = ("-" if "-" in lead[1] + lead[4] else "") + text[lead.end() :]
    core, words = rest, ""
    for start in _START.finditer(rest):
        if _is_unit(rest[: start.start()], rest[start.start() :], letters):
            core, words = rest[: start.start()].strip(), rest[start.start() :]
            break
    unit, scale = unit_of(words) if words else (NONE, 1)
    if money is not None:
        unit = Unit((money,) + tuple(name for name in unit.main if name != money), unit.per, unit.nouns)
    return core, unit, scale


def _is_unit(core: str, words: str, letters: frozenset[str]) -> bool:
    if not core.strip() or not _TRAILER.fullmatch(words) or core.count("{") != core.count("}"):
        return False
    if _NO_UNIT.search(words):
        return False
    if core.count("(") != core.count(")") or core.rstrip()[-1] in "+*/^_\\=,<>":
        return False
    if "^\\circ" in words and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", core):
        return False
    if words.lstrip().startswith(("\\text", "\\%", "‰", "^\\circ", *CURRENCIES)):
        bare = re.sub(r"\\text ?\{[^{}]*\}|\^\\circ ?[CF]?(?![a-zA-Z])|/ ?[a-zA-Z]+", " ", words)
        return re.search(r"[\w}]", core) is not None and not re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", bare)
    if re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", core)) or not re.search(r"[\d})]\s*$|\\pi ?$", core):
        return False
    spaced = words[0] in " -" or core.endswith(" ")
    bare = re.sub(r"\\text ?\{[^{}]*\}", " ", words)
    for i, word in enumerate(re.findall(r"(?<!\\)\b[a-zA-Z]+", bare)):
        if len(word) == 1 and not (word in letters or (i > 0 and word in "aCF")):
            if not (i > 0 and word.lower() in _SMALL_LETTERS and "/" in bare):
                return False
        elif (
            word.lower() not in _UNITS
            and word.lower() not in _SCALES
            and not (spaced or i > 0)
            or len(word) == 2
            and word.lower() not in _UNITS
            and i == 0
            and word.lower() not in _POWER_WORDS
        ):
            return False
    return True


def _singular(word: str) -> str:
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"), ("shes", "sh")):
        if word.endswith(ending):
            return word[: -len(ending)] + instead
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word
