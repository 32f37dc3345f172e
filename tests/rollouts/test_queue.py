"""The queue hands out groups in the order their prompts were taken, whatever the thread that draws is doing."""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bare import RecordingEngine
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lit.data.state import asked_again, gathered, own_share
from grpo_lit.errors import EngineError
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.handover import Probe
from grpo_lit.rollouts.queue import Asked, RolloutQueue
from grpo_lit.rollouts.sampler import Sampler

ALONE = Ranks(SingleDeviceStrategy(device=torch.device("cpu")))
SAMPLING, PROBE = Sampling(completions=1), Probe((1,), ())


class Gated(Sampler):
    """Draws a group per prompt, n tokens for prompt n, once ``gate`` lets it; prompt 13 is more than it can bear."""

    def __init__(self) -> None:
        self.gate, self.ended = threading.Semaphore(0), threading.Event()
        self.rewards = SimpleNamespace(counters=lambda: {"r_unreadable": len(self.asked)})
        self.engine = RecordingEngine()
        self.engine.weight_version = 0
        self.asked: list[int] = []
        self.threads: set[str] = set()

    def take_seconds(self) -> dict[str, float]:
        return {"rollout": 1.0}

    def scored_groups(self, prompts: Sequence[tuple[Prompt, int]], sampling: Sampling) -> list[Group]:
        while not self.gate.acquire(timeout=0.01):
            if self.ended.is_set():
                raise EngineError("sampling was ended")
        self.threads.add(threading.current_thread().name)
        self.asked += [int(prompt.id) for prompt, _ in prompts]
        if 13 in self.asked:
            raise EngineError("unlucky")
        version = self.engine.weight_version
        return [
            Group(prompt, epoch, (Completion((7,) * n, (-1.0,) * n, "", "stop", version),), {"r": [1.0]}, [1.0], [True])
            for prompt, epoch in prompts
            for n in [int(prompt.id)]
        ]


class Numbers:
    """0, 1, 2, ... without end."""

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def __call__(self, count: int) -> list[tuple[Prompt, int]]:
        self.next += count
        return [(Prompt(str(n), "", token_ids=(n,)), 0) for n in range(self.next - count, self.next)]


@pytest.fixture
def build() -> Any:
    """``build(when_stale="drop")``: a queue, its sampler, its prompts; the thread is ended whatever happens."""
    made: list[RolloutQueue] = []

    def make(first: int = 0, **settings: Any) -> tuple[RolloutQueue, Gated, Callable[..., Asked]]:
        queue = RolloutQueue(Gated(), Asynchronous(**{"max_staleness": 9, **settings}))
        queue.handover.version = 0
        made.append(queue)
        take = Numbers(first)

        def ask(count: int, oldest: int | None = None, ahead: Sequence[int] = ()) -> Asked:
            got = queue.ask(count, take, SAMPLING, ALONE, oldest) if count else Asked()
            queue.fill(ahead, take, SAMPLING, ALONE)
            return got

        return queue, queue.sampler, ask

    yield make
    for queue in made:
        queue.give_up()
        queue.join()


def names(got: Asked) -> list[int]:
    assert [prompt.id for prompt, _ in got.prompts] == [group.prompt.id for group in got.groups.values()]
    return [int(prompt.id) for prompt, _ in got.prompts]


def test_prompts_come_in_the_order_they_were_taken_in_portions_of_any_size(build: Callable) -> None:
    queue, sampler, ask = build()
    sampler.gate.release(9)
    ask(0, ahead=[3, 4])
    assert len(queue) == 7
    assert names(ask(2)) == [0, 1]
    got = ask(3)
    assert names(got) == [2, 3, 4]
    assert names(ask(4)) == [5, 6, 7, 8]  # the last two are drawn when they are asked for
    assert (len(queue), queue.ready) == (0, 0)
    assert sampler.threads == {"grpo-lit-rollouts_0"}
    assert sampler.asked == list(range(9))


def test_what_lies_ready_is_counted_and_what_is_missing_is_waited_for(build: Callable) -> None:
    queue, sampler, ask = build()
    ask(0, ahead=[2, 3])
    sampler.gate.release()
    queue._rounds[0].future.result(10)
    assert (len(queue), queue.ready) == (5, 2)
    assert names(ask(1)) == [0]
    assert queue.ready == 1
    threading.Timer(0.05, sampler.gate.release).start()
    assert names(ask(4)) == [1, 2, 3, 4]
    seconds = queue.take_seconds()
    assert seconds["rollout"] == 2.0  # once for each of two rounds
    assert seconds["wait_rollout"] >= 0.04
    assert queue.take_seconds() == {}


