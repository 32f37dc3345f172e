"""The worker's side, in this process: only expressions that are harmless to look at."""

import importlib.util
from pathlib import Path

import pytest

import grpo_lit.rewards.workers


@pytest.fixture(scope="module")
def equivalence():
    spec = importlib.util.spec_from_file_location(
        "equivalence", Path(grpo_lit.rewards.workers.__file__).with_name("equivalence.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        r"9^{9^{9^9}}",
        r"\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}",
        "10^{1000000000}",
        r"\binom{10^9}{5*10^8}",
        r"\binom{1000000000}{500000000}",
        "(10^9)!",
        "10000000!",
        "99999!!!",
        "2^{10^7}",
        "x^{10^9}",
        r"\sum_{k=1}^{10^9} k^k",
        r"\prod_{k=1}^{1000000} k",
        r"\Gamma(10^9)",
        "e^{e^{e^{e^{e}}}}",
        "(1+1)^{10^{10}}",
    ],
)
def test_a_giant_is_refused_before_it_is_evaluated(equivalence, text):
    assert equivalence.equivalent("7", text) == "refused"
    assert not equivalence.readable(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "2^{2005}",
            "100!",
            r"\binom{100}{50}",
            "x^{100}",
            "2^{n+m+k+l+5}",
            r"e^{-(x-\mu)^2/(2\sigma^2)}",
            "10^{100}",
        ),
        *(r"\sum_{k=1}^{\infty} 1/k^2", r"(-\infty,3)", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\{1,2\}"),
    ],
)
def test_what_people_write_is_not(equivalence, text):
    assert equivalence.readable(text)


@pytest.mark.parametrize(
    ("decimal", "other", "equal"),
    [
        ("0.5", r"\frac{\sqrt{4}}{4}", True),
        ("1.41421", r"\sqrt{2}", True),
        ("1.4142", r"\sqrt{2}", False),  # five digits
        ("1.414213", r"\sqrt{2}", True),  # cut; 1.4142135...
        ("1.414214", r"\sqrt{2}", True),  # rounded
        ("1.414215", r"\sqrt{2}", False),
        ("3.14", r"\pi", False),
        ("3.14159", r"\pi", True),
        # math-verify alone rounds both to 0.
        ("0.0000001", r"\frac{\pi}{10^8}", False),
        ("0.5", "2x", False),
        ("0.5", r"\{0.5, 1\}", False),
        ("0.5", r"x = \frac{\sqrt{4}}{4}", True),
        ("0.5", "i", False),
        ("0.5", r"\infty", False),
    ],
)
def test_decimals_follow_our_own_rule_on_either_side(equivalence, decimal, other, equal):
    assert equivalence.equivalent(decimal, other) == ("equal" if equal else "different")
    assert equivalence.equivalent(other, decimal) == ("equal" if equal else "different")


def test_what_cannot_be_parsed_is_different_and_no_gold(equivalence):
    assert not equivalence.readable("")
    assert equivalence.equivalent("7", r"\begin{") == "different"
