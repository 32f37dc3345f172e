import time
import warnings
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.numeric import NumericCloseness, NumericMatch, last_number, only_number
from grpo_lit.rollout import Completion, Prompt


def score(text, answer, extract="last_number", metadata=None):
    prompt = Prompt(id="sum/0", question="", answer=answer, metadata=metadata or {})
    return NumericMatch(extract)(prompt, [Completion((), (), text, "stop", 0)])[0]


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
