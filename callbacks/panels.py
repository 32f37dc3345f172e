"""TensorBoard's overviews: the five panels in one tab, and a row for the run in the table of hyperparameters."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.tensorboard.summary import hparams

from callbacks.tensorboard import tensorboards
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.metrics.names import is_accuracy
from grpo_lit.module import GRPOModule
from grpo_lit.report.charts import ACCURACY, PANELS, SHARE, Chart

#: Chart that stands before all others.
HELD_OUT = Chart(ACCURACY, SHARE, ("val/*/greedy", "val/*/avg@*", "val/*/maj@*", "val/*/pass@*"))


class Panels(Callback):
    """Writes what TensorBoard's *custom scalars* and *HParams* tabs show.

    The first has five groups of charts, which say how a run goes: reward, exploration, length, optimization, system.
    The second gets a row at the end of the run, finished or not: the parts of the recipe and the numbers that are
    changed most, beside the last held-out accuracies. Only a TensorBoardLogger has these tabs.
    """

    def __init__(self) -> None:
        self._hparams: dict[str, Any] = {}
        self._laid_out = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what the run was begun with: callbacks may change it later."""
        self._hparams = hyperparameters(trainer, cast("GRPOModule", pl_module))
        self._laid_out = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the layout after the first step of a rollout, when it is known which charts would stay empty."""
        if self._laid_out or "reward/total" not in trainer.callback_metrics:
            return
        self._laid_out = True
        for logger in tensorboards(trainer):
            logger.experiment.add_custom_scalars(layout(trainer.callback_metrics))
            logger.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the row."""
        self._write_row(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the row with what was reached."""
        if self._hparams:
            self._write_row(trainer)

    def _write_row(self, trainer: Trainer) -> None:
        """Name the metrics only: the tab takes their last values from the curves, and no point is added to those."""
        names = [name for name in trainer.callback_metrics if is_accuracy(name) or name == "reward/correct"]
        if not trainer.is_global_zero:  # the others have no writer
            return
        for logger in tensorboards(trainer):
            for summary in hparams(self._hparams, dict.fromkeys(sorted(names), 0.0)):
                logger.experiment._get_file_writer().add_summary(summary)
            logger.save()


def layout(names: Iterable[str] | None = None) -> dict[str, dict[str, list[Any]]]:
    """Return the panels as TensorBoard takes them: with regular expressions for names, matched from their beginning.

    The charts are those of ``scripts/report``, and hold the same metrics: one that several patterns fit is in the chart
    that names it, else in that of the longest pattern.

    Args:
        names: Metrics of the run: a chart that would hold none of them is left out, unless it is of held-out answers,
            which may come later. ``None``: every chart.
    """
    patterns = [name for charts in PANELS.values() for chart in charts for name in chart.patterns]
    tags = {pattern: _tag(pattern, patterns) for pattern in (*patterns, *HELD_OUT.patterns)}
    known = None if names is None else list(names)

    def shown(chart: Chart) -> bool:
        later = any(pattern.startswith("val/") for pattern in chart.patterns)
        return known is None or later or any(re.match(tags[p], name) for p in chart.patterns for name in known)

    return {
        panel: {
            _title(chart): ["Multiline", [tags[pattern] for pattern in chart.patterns]]
            for chart in ((HELD_OUT, *charts) if panel == "reward" else charts)
            if shown(chart)
        }
        for panel, charts in PANELS.items()
    }


def _title(chart: Chart) -> str:
    return f"{chart.title} [{chart.unit}]" if chart.unit else chart.title


def _expression(name: str) -> str:
    return re.escape(name).replace(re.escape("*"), "[^/]+")


def _tag(pattern: str, patterns: Sequence[str]) -> str:
    # What is more special, and no instance of its own.
    others = [_expression(other) for other in patterns if other != pattern and fnmatchcase(other, pattern)]
    without = f"(?!({'|'.join(others)})$)" if others else ""
    return f"{without}{_expression(pattern)}$"


def hyperparameters(trainer: Trainer, module: GRPOModule) -> dict[str, Any]:
    """Return the parts of the recipe and the numbers that are changed most, as texts and numbers by a short name."""
    objective, data = module.objective, cast("RolloutDataModule", trainer.datamodule)  # type: ignore[attr-defined]
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    options = data.collector.dynamic, data.collector.replay, data.solve_rates.settings, data.asynchronous
    return {
        "model": Path(module.checkpoint).name,
        "advantage": _described(objective.advantage),
        "surrogate": _described(objective.surrogate),
        "reduction": _described(objective.reduction),
        "divergence": _described(objective.divergence),
        "corrections": ", ".join(map(_described, objective.corrections)) or "none",
        "filters": ", ".join(map(_described, objective.filters)) or "none",
        "selection": _described(objective.selection),
        "entropy_coefficient": objective.entropy_coefficient,
        "old_policy": module.old_policy_source,
        "optimizer": type(optimizer).__name__,
        "lr": group.get("initial_lr", group["lr"]),
        "rewards": ", ".join(f"{name} {part.weight:g}" for name, part in data.rewards.rewards.items()),
        "rollout": ", ".join(_described(part) for part in options if part is not None) or "plain",
        "prompts_per_rollout": data.prompts_per_rollout,
        "completions": data.sampling.completions,
        "num_updates": data.num_updates,
        "num_epochs": data.num_epochs,
        "temperature": data.sampling.temperature,
        "max_tokens": data.sampling.max_tokens,
        "engine": type(data.engine).__name__,
        "precision": str(trainer.precision),
        "seed": data.seed,
    }


def _described(part: Any) -> str:
    """Return ``TokenClip(low=0.2, high=0.28)``: a part with what is set of it."""
    if part is None:
        return "none"
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else {}
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None and value is not False)
    return f"{type(part).__name__}({shown})" if shown else type(part).__name__
