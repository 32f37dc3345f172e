"""A collapsed run ends, and says what was seen."""

import math
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.rollouts.minibatch import Minibatch


class EarlyStop(RolloutCallback):
    """Ends a run whose entropy or reward has lain at the floor for many optimizer steps in a row.

    The run ends as one that has reached ``max_steps``: held-out prompts are scored once more. A step that drew no new
    rollout counts with the reward of the newest one.

    Args:
        entropy: Sick below this mean entropy per token [nats]: the policy has nothing left to explore. ``null``: never.
        reward: Sick at or below this ``reward/total``: nothing is learnt. ``null``: never.
        when: ``any`` of the two is enough, or it takes ``all`` that are set.
        patience: Sick optimizer steps in a row after which the run ends.

    Raises:
        ConfigError: For no floor, or a patience below 1.
    """

    def __init__(
        self,
        entropy: float | None = 0.01,
        reward: float | None = None,
        when: Literal["any", "all"] = "any",
        patience: int = 20,
    ) -> None:
        if entropy is None and reward is None:
            raise ConfigError("`entropy` or `reward` of EarlyStop expected a floor, but got none")
        if patience < 1:
            raise ConfigError(f"`patience` of EarlyStop expected to be >= 1, but got {patience}")
        self.entropy, self.reward, self.when, self.patience = entropy, reward, when, patience
        self._sick, self._reward = 0, math.nan

    def state_dict(self) -> dict[str, Any]:
        """Keep the count across a resume."""
        return {"sick": self._sick, "reward": self._reward}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._sick, self._reward = state_dict["sick"], state_dict["reward"]

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Count a sick step, or start anew; end the run after enough of them. All ranks see the same values."""
        self._reward = values.get("reward/total", self._reward)
        entropy, found = values["exploration/entropy"], {}
        if self.entropy is not None:
            found[f"exploration/entropy {entropy:.3g} is below {self.entropy:g}"] = entropy < self.entropy
        if self.reward is not None:
            found[f"reward/total {self._reward:.3g} is not above {self.reward:g}"] = self._reward <= self.reward
        is_sick = any(found.values()) if self.when == "any" else all(found.values())
        self._sick = self._sick + 1 if is_sick else 0
        if self._sick >= self.patience:
            seen = " and ".join(text for text, is_true in found.items() if is_true)
            rank_zero_warn(
                f"EarlyStop ends the run at step {trainer.global_step}, after {self._sick} steps in a row at the "
                f"floor: {seen}. Go on from a checkpoint before that, with a lower learning rate, an entropy bonus "
                "(callbacks.EntropyTarget) or another task"
            )
            trainer.should_stop = True
