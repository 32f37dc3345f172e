"""Several sources in fixed shares."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import Letters

from grpo_lit.data.mixture import Mixture, MixturePart
from grpo_lit.errors import ConfigError


def test_each_source_has_its_share_and_keeps_its_prompts() -> None:
    # Shares 1/4 and 3/4 of 8: 2 and 6.
    mixture = Mixture({"a": MixturePart(Letters(12)), "b": MixturePart(Letters(12), 3.0, domain="hard")}, size=8)
    prompts = [mixture[i] for i in range(len(mixture))]
    assert Counter(prompt.id.split("/")[0] for prompt in prompts) == {"a": 2, "b": 6}
    assert [p.question for p in prompts] == [Letters(12)[i].question for i in [0, 1, 0, 1, 2, 3, 4, 5]]
    assert [p.domain for p in prompts] == [Letters(12)[0].domain] * 2 + ["hard"] * 6
    assert len({prompt.id for prompt in prompts}) == 8
    assert [mixture.prompt_id(i) for i in range(8)] == [prompt.id for prompt in prompts]
    with pytest.raises(IndexError, match="0 to 7"):
        mixture[8]


def test_without_a_size_no_prompt_is_asked_twice() -> None:
    # Half and half of 3 and 12 prompts: 3 and 3. A tenth of 3 and nine tenths of 12: 12 / .9 = 13.3 is the bound.
    assert Mixture({"a": MixturePart(Letters(3)), "b": MixturePart(Letters(12))}).counts == {"a": 3, "b": 3}
    assert Mixture({"a": MixturePart(Letters(3), 0.1), "b": MixturePart(Letters(12), 0.9)}).counts == {"a": 1, "b": 12}


def test_a_small_source_starts_again_under_new_ids() -> None:
    mixture = Mixture({"a": MixturePart(Letters(2)), "b": MixturePart(Letters(12))}, size=10)
    ids = [mixture[i].id for i in range(5)]
    assert len(set(ids)) == 5
    assert mixture[0].question == mixture[2].question == mixture[4].question
    assert [mixture.prompt_id(i) for i in range(5)] == ids


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 300))
def test_shares_are_kept_to_the_nearest_prompt(weights: list[float], extra: int) -> None:
    size = 10 * round(sum(weights) / min(weights)) + 10 + extra  # enough for the smallest
    mixture = Mixture({str(i): MixturePart(Letters(3), w) for i, w in enumerate(weights)}, size=size)
    assert len(mixture) == size
    for i, weight in enumerate(weights):
        assert abs(mixture.counts[str(i)] - size * weight / sum(weights)) < 1


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one source"):
        Mixture({})
    with pytest.raises(ConfigError, match=r"`size`.*'b' 0"):
        Mixture({"a": MixturePart(Letters(3), 99.0), "b": MixturePart(Letters(3))}, size=5)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="`weight`"):
            MixturePart(Letters(3), weight)


def test_domains_are_known_without_making_a_prompt() -> None:
    class Telling(Letters):
        domains = ("letters", "more")

    telling, silent = MixturePart(Telling(3)), MixturePart(Letters(3))
    named = MixturePart(Letters(3), domain="hard")
    assert set(Mixture({"a": telling, "b": named}).domains) == {"letters", "more", "hard"}
    assert Mixture({"a": telling, "b": silent}).domains is None
