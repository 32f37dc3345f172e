"""Clip bounds that change while a run goes on."""

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer

from callbacks.schedules import Schedule
from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.objectives import Surrogate
from grpo_lit.rollouts.minibatch import Minibatch

#: What a surrogate may call its bounds; the first that it has is meant.
LOW, HIGH = ("low", "delta_low"), ("high", "delta_high", "cap")


class ClipSchedule(RolloutCallback):
    """Sets the lower and the upper clip bound of the surrogate before every optimizer step.

    The lower bound is the surrogate's ``low`` or ``delta_low``, the upper one its ``high``, ``delta_high`` or ``cap``,
    the first of them that it has; shadows keep theirs. Each is in the surrogate's own unit. Schedules count
    ``trainer.global_step``, so a resumed run goes on where it was, closed loops too.

    Args:
        low: Of the lower bound; ``null`` leaves it as the recipe says.
        high: Of the upper bound; ``null`` leaves it as the recipe says.

    Raises:
        ConfigError: For no schedule, a surrogate without the bound, or a number that it refuses.
    """

    def __init__(self, low: Schedule | None = None, high: Schedule | None = None) -> None:
        if low is None and high is None:
            raise ConfigError("`low` or `high` of ClipSchedule expected a schedule, but got none")
        self.schedules = {side: s for side, s in {"low": low, "high": high}.items() if s is not None}
        self._names: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        """Keep where closed loops stand across a resume."""
        return {side: schedule.state_dict() for side, schedule in self.schedules.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the loops of the run that is resumed; a bound that had no schedule there starts anew."""
        for side, schedule in self.schedules.items():
            if state_dict.get(side):
                schedule.load_state_dict(state_dict[side])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a surrogate without these bounds, and bounds that it refuses."""
        surrogate = cast("GRPOModule", pl_module).objective.surrogate
        self._names = {side: _bound(surrogate, side) for side in self.schedules}
        for side, schedule in self.schedules.items():
            before = getattr(surrogate, self._names[side])
            for value in schedule.extremes:
                self._set(surrogate, side, value)
            self._set(surrogate, side, before)

    def _set(self, surrogate: Surrogate, side: str, value: float) -> None:
        setattr(surrogate, self._names[side], value)
        if check := getattr(surrogate, "__post_init__", None):
            check()  # where a surrogate refuses bounds that are none

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the bounds of the step that follows."""
        for side, schedule in self.schedules.items():
            self._set(cast("GRPOModule", pl_module).objective.surrogate, side, schedule(trainer.global_step))

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Log the bounds that the step was made with, and let closed loops see it."""
        bounds = {
            f"optimization/epsilon_{side}": float(getattr(module.objective.surrogate, name))
            for side, name in self._names.items()
        }
        module.log_at(trainer.global_step - 1, bounds)
        for schedule in self.schedules.values():
            schedule.observe(values)


def _bound(surrogate: Surrogate, side: str) -> str:
    names = LOW if side == "low" else HIGH
    for name in names:
        if hasattr(surrogate, name):
            return name
    wanted = " or ".join(f"`{name}`" for name in names)
    raise ConfigError(
        f"`trainer.callbacks: ClipSchedule` expected a surrogate with {wanted} to schedule its `{side}`, but "
        f"{type(surrogate).__name__} has none: drop the callback, or set another `model.objective.surrogate`"
    )
