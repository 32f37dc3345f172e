"""A number for every optimizer step: constant, linear, cosine, in steps, or closing a loop on the entropy."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_lit.errors import ConfigError


class Schedule(ABC):
    """A number for every optimizer step; one that depends on the step alone needs no state."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the number for the step that makes ``step + 1`` of ``step`` optimizer steps."""

    @property
    @abstractmethod
    def extremes(self) -> tuple[float, ...]:
        """The smallest and the largest number there will be, to be refused before the first step."""

    def observe(self, values: Mapping[str, float]) -> None:  # noqa: B027 (most have nothing to do here)
        """Take in what the step logged."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on with what :meth:`state_dict` wrote."""


@dataclass
class Constant(Schedule):
    """The same number at every step.

    Args:
        value: The number.
    """

    value: float

    def __call__(self, step: int) -> float:
        """Return the number."""
        return self.value

    @property
    def extremes(self) -> tuple[float, ...]:
        """The number."""
        return (self.value,)


@dataclass
class _Ramp(Schedule):
    """From ``start`` to ``end`` in ``steps`` optimizer steps, and there from then on."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        """Refuse a schedule without steps."""
        if self.steps < 1:
            raise ConfigError(f"`steps` of {type(self).__name__} expected to be >= 1, but got {self.steps}")

    @property
    def extremes(self) -> tuple[float, ...]:
        """Both ends."""
        return (self.start, self.end)

    def _share(self, step: int) -> float:
        """Return how much of the way is made."""
        return min(step / self.steps, 1.0)


@dataclass
class Linear(_Ramp):
    """A straight line, and its end from then on.

        start + (end - start) min(step / steps, 1)

    Args:
        start: At step 0.
        end: From step ``steps`` on.
        steps: Optimizer steps in between.

    Raises:
        ConfigError: For no steps.
    """

    def __call__(self, step: int) -> float:
        """Return the number; see the class."""
        return self.start + (self.end - self.start) * self._share(step)


@dataclass
class Cosine(_Ramp):
    """Half a cosine, flat at both ends.

        end + (start - end) (1 + cos(pi min(step / steps, 1))) / 2

    Args:
        start: At step 0.
        end: From step ``steps`` on.
        steps: Optimizer steps in between.

    Raises:
        ConfigError: For no steps.
    """

    def __call__(self, step: int) -> float:
        """Return the number; see the class."""
        share = (1 + math.cos(math.pi * self._share(step))) / 2
        return self.end + (self.start - self.end) * share


@dataclass
class Step(Schedule):
    """Stairs.

    Args:
        values: Number by the step from which it holds, one of them 0: ``{0: 0.2, 100: 0.28}``.

    Raises:
        ConfigError: For no number at step 0.
    """

    values: dict[int, float]

    def __post_init__(self) -> None:
        """Refuse stairs that do not begin at the first step."""
        if min(self.values, default=-1) != 0:
            raise ConfigError(f"`values` of Step expected its first number at step 0, but got {self.values}")

    def __call__(self, step: int) -> float:
        """Return the number of the newest stair."""
        return self.values[max(first for first in self.values if first <= step)]

    @property
    def extremes(self) -> tuple[float, ...]:
        """All of them."""
        return tuple(self.values.values())


@dataclass
class EntropyLoop(Schedule):
    """Raised while the policy's entropy is below a target, lowered while it is above.

        value_(k+1) = clip(value_k + rate sign(target - entropy_k), minimum, maximum)

    As the upper clip bound: the wider it is, the more unlikely tokens may gain in one rollout, which holds entropy up
    (clip-higher, DAPO, https://arxiv.org/abs/2503.14476). It acts only where ratios reach the bound, so give a rollout
    more than one update.

    Args:
        target: Mean entropy per token [nats].
        start: At step 0.
        rate: Change per optimizer step.
        minimum: Never below.
        maximum: Never above.

    Raises:
        ConfigError: For a range that does not hold ``start``, or a number that is not above 0.
    """

    target: float = 0.2
    start: float = 0.28
    rate: float = 0.005
    minimum: float = 0.1
    maximum: float = 0.5
    _value: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a loop that cannot close."""
        for name in ("target", "rate"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"`{name}` of EntropyLoop expected to be > 0, but got {value}")
        if not self.minimum <= self.start <= self.maximum:
            raise ConfigError(
                f"`start` of EntropyLoop expected `minimum` ({self.minimum}) to `maximum` ({self.maximum}), but got "
                f"{self.start}"
            )
        self._value = self.start

    def __call__(self, step: int) -> float:
        """Return where the loop stands, whatever the step."""
        return self._value

    @property
    def extremes(self) -> tuple[float, ...]:
        """The range."""
        return (self.minimum, self.maximum)

    def observe(self, values: Mapping[str, float]) -> None:
        """Move by one rate towards the target; an entropy that is not known moves nothing."""
        entropy = values["exploration/entropy"]
        change = self.rate * ((entropy < self.target) - (entropy > self.target))
        self._value = min(max(self._value + change, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands."""
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, within the range that is set now."""
        self._value = min(max(state["value"], self.minimum), self.maximum)
