"""What a module does with held-out answers, and how it logs: apart from any training."""

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lit.data.evaluation import EvaluationBatch
from grpo_lit.data.predictions import PredictionWriter, prediction_rows
from grpo_lit.metrics.evaluation import HeldOutFigures
from grpo_lit.ranks import Ranks
from grpo_lit.strategies.failures import FailureWatch


class EvaluatingModule(LightningModule):
    """Counts held-out answers over all ranks, for ``fit``, ``validate``, ``test`` and ``predict``."""

    #: Optimizer steps of the checkpoint that the weights come from; 0 without one.
    resumed_step = 0

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return Ranks(self.trainer.strategy)

    def on_validation_epoch_start(self) -> None:
        """Start counting answers."""
        self._figures = HeldOutFigures()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count what the engine answered."""
        for place, figures in batch.figures():
            self._figures.add(batch.name, place, figures)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log means over all prompts of all ranks, also when they are measured before the first step.

        Outside of ``fit`` with the bounds of their intervals; in it they would be two more curves for every one.
        """
        figures = self._figures.gathered(self.ranks)
        values = figures.means()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.log_at(self.global_step, values)
            return
        self.log_at(self.resumed_step, values | figures.bounds())
        for name, value in values.items():
            if math.isfinite(value):
                # For the table that Lightning prints and returns. Every rank has this value already, and their maximum
                # is exactly it; unsynchronised, Lightning would warn of what each rank knows for itself.
                self.log(name, value, logger=False, sync_dist=True, reduce_fx="max")

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Return the answers as rows of plain types, which :class:`PredictionWriter` writes."""
        return prediction_rows(batch)

    def configure_callbacks(self) -> list[Callback]:
        """Return what writes the answers of ``predict``, and what ends the run where another rank fails."""
        return [PredictionWriter(), FailureWatch()]

    def log_at(self, step: int, values: dict[str, float]) -> None:
        """Log finite values under their names; a leading underscore marks what was only needed on the way.

        Not through ``self.log``: Lightning throws away what is logged before training, writes a value again at every
        later step until the epoch ends, and counts steps of its own, one off after some resumes.

        Args:
            step: Optimizer steps that the weights have had, the x-axis.
            values: By name.
        """
        shown = {n: v for n, v in values.items() if not n.startswith("_") and math.isfinite(v)}
        # What cannot be measured now is not what it was a step ago, and a ModelCheckpoint misses a name that is gone.
        known = self.trainer.callback_metrics
        known.update({n: torch.tensor(v) for n, v in values.items() if n in shown or n in known})
        every = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if step % every == 0 or any(name.startswith("val/") for name in shown):
            for logger in self.trainer.loggers:
                logger.log_metrics(shown, step=step)
                logger.save()
