"""The progress bar: optimizer steps, and the five figures that tell how a run goes."""

import math
import sys

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import CustomTimeColumn
from rich.progress import BarColumn, ProgressColumn, TextColumn

#: Metric, its name on the bar, and how it is written there.
SHOWN = (
    ("reward/total", "reward", "{:.2f}"),
    ("reward/correct", "correct", "{:.0%}"),
    ("length/mean", "length", "{:.1f}"),
    ("exploration/entropy", "entropy", "{:.2f}"),
    ("system/rollout_tokens_per_s", "tok/s", "{:.0f}"),
)


class ProgressBar(RichProgressBar):
    """A bar with the optimizer step, reward, accuracy and length of the completions, entropy and sampling speed.

    Args:
        refresh_rate: Redraw after this many batches; 0 shows no bar.
        leave: Keep the bar of an epoch when the next one begins.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)

    @property
    def is_enabled(self) -> bool:
        """Whether there is a terminal to draw on; elsewhere :class:`callbacks.Console` prints a line per step."""
        return bool(super().is_enabled) and sys.stdout.isatty()

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return a narrow bar, so that the figures fit beside it in a terminal of 100 columns."""
        return [
            TextColumn("{task.description}"),
            BarColumn(bar_width=8, complete_style=self.theme.progress_bar),
            CustomTimeColumn(style=self.theme.time),
        ]

    def _get_train_description(self, current_epoch: int) -> str:
        return ""  # a run has optimizer steps, which stand among the figures, and no epochs worth a column

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what stands to the right of the bar: names without their panel, figures in their own form."""
        steps = f"{trainer.global_step}/{trainer.max_steps}" if trainer.max_steps > 0 else f"{trainer.global_step}"
        return {"step": steps, **figures_of(trainer)}


def figures_of(trainer: Trainer) -> dict[str, str]:
    """Return the newest figures of a run under short names, each in its own form."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        short: form.format(values[name]) for name, short, form in SHOWN if math.isfinite(values.get(name, math.nan))
    }
