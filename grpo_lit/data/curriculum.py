"""A curriculum: prompts that teach nothing now are asked less often."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lit.errors import ConfigError


@dataclass(frozen=True)
class Curriculum:
    """Settings of a curriculum by measured solve rate.

    A prompt whose last ``patience`` groups were all solved by every sample, or all by none, is passed over with
    probability ``1 - revisit`` whenever the stream comes to it; any other group brings it back at full rate. Source of
    the idea: prioritised level replay (https://arxiv.org/abs/2010.03934); for verifiable rewards, the solve-rate
    filters of Kimi k1.5 (https://arxiv.org/abs/2501.12599).

    Args:
        revisit: Probability to ask such a prompt all the same.
        patience: Groups without signal in a row until then.

    Raises:
        ConfigError: For a number out of range.
    """

    revisit: float = 0.25
    patience: int = 1

    def __post_init__(self) -> None:
        """Refuse what would never come back to a prompt."""
        if not 0 < self.revisit <= 1:
            raise ConfigError(f"`data.rollout.curriculum.revisit` expected above 0 to 1, but got {self.revisit}")
        if self.patience < 1:
            raise ConfigError(f"`data.rollout.curriculum.patience` expected to be >= 1, but got {self.patience}")


class SolveRates:
    """The solve rate of every prompt's last groups, and which prompts the curriculum passes over.

    Args:
        settings: Of the curriculum; ``None`` keeps the rates and passes over nothing.
        seed: The run's seed.
        memory: Groups remembered per prompt.
    """

    def __init__(self, settings: Curriculum | None, seed: int, memory: int = 4) -> None:
        self.settings, self.seed = settings, seed
        self._memory = max(memory, settings.patience if settings else 0)
        self.history: dict[str, list[float]] = {}

    def record(self, solved: Mapping[str, float]) -> None:
        """Add the solve rate of each prompt's newest group."""
        for prompt, rate in solved.items():
            self.history[prompt] = [*self.history.get(prompt, []), rate][-self._memory :]

    def passes_over(self, prompt: str, epoch: int) -> bool:
        """Return whether the stream goes on to the next prompt; the same on every rank and after a resume."""
        if self.settings is None:
            return False
        last = self.history.get(prompt, [])[-self.settings.patience :]
        if len(last) < self.settings.patience or not (set(last) == {0.0} or set(last) == {1.0}):
            return False
        digest = hashlib.blake2b(f"{self.seed}\x1f{prompt}\x1f{epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >= self.settings.revisit * 2**64

    def state_dict(self) -> dict[str, Any]:
        """Return plain types only."""
        return {"history": dict(self.history)}  # the lists are replaced, never changed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` wrote."""
        self.history = dict(state["history"])
