"""Asynchronous rollouts through the real training path."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from toys import Letters, SomePrompts

from grpo_lit.data.curriculum import Curriculum
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import EngineError
from grpo_lit.objectives import Objective, TruncatedIS
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.dynamic import DynamicSampling
from grpo_lit.rollouts.in_flight import InFlight, Load, Updates
from grpo_lit.rollouts.replay import Replay
from grpo_lit.rollouts.transformers import TransformersEngine


class Recorder(Callback):
    """Keeps prompts, figures and batch of every step."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.figures: list[dict[str, float]] = []
        self.batches: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.asked += [group.prompt.id for group in batch.rollout.groups] if batch.update == 0 else []
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.batches.append(batch.rollout.batch)


class Watched(TransformersEngine):
    """Writes down with which weights it answered what, and fails at a given call."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__(device="cpu")
        self.calls: list[tuple[int, bool]] = []
        self.fails_at = fails_at

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.calls.append((self.weight_version, sampling.temperature == 0))
        if len(self.calls) == self.fails_at:
            raise EngineError("the engine has died")
        return super().generate(requests, sampling)


def gentle(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def drawing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("grpo-lit-rollouts")]


def without_clocks(figures: dict[str, float]) -> dict[str, float]:
    own = ("system/time", "system/memory", "system/queue_size", "system/dropped_stale", "length/dropped_stale")
    return {n: v for n, v in figures.items() if not n.startswith(own) and "tokens_per_s" not in n and v == v}


@pytest.mark.parametrize(
    ("num_updates", "old_policy", "in_flight"), [(1, "logprobs", "resume"), (2, "weights", "wait")]
)
def test_without_slack_it_equals_the_synchronous_run_bit_for_bit(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, num_updates: int,
    old_policy: str, in_flight: InFlight,
) -> None:  # fmt: skip
    """Field bug E7."""
    ends, figures = [], []
    for asynchronous in (None, Asynchronous(max_staleness=num_updates - 1, in_flight=in_flight)):
        recorder, module = Recorder(), make_module(optimizer=gentle, old_policy=old_policy)
        rollout = RolloutOptions(DynamicSampling(max_age=0), curriculum=Curriculum(), asynchronous=asynchronous)
        data = make_data(rollout=rollout, num_updates=num_updates)
        make_trainer(max_steps=4, callbacks=[recorder], num_sanity_val_steps=0).fit(module, datamodule=data)
        ends.append(weights_of(module))
        figures.append([without_clocks(step) for step in recorder.figures])
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    assert figures[1] == figures[0]
    assert not drawing_threads()


def test_a_resumed_run_equals_one_never_stopped_with_everything_on(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, tmp_path: Path
) -> None:
    """Field bug F3, Field bug E4, Field bug E7: queue, validation, dynamic sampling, replay and curriculum together."""

    def build(max_steps: int, *callbacks: Callback) -> tuple[Any, Any, Trainer, Recorder]:
        rollout = RolloutOptions(
            DynamicSampling(oversample=2.0, max_rounds=1, max_age=1),
            Replay(max_age=3, max_uses=2),
            Curriculum(revisit=0.3),
            Asynchronous(max_staleness=3, queue_size=2),
        )
        data = make_data(
            rollout=rollout,
            engine=Watched(),
            train=Letters(12),
            val={"letters": Letters(2, heldout=True)},
            rewards=RewardCombination({"r": WeightedReward(SomePrompts())}, correct_at=0.5),
        )
        recorder = Recorder()
        trainer = make_trainer(max_steps=max_steps, callbacks=[recorder, *callbacks], val_check_interval=3)
        return make_module(optimizer=gentle), data, trainer, recorder

    straight, data, trainer, every = build(8)
    trainer.fit(straight, datamodule=data)
    saver = ModelCheckpoint(tmp_path / "saved", filename="x", every_n_train_steps=4)
    module, first_data, trainer, first = build(4, saver)
    trainer.fit(module, datamodule=first_data)
    state = torch.load(tmp_path / "saved" / "x.ckpt", weights_only=True)["RolloutDataModule"]
    assert len(state["queue"]["rounds"]) >= 2
    resumed, rest_data, trainer, rest = build(8)
    trainer.fit(resumed, datamodule=rest_data, ckpt_path=str(tmp_path / "saved" / "x.ckpt"))

    assert first.asked + rest.asked == every.asked
    torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)
    stale = [figures["system/staleness_max"] for figures in every.figures]
    assert max(stale) == 3
    assert [float((step - b.weight_version).max()) for step, b in enumerate(every.batches)] == stale  # the truth
    # Old samples compare with the weights that drew them: the ratio is not 1 from the first update on.
    assert every.figures[0]["optimization/kl_old"] < 1e-9
    assert max(figures["optimization/kl_old"] for figures in every.figures[2:]) > 1e-7
    # Validation answers with the weights of its step (before the first, and after 3 and 6), greedy and sampled.
    assert [version for version, greedy in data.engine.calls if greedy] == [0, 3, 6]
    assert not drawing_threads()


@dataclass(frozen=True)
class AtThirdToken(Updates):
    """Lets new weights wait until every completion has two tokens, and the completions wait for them."""

    inner: Updates
    engine: TransformersEngine
    asked: list[int] = field(default_factory=list)

    def take(self, load: Load) -> bool:
        self.asked.append(1)
        while (took := len(self.asked) == 3) and not self.inner.take(load):
            if self.engine._model is None:  # closed: the run has ended
                return False
            time.sleep(0.001)
        return took


class AcrossUpdates(Watched):
    """Takes the weights of the step that waits for its completions in the middle of them."""

    def generate_through(self, requests: Sequence[Request], sampling: Sampling, updates: Updates) -> list[Completion]:
        if self.weight_version == 0 and not self.calls:
            return self.generate(requests, sampling)  # the first rollout: nothing new can come
        self.calls.append((self.weight_version, False))
        return super().generate_through(requests, sampling, AtThirdToken(updates.recompute, updates, self))


def test_completions_that_go_on_across_updates_are_trained_on_with_each_tokens_own_log_prob(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    recorder = Recorder()
    settings = Asynchronous(1, in_flight="resume", stale_old_policy="learner")
    data = make_data(engine=AcrossUpdates(), rollout=RolloutOptions(asynchronous=settings))
    module = make_module(objective=Objective(corrections=[TruncatedIS(cap=10.0)]))
    kept: list[Any] = []

    class Weighs(Callback):
        """Holds the gap of the learner to the sampler on the tokens of the old weights and on those of the new."""

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            tokens = batch.rollout.batch
            said = pl_module.learner.evaluate(pl_module.policy, tokens).logprobs
            gap = (said - tokens.sampler_logprobs).abs()
            new = tokens.token_versions == trainer.global_step
            kept.append((gap[new], gap[~new]))

    trainer = make_trainer(max_steps=4, callbacks=[recorder, Weighs()], num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    for step, (batch, figures) in enumerate(zip(recorder.batches, recorder.figures, strict=True)):
        ages = (step - batch.token_versions).double()
        assert figures["system/staleness_max"] == float(ages.max()) == min(step, 1)
        assert figures["system/staleness_mean"] == pytest.approx(float(ages.mean()))
        assert 0 < float(ages.mean()) < 1 or step == 0
    for new, old in kept[1:]:
        # Tokens of the weights that are trained are on-policy, those before are not, though in one completion.
        assert float(new.max()) < 1e-4 < 1e-2 < float(old.max())
    # The learner is the old policy of all of them: the gap is what corrections weigh, and all they weigh.
    assert [figures["system/ess"] < 1 - 1e-4 for figures in recorder.figures] == [False, True, True, True]


def test_an_engine_that_fails_ends_the_run_with_its_message(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    engine = Watched(fails_at=3)
    data = make_data(engine=engine, rollout=RolloutOptions(asynchronous=Asynchronous(1)))
    with pytest.raises(EngineError, match="the engine has died"):
        make_trainer(max_steps=6, num_sanity_val_steps=0).fit(make_module(), datamodule=data)
    assert engine.weight_version is None  # closed
    assert not drawing_threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_is_ended_from_outside_leaves_no_thread_and_loses_no_prompt(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path, error: type[BaseException]
) -> None:
    """Field bug F3."""

    class Fails(Callback):
        """Ends the third step before it is made."""

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise error

    def build(max_steps: int, *callbacks: Callback) -> tuple[Any, Trainer, Recorder]:
        data, recorder = make_data(rollout=RolloutOptions(asynchronous=Asynchronous(2))), Recorder()
        trainer = make_trainer(max_steps=max_steps, callbacks=[recorder, *callbacks], num_sanity_val_steps=0)
        return data, trainer, recorder

    data, trainer, every = build(6)
    trainer.fit(make_module(), datamodule=data)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=100, save_last=True, save_on_exception=True)
    data, trainer, first = build(6, Fails(), saver)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(make_module(), datamodule=data)
    assert data.engine.weight_version is None
    assert not drawing_threads()
    data, trainer, rest = build(6)
    trainer.fit(make_module(), datamodule=data, ckpt_path=str(tmp_path / "last.ckpt"))
    assert first.asked + rest.asked == every.asked
