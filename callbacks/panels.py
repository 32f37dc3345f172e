"""TensorBoard's overviews: the five panels in one tab, and a row for the run in the table of hyperparameters."""

import dataclasses
import re
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.tensorboard.summary import hparams

from callbacks.tensorboard import tensorboards
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.metrics.names import is_accuracy
from grpo_lit.module import GRPOModule

#: Charts of each panel, and the metrics in each; ``*`` stands for anything but a slash.
PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "reward": {
        "accuracy in training": ("reward/correct", "reward/total"),
        "accuracy on held-out prompts": ("val/*/greedy", "val/*/avg@*"),
        "each reward": ("reward/*",),
    },
    "exploration": {
        "entropy [nats]": ("exploration/entropy",),
        "groups": (
            "exploration/zero_signal",
            "exploration/solve_all",
            "exploration/solve_none",
            "exploration/accepted",
        ),
        "distinct answers of a group": ("exploration/group_diversity",),
        "probability of the sampled tokens": ("exploration/token_prob",),
    },
    "length": {
        "completion [tokens]": ("length/mean", "length/correct", "length/incorrect"),
        "cut at max_tokens": ("length/truncated", "val/*/truncated"),
        "ends in a loop": ("length/repetition",),
    },
    "optimization": {
        "gradient norm": ("optimization/grad_norm",),
        "clipped tokens": ("optimization/clip_low", "optimization/clip_high"),
        "clip bounds": ("optimization/clip_bound_low", "optimization/clip_bound_high"),
        "KL [nats per token]": ("optimization/kl_old", "optimization/kl_reference"),
        "largest ratio": ("optimization/ratio_max",),
        "learning rate": ("optimization/lr",),
        "minibatches skipped": ("optimization/skipped",),
    },
    "system": {
        "a step [s]": ("system/time_step", "system/time_rollout", "system/time_learn", "system/time_sync"),
        "tokens per second": ("system/rollout_tokens_per_s", "system/learner_tokens_per_s"),
        "engine against learner [nats]": ("system/mismatch_abs", "system/mismatch_kl"),
        "corrections": ("system/ess", "system/is_cut"),
        "staleness [steps]": ("system/staleness_mean", "system/staleness_max"),
        "memory [GiB]": ("system/memory_learn", "system/memory_rollout", "system/memory_engine"),
    },
}


class Panels(Callback):
    """Writes what TensorBoard's *custom scalars* and *HParams* tabs show.

    The first has five groups of charts, which say how a run goes: reward, exploration, length, optimization, system.
    The second gets a row at the end of the run, finished or not: the parts of the recipe and the numbers that are
    changed most, beside the last held-out accuracies. Only a TensorBoardLogger has these tabs.
    """

    def __init__(self) -> None:
        self._hparams: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout, and note what the run was begun with: callbacks may change it later."""
        self._hparams = hyperparameters(trainer, cast("GRPOModule", pl_module))
        for logger in tensorboards(trainer):
            logger.experiment.add_custom_scalars(layout())
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
        for logger in tensorboards(trainer):
            for summary in hparams(self._hparams, dict.fromkeys(sorted(names), 0.0)):
                logger.experiment._get_file_writer().add_summary(summary)
            logger.save()


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the panels as TensorBoard takes them: with regular expressions for names, matched from their beginning.

    Rewards have names of the user's own, so that one chart holds whatever stands under ``reward/``.
    """
    return {
        panel: {
            title: ["Multiline", [f"{re.escape(name).replace(re.escape('*'), '[^/]+')}$" for name in names]]
            for title, names in charts.items()
        }
        for panel, charts in PANELS.items()
    }


def hyperparameters(trainer: Trainer, module: GRPOModule) -> dict[str, Any]:
    """Return the parts of the recipe and the numbers that are changed most, as texts and numbers by a short name."""
    objective, data = module.objective, cast("RolloutDataModule", trainer.datamodule)  # type: ignore[attr-defined]
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    options = data.collector.dynamic, data.collector.replay, data.solve_rates.settings
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
        "rollout": ", ".join(type(part).__name__ for part in options if part is not None) or "plain",
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
