import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lit.data.source import is_heldout


@given(st.text())
def test_every_question_is_in_exactly_one_split_and_stays_there(question):
    assert is_heldout(question, 0.5) == is_heldout(question, 0.5)
    assert not is_heldout(question, 0.0)
    assert is_heldout(question, 1.0)


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_only_adds_questions(question, a, b):
    low, high = sorted((a, b))
    assert is_heldout(question, high) or not is_heldout(question, low)


def test_the_share_is_the_fraction():
    # Binomial(10_000, 0.1): standard deviation 30, so 5 of them are 150.
    share = sum(is_heldout(f"question {i}", 0.1) for i in range(10_000))
    assert abs(share - 1000) < 150


@pytest.mark.parametrize(
    ("question", "share"),
    # `echo -n QUESTION | b2sum -l 64` gives 2ae7e444... and d664b549...: 0x2ae7e444 / 2^32 = 0.1676, 0xd664b549 / 2^32
    # = 0.8375. A change of the hash would leak held-out questions of old runs into new training.
    [("3 + 4 =", 0.1676), ("4 + 3 =", 0.8375)],
)
def test_the_hash_is_pinned(question, share):
    assert is_heldout(question, share + 0.001)
    assert not is_heldout(question, share - 0.001)
