"""Lightning's checkpoints for runs that take long: never lost to a full disk, a stale metric, or an end between two."""

import time
import warnings
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from grpo_lit.errors import ConfigError, SaveError
from grpo_lit.interrupts import Interrupted
from grpo_lit.metrics.names import is_held_out
from grpo_lit.policy.zero import size
from grpo_lit.strategies import FSDP2
from grpo_lit.strategies.checkpoint_io import in_own_format
from grpo_lit.strategies.failures import stop_at_same_step
from grpo_lit.strategies.reading import check_there
from grpo_lit.strategies.saving import check_writable, finish, link, sweep

_KEY = "trainer.callbacks: ModelCheckpoint.dirpath"
#: What killed processes left in the folder of an earlier run goes if nothing was written into it for so long [s].
_IDLE = 600.0


class ModelCheckpoint(lightning_callbacks.ModelCheckpoint):
    """Lightning's ModelCheckpoint, of which ``last`` is the last state and ``best`` was measured on the state it holds.

    - A process that is killed at any moment leaves the newest complete checkpoint behind, and with ``save_last: link``
      a ``last.ckpt`` that points to it; where a ``monitor`` says that it is not among the best, ``last.ckpt`` holds it.
    - The state at the end of training is saved, whether or not a save was due.
    - A held-out ``monitor`` is looked at when it has been measured on the state to be saved, not on an earlier one.
    - A folder that cannot be written to is refused before the engine starts.
    - ``save_on_exception`` lets a failing rank end. Saving waits for all ranks. Ctrl-C and SIGTERM reach all of them,
      an error is one rank's own, and the others would be waited for until the process group's time-out, with the
      reason untold. There the last checkpoint on schedule has to do.
    """

    # ------------------------------------------------------------------ the folder

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a folder that cannot be written to, and clear away what a killed run left half written."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or _tries(trainer) or not _is_local_file_protocol(self.dirpath):
            return
        if self._writes(trainer):
            check_writable(Path(self.dirpath), _KEY)
        if trainer.is_global_zero:
            sweep(Path(self.dirpath))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a disk without room for the weights, and a monitor that nothing will measure."""
        if _tries(trainer):
            return
        if _is_local_file_protocol(self.dirpath) and self._writes(trainer):
            parts = [p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters() if p.requires_grad]
            check_writable(Path(self.dirpath), _KEY, needed=sum(size(part) * part.element_size() for part in parts))
        if self.monitor is not None and is_held_out(self.monitor) and not self._is_validated(trainer):
            raise ConfigError(
                f"`trainer.callbacks: ModelCheckpoint` expected a `monitor` that is logged, but got {self.monitor!r} "
                "without held-out prompts, so that nothing would ever be saved: set `data.val`, or another `monitor`"
            )

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with the best and the ``last`` of the folder that the checkpoint lies in, though it was moved."""
        state = checkpoint["callbacks"].get(self.state_key, {})
        before, now = state.get("dirpath"), Path(self.dirpath)
        here = self._lies_here(trainer)
        if here and before is not None and before != self.dirpath:
            for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                state[name] = _moved(state[name], before, now)
            state["best_k_models"] = {_moved(path, before, now): v for path, v in state["best_k_models"].items()}
            state["dirpath"] = self.dirpath
        if (here or before == self.dirpath) and self.save_last == "link" and not state.get("last_model_path"):
            # The run's first checkpoint does not know of its `last` yet.
            self.last_model_path = self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)
            if state:
                state["last_model_path"] = self.last_model_path
        if trainer.is_global_zero and not here and trainer.state.fn == TrainerFn.FITTING:
            sweep(Path(trainer.ckpt_path).resolve().parent, idle=_IDLE)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin anew in another folder; :class:`callbacks.Console` says where that is."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            super().load_state_dict(state_dict)

    @override
    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # `last` of a run with version folders lies in an earlier one: this run's own is new.
        if self.dirpath is not None and _is_local_file_protocol(self.dirpath):
            finish(Path(self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)))  # it may have no name right now
        found = super()._find_last_checkpoints(trainer)
        for path in found:
            if _is_local_file_protocol(path) and in_own_format(trainer.strategy):
                check_there(Path(path))  # Lightning would begin anew where a link points to nothing
        if found or self.dirpath is not None or trainer.log_dir is None:
            return found
        own = Path(trainer.log_dir)
        paths = [path for path in own.parent.glob("version_*/checkpoints/last*.ckpt") if path.exists()]
        numbers = [(path.parents[1].name.removeprefix("version_"), path) for path in paths]
        earlier = [(int(number), str(path)) for number, path in numbers if number.isdigit()]
        newest = max(earlier, default=(0, ""))[0]
        return {path for number, path in earlier if number == newest}

    # ------------------------------------------------------------------ when to save

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the state that is gone on from as saved where it lies in this folder."""
        super().on_train_start(trainer, pl_module)
        if trainer.ckpt_path is not None and self._lies_here(trainer):
            self._last_global_step_saved = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where it is due; where the best is told by what is yet to be measured, the last state alone.

        Validation may take long, and the run be killed in it: the last state does not wait for it.

        Lightning's own, under manual optimization, knows no ``train_time_interval`` and takes the score of an earlier
        state for this one's.
        """
        if not self._is_due(trainer) or self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        unknown = self.monitor is not None and (is_held_out(self.monitor) or self.monitor not in candidates)
        self._defer_save_until_validation = unknown and self._is_validated(trainer)
        if not self._defer_save_until_validation:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save where that is due by epochs, or the best where it was put off until now."""
        if not self._defer_save_until_validation:
            if self._every_n_epochs >= 1:
                super().on_validation_end(trainer, pl_module)
            return
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        # Lightning's own takes a step whose last state is saved for one whose best is. The last one is saved again: a
        # new best, and what callbacks counted in the validation, go on with it.
        self._defer_save_until_validation, self._last_checkpoint_saved = False, ""
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save where that is due by epochs."""
        if self._every_n_epochs >= 1:
            super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was learnt since the last save."""
        if not self.save_last or _tries(trainer) or self._last_global_step_saved == trainer.global_step:
            return
        candidates = self._monitor_candidates(trainer)
        if self.monitor is None:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what was learnt, on one process or where all of them stop; not after a save that failed."""
        if self._defer_save_until_validation:  # a run stopped in its validation finishes that when it goes on
            self._last_global_step_saved = -1
        everywhere = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt | Interrupted)
        if not everywhere or isinstance(exception, SaveError) or not self._should_save_on_exception(trainer):
            return
        if not stop_at_same_step(trainer):
            rank_zero_warn("nothing is saved at the end: ranks were stopped at different steps, or one does not answer")
            return
        # As Lightning, which beside that prints the exception's message, before it is an error's that the user sees.
        candidates = self._monitor_candidates(trainer)
        path = self.format_checkpoint_name(candidates)
        try:
            self._save_checkpoint(trainer, path)
            self._save_last_checkpoint(trainer, candidates)
        except SaveError as failure:  # what ended the run is to be told, not this
            rank_zero_warn(str(failure))
            return
        if not isinstance(exception, Interrupted):  # its end tells of all that was saved
            rank_zero_info(f"step {trainer.global_step} is saved in {path}")

    def _is_due(self, trainer: Trainer) -> bool:
        if self._every_n_train_steps >= 1:
            return trainer.global_step % self._every_n_train_steps == 0
        if self._train_time_interval is None:
            return False  # validation, or the end of an epoch, is when it is
        waited = time.monotonic() - self._last_time_checked
        due = trainer.strategy.broadcast(waited >= self._train_time_interval.total_seconds())
        if due:
            self._last_time_checked = time.monotonic()
        return due

    @staticmethod
    def _writes(trainer: Trainer) -> bool:
        """Return whether this rank writes: the first one, or all of them, each its share."""
        return bool(trainer.is_global_zero or isinstance(trainer.strategy, FSDP2))

    def _lies_here(self, trainer: Trainer) -> bool:
        return Path(trainer.ckpt_path).resolve().parent == Path(self.dirpath).resolve()

    @staticmethod
    def _is_validated(trainer: Trainer) -> bool:
        return trainer.limit_val_batches != 0 and bool(trainer.datamodule.val)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ best and last

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
    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        # Lightning links to what was saved last: with a monitor, to the last state that was among the best.
        if self.save_last == "link" and self._last_global_step_saved != trainer.global_step:
            self._last_checkpoint_saved = ""  # nothing to link to
        super()._save_last_checkpoint(trainer, monitor_candidates)

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


def _tries(trainer: Any) -> bool:
    """Return whether this is a trial run, which saves nothing."""
    return bool(trainer.fast_dev_run)


def _moved(path: str, before: str, now: Path) -> str:
    """Return a path in a folder after the folder was moved; one that lay elsewhere stays."""
    return str(now / Path(path).relative_to(before)) if path and Path(path).is_relative_to(before) else path
