"""What a module does with held-out answers, and how it logs: apart from any training."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lit.data.evaluation import EvaluationBatch
from grpo_lit.metrics.rates import Rates
from grpo_lit.ranks import Ranks


class EvaluatingModule(LightningModule):
    """Counts held-out answers over all ranks, for ``fit``, ``validate``, ``test`` and ``predict``."""

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return Ranks(self.trainer.strategy)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Number this step's values by ``global_step``: Lightning's own count is one off after some resumes."""
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.global_step

    def on_validation_epoch_start(self) -> None:
        """Start counting answers."""
        self._evaluation = Rates()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count what the engine answered."""
        self._evaluation.merge(batch.rates())

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log accuracy over all prompts of all ranks, also when it is measured before the first step."""
        values = self._evaluation.compute(self.ranks.sum, self.ranks.max)
        if self.trainer.state.fn == TrainerFn.FITTING:
            # Not through self.log: before training Lightning throws it away, and later it puts it at the step before.
            for logger in self.trainer.loggers:
                logger.log_metrics(values, step=self.global_step)
            self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        else:
            self.log_values(values)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Return the answers as plain types."""
        return [group.state_dict() for group in (*batch.greedy, *batch.sampled)]

    def log_values(self, values: dict[str, float]) -> None:
        """Log finite values under their names; a leading underscore marks what was only needed on the way."""
        for name, value in values.items():
            if not name.startswith("_") and math.isfinite(value):
                self.log(name, value)
