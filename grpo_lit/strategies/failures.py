"""One rank's failure ends the run on all ranks, with its message in every log."""

import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from grpo_lit.interrupts import Interrupted

#: How often a rank looks whether another has failed [s].
_LOOK = 1.0
#: How long a failing rank waits for the others to read its message, and they for their own end, which a broken
#: connection mostly brings at once; a collective of NCCL waits for the process group's time-out [s].
_GRACE = 10.0
#: A rank that has given no sign for so long was killed, or is held up as if it were, and nobody waits for it [s].
_SILENCE = 5.0
#: Most characters of a message.
_LENGTH = 4000
#: Of the runs of this process, equal on all ranks: the store outlives a run.
_RUNS = itertools.count()


def stop_at_same_step(trainer: Trainer, store: Store | None = None, patience: float = _SILENCE) -> bool:
    """Return whether all ranks have been interrupted, and after the same number of optimizer steps.

    Only then is what they would save together one state: a signal reaches each rank somewhere else. One that waits in a
    collective does not answer. Nothing is waited for in a collective here, since another may be under way.

    Args:
        trainer: Of the run.
        store: At which the ranks meet; default: the process group's.
        patience: How long to wait for the others [s].
    """
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return True
    store = store or _get_default_store()
    keys = [f"grpo_lit/interrupted/{trainer.global_step}/{rank}" for rank in range(trainer.world_size)]
    try:
        store.set(keys[trainer.global_rank], "")
        store.wait(keys, timedelta(seconds=patience))
    except torch.distributed.DistError:
        return False
    return True


class FailureWatch(Callback):
    """Tells the other ranks of an error, and ends this one where another has failed.

    The others would wait for the failed rank in their next collective, and its reason would be in its own log only.
    Messages go through the store at which the ranks met: a collective that waits does not block it. Ctrl-C and SIGTERM
    are told too, since ``kill`` may reach one rank alone, but nobody is waited for: where all have it, each ends by
    itself. A rank that is killed (``kill -9``, the machine is out of memory) says nothing: the others find its
    connections broken, or their launcher ends them, and name it by its silence.
    """

    def __init__(self) -> None:
        self._run = f"grpo_lit/{next(_RUNS)}"
        self._finished = threading.Event()
        self._told = self._heard = False
        self._thread: threading.Thread | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to look."""
        self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        if trainer.world_size == 1 or not torch.distributed.is_initialized() or self._thread is not None:
            return
        self._finished.clear()
        self._thread = threading.Thread(target=self._look, args=(trainer,), daemon=True, name="grpo-lit-failures")
        self._thread.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look no more."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say why this rank ends, and wait until the others know."""
        self._stop()
        if trainer.world_size == 1 or not torch.distributed.is_initialized():
            return
        asked = isinstance(exception, KeyboardInterrupt | Interrupted)
        if asked and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGTERM)  # the ranks that this one started, so that all of them save
        said = f"rank {trainer.global_rank} failed, and ends the run:\n"
        said += "".join(traceback.format_exception(exception))[-_LENGTH:]
        if asked:
            said = f"rank {trainer.global_rank} was ended by {str(exception) or type(exception).__name__}"
        store = _get_default_store()
        try:
            if store.add(f"{self._run}/failures", 1) == 1:
                store.set(f"{self._run}/message", said)
            elif not asked and not self._heard and store.check([f"{self._run}/message"]):
                self._print_message()  # what has failed here is a connection to the rank that failed first
            self._wait_for_others(trainer, 0.0 if asked else _GRACE)
        except torch.distributed.DistError:
            return  # the first rank, which keeps the store, has ended: it was told, or failed itself

    def _wait_for_others(self, trainer: Trainer, grace: float) -> None:
        """Wait until all ranks know, as far as they are still there, and name those that are not."""
        store, started, own = _get_default_store(), time.monotonic(), trainer.global_rank
        others = [rank for rank in range(trainer.world_size) if rank != own]
        signs, last = dict.fromkeys(others, 0), dict.fromkeys(others, started)
        silent: list[int] = []
        while self._acknowledge(own) < trainer.world_size and (now := time.monotonic()) - started < grace:
            for rank in others:
                if (sign := store.add(f"{self._run}/alive/{rank}", 0)) != signs[rank]:
                    signs[rank], last[rank] = sign, now
            waited_for = [rank for rank in others if not store.check([f"{self._run}/told/{rank}"])]
            silent = [rank for rank in waited_for if now - last[rank] > _SILENCE]
            if len(silent) == len(waited_for):
                break
            time.sleep(_LOOK / 10)
        for rank in silent:
            said = f"rank {rank} has not answered for {_SILENCE:g} s: {self._fate(rank)}"
            print(said, file=sys.stderr, flush=True)

    def _fate(self, rank: int) -> str:
        """Return what is known of a rank that is silent; its process can be looked up on this machine alone."""
        store, key = _get_default_store(), f"{self._run}/process/{rank}"
        host, pid = store.get(key).decode().rsplit(" ", 1) if store.check([key]) else ("", "0")
        if host != socket.gethostname():
            return "it was killed, its machine is gone, or something in it holds Python's lock"
        try:
            ended = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        except psutil.Error:
            return f"nothing is known of its process {pid}"
        held = f"its process {pid} is there but held up: it was stopped, or something in it holds Python's lock"
        return "its process has ended" if ended else held

    @classmethod
    def begin(cls, trainer: Any) -> None:
        """Let a run's watch begin before Lightning comes to it: data that one rank cannot read are a failure too."""
        for part in trainer.callbacks:
            if isinstance(part, cls):
                part._start(trainer)

    def _stop(self) -> None:
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look(self, trainer: Trainer) -> None:
        store = _get_default_store()
        try:
            store.set(f"{self._run}/process/{trainer.global_rank}", f"{socket.gethostname()} {os.getpid()}")
            while not store.check([f"{self._run}/message"]):
                store.add(f"{self._run}/alive/{trainer.global_rank}", 1)
                if self._finished.wait(_LOOK):
                    return
            said = self._print_message()
            self._acknowledge(trainer.global_rank)
        except torch.distributed.DistError:
            said = "the first rank is gone without a word, and ends the run"
        if self._finished.wait(_GRACE):
            return
        print(f"rank {trainer.global_rank} ends, since {said.splitlines()[0]}", file=sys.stderr, flush=True)
        try:
            trainer.datamodule.close()  # type: ignore[attr-defined]  # no process of an engine outlives the run
        finally:
            # The main thread waits in a collective, where no exception reaches it.
            os._exit(1)

    def _print_message(self) -> str:
        self._heard = True
        said = _get_default_store().get(f"{self._run}/message").decode()
        print(said, file=sys.stderr, flush=True)
        return str(said)

    def _acknowledge(self, rank: int) -> int:
        """Count this rank as told, once, and return how many are."""
        store = _get_default_store()
        count = store.add(f"{self._run}/told", 0 if self._told else 1)
        if not self._told:
            store.set(f"{self._run}/told/{rank}", "")
        self._told = True
        return int(count)
