"""What a person watching the console sees: held-out accuracy, before, now, and after."""

import math
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from callbacks.progress import figures_of
from grpo_lit.metrics.evaluation import ENDS
from grpo_lit.metrics.names import is_accuracy


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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print where this run writes: a run that goes on from a checkpoint mostly has a folder of its own."""
        savers = [str(part.dirpath) for part in trainer.checkpoint_callbacks if isinstance(part, ModelCheckpoint)]
        logs = trainer.log_dir if trainer.loggers else None
        places = [f"logs: {logs}"] * (logs is not None) + [f"checkpoints: {', '.join(savers)}"] * bool(savers)
        if places:
            rank_zero_info("; ".join(places))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what takes its time before the first step; the engine, which says so itself, starts on the way."""
        sources = trainer.datamodule.val.values()  # type: ignore[attr-defined]
        questions = sum(len(source) for source in sources)
        rank_zero_info(f"before step 1: {questions} held-out questions are answered")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how much is drawn before the first step is made."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        prompts, completions = data.prompts_per_rollout, data.sampling.completions
        rank_zero_info(
            f"step {trainer.global_step + 1} begins with a rollout: {prompts} prompts, {completions} answers each"
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the accuracies just measured, with 95 % intervals in brackets outside of training."""
        values = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(self.prefix)}
        step = trainer.global_step or getattr(pl_module, "resumed_step", 0)
        self._now = {n: v for n, v in values.items() if is_accuracy(n) and math.isfinite(v)}
        if step == 0:
            self._before = dict(self._now)
        self._measured_at = trainer.global_step
        if self._now:
            shown = ", ".join(f"{n} {v:.1%}{_interval(values, n)}" for n, v in self._now.items())
            rank_zero_info(f"step {step}: {shown}")

    on_test_end = on_validation_end

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line per optimizer step where no progress bar can be watched: into a file, or a pipe."""
        if sys.stdout.isatty():
            return
        figures = ", ".join(f"{name} {value}" for name, value in figures_of(trainer).items())
        rank_zero_info(f"step {trainer.global_step}: {figures}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print before and after, and where the curves are."""
        if self._now and self._measured_at < trainer.global_step:
            rank_zero_info(f"held-out accuracy was last measured at step {self._measured_at} of {trainer.global_step}")
        for name, after in self._now.items():
            before = self._before.get(name)
            gain = "" if before is None else f"{before:.1%} before, "
            points = "" if before is None else f" ({100 * (after - before):+.1f} points)"
            rank_zero_info(f"{name}: {gain}{after:.1%} after{points}")
        if trainer.log_dir is not None:
            tensorboard = Path(sys.executable).with_name("tensorboard")
            command = os.path.relpath(tensorboard) if tensorboard.is_relative_to(Path.cwd()) else str(tensorboard)
            rank_zero_info(f"curves: {command} --logdir {trainer.log_dir}")


def _interval(values: dict[str, float], name: str) -> str:
    ends = [values.get(f"{name}/{end}") for end in ENDS]
    return "" if None in ends else f" [{ends[0]:.1%}, {ends[1]:.1%}]"