def test_who_waits_for_whom_is_told(build: Callable) -> None:
    queue, sampler, ask = build()
    sampler.gate.release(2)
    ask(1)
    assert queue.take_seconds()["wait_learner"] == 0  # nothing was to be drawn before it
    time.sleep(0.05)
    ask(0, ahead=[1])
    queue.settle()
    ask(1)
    second = queue.take_seconds()
    assert second["wait_rollout"] == 0  # it lay ready
    assert second["wait_learner"] >= 0.05


def test_rounds_are_drawn_with_the_weights_that_were_theirs_when_they_were_begun(build: Callable) -> None:
    queue, sampler, ask = build()
    ask(0, ahead=[1, 1])
    queue.handover.put([], 5, PROBE)
    ask(0, ahead=[1, 1, 1])
    sampler.gate.release(3)
    assert ask(3).versions == [0, 0, 5]


def test_a_new_copy_waits_for_the_round_that_takes_the_last_one_up(build: Callable) -> None:
    queue, sampler, ask = build()
    ask(0, ahead=[1])
    queue.handover.put([], 1, PROBE)
    queue.wait_for_copy()  # nothing is to be drawn with it yet
    ask(0, ahead=[1, 1])
    threading.Timer(0.05, sampler.gate.release).start()  # the first round ends, the second loads version 1
    queue.wait_for_copy()
    assert queue.handover._copy is None
    assert queue.ready == 1


def test_the_newest_weights_are_taken_where_timing_may_decide(build: Callable) -> None:
    queue, sampler, ask = build(when_stale="drop")
    ask(0, ahead=[1, 1])
    queue.wait_for_copy()
    queue._rounds[0].begun.wait(10)
    queue.handover.put([], 5, PROBE)
    sampler.gate.release(2)
    assert ask(2).versions == [0, 5]


def test_too_stale_groups_are_counted_by_length_and_drawn_again_in_their_places(build: Callable) -> None:
    queue, sampler, ask = build(first=3, when_stale="drop")
    sampler.gate.release(3)
    ask(0, ahead=[2])
    queue.settle()
    queue.handover.put([], 5, PROBE)
    got = ask(3, oldest=1)
    assert names(got) == [3, 4, 5]  # none is lost: the slow ones come again
    assert sampler.asked == [3, 4, 5, 3, 4]
    assert got.versions == [5, 5, 5]
    assert [group.completions[0].weight_version for group in got.groups.values()] == [5, 5, 5]
    assert (got.too_stale, got.dropped) == (2, [3, 4])
    assert got.counts == {"r_unreadable": 5}


