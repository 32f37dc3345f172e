"""Ctrl-C and SIGTERM end a run in order: what was learnt is saved, engines end, the exit status names the signal."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

#: A launcher may pass on what the terminal has sent already: Ctrl-C again within this time is the same one [s].
_SAME = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked the run to end.

    No ``KeyboardInterrupt``: vLLM swallows that while it starts, and Lightning would ignore every further Ctrl-C.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(_name(number))
        #: Exit status of a process that ends because of it.
        self.status = 128 + number
        #: What the run left behind, for the user.
        self.outcome = ""


class _Watch:
    """The signals of this process, as its main thread handles them."""

    def __init__(self) -> None:
        self.came_at: float | None = None
        self._held, self._waiting = False, 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise for the first signal; end everything at once where Ctrl-C comes again."""
        if self.came_at is None:
            self.came_at = time.monotonic()
            _say(f"{_name(number)}: saving and ending; one more Ctrl-C ends at once, unsaved")
            if self._held:
                self._waiting = number
                return
            raise Interrupted(number)
        if number == signal.SIGINT and time.monotonic() - self.came_at > _SAME:
            end_at_once(128 + number)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let a signal wait for the end of what must not be done by half."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        number, self._waiting = self._waiting, 0
        if number:
            raise Interrupted(number)


_WATCH = _Watch()
held_back, handle = _WATCH.held_back, _WATCH.handle


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Raise :class:`Interrupted` within where Ctrl-C or SIGTERM comes.

    In another than the main thread nothing is changed, nor for a signal that is ignored, as Ctrl-C is in the background
    of a shell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _WATCH.came_at = None
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _WATCH.handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(status: int) -> None:
    """Kill every process below this one, and end."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(status)


def outcome_of(trainer: Trainer) -> str:
    """Return where an interrupted run stood, what of it is saved, and how to go on."""
    if trainer.state.fn != TrainerFn.FITTING:
        return f"{TrainerFn(trainer.state.fn).value} ended, the engine too"
    if trainer.global_step == 0:
        return "ended before the first step, the engine too; there was nothing to save"
    saved = [(part._last_global_step_saved, _newest(part)) for part in trainer.checkpoint_callbacks]  # type: ignore[attr-defined]
    step, path = max(saved, default=(0, ""))
    ended = f"ended after step {trainer.global_step}, the engine too"
    if not path:
        return f"{ended}; no `callbacks.ModelCheckpoint` was there to save it"
    when = "saved" if step == trainer.global_step else f"last saved at step {step}"
    return f"{ended}; {when} in {path}. To go on: the same command with --ckpt_path {path}"


def _newest(checkpoints: Any) -> str:
    """Return the newest checkpoint of a callback, by the name that stays where there is one."""
    path = checkpoints.last_model_path or checkpoints._last_checkpoint_saved
    return os.path.relpath(path) if path and Path(path).is_relative_to(Path.cwd()) else path


def started_by_lightning(trainer: Trainer) -> bool:
    """Whether this is a rank that the first one started.

    Lightning kills the first rank when such a process ends with another status than 0.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.global_rank > 0


def is_first_rank() -> bool:
    """Whether this process speaks for all; known before there is a trainer."""
    return getattr(rank_zero_only, "rank", 0) == 0


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(text: str) -> None:
    if is_first_rank():
        os.write(2, f"\n{text}\n".encode())  # a print may be in progress already: it cannot be entered twice
