"""Lightning's checkpoints, saved on errors only where that cannot hang."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks


class ModelCheckpoint(lightning_callbacks.ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose ``save_on_exception`` lets a failing rank end.

    Saving waits for all ranks. Ctrl-C reaches all of them; an error is one rank's own, and the others would be waited
    for until the process group's time-out, with the reason untold. There the last checkpoint on schedule has to do.
    """

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what was learnt, on one process or where all of them stop."""
        if trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt):
            super().on_exception(trainer, pl_module, exception)
