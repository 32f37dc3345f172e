from fractions import Fraction

import pytest

from grpo_lit.rewards.plain import plain_number
from grpo_lit.rewards.units import Unit, marked_powers, unit_beside


def unit(text, number="7"):
    start = text.index(number)
    return unit_beside(text, start, start + len(number))


@pytest.mark.parametrize(
    ("text", "dimensions", "factor"),
    [
        ("7 m", (("length", 1),), 1),
        ("7 yards", (("length", 1),), Fraction("0.9144")),
        ("7 pounds", (("mass", 1),), Fraction("453.59237")),
        ("7 sq ft", (("length", 2),), Fraction("0.3048") ** 2),
        ("7 cubic inches", (("length", 3),), Fraction("0.0254") ** 3),
        # A litre is 10 cm cubed: (1/10)^3 m^3.
        ("7 L", (("length", 3),), Fraction(1, 1000)),
        ("7 ml", (("length", 3),), Fraction(1, 1_000_000)),
        ("7 g/cm³", (("length", -3), ("mass", 1)), 1_000_000),
        ("7 miles per hour", (("length", 1), ("time", -1)), Fraction("1609.344") / 3600),
        (r"7~\text{m}/\text{s}²", (("length", 1), ("time", -2)), 1),
        # What cancels is gone.
        ("7 m/cm", (), 100),
        ("€ 7", (("euros", 1),), 1),
        ("7 USD", (("dollars", 1),), 1),
        (r"7\%", (("share", 1),), 1),
    ],
)
def test_known_units(text, dimensions, factor):
    assert unit(text) == Unit(dimensions, Fraction(factor))


@pytest.mark.parametrize(
    "text", ["7", "7.", "7 apples", "7 in total", "7 because", "7 Gs", "$7$", "$7 = x$", "7 per hour", "7 a"]
)
def test_other_words_are_no_units(text):
    assert unit(text) is None


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("7 cm^2", "7 cm²"),
        ("7 cm^{3}", "7 cm³"),
        (r"\boxed{7\text{ cm}^2}", r"\boxed{7\text{ cm}²}"),
        # No unit, no such power, or more digits than one.
        ("x^2", "x^2"),
        ("cm^4", "cm^4"),
        ("cm^23", "cm^23"),
        ("2^3", "2^3"),
    ],
)
def test_powers_of_units_are_no_numbers(text, marked):
    assert marked_powers(text) == marked


def test_the_words_that_math_answers_may_end_in_are_those_of_the_units_and_no_variable():
    for text in ("7 km", "7 miles", "7 kilograms", "7 min", "7 hr", "7 mL", "7 USD", "7 people", "7 years", "7 in"):
        assert plain_number(text).value == 7, text
    for text in ("7 m", "7s", "7 x", "7 h", "7 apples", "7 inn"):  # m may be a variable, as x is
        assert plain_number(text) is None, text
