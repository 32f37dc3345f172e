"""Rollouts drawn ahead: bounded staleness, nothing lost, nothing idle, whatever takes how long."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bare import RecordingEngine, assert_synchronous, bare_data, one_of
from lightning.pytorch.trainer.states import TrainerStatus
from toys import Letters

from grpo_lit.data.curriculum import Curriculum
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import EngineError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.dynamic import DynamicSampling

TICK = 0.002
#: Ticks that the calls of the engine take, over and over: one in four is slow.
DELAYS = (1, 1, 1, 5)


class Delayed(RecordingEngine):
    """Takes its time; completions are as long as they took. Two calls at a time are a mistake of whoever makes them."""

    def __init__(self, tick: float = TICK, delays: Sequence[int] = DELAYS) -> None:
        super().__init__()
        self.tick, self.delays, self.drawn, self.fails_at = tick, delays, 0, -1
        self._busy = threading.Lock()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        assert self._busy.acquire(blocking=False), "weights were loaded while the engine was drawing"
        super().load_weights(weights, version)
        self._busy.release()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        assert self._busy.acquire(blocking=False), "two threads use the engine"
        delay = self.delays[self.drawn % len(self.delays)]
        self.drawn += 1
        if self.drawn == self.fails_at:
            raise EngineError("the engine has died")
        time.sleep(delay * self.tick)
        drawn = super().generate(requests, sampling)
        self._busy.release()
        tokens = tuple(range(4, 4 + delay))
        return [replace(one, token_ids=tokens, logprobs=(-1.0,) * delay) for one in drawn]


@pytest.fixture
def build(tiny_model_path: Path) -> Iterator[Callable[..., RolloutDataModule]]:
    made: list[RolloutDataModule] = []

    def make(asynchronous: Asynchronous | None, strategy: Any = None, **changes: Any) -> RolloutDataModule:
        options = replace(changes.pop("rollout", RolloutOptions()), asynchronous=asynchronous)
        arguments = {"engine": Delayed(), "prompts_per_rollout": 2, "rollout": options, **changes}
        made.append(bare_data(tiny_model_path, strategy or one_of(0, 1), **arguments))
        return made[-1]

    yield make
    for data in made:
        data.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grpo-lit-rollouts")]


def train(data: RolloutDataModule, steps: Iterable[int], learn: float = TICK) -> list[Any]:
    """Draw the minibatch of every step, and take as long to learn from it."""
    drawn = []
    for step in steps:
        data.trainer.lightning_module.global_step = step
        minibatch = data.draw()
        drawn.append(minibatch.rollout)
        time.sleep(learn)
    return drawn


def asked(rollouts: Iterable[Any]) -> list[str]:
    return [group.prompt.id for rollout in rollouts for group in rollout.groups]


def staleness(rollouts: Iterable[Any]) -> list[int]:
    """Return that of the most stale sample at each step."""
    return [step - int(rollout.batch.weight_version.min()) for step, rollout in enumerate(rollouts)]


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("when_stale", ["wait", "drop"])
@pytest.mark.parametrize("learn", [TICK / 4, 4 * TICK])
def test_no_sample_is_staler_than_the_bound_and_no_prompt_is_passed_over(
    build: Callable, bound: int, when_stale: str, learn: float
) -> None:
    """Field bug E7: off by one, starvation, long completions dropped; a learner slower and faster than the engine."""
    order = build(None).stream
    data = build(Asynchronous(bound, when_stale=when_stale, queue_size=3))
    rollouts = train(data, range(8), learn)
    assert max(staleness(rollouts)) <= bound
    # 16 of 12 prompts: each in its turn, the slow ones too.
    assert asked(rollouts) == [prompt.id for _ in range(8) for prompt, _ in order.take(2)]
    figures = [rollout.rates.compute() for rollout in rollouts]
    if when_stale == "wait":
        # Decided beforehand, whatever takes how long: as stale as the bound allows once the queue is filled.
        assert staleness(rollouts) == [min(step, bound) for step in range(8)]
        assert {figure["system/dropped_stale"] for figure in figures} == {0.0}
    lost = [figure for figure in figures if figure["system/dropped_stale"] > 0]
    assert {figure["length/dropped_stale"] for figure in lost} <= {1.0, 5.0}
    assert lost or when_stale == "wait" or bound > 0 or learn < TICK  # a quick engine has drawn all of them too early


def test_with_a_bound_of_zero_the_engine_is_asked_what_it_is_asked_without_a_thread(build: Callable) -> None:
    """Field bug E7: 0 is the synchronous run."""
    sync, ahead = build(None), build(Asynchronous(0))
    one, other = train(sync, range(4)), train(ahead, range(4))
    assert_synchronous(ahead, other, sync, one)


def test_new_weights_come_between_two_calls_and_a_lost_one_is_reported(build: Callable) -> None:
    """Field bug E4: at the start, at every sync, after evaluation; and what did not arrive is told."""
    data = build(Asynchronous(1), val={"held": Letters(2, heldout=True)})
    train(data, range(3))
    (loader,) = data.val_dataloader()
    data.trainer.lightning_module.global_step = 3
    list(loader)
    train(data, range(3, 5))
    data.queue.settle()
    calls = [call for call in data.engine.calls if call != "score"]
    assert calls == [
        "start",
        "load 0",
        "generate 4 with 0",
        "generate 4 with 0",
        *["load 1", "generate 4 with 1", "load 2", "generate 4 with 2"],
        *["load 3", "generate 2 with 3", "generate 4 with 3"],  # evaluation, and the weights are there already
        *["load 4", "generate 4 with 4"],
    ]
    data.engine.gap = 0.5
    with pytest.warns(UserWarning, match="disagree after the weight sync of step 5: mean log-prob gap 0.5"):
        train(data, range(5, 7), learn=0.05)


def test_weights_are_handed_over_every_so_many_steps(build: Callable) -> None:
    data = build(Asynchronous(4, weight_sync_steps=2, queue_size=1))
    rollouts = train(data, range(6))
    data.queue.settle()
    assert [call for call in data.engine.calls if call.startswith("load")] == ["load 0", "load 2", "load 4"]
    assert [int(rollout.batch.weight_version[0]) for rollout in rollouts] == [0, 0, 0, 2, 2, 4]


def test_several_steps_on_a_rollout_count(build: Callable) -> None:
    # Its last step is one later than its first: 3 = 2 * 2 - 1 is what one rollout ahead needs.
    data = build(Asynchronous(3), num_updates=2)
    rollouts = train(data, range(8))
    ages = [step - int(rollout.batch.weight_version.min()) for step, rollout in enumerate(rollouts)]
    assert ages == [0, 1, 2, 3, 2, 3, 2, 3]
    assert [bool(rollout.batch.stale.all()) for rollout in rollouts[::2]] == [False, True, True, True]


def test_stale_samples_are_left_to_corrections_where_that_is_asked_for(build: Callable) -> None:
    for compared, flagged in (("sampler", [False, True, True]), ("learner", [None, None, None])):
        rollouts = train(build(Asynchronous(1, stale_old_policy=compared)), range(3))
        assert staleness(rollouts) == [0, 1, 1]
        stale = [rollout.batch.stale for rollout in rollouts]
        assert [None if flags is None else bool(flags.all()) for flags in stale] == flagged


def test_a_surplus_that_waits_too_long_is_dropped_and_counted(build: Callable) -> None:
    # Two rollouts ahead are two steps stale when their turn comes, and a bound of two leaves no time to wait.
    class Differ(RecordingEngine):
        """Samples of a group differ, so that every group is kept."""

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            drawn = super().generate(requests, sampling)
            return [replace(one, token_ids=(4 + i % 2, 2)) for i, one in enumerate(drawn)]

    dynamic = DynamicSampling(oversample=1.5, max_age=2, signal="reward")
    data = build(Asynchronous(2), engine=Differ(), rollout=RolloutOptions(dynamic), num_updates=1)
    rollouts = train(data, range(8))
    assert max(staleness(rollouts)) <= 2
    figures = [rollout.rates.compute() for rollout in rollouts]
    assert any(figure["exploration/carried"] > 0 for figure in figures)
    lost = [figure for figure in figures if figure["system/dropped_stale"] > 0]
    assert lost
    assert {figure["length/dropped_stale"] for figure in lost} == {2.0}


def test_the_engine_draws_while_the_learner_learns(build: Callable) -> None:
    def seconds_of_a_step(asynchronous: Asynchronous | None) -> float:
        data, ends = build(asynchronous, engine=Delayed(tick=0.2, delays=(1,))), []
        for step in range(6):
            train(data, [step], learn=0.2)
            ends.append(time.perf_counter())
        return min(after - before for before, after in pairwise(ends[1:]))  # whatever else the machine does adds to it

    assert seconds_of_a_step(Asynchronous(1)) <= 0.6 * seconds_of_a_step(None)


def test_a_producer_that_dies_is_told_of_at_the_next_draw(build: Callable) -> None:
    """Field bug E7: the producer dies mid-way."""
    data = build(Asynchronous(1))
    train(data, range(2))
    data.engine.fails_at = data.engine.drawn + 1
    with pytest.raises(EngineError, match="the engine has died"):
        train(data, range(2, 5))


@pytest.mark.parametrize("when_stale", ["wait", "drop"])
@pytest.mark.parametrize("status", [TrainerStatus.RUNNING, TrainerStatus.INTERRUPTED])
def test_a_resumed_run_asks_what_one_never_stopped_asks(
    build: Callable, when_stale: str, status: TrainerStatus
) -> None:
    """Field bug F3: prompts in the queue, and those being drawn, are asked once."""

    def make() -> RolloutDataModule:
        curriculum = RolloutOptions(curriculum=Curriculum(revisit=1.0))
        return build(Asynchronous(2, when_stale=when_stale), rollout=curriculum)

    straight = train(make(), range(9))
    stopped, resumed = make(), make()
    first = train(stopped, range(3))
    stopped.engine.tick = 0.3  # still being drawn when the checkpoint is written
    first += train(stopped, [3])
    stopped.trainer.lightning_module.global_step = 4
    stopped.trainer.state.status = status  # interrupted: what is being drawn is not waited for
    state = stopped.state_dict()
    in_flight = [part for part in state["ranks"][0]["drawn"] if part is None]
    assert len(state["queue"]["rounds"]) == 2
    assert bool(in_flight) == (status == TrainerStatus.INTERRUPTED)
    resumed.load_state_dict(state)
    rest = train(resumed, range(4, 9))
    assert asked(first + rest) == asked(straight)
    if when_stale == "wait" and status == TrainerStatus.RUNNING:
        for one, other in zip(straight[4:], rest, strict=True):
            assert one.batch.weight_version.tolist() == other.batch.weight_version.tolist()


def test_a_checkpoint_with_a_queue_goes_on_without_one(build: Callable) -> None:
    ahead, sync = build(Asynchronous(2)), build(None)
    first = train(ahead, range(3))
    ahead.trainer.lightning_module.global_step = 3
    sync.load_state_dict(ahead.state_dict())
    rest = train(sync, range(3, 7))
    assert asked(first + rest) == asked(train(build(None), range(7)))
    assert [bool(rollout.batch.stale.all()) for rollout in rest] == [True, True, False, False]


class Lockstep:
    """Sums and maxima over two ranks that are threads, and who asked for them."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2, timeout=20), [None, None]
        self.threads: set[str] = set()

    def reduce(self, index: int) -> Callable[..., torch.Tensor]:
        def reduce(values: torch.Tensor, reduce_op: str) -> torch.Tensor:
            self.threads.add(threading.current_thread().name)
            self.given[index] = values
            self.barrier.wait()
            one, other = self.given
            result = one + other if reduce_op == "sum" else torch.maximum(one, other)
            self.barrier.wait()
            return result

        return reduce


@pytest.mark.parametrize("when_stale", ["wait", "drop"])
def test_two_ranks_draw_what_one_draws_and_only_the_learners_threads_talk(build: Callable, when_stale: str) -> None:
    settings = Asynchronous(1, when_stale=when_stale, queue_size=2)
    alone, both, found = train(build(settings), range(6)), Lockstep(), [[], []]

    def work(index: int) -> None:
        # One engine is four times as slow as the other: what is too stale here may not be there.
        engine = Delayed(TICK * (1 + 3 * index))
        data = build(settings, one_of(index, 2, both.reduce(index)), engine=engine)
        found[index] = train(data, range(6))

    threads = [threading.Thread(target=work, args=(index,), name=f"rank {index}") for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert both.threads == {"rank 0", "rank 1"}
    for step, whole in enumerate(alone):
        parts = [found[index][step] for index in range(2)]
        assert sorted(asked(parts)) == sorted(asked([whole]))
        assert max(step - int(part.batch.weight_version.min()) for part in parts) <= 1
        if when_stale == "wait":
            seen = {group.prompt.id: group.state_dict() for part in parts for group in part.groups}
            versions = {c["weight_version"] for group in seen.values() for c in group["completions"]}
            assert versions == set(whole.batch.weight_version.tolist())
