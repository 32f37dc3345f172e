"""Lightning's checkpoints, saved on errors only where that cannot hang, and ``last`` never pointing to nothing."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from grpo_lit.errors import ConfigError
from grpo_lit.interrupts import Interrupted
from grpo_lit.metrics.names import is_held_out
from grpo_lit.strategies.saving import link


class ModelCheckpoint(lightning_callbacks.ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose ``save_on_exception`` lets a failing rank end.

    Saving waits for all ranks. Ctrl-C and SIGTERM reach all of them; an error is one rank's own, and the others would
    be waited for until the process group's time-out, with the reason untold. There the last checkpoint on schedule has
    to do.

    A process that is killed at any moment leaves the newest complete checkpoint behind, and with ``save_last: link`` a
    ``last.ckpt`` that points to it.
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what was learnt, on one process or where all of them stop."""
        everywhere = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt | Interrupted)
        if not everywhere or not self._should_save_on_exception(trainer):
            return
        # As Lightning, which beside that prints the exception's message, before it is an error's that the user sees.
        candidates = self._monitor_candidates(trainer)
        path = self.format_checkpoint_name(candidates)
        self._save_checkpoint(trainer, path)
        self._save_last_checkpoint(trainer, candidates)
        if not isinstance(exception, Interrupted):  # its end tells of all that was saved
            rank_zero_info(f"step {trainer.global_step} is saved in {path}")

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the ``last`` of this folder, which the run's first checkpoint does not know of yet."""
        super().load_state_dict(state_dict)
        if self.save_last == "link" and not self.last_model_path and self.dirpath == state_dict.get("dirpath"):
            self.last_model_path = self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the ``last`` of this folder too where a run is resumed from it after it was moved."""
        super().on_train_start(trainer, pl_module)
        if self.save_last != "link" or self.last_model_path or trainer.ckpt_path is None or self.dirpath is None:
            return
        if Path(trainer.ckpt_path).resolve().parent == Path(self.dirpath).resolve():
            self.last_model_path = self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)

    @override
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        # Lightning would write nothing, and say nothing of it.
        known = list(trainer.callback_metrics)
        measured = self.monitor is not None and (not is_held_out(self.monitor) or any(map(is_held_out, known)))
        if measured and self.monitor not in known:
            close = get_close_matches(str(self.monitor), known, n=3) or sorted(known)[:3]
            raise ConfigError(
                f"`trainer.callbacks: ModelCheckpoint` expected a `monitor` that is logged, but got {self.monitor!r}, "
                f"so that nothing would ever be saved: did you mean {' or '.join(close)}?"
            )
        super()._save_topk_checkpoint(trainer, monitor_candidates)

    @override
    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        # Lightning removes the old one first and then lets `last` point to the new one.
        if self.save_last == "link" and self.last_model_path and self._last_checkpoint_saved:
            self._link_checkpoint(trainer, self._last_checkpoint_saved, self.last_model_path)
        super()._remove_checkpoint(trainer, filepath)

    @staticmethod
    @override
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and Path(filepath).absolute() != Path(linkpath).absolute():
            link(Path(filepath), Path(linkpath))
        trainer.strategy.barrier()
