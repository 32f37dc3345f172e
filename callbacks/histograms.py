"""Distributions behind the means."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

import numpy as np
from lightning.pytorch import LightningModule, Trainer

from callbacks.tensorboard import writers
from grpo_lit.batch import TokenBatch
from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.module import GRPOModule
from grpo_lit.policy.policy import PolicyOutput
from grpo_lit.rollout import Group
from grpo_lit.rollouts.minibatch import Minibatch

#: Tag of each distribution of samples; that of the prompts' solve rates is ``exploration/solve_rate_histogram``.
TAGS = (
    "length/histogram",
    "length/correct_histogram",
    "length/incorrect_histogram",
    "reward/total_histogram",
    "optimization/advantage_histogram",
    "exploration/entropy_histogram",
)
#: Most tokens of a micro-batch whose entropy is kept; of more, every second, third, ...
MOST_TOKENS = 8192


class Histograms(RolloutCallback):
    """Histograms on TensorBoard: completion lengths (all, right, wrong), rewards, advantages, entropies, solve rates.

    Lengths and rewards are of all samples drawn since the histograms before, on all ranks, those of dropped groups
    included; advantages and the entropies of tokens [nats] are the step's; a prompt's solve rate is the mean over its
    last groups that the data module remembers (``data.rollout.curriculum``; four without one). What was drawn before a
    resume is not counted again.

    Args:
        every_n_steps: Optimizer steps between two sets of histograms, the first step among them.

    Raises:
        ConfigError: For a number below 1.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"`every_n_steps` of Histograms expected to be >= 1, but got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._drawn: dict[str, list[float]] = {tag: [] for tag in TAGS}
        self._due = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have every micro-batch measured."""
        cast("GRPOModule", pl_module).measurements.append(self.measure)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure no more."""
        cast("GRPOModule", pl_module).measurements.remove(self.measure)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look whether the step that follows is shown."""
        self._due = trainer.global_step % self.every_n_steps == 0

    def measure(self, batch: TokenBatch, output: PolicyOutput) -> Rates:
        """Note the entropies of a micro-batch; nothing is logged of them but the histogram."""
        if self._due:
            every = -(-len(output.entropy) // MOST_TOKENS) or 1
            self._drawn["exploration/entropy_histogram"] += output.entropy[::every].float().tolist()
        return Rates()

    def on_groups_scored(self, trainer: Trainer, module: GRPOModule, groups: Sequence[Group]) -> None:
        """Note the lengths and rewards."""
        for group in groups:
            for completion, reward, correct in zip(group.completions, group.rewards, group.correct, strict=True):
                length = float(len(completion.token_ids))
                self._drawn["length/histogram"].append(length)
                if correct is not None:
                    self._drawn[f"length/{'correct' if correct else 'incorrect'}_histogram"].append(length)
                if reward is not None:
                    self._drawn["reward/total_histogram"].append(float(reward))

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Write what was noted on all ranks."""
        step = trainer.global_step - 1
        if step % self.every_n_steps:
            return
        rollout = minibatch.rollout
        self._drawn["optimization/advantage_histogram"] = rollout.batch.advantages[
            rollout.updates[minibatch.update]
        ].tolist()
        parts = module.ranks.gather(self._drawn)
        self._drawn = {tag: [] for tag in TAGS}
        shown = {tag: [value for part in parts for value in part[tag]] for tag in TAGS}
        history = trainer.datamodule.solve_rates.history  # type: ignore[attr-defined]
        shown["exploration/solve_rate_histogram"] = [fmean(rates) for rates in history.values()]
        for writer in writers(trainer):
            for tag, values_of_tag in shown.items():
                if values_of_tag:
                    writer.add_histogram(tag, np.array(values_of_tag), step)
