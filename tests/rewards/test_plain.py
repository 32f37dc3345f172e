from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_lit.rewards.numeric import only_number, without_separators
from grpo_lit.rewards.plain import based, clean, plain_number, word


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("1{,}234", 1234),
        (r"1\,234", 1234),
        (r"1,\!234", 1234),
        (r"11,\! 111,\! 111,\! 100", 11111111100),
        ("1 234", 1234),
        ("1~234", 1234),
        (r"1\ 234", 1234),
        ("1\u202f234", 1234),
        ("1,234,567.5", "1234567.5"),
        ("70,000", 70000),
        ("007", 7),
        ("+7", 7),
        ("7.", 7),
        ("7.50", "7.5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("\u22125", -5),
        ("**73**", 73),
        ("$5$", 5),
        ("$$5$$", 5),
        (r"\(5\)", 5),
        (r"\[5\]", 5),
        (r"\mathbf{5}", 5),
        ("{5}", 5),
        (r"\boxed{5}", 5),
        ("$5", 5),
        (r"\$18.90", "18.9"),
        ("-$5", -5),
        ("$-5", -5),
        ("28%", 28),
        (r"28\%", 28),
        ("5 cm", 5),
        ("5 degrees", 5),
        (r"5^\circ", 5),
        (r"5^{\circ}", 5),
        ("5°", 5),
        (r"864 \mbox{ inches}^2", 864),
        (r"5.4 \text{ cents}", "5.4"),
        (r"5\text{ apples}", 5),
        ("x=5", 5),
        ("x_1 = -5", -5),
        ("2 2/3", Fraction(8, 3)),
        (r"2\frac{2}{3}", Fraction(8, 3)),
        (r"-2\frac{2}{3}", Fraction(-8, 3)),
        (r"137 \frac{1}{2}", "137.5"),
        ("8/3", Fraction(8, 3)),
        ("22/3", Fraction(22, 3)),
        (r"\frac83", Fraction(8, 3)),
        (r"\dfrac 59", Fraction(5, 9)),
        (r"\frac{-1}{2}", "-0.5"),
        (r"-\frac{35}{9}", Fraction(-35, 9)),
        (r"\frac{270}7\text{ degrees}", Fraction(270, 7)),
        ("2/4", "0.5"),
        ("1e3", 1000),
        ("1.5e-3", "0.0015"),
        (r"6.02\times 10^{23}", 602 * 10**21),
        ("3 million", 3_000_000),
        (r"\$3\text{ million}", 3_000_000),
        ("2 dozen", 24),
        # 0.1 + 0.2 is not 0.3 in floats, and these two are the same float.
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_number(text, value):
    assert plain_number(clean(text)).value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", ".", "x", "2x", "2 x", "2xy", "2 pi", r"2\pi", "5 or 7", "5, 7", "1,2", "12,34", "1, 234", "(5)"),
        *(r"2\frac{5}{3}", "2 12/3", "1/0", "5!", "5^2", "1e999999999", "9" * 1001, "1.2.3", "5 = 5", "12:30", "٣"),
        *(r"5 \text{ or }7", "52_8", "x=y=5", "--5", "5..."),
    ],
)
def test_no_plain_number(text):
    assert plain_number(clean(text)) is None


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("0.333333", "1/3", True),
        ("0.33333", "1/3", False),  # five digits
        ("0.3333333333", r"\frac13", True),
        ("0.333335", "1/3", False),  # off by 1.67e-6
        ("0.666667", "2/3", True),  # rounded
        ("0.666666", "2/3", True),  # cut
        ("0.000000333", "1/3000000", False),  # three digits
        ("7.0000001", "7", False),
        ("0.0000001", "0", False),
        ("0.0000001", "0.0000002", False),
        ("0.1234567", "0.1234568", False),
        ("0.500001", "1/2", False),  # a half has an end
        ("0.30", ".3", True),
        ("3.14", "22/7", False),
        ("28%", "0.28", False),
    ],
)
def test_a_decimal_and_a_number_without_end(one, other, equal):
    a, b = plain_number(one), plain_number(other)
    assert a.equals(b) is equal
    assert b.equals(a) is equal


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fractions(max_denominator=10**6))
def test_what_is_written_is_read_back(value):
    text = str(plain_number(f"{value.numerator}/{value.denominator}"))
    assert plain_number(text).value == value


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9))
def test_a_decimal_keeps_its_digits(value):
    number = plain_number(f"{value:f}")
    assert number.value == Fraction(value)
    assert Fraction(str(number)) == Fraction(value)
    assert plain_number(str(number)) == number


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"\text{Evelyn}", ("evelyn", True)),
        ("Evelyn", ("evelyn", False)),
        (r"\text{(C)}", ("c", True)),
        (r"\textbf{(C) }", ("c", True)),
        ("(C)", ("c", False)),
        ("yes", ("yes", False)),
        (r"\text{E}", ("e", True)),
        (r"\text{ no  solution }", ("no solution", True)),
        ("x", None),
        ("p - q", None),
        ("x y", None),
        (r"\pi", None),
        (r"5\text{ cm}", None),
        ("", None),
        ("7", None),
    ],
)
def test_words(text, words):
    assert word(clean(text)) == words


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("52_8", ("52", 8)),
        ("4210_{5}", ("4210", 5)),
        ("1f_{16}", ("1F", 16)),
        ("52", None),
        ("5_1", None),
        ("_8", None),
    ],
)
def test_numbers_of_another_base(text, digits):
    assert based(text) == digits


@pytest.mark.parametrize(
    "between", [r"\,", r"\;", r"\:", r"\!", r",\!", r",\! ", "{,}", r"{,}\!", "\u00a0", "\u2009", "\u202f"]
)
def test_every_reader_knows_the_same_separators(between):
    text = f"12{between}345{between}678"
    assert plain_number(text).value == 12_345_678
    assert only_number(text) == 12_345_678
    assert without_separators(f"({text}, x)") == "(12345678, x)"
