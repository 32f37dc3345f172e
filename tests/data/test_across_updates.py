"""Rollouts drawn ahead go on across weight updates: no token is older than the bound, nothing is lost or doubled."""

import io
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bare import RecordingEngine, assert_synchronous, bare_data, one_of
from toys import Letters

from grpo_lit.data.module import RolloutDataModule
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.in_flight import InFlight, Updates

TICK = 0.001
LONGEST = 6


class TokenByToken(RecordingEngine):
    """Draws one token of every request at a time, 1 to 6 of them, and looks for new weights before each.

    Args:
        ticks: How long a token takes, over and over.
        waits_at: In every call but the first, new weights are waited for before this token, and not looked for before.
    """

    in_flight: tuple[InFlight, ...] = ("wait", "keep", "resume")

    def __init__(self, ticks: Sequence[float] = (0,), waits_at: int | None = None) -> None:
        super().__init__()
        self.ticks, self.waits_at, self.rounds, self.across = ticks, waits_at, 0, 0
        self._busy = threading.Lock()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        assert self._busy.acquire(blocking=False), "weights were loaded by somebody else than who draws"
        super().load_weights(weights, version)
        self._busy.release()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self.generate_through(requests, sampling, None)

    def generate_through(
        self, requests: Sequence[Request], sampling: Sampling, updates: Updates | None
    ) -> list[Completion]:
        assert self._busy.acquire(blocking=False), "two threads use the engine"
        self.rounds += 1
        versions: list[int] = []
        for token in range(LONGEST):
            if updates is not None and (self.waits_at is None or self.rounds == 1):
                self._took(updates)
            elif updates is not None and token == self.waits_at:
                while not self._took(updates) and self.waits_at is not None:
                    time.sleep(TICK)
            time.sleep(self.ticks[(self.rounds + token) % len(self.ticks)])
            versions.append(self.weight_version)
        drawn = super().generate(requests, sampling)
        self._busy.release()
        lengths = [1 + request.seed % LONGEST for request in requests]
        return [
            Completion((7,) * n, tuple(-0.1 * v for v in versions[:n]), one.text, "stop", 0).sampled_by(versions[:n])
            for one, n in zip(drawn, lengths, strict=True)
        ]

    def _took(self, updates: Updates) -> bool:
        def load(weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            self.across += 1
            RecordingEngine.load_weights(self, weights, version)

        return updates.take(load)


@pytest.fixture
def build(tiny_model_path: Path) -> Iterator[Callable[..., RolloutDataModule]]:
    made: list[RolloutDataModule] = []

    def make(asynchronous: Asynchronous | None, **changes: Any) -> RolloutDataModule:
        arguments = {"engine": TokenByToken(), "prompts_per_rollout": 2, **changes}
        made.append(
            bare_data(tiny_model_path, one_of(0, 1), **arguments, rollout=RolloutOptions(asynchronous=asynchronous))
        )
        return made[-1]

    yield make
    for data in made:
        data.engine.waits_at = None
        data.close()


def train(data: RolloutDataModule, steps: Iterable[int], learn: float = TICK) -> list[Any]:
    drawn = []
    for step in steps:
        data.trainer.lightning_module.global_step = step
        drawn.append(data.draw().rollout)
        time.sleep(learn)
    return drawn


def completions(rollout: Any) -> list[Completion]:
    return [completion for group in rollout.groups for completion in group.completions]


@pytest.mark.parametrize("when_stale", ["wait", "drop"])
@pytest.mark.parametrize(("bound", "how"), [(0, "keep"), (1, "resume"), (2, "keep"), (4, "resume")])
def test_no_token_is_staler_than_the_bound_and_every_prompt_comes_in_its_turn(
    build: Callable, bound: int, how: InFlight, when_stale: str
) -> None:
    """Field bug E7, token by token; engine and learner take turns at being the slower one, by chance."""
    script = random.Random(bound)
    engine = TokenByToken([script.choice((0, 0, TICK, 4 * TICK)) for _ in range(7)])
    order = build(None).stream
    data = build(Asynchronous(bound, when_stale=when_stale, queue_size=3, in_flight=how), engine=engine)
    rollouts = [train(data, [step], script.choice((0, TICK, 20 * TICK)))[0] for step in range(10)]
    for step, rollout in enumerate(rollouts):
        ages = step - rollout.batch.token_versions
        assert 0 <= int(ages.min()) <= int(ages.max()) <= bound
        for completion in completions(rollout):
            assert len(completion.token_versions) == len(completion.token_ids)
            assert all(one <= other for one, other in pairwise(completion.token_versions))
            assert completion.logprobs == tuple(-0.1 * version for version in completion.token_versions)
    asked = [group.prompt.id for rollout in rollouts for group in rollout.groups]
    assert asked == [prompt.id for _ in range(10) for prompt, _ in order.take(2)]
    if when_stale == "wait":  # nothing is drawn twice
        assert len(set(engine.seeds)) == len(engine.seeds)
        assert {rollout.rates.compute()["system/dropped_stale"] for rollout in rollouts} == {0.0}
    assert engine.across == 0 or bound > 0 or when_stale == "drop"


def test_a_rollout_in_progress_gets_the_weights_of_the_step_that_asks_for_it(build: Callable) -> None:
    data = build(Asynchronous(1, in_flight="resume"), engine=TokenByToken(waits_at=2))
    rollouts = train(data, range(4))
    assert [completion.versions for completion in completions(rollouts[0])] == [None] * 4
    for step, rollout in enumerate(rollouts[1:], 1):
        # Begun with the weights of the step before; the third token waited for those of this one.
        assert {completion.token_versions for completion in completions(rollout)} == {
            (step - 1, step - 1, *[step] * LONGEST)[: len(completion.token_ids)] for completion in completions(rollout)
        }
        assert bool(rollout.batch.stale.all())  # their first tokens are: the old policy is the sampler
        assert rollout.seconds["sync"] > 0
    assert data.engine.across == 3
    assert data.engine.calls.count("score") == 4  # and engine and learner were compared after each


@pytest.mark.parametrize("how", ["keep", "resume"])
def test_with_a_bound_of_zero_it_is_the_synchronous_run(build: Callable, how: InFlight) -> None:
    sync, ahead = build(None), build(Asynchronous(0, in_flight=how))
    one, other = train(sync, range(4)), train(ahead, range(4))
    assert_synchronous(ahead, other, sync, one)


def test_the_queue_of_a_checkpoint_keeps_the_version_of_each_token(build: Callable) -> None:
    settings = Asynchronous(2, in_flight="keep", queue_size=2)
    stopped = build(settings, engine=TokenByToken(waits_at=2))
    train(stopped, range(2))
    stopped.trainer.lightning_module.global_step = 2
    stopped.sync_weights(in_passing=True)  # what the round in progress waits for
    while stopped.engine.across < 2:
        time.sleep(TICK)
    stopped.engine.waits_at = None
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    waiting = [part for part in stopped.queue.state_dict()["rounds"] if part.outcome is not None]
    kept = [c for part in waiting for group in part.outcome.groups for c in group.completions]
    assert any(completion.versions is not None for completion in kept)
    resumed = build(settings)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    again = [c for rollout in train(resumed, range(2, 4)) for c in completions(rollout)]
    assert again[: len(kept)] == kept


def test_evaluation_is_of_one_version(build: Callable) -> None:
    data = build(Asynchronous(2, in_flight="keep"), val={"held": Letters(2, heldout=True)})
    train(data, range(3))
    data.trainer.lightning_module.global_step = 3
    (loader,) = data.val_dataloader()
    (batch,) = list(loader)
    assert {c.token_versions[0] for group in batch.greedy for c in group.completions} == {3}
    assert [c.versions for group in batch.greedy for c in group.completions] == [None, None]


def test_an_engine_that_cannot_is_refused_before_anything_is_loaded(build: Callable) -> None:
    with pytest.raises(ConfigError, match=r"`data\.rollout\.asynchronous\.in_flight` expected wait with Recording"):
        build(Asynchronous(1, in_flight="keep"), engine=RecordingEngine())
