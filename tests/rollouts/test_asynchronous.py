"""How far ahead rollouts are drawn, and what contradicts the bound on staleness."""

import pytest

from grpo_lit.data.checks import check_staleness
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import ConfigError
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.dynamic import DynamicSampling
from grpo_lit.rollouts.replay import Replay


# The j-th rollout ahead is begun with weights of that staleness and has its last step j * steps + steps - 1 later.
@pytest.mark.parametrize(
    ("bound", "queue", "steps", "staleness", "ahead"),
    [
        (0, 2, 1, 0, 0),
        (1, 2, 1, 0, 1),
        (1, 2, 1, 1, 0),  # the engine still holds the weights before
        (2, 2, 1, 0, 2),
        (9, 2, 1, 0, 2),  # the queue is full
        (3, 2, 4, 0, 0),  # the fourth step on a rollout is 3 later than the first: nothing is left
        (6, 2, 4, 0, 0),
        (7, 2, 4, 0, 1),
        (11, 2, 4, 0, 2),
        (11, 2, 4, 1, 1),
    ],
)
def test_no_more_is_drawn_ahead_than_the_bound_allows(
    bound: int, queue: int, steps: int, staleness: int, ahead: int
) -> None:
    settings = Asynchronous(max_staleness=bound, queue_size=queue)
    assert settings.rollouts_ahead(steps, staleness) == ahead
    assert staleness + ahead * steps + steps - 1 <= bound or ahead == 0
    assert Asynchronous(max_staleness=bound, queue_size=queue, when_stale="drop").rollouts_ahead(steps, 0) == queue


@pytest.mark.parametrize("settings", [{"max_staleness": -1}, {"weight_sync_steps": 0}, {"queue_size": 0}])
def test_numbers_without_meaning_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"data\.rollout\.asynchronous\.{next(iter(settings))}"):
        Asynchronous(**settings)


@pytest.mark.parametrize(
    ("bound", "more", "steps", "key", "enough"),
    [
        (2, {}, 4, "data.num_updates", 3),
        (2, {"weight_sync_steps": 4}, 1, "asynchronous.weight_sync_steps", 3),
        (8, {"replay": Replay(max_age=8)}, 2, "data.rollout.replay.max_age", 9),
        (4, {"dynamic_sampling": DynamicSampling(max_age=2)}, 2, "data.rollout.dynamic_sampling.max_age", 5),
    ],
)
def test_what_would_always_be_too_stale_is_refused_with_both_keys(
    bound: int, more: dict, steps: int, key: str, enough: int
) -> None:
    parts = {name: value for name, value in more.items() if name != "weight_sync_steps"}
    every = more.get("weight_sync_steps", 1)

    def check(bound: int) -> None:
        check_staleness(RolloutOptions(asynchronous=Asynchronous(bound, every), **parts), steps)

    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as refused:
        check(bound)
    assert "data.rollout.asynchronous.max_staleness" in str(refused.value)
    assert str(enough) in str(refused.value)
    check(enough)  # what the message says is enough, is
    check_staleness(RolloutOptions(**parts), steps)  # nobody bounds a synchronous run
