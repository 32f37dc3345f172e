"""Limits on sampling through the real training path: the ratio to the sampler is 1."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from grpo_lit.objectives import Objective, TruncatedIS
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.transformers import TransformersEngine


class Recorder(Callback):
    """Keeps what each step logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"temperature": 0.6, "top_k": 6}, 6),
        ({"top_p": 0.7}, 260),
        ({"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02}, 50),
    ],
)
@pytest.mark.parametrize("old_policy", ["logprobs", "sampler"])
def test_the_learner_agrees_with_a_limited_sampler(
    make_module: Callable, make_data: Callable, make_trainer: Callable, limits: dict, most: int, old_policy: str
) -> None:
    """Field bug E1, Field bug E2: temperature and limits are the same on both sides, or the ratio is not 1."""
    recorder = Recorder()
    corrections = [TruncatedIS(cap=2.0)] if old_policy == "logprobs" else []
    module = make_module(old_policy=old_policy, objective=Objective(corrections=corrections))
    data = make_data(sampling=Sampling(max_tokens=6, completions=3, **limits))
    make_trainer(max_steps=2, callbacks=[recorder]).fit(module, datamodule=data)
    for step in recorder.steps:
        assert step["optimization/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["system/mismatch_abs"] < 1e-4  # without kept tokens: minus the log of the mass that was possible
        assert 1.0 <= step["system/kept_tokens"] <= most
        assert step["exploration/entropy"] <= math.log(most)
        assert step["optimization/grad_norm"] > 0


class Forgetful(TransformersEngine):
    """Limits what is sampled, and does not say what was possible."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return [replace(completion, kept=None) for completion in super().generate(requests, sampling)]


class MeanRatio(Callback):
    """The mean ratio of policy and sampler over the tokens of a rollout, before the step on it."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        drawn = batch.rollout.batch
        logprobs = pl_module.learner.evaluate(pl_module.policy, drawn).logprobs
        self.means.append(float((logprobs - drawn.sampler_logprobs).exp().mean()))


@pytest.mark.parametrize(("engine", "remembers"), [(TransformersEngine, True), (Forgetful, False)])
def test_on_policy_the_mean_ratio_is_1_with_kept_tokens_and_visibly_not_without(
    make_module: Callable, make_data: Callable, make_trainer: Callable, engine: type, remembers: bool
) -> None:
    """Field bug E2."""
    recorder, ratio = Recorder(), MeanRatio()
    data = make_data(sampling=Sampling(1.0, max_tokens=6, completions=3, top_k=6), engine=engine(device="cpu"))
    make_trainer(max_steps=2, callbacks=[recorder, ratio]).fit(make_module(), datamodule=data)
    for step, mean in zip(recorder.steps, ratio.means, strict=True):
        if remembers:
            assert mean == pytest.approx(1.0, abs=1e-4)
            assert step["system/mismatch_abs"] < 1e-4
        else:  # the mass of the six likeliest tokens
            assert mean < 0.9
            assert step["system/mismatch_abs"] > 0.1


def test_without_limits_nothing_of_it_is_logged(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    recorder = Recorder()
    make_trainer(max_steps=1, callbacks=[recorder]).fit(make_module(), datamodule=make_data())
    assert "system/kept_tokens" not in recorder.steps[0]
