import time
import warnings
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.numeric import NumericCloseness, NumericMatch, last_number, only_number
from grpo_lit.rollout import Completion, Prompt


def score(text, answer, extract="last_number", metadata=None, **options):
    prompt = Prompt(id="sum/0", question="", answer=answer, metadata=metadata or {})
    return NumericMatch(extract, **options)(prompt, [Completion((), (), text, "stop", 0)])[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7", "7"),
        ("7", "7.0"),
        ("7.00", "7"),
        ("007", "7"),
        ("+7", "7"),
        ("The answer is 7.", "7"),
        ("**73**", "73"),
        ("x=5", "5"),
        ("5 cm", "5"),
        ("5 degrees", "5"),
        ("5°", "5"),
        ("$5", "5"),
        (r"\$5", "5"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("1\u202f234", "1234"),
        ("1\u00a0234", "1234"),
        ("#### 70,000", "70000"),
        ("70000", "#### 70,000"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("=-3", "-3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("-0", "0"),
        ("0", "-0"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1/2", "0.5"),
        (r"\frac{1}{2}", "1/2"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac13", "1/3"),
        (r"\dfrac{10}{7}.", "10/7"),
        ("1e3", "1000"),
        ("1000", "1e3"),
        ("2.5e-3", "0.0025"),
        ("28%", "28"),
        (r"28\%", "28"),
        ("wait...5", "5"),
        ("[1, 2, 3]", "3"),
        ("10-3", "3"),
        # 0.1 + 0.2 is not 0.3 in floats, and these two are the same float.
        ("0.30000000000000000000000001", "0.30000000000000000000000001"),
        ("9007199254740993", "9007199254740993"),
    ],
)
def test_equal(text, answer):
    """Field bug C7."""
    assert score(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "7"),
        ("seven", "7"),
        ("7 or 8", "7"),
        ("-7", "7"),
        ("7.0000001", "7"),
        ("28%", "0.28"),
        ("12,34", "1234"),
        ("1 234", "1234"),
        ("1,2345", "12345"),
        (r"2\frac{1}{2}", "10.5"),
        # A question repeated is no answer.
        ("28/7", "4"),
        ("28/7 =", "4"),
        ("2/4", "0.5"),
        ("4/1", "4"),
        ("1/0", "0"),
        ("0/5", "0"),
        ("10-3", "-3"),
        ("1e999999999", "1"),
        ("1e-999999999", "0"),
        ("9" * 5000, "9"),
        ("٣", "3"),
        ("9007199254740992", "9007199254740993"),
        ("0.3333", "1/3"),
        ("3.14", "3.14159"),
    ],
)
def test_not_equal(text, answer):
    """Field bug C7."""
    assert score(text, answer) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "extract", "expected"),
    [
        ("<answer>7</answer> and 8", "7", "answer_tag", 1.0),
        ("7 <answer>8</answer>", "7", "answer_tag", 0.0),
        ("7", "7", "answer_tag", 0.0),
        ("<answer>7", "7", "answer_tag", 0.0),
        ("<answer>\n 3 + 4 = 7 \n</answer>", "7", "answer_tag", 1.0),
        ("<answer>5, 6, 7</answer>", "7", "answer_tag", 0.0),
        ("<answer>7 7</answer>", "7", "answer_tag", 0.0),
        ("<answer>3</answer> no <answer>7</answer>", "7", "answer_tag", 1.0),
        ("<answer></answer>", "7", "answer_tag", 0.0),
        (r"First \boxed{5}. Wrong; it is \boxed{7}.", "7", "boxed", 1.0),
        (r"First \boxed{5}. Wrong; it is \boxed{7}.", "5", "boxed", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", "boxed", 1.0),
        (r"\boxed{\frac{1}{2", "0.5", "boxed", 0.0),
        (r"\boxed{}", "0", "boxed", 0.0),
        (r"\boxed{\text{E}}", "0", "boxed", 0.0),
        (r"\fbox{7}", "7", "boxed", 1.0),
        (r"\boxed{x = 7\text{ cm}}", "7", "boxed", 1.0),
        (r"\boxed{2\frac{2}{3}}", "8/3", "boxed", 0.0),
    ],
)
def test_where_the_number_stands(text, answer, extract, expected):
    assert score(text, answer, extract) == expected


def test_an_answer_tag_that_the_template_opened_counts():
    assert score("7</answer>", "7", "answer_tag", {"prefill": "<|im_start|>assistant\n<answer>"}) == 1.0
    assert score("7</answer>", "7", "answer_tag") == 0.0


@pytest.mark.parametrize("answer", [None, "", "yes", "E", "3 or 4", "2/4", "1e999999999", "(1, 2)", "1 234"])
def test_an_answer_that_is_no_number_abstains_and_is_counted(answer):
    reward = NumericMatch()
    prompts = [Prompt(id=f"q/{i}", question="", answer=answer) for i in range(3)]
    completions = [Completion((), (), text, "stop", 0) for text in ("7", "yes")]
    with pytest.warns(UserWarning, match="abstains on prompt q/0") as caught:
        assert [reward(prompt, completions) for prompt in prompts] == [[None, None]] * 3
    assert len(caught) == 1
    assert reward.unreadable == 3
    assert [reward.problem(prompt) for prompt in prompts] == ["an answer that is not one number"] * 3
    assert reward.problem(Prompt(id="q", question="", answer="7 km")) is None


def test_a_readable_answer_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score("7", "7") == 1.0


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer(n):
    for text in (
        f"{n}",
        f"{n:,}",
        f"It is {n}.",
        f"**{n:+}**",
        f"{n}.000",
        f"{n:,}.0 m",
        f"{n}".replace("-", "\u2212"),
    ):
        assert last_number(text) == n
        assert only_number(text) == n


@given(st.decimals(-(10**6), 10**6, places=3))
def test_decimals_are_exact(d):
    assert last_number(f"{d}") == Fraction(d)


@given(st.fractions(-1000, 1000, max_denominator=1000))
def test_fractions_in_lowest_terms_are_exact(f):
    assert last_number(f"so {f}") == f


@given(st.text(alphabet="0123456789.,-+/eE$%{}\\frac= \n", max_size=60))
def test_no_text_breaks_the_reader(text):
    last_number(text)
    only_number(text)


@pytest.mark.parametrize(
    "piece", ["1", "1,", "1,111", ",111", "1.", ".", "-", "1/", "1e", "1e1", r"\frac1", "1\\,", "$", " "]
)
@pytest.mark.parametrize("end", ["", "x", "/1", "2"])
def test_reading_takes_linear_time(piece, end):
    text = piece * (200_000 // len(piece)) + end
    started = time.process_time()
    last_number(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "score"), [("The answer is 41.", 1.0), ("43", 0.8), ("39", 0.8), ("36", 0.5), ("52", 0.0), ("no", 0.0)]
)
def test_closeness_falls_linearly_with_distance(text: str, score: float) -> None:
    # scale 10: 1 - |number - 41| / 10, not below 0
    completion = Completion((), (), text, "stop", 0)
    (got,) = NumericCloseness(scale=10.0)(Prompt("p", "q", "41"), [completion])
    assert got == pytest.approx(score)


def test_closeness_to_an_unreadable_answer_abstains_and_a_scale_of_nothing_is_refused() -> None:
    assert NumericCloseness()(Prompt("p", "q", "yes"), [Completion((), (), "3", "stop", 0)]) == [None]
    with pytest.raises(ConfigError, match="scale"):
        NumericCloseness(scale=0.0)


# ---------------------------------------------------------------- tolerance


@pytest.mark.parametrize(
    ("text", "answer", "relative", "absolute", "expected"),
    [
        # Bounds belong to what is right, to the last digit: 1 % of 100 is 1.
        ("101", "100", 0.01, 0.0, 1.0),
        ("99", "100", 0.01, 0.0, 1.0),
        ("101.0000000000000000001", "100", 0.01, 0.0, 0.0),
        ("-101", "-100", 0.01, 0.0, 1.0),
        ("100", "-100", 0.5, 0.0, 0.0),
        ("3.14", "3.14159", 0.001, 0.0, 1.0),
        ("3.1", "3.14159", 0.001, 0.0, 0.0),
        ("0.333333", "1/3", 1e-5, 0.0, 1.0),
        # A share of 0 is 0.
        ("0.001", "0", 0.5, 0.0, 0.0),
        ("0.001", "0", 0.0, 0.001, 1.0),
        ("0.3", "0.2", 0.0, 0.1, 1.0),
        ("0.31", "0.2", 0.0, 0.1, 0.0),
        # The larger of the two counts: 0.01 * 100 = 1 against 2, and 0.03 * 100 = 3 against 2.
        ("102", "100", 0.01, 2.0, 1.0),
        ("103", "100", 0.03, 2.0, 1.0),
        ("none", "100", 0.5, 1e9, 0.0),
    ],
)
def test_tolerance(text, answer, relative, absolute, expected):
    assert score(text, answer, relative_tolerance=relative, absolute_tolerance=absolute) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relative_tolerance": 1.0}, "`relative_tolerance` expected 0 or more, below 1, but got 1.0"),
        ({"relative_tolerance": -0.1}, "`relative_tolerance` expected"),
        ({"relative_tolerance": float("nan")}, "`relative_tolerance` expected"),
        ({"absolute_tolerance": -1.0}, "`absolute_tolerance` expected 0 or more, but got -1.0"),
        ({"absolute_tolerance": float("inf")}, "`absolute_tolerance` expected"),
    ],
)
def test_a_tolerance_that_takes_anything_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        NumericMatch(**options)


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "answer", "convert", "require"),
    [
        ("7 cm", "7 cm", 1.0, 1.0),
        ("7cm", "7 centimeters", 1.0, 1.0),
        (r"7\text{ cm}", "7 cm", 1.0, 1.0),
        (r"$7 \, \mathrm{cm}$.", "7 cm", 1.0, 1.0),
        ("70 mm", "7 cm", 1.0, 1.0),
        ("7 mm", "7 cm", 0.0, 0.0),
        ("7 kg", "7 cm", 0.0, 0.0),
        ("1.5 km", "1500 m", 1.0, 1.0),
        ("12 inches", "1 foot", 1.0, 1.0),
        ("1.5 hours", "90 minutes", 1.0, 1.0),
        ("90 Minutes", "1.5 h", 1.0, 1.0),
        # km/h to m/s: 36 * 1000 / 3600 = 10
        ("36 km/h", "10 m/s", 1.0, 1.0),
        ("10 meters per second", "36 km/h", 1.0, 1.0),
        ("10 m", "36 km/h", 0.0, 0.0),
        ("2 m^2", "20000 cm^2", 1.0, 1.0),
        (r"2\text{ m}^{2}", "2 square meters", 1.0, 1.0),
        ("2 m²", "2 sq m", 1.0, 1.0),
        ("2 m", "2 m^2", 0.0, 0.0),
        ("1 liter", "1000 cm^3", 1.0, 1.0),
        ("250 ml", "0.25 L", 1.0, 1.0),
        ("$0.50", "50 cents", 1.0, 1.0),
        (r"\$5", "$5", 1.0, 1.0),
        ("5 dollars", "$5", 1.0, 1.0),
        ("$5 per hour", "5 dollars per hour", 1.0, 1.0),
        ("€5", "$5", 0.0, 0.0),
        ("28%", r"28\%", 1.0, 1.0),
        ("28 percent", "28%", 1.0, 1.0),
        (r"90^\circ", "90 degrees", 1.0, 1.0),
        # Without a unit it means the answer's, unless one is required.
        ("7", "7 cm", 1.0, 0.0),
        ("$7$", "7 cm", 1.0, 0.0),
        ("70", "7 cm", 0.0, 0.0),
        ("0.28", "28%", 0.0, 0.0),
        ("7 because I measured it", "7 cm", 1.0, 0.0),
        # An answer without a unit asks for none.
        ("7 cm", "7", 1.0, 1.0),
        ("7 apples", "7 oranges", 1.0, 1.0),
    ],
)
def test_units(text, answer, convert, require):
    assert score(text, answer, units="convert") == convert
    assert score(text, answer, units="require") == require
    assert score(rf"\boxed{{{text.rstrip('.')}}}", answer, "boxed", units="convert") == convert


def test_units_and_tolerance_go_together():
    # 1 % of 1 mile = 1609.344 m is 16.09344 m: 1593.25 to 1625.43
    assert score("1600 m", "1 mile", units="convert", relative_tolerance=0.01) == 1.0
    assert score("1590 m", "1 mile", units="convert", relative_tolerance=0.01) == 0.0


def test_units_count_for_nothing_unless_asked():
    assert score("7 kg", "7 cm") == 1.0
    assert score("70 mm", "7 cm") == 0.0


@pytest.mark.parametrize("piece", ["1 m", "m^2", "$1", "1 sq ", "1 m per ", "1\\text{", "1~", "a^"])
def test_reading_units_takes_linear_time(piece):
    started = time.process_time()
    score(piece * (200_000 // len(piece)), "7 cm", units="convert")
    assert time.process_time() - started < 2