def test_a_group_is_as_old_as_its_oldest_token(build: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, sampler, ask = build(first=2, when_stale="drop", in_flight="keep")
    assert sampler.updates.handover is queue.handover
    draw = sampler.scored_groups

    def across(prompts: Sequence[tuple[Prompt, int]], sampling: Sampling) -> list[Group]:
        groups = draw(prompts, sampling)
        for n, group in enumerate(groups):  # the n-th group begins with version 5 + n, and all end with 9
            (one,) = group.completions
            group.completions = (one.sampled_by([5 + n, *[9] * (len(one.token_ids) - 1)]),)
        sampler.engine.weight_version = 9
        return groups

    monkeypatch.setattr(sampler, "scored_groups", across)
    sampler.gate.release(1)
    assert ask(3).versions == [5, 6, 7]
    sampler.gate.release(2)
    got = ask(3, oldest=6)  # 5, 6, 7: the first is drawn again, alone, and no better
    assert (got.versions, got.too_stale, got.dropped) == ([5, 6, 7], 1, [5])


def test_a_failure_is_told_at_the_next_look_and_when_it_is_asked_for(build: Callable) -> None:
    queue, sampler, ask = build(first=12)
    ask(0, ahead=[1, 1])
    queue.check()
    sampler.gate.release(2)
    queue.settle()
    with pytest.raises(EngineError, match="unlucky"):
        queue.check()
    assert names(ask(1)) == [12]
    with pytest.raises(EngineError, match="unlucky"):
        ask(1)


def test_a_shaped_group_is_not_the_one_that_a_checkpoint_holds(build: Callable) -> None:
    queue, sampler, ask = build()
    sampler.gate.release(1)
    ask(0, ahead=[2])
    queue.settle()
    state = queue.state_dict()
    (group, _) = ask(2).groups.values()
    group.rewards[0] = -1.0
    group.masked = [True]
    held = state["rounds"][0].outcome.groups[0]
    assert (held.rewards, held.masked) == ([1.0], [])


def test_what_was_given_up_is_drawn_again(build: Callable) -> None:
    queue, sampler, ask = build()
    sampler.gate.release()
    ask(0, ahead=[1, 1, 1])
    queue._rounds[0].future.result(10)
    queue.give_up()
    queue.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grpo-lit-rollouts")]
    assert sampler.asked == [0]
    queue.handover.version = 4
    sampler.gate.release(2)
    assert names(ask(3)) == [0, 1, 2]


def test_without_settings_nothing_is_begun_before_it_is_asked_for_and_no_thread_is_there() -> None:
    sampler = Gated()
    sampler.gate.release(1)
    queue = RolloutQueue(sampler)
    assert names(queue.ask(2, Numbers(), SAMPLING, ALONE)) == [0, 1]
    assert sampler.threads == {threading.current_thread().name}
    assert "wait_rollout" not in queue.take_seconds()


def rank(index: int, size: int, gather: Callable[[Any], list[Any]] | None = None) -> Ranks:
    return Mock(spec=Ranks, rank=index, world_size=size, gather=gather or (lambda value: [value]))


def written(queues: Sequence[RolloutQueue]) -> dict[str, Any]:
    """The checkpoint of several ranks."""
    empty = {"waiting": {"serials": [], "versions": [], "drawn": [], "groups": {}}, "replay": None}
    states = [{"collector": empty, "rollout": None, "queue": queue.state_dict()} for queue in queues]
    parts: list[Any] = []
    for index, state in enumerate(states):
        gathered(state, rank(index, len(states), lambda value: parts.append(value) or [value]))
    return gathered(states[0], rank(0, len(states), lambda value: parts))


@pytest.mark.parametrize("slow", [None, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_holds_what_all_ranks_have_drawn_and_the_prompts_of_the_rest(
    build: Callable, size: int, slow: int | None
) -> None:
    """Field bug F3: what is queued or in flight is neither lost nor asked twice, on any number of ranks."""
    queues = []
    for index in range(2):
        queue, sampler, _ = build()
        take = Numbers()
        sampler.gate.release(1 if index == slow else 2)  # of two rounds
        queue.fill([3, 2], take, SAMPLING, rank(index, 2))
        for part in list(queue._rounds)[: 1 if index == slow else 2]:
            part.future.result(10)
        queues.append(queue)
    state = written(queues)
    for index in range(size):
        queue, sampler, _ = build()
        queue.load_state_dict(own_share(state, rank(index, size))["queue"])
        first, second = queue._rounds
        assert [group.prompt.id for group in first.outcome.groups] == [str(n) for n in range(3)][index::size]
        assert [prompt.id for prompt, _ in second.prompts] == ["3", "4"]
        assert (second.outcome is None) == (slow is not None)
    if size == 1:
        queue.handover.version = sampler.engine.weight_version = 4
        sampler.gate.release(1)
        got = queue.ask(5, Numbers(), SAMPLING, ALONE)
        assert names(got) == [0, 1, 2, 3, 4]
        assert got.versions == [0, 0, 0] + ([0, 0] if slow is None else [4, 4])


def test_under_other_settings_the_prompts_are_asked_again_and_the_groups_are_not_kept(build: Callable) -> None:
    queue, sampler, ask = build()
    sampler.gate.release(2)
    ask(0, ahead=[2])
    queue.settle()
    other, sampler, ask = build(first=2)
    other.load_state_dict(asked_again(own_share(written([queue]), rank(0, 1))["queue"]))
    assert (len(other), other.ready) == (2, 0)
    sampler.gate.release(1)
    assert names(ask(2)) == [0, 1]
    assert sampler.asked == [0, 1]
