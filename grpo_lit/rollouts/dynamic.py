"""Settings of dynamic sampling."""

import math
from dataclasses import dataclass
from typing import Literal

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rollout import has_signal
from grpo_lit.rollout import Group

#: A larger factor is a mistake: where one prompt in a thousand has signal, the task is at fault.
MOST_OVERSAMPLE = 1000.0
#: Times ``oversample`` that a later round may ask: a first round without any signal says little of the next.
MOST_ADAPTED = 4


@dataclass(frozen=True)
class DynamicSampling:
    """Settings of dynamic sampling: a rollout holds groups with signal only (DAPO, https://arxiv.org/abs/2503.14476).

    A group has signal where its samples differ in correctness. Rounds of prompts are asked until enough groups have
    it; surplus ones wait for the next rollout. The first round asks ``oversample`` prompts for every missing group, a
    later one as many as the rollout's acceptance so far calls for, within bounds:

        prompts = missing * clip(asked / max(accepted, 1), oversample, 4 oversample)

    With a ``probe``, prompts whose first samples show no signal get no more of them: most of what is thrown away
    without it is never drawn. Prompts that are nearly always solved, or nearly never, are then kept less often
    (R. Zhang et al., "SPEED-RL", https://arxiv.org/abs/2506.09016v2).

    ``oversample: 1, adapt: false`` asks exactly as many new prompts as groups are missing: active sampling (OLMo 3,
    https://arxiv.org/abs/2512.13961).

    Args:
        oversample: Prompts of a round over the groups that are still missing; a round is one pass over the source at
            most.
        adapt: Let later rounds ask more where few groups of this rollout were accepted.
        max_rounds: Rounds after which a rollout is made of what there is (after replay has filled in, if it is on).
        max_age: Rollouts that a surplus group may wait for; 0 drops it at once. In optimizer steps, which is what
            ``data.rollout.replay.max_age`` counts, each is ``data.num_updates`` times ``data.num_epochs``.
        signal: What must differ within a group: ``correct``, the verifier's flag, or ``reward``, the total.
        probe: Samples of a prompt that must show signal before the others are drawn; fewer than
            ``data.sampling.completions``. Rates of rewards, lengths and groups are then of these alone, since they
            would favour the groups that are drawn whole. ``null``: all samples are drawn.

    Raises:
        ConfigError: For a number out of range.
    """

    oversample: float = 1.5
    adapt: bool = True
    max_rounds: int = 4
    max_age: int = 1
    signal: Literal["correct", "reward"] = "correct"
    probe: int | None = None

    def __post_init__(self) -> None:
        """Refuse a setting under which a rollout could never be filled."""
        if not 1 <= self.oversample <= MOST_OVERSAMPLE:
            raise ConfigError(
                f"`data.rollout.dynamic_sampling.oversample` expected 1 to {MOST_OVERSAMPLE:g}, but got "
                f"{self.oversample}"
            )
        for name, bound in {"max_rounds": 1, "max_age": 0}.items():
            value = getattr(self, name)
            if value < bound:
                raise ConfigError(f"`data.rollout.dynamic_sampling.{name}` expected to be >= {bound}, but got {value}")
        if self.probe is not None and self.probe < 2:
            raise ConfigError(
                f"`data.rollout.dynamic_sampling.probe` expected at least 2 samples, which may differ, but got "
                f"{self.probe}: use null for none"
            )
        if self.probe is not None and self.signal == "reward":
            raise ConfigError(
                "`data.rollout.dynamic_sampling.probe` and `signal: reward` contradict: callbacks shape rewards when a "
                "group is whole, after the probe has decided on it. Drop one"
            )

    def shows_signal(self, group: Group) -> bool:
        """Return whether the samples of a group differ in what must differ."""
        return has_signal(group.correct if self.signal == "correct" else group.rewards)

    def prompts(self, missing: int, asked: int, accepted: int) -> int:
        """Return how many prompts the next round of a rollout asks.

        Args:
            missing: Groups that the rollout lacks.
            asked: Prompts of its rounds so far.
            accepted: Groups with signal among them.
        """
        called_for = asked / max(accepted, 1) if self.adapt else 0.0
        return math.ceil(missing * min(max(called_for, self.oversample), MOST_ADAPTED * self.oversample))
