"""What a person watching the console sees: held-out accuracy, before, now, and after."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info


class Console(Callback):
    """Prints held-out accuracies when they are measured, and before and after when training ends.

    Args:
        prefix: Metrics whose name starts so are held-out ones.
    """

    def __init__(self, prefix: str = "val/") -> None:
        self.prefix = prefix
        self._before: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._measured_at = 0

    def state_dict(self) -> dict[str, Any]:
        """Keep the accuracies before the first step across a resume."""
        return {"before": dict(self._before)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the accuracies of the run that is resumed."""
        self._before = dict(state_dict["before"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the accuracies just measured."""
        values = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(self.prefix)}
        self._now = {n: v for n, v in values.items() if _is_accuracy(n) and math.isfinite(v)}
        for name, value in self._now.items():
            self._before.setdefault(name, value)
        self._measured_at = trainer.global_step
        if self._now:
            rank_zero_info(f"step {trainer.global_step}: " + ", ".join(f"{n} {v:.1%}" for n, v in self._now.items()))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print before and after, and where the curves are."""
        if self._now and self._measured_at < trainer.global_step:
            rank_zero_info(f"held-out accuracy was last measured at step {self._measured_at} of {trainer.global_step}")
        for name, after in self._now.items():
            before = self._before[name]
            rank_zero_info(f"{name}: {before:.1%} before, {after:.1%} after ({100 * (after - before):+.1f} points)")
        if trainer.log_dir is not None:
            rank_zero_info(f"curves: tensorboard --logdir {trainer.log_dir}")


def _is_accuracy(name: str) -> bool:
    return name.rsplit("/", 1)[-1].split("@")[0] in ("greedy", "avg")
