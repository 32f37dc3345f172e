"""A reference that follows the policy."""

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule


class ReferenceRefresh(Callback):
    """Moves the reference towards the policy every so many optimizer steps.

        reference = decay * reference + (1 - decay) * policy

    A KL to where the run began holds a long run back; one to a recent policy holds back sudden moves only. ``decay: 0``
    replaces the reference (TR-DPO's hard update, https://arxiv.org/abs/2404.09656; ProRL's reset,
    https://arxiv.org/abs/2505.24864); ``every_n_steps: 1`` with a decay near 1 is a moving average (TR-DPO's soft one).
    The reference is part of a checkpoint, so a resumed run goes on with the one it had.

    Args:
        every_n_steps: Optimizer steps between two refreshes.
        decay: Share of the old reference that stays, 0 to 1.

    Raises:
        ConfigError: For a number out of range, a recipe that pays no KL, or a reference that cannot be moved.
    """

    def __init__(self, every_n_steps: int = 100, decay: float = 0.0) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"`every_n_steps` of ReferenceRefresh expected to be >= 1, but got {every_n_steps}")
        if not 0 <= decay < 1:
            raise ConfigError(f"`decay` of ReferenceRefresh expected 0 to below 1, but got {decay}: 1 never refreshes")
        self.every_n_steps, self.decay = every_n_steps, decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the reference held in float32 where it is to be an average."""
        cast("GRPOModule", pl_module).averages_reference = self.decay > 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a run without a reference, or with one that cannot be moved."""
        module = cast("GRPOModule", pl_module)
        if not module.objective.needs_reference:
            raise ConfigError(
                "`trainer.callbacks: ReferenceRefresh` expected a recipe with a reference, but got none: set "
                "`model.objective.divergence` with a `beta` above 0, or drop the callback"
            )
        module.check_refresh(self.decay)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh after every ``every_n_steps``-th optimizer step."""
        if trainer.global_step % self.every_n_steps == 0:
            cast("GRPOModule", pl_module).refresh_reference(self.decay)
