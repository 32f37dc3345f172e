"""DAPO's soft penalty for answers that come near the length limit."""

from collections.abc import Sequence
from typing import cast

import torch
from lightning.pytorch import LightningModule, Trainer

from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.module import GRPOModule
from grpo_lit.rollout import Group
from grpo_lit.rollouts.minibatch import Minibatch


class SoftOverlong(RolloutCallback):
    """Takes something off the reward of an answer, the more the nearer its length L comes to the limit.

        reward + weight p(L)      p = 0                                       L <= max_length - cache
                                  p = (max_length - cache - L) / cache        in between
                                  p = -1                                      L > max_length

    An answer that is cut just before its end is not worthless; without a slope the penalty is noise. Correctness
    stays as it was judged. Paper: DAPO (https://arxiv.org/abs/2503.14476), equation 13, with a limit of 20480 and a
    cache of 4096.

    Args:
        max_length: L_max, completion tokens from which the penalty is whole. ``null``: ``data.sampling.max_tokens``.
        cache: L_cache, tokens over which it grows. ``null``: a fifth of ``max_length``, as in the paper.
        weight: The whole penalty, in units of reward.

    Raises:
        ConfigError: For numbers that make no penalty, or an advantage that does not look at the total reward.
    """

    def __init__(self, max_length: int | None = None, cache: int | None = None, weight: float = 1.0) -> None:
        for name, value in {"max_length": max_length, "cache": cache}.items():
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` of SoftOverlong expected to be >= 1, but got {value}")
        if not weight > 0:
            raise ConfigError(f"`weight` of SoftOverlong expected to be > 0, but got {weight}: it is taken off")
        self.max_length, self.cache, self.weight = max_length, cache, weight
        self._rates: Rates | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a run that the penalty could not touch."""
        advantage = cast("GRPOModule", pl_module).objective.advantage
        if not advantage.reads_rewards:
            raise ConfigError(
                f"`trainer.callbacks: SoftOverlong` and `model.objective.advantage: {type(advantage).__name__}` "
                "contradict: it reads each reward by itself, and not the total that is shaped. Drop one of them"
            )
        longest = trainer.datamodule.sampling.max_tokens  # type: ignore[attr-defined]
        self.max_length = longest if self.max_length is None else self.max_length
        self.cache = max(self.max_length // 5, 1) if self.cache is None else self.cache
        if not 0 <= self.max_length - self.cache < longest:
            raise ConfigError(
                f"`max_length` - `cache` of SoftOverlong expected 0 to below `data.sampling.max_tokens` ({longest}), "
                f"but got {self.max_length} - {self.cache}: every answer is punished, or none"
            )

    def penalty(self, length: int) -> float:
        """Return p of an answer of this many tokens, -1 to 0."""
        return -min(max(length - (self.max_length - self.cache), 0) / self.cache, 1.0)

    def on_groups_scored(self, trainer: Trainer, module: GRPOModule, groups: Sequence[Group]) -> None:
        """Take the penalty off the rewards."""
        penalties = []
        for group in groups:
            for i, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True)):
                if reward is not None:
                    penalties.append(self.weight * self.penalty(len(completion.token_ids)))
                    group.rewards[i] = reward + penalties[-1]
        self._rates = self._rates or Rates()
        taken = torch.tensor(penalties, dtype=torch.double)
        self._rates.add("reward/overlong_penalty", taken)
        self._rates.add("length/overlong", (taken < 0).double())

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Log what was taken off the answers drawn for this step, on average, and of how many."""
        if self._rates is not None:
            module.log_at(trainer.global_step - 1, self._rates.compute(module.ranks.sum, module.ranks.max))
            self._rates = None
