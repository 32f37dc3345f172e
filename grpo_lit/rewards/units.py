"""Units of measurement beside a number: which they are, and what one is in another."""

import re
from dataclasses import dataclass
from fractions import Fraction

_F = Fraction

#: Dimension, and what one unit is of the dimension's base, by the names it goes under. Names of more than two letters
#: also count in capitals and in the plural.
_UNITS: dict[tuple[str, Fraction], str] = {
    ("length", _F(1, 1000)): "mm millimeter millimetre",
    ("length", _F(1, 100)): "cm centimeter centimetre",
    ("length", _F(1, 10)): "dm decimeter decimetre",
    ("length", _F(1)): "m meter metre",
    ("length", _F(1000)): "km kilometer kilometre",
    ("length", _F(254, 10000)): "inch inches",
    ("length", _F(3048, 10000)): "ft foot feet",
    ("length", _F(9144, 10000)): "yd yard",
    ("length", _F(1609344, 1000)): "mi mile",
    ("mass", _F(1, 1000)): "mg milligram",
    ("mass", _F(1)): "g gram",
    ("mass", _F(1000)): "kg kilogram",
    ("mass", _F(45359237, 100000)): "lb lbs pound",
    ("mass", _F(45359237, 1600000)): "oz ounce",
    ("volume", _F(1, 1000)): "ml mL milliliter millilitre",
    ("volume", _F(1)): "l L liter litre",
    ("time", _F(1, 1000)): "ms millisecond",
    ("time", _F(1)): "s sec second",
    ("time", _F(60)): "min minute",
    ("time", _F(3600)): "h hr hour",
    ("time", _F(86400)): "day",
    ("time", _F(604800)): "week",
    ("angle", _F(1)): "° degree",
    ("share", _F(1)): "% percent",
    ("dollars", _F(1)): "$ dollar USD",
    ("dollars", _F(1, 100)): "¢ cent",
    ("euros", _F(1)): "€ euro EUR",
    ("pounds sterling", _F(1)): "£ GBP",
}
_NAMES = {name: unit for unit, names in _UNITS.items() for name in names.split()}
#: Further words beside a number that are not read as something else: what is counted, and units without a conversion.
_COUNTED = "in ton gallon month year radian mph unit point people"

_GAP = r"(?:\s|~|\\[ ,;:!]|\\quad)*"
_TYPE = r"(?:\\(?:text|textrm|mathrm|mbox|rm)\s*\{?)?"
_NAME = r"(?:\^\s*\{?\\circ\}?|\\circ|\\?%|°|¢|€|£|[A-Za-z]+)"
_POWER = r"(?:\}?\s*\^?\s*\{?\s*([23²³])(?![0-9])\s*\}?)?"
_WORD = re.compile(rf"{_GAP}{_TYPE}{_GAP}(?:(square|sq|cubic|cu)\b\.?\s*)?({_NAME}){_POWER}")
_PER = re.compile(rf"\}}?{_GAP}(?:/|{_TYPE}per\b)")
_BEFORE = re.compile(r"(\\?)([$€£])\s*$")
_HELD = re.compile(r"[-+]?(\\?)([$€£])")
_DOLLAR_LATER = re.compile(r"[^\n$]*\$")
_RAISED = re.compile(r"(?<![A-Za-z])([A-Za-z]+)(\}?)\s*\^\s*(?:([23])(?![0-9])|\{\s*([23])\s*\})")
_POWERS = {None: 1, "square": 2, "sq": 2, "2": 2, "²": 2, "cubic": 3, "cu": 3, "3": 3, "³": 3}


@dataclass(frozen=True)
class Unit:
    """A unit of measurement, such as km/h.

    Attributes:
        dimensions: What it measures: powers of dimensions, in order.
        factor: What one of it is of the base units.
    """

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction


def unit_beside(text: str, start: int, end: int) -> Unit | None:
    """Return the unit of the number at ``text[start:end]``; ``None`` where no known one stands there.

    It stands behind the number, up to ``per`` one other, or is a currency before it. Other words are no units: "7
    because" and "7 apples" have none. A dollar sign that another one follows on its line begins a formula.
    """
    found = _WORD.match(text, end)
    parts = [(found[2], _power(found))] if found and _known(found[2]) else []
    upto = found.end() if found and parts else end
    currency = _BEFORE.search(text, max(start - 4, 0), start) or _HELD.match(text, start, end)
    if not parts and currency and (currency[1] or currency[2] != "$" or not _DOLLAR_LATER.match(text, end)):
        parts = [(currency[2], 1)]
    if parts and (per := _PER.match(text, upto)) and (below := _WORD.match(text, per.end())):
        parts.append((below[2], -_power(below)))
    return _product(parts) if parts else None


def words_beside_numbers() -> str:
    """Return a regex for the words that say what a number counts, of two letters at least: one may be a variable."""
    words = [name for name in (*_NAMES, *_COUNTED.split()) if len(name) > 1 and name.isalpha()]
    return "|".join(rf"{word}s?" if len(word) > 2 else word for word in words)


def marked_powers(text: str) -> str:
    """Write the powers of units as ``cm²``, so that no reader takes the 2 of ``cm^2`` for a number."""

    def mark(match: re.Match[str]) -> str:
        power = {"2": "²", "3": "³"}[match[3] or match[4]]
        return match[0] if _known(match[1]) is None else match[1] + match[2] + power

    return _RAISED.sub(mark, text)


def _power(found: re.Match[str]) -> int:
    return _POWERS[found[1]] * _POWERS[found[3]]


def _product(parts: list[tuple[str, int]]) -> Unit | None:
    """Return the product of powers of named units; ``None`` where one of them is not known."""
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for name, power in parts:
        known = _known(name)
        if known is None:
            return None
        powers[known[0]] = powers.get(known[0], 0) + power
        factor *= known[1] ** power
    # A litre is a cubic decimetre.
    if volume := powers.pop("volume", 0):
        powers["length"] = powers.get("length", 0) + 3 * volume
        factor *= Fraction(1, 1000) ** volume
    return Unit(tuple(sorted((name, power) for name, power in powers.items() if power)), factor)


def _known(name: str) -> tuple[str, Fraction] | None:
    name = "°" if "circ" in name else name.lstrip("\\")
    lower = name.lower()
    forms = [name] if len(name) < 3 else [name, lower, lower.removesuffix("s")]
    return next((_NAMES[form] for form in forms if form in _NAMES), None)
