"""RolloutCallback: Lightning's Callback with three more hooks, for what Lightning does not know of: groups."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from lightning.pytorch import Callback, Trainer

from grpo_lit.errors import TrainingError
from grpo_lit.rollout import Group
from grpo_lit.rollouts.minibatch import Minibatch

if TYPE_CHECKING:
    import grpo_lit.module


class RolloutCallback(Callback):
    """A callback that sees groups and optimizer steps, and may shape rewards.

    Order of one rollout: ``on_groups_scored`` once per round of prompts, ``on_groups_kept`` once,
    ``on_step_finished`` once per optimizer step made on it. Each hook is called on every rank, also where that rank
    holds no group, in the order of ``trainer.callbacks``: one callback sees what those before it did. Answers to
    held-out prompts come to none of them, so evaluation is never shaped. What a callback must not forget goes into
    Lightning's ``state_dict``, in plain types and equal on all ranks: a checkpoint holds that of rank 0.
    """

    def on_groups_scored(self, trainer: Trainer, module: "grpo_lit.module.GRPOModule", groups: Sequence[Group]) -> None:
        """Look at groups just scored, before dynamic sampling looks for signal; the one place to shape them.

        Allowed are other ``group.rewards``, where ``None`` drops the sample as if never drawn, and ``group.masked``
        flags, which keep it out of the loss and in the baseline of its group. ``group.correct`` must stay.
        ``reward/total`` is what the rewards are after this.

        Args:
            trainer: Of the run.
            module: Being trained.
            groups: Those of this rank; perhaps none.
        """

    def on_groups_kept(self, trainer: Trainer, module: "grpo_lit.module.GRPOModule", groups: Sequence[Group]) -> None:
        """Look at the groups that a rollout is made of: new, carried over and replayed ones.

        Args:
            trainer: Of the run.
            module: Being trained.
            groups: Those of this rank; perhaps none.
        """

    def on_step_finished(
        self, trainer: Trainer, module: "grpo_lit.module.GRPOModule", minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Look at a finished optimizer step: ``trainer.global_step`` counts it, its figures stand at one less.

        Args:
            trainer: Of the run.
            module: Just trained.
            minibatch: What the step was made on, this rank's share.
            values: What was logged of it, the same on all ranks; NaN where there was nothing to measure.
        """


class RolloutHooks:
    """Calls the hooks of all RolloutCallbacks of a run, in the order of ``trainer.callbacks``.

    Args:
        trainer: Of the run; ``None``: there is none, and nobody to call.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        self._trainer = trainer
        callbacks = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        self._module = None if trainer is None else cast("grpo_lit.module.GRPOModule", trainer.lightning_module)
        self._callbacks = [callback for callback in callbacks if isinstance(callback, RolloutCallback)]

    def groups_scored(self, groups: Sequence[Group]) -> None:
        """Call ``on_groups_scored``.

        Raises:
            TrainingError: A callback touched what is not its to change, or left a reward that is no number.
        """
        for callback in self._callbacks:
            before = [list(group.correct) for group in groups]
            callback.on_groups_scored(self._trainer, self._module, groups)
            for group, correct in zip(groups, before, strict=True):
                _check(type(callback).__name__, group, correct)

    def groups_kept(self, groups: Sequence[Group]) -> None:
        """Call ``on_groups_kept``."""
        for callback in self._callbacks:
            callback.on_groups_kept(self._trainer, self._module, groups)

    def step_finished(self, minibatch: Minibatch, values: dict[str, float]) -> None:
        """Call ``on_step_finished``."""
        for callback in self._callbacks:
            callback.on_step_finished(self._trainer, self._module, minibatch, values)


def _check(name: str, group: Group, correct: list[bool | None]) -> None:
    if group.correct != correct:
        raise TrainingError(
            f"`{name}.on_groups_scored` expected to leave `group.correct` alone, but changed it for "
            f"{group.prompt.id}: accuracy and dynamic sampling look there. Shape `group.rewards`"
        )
    size = len(group.completions)
    if len(group.rewards) != size or (group.masked and len(group.masked) != size):
        raise TrainingError(
            f"`{name}.on_groups_scored` expected to leave {size} rewards, and {size} `masked` flags or none, but left "
            f"{len(group.rewards)} and {len(group.masked)} for {group.prompt.id}"
        )
    if bad := [reward for reward in group.rewards if reward is not None and not math.isfinite(reward)]:
        raise TrainingError(
            f"`{name}.on_groups_scored` expected to leave finite rewards or None, but left {bad[0]} for "
            f"{group.prompt.id}"
        )
