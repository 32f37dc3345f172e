"""A pool of processes for functions that may hang, crash or eat memory: the call is lost, nothing else is."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from grpo_lit.errors import ConfigError, RewardError

Failure = Literal["time", "memory", "killed", "crashed"]

_PROGRAM = Path(__file__).with_name("worker_process.py")
#: Seconds in which a worker must have loaded its module: a busy machine with slow disks needs a while.
_START = 300.0
#: Seconds that a worker's own timers may come late before it is killed from here.
_GRACE = 5.0
#: Tries of a call whose worker was killed by somebody else, which says nothing about the call.
_TRIES = 2


@dataclass(frozen=True)
class Outcome:
    """What came of one call.

    Attributes:
        value: What the function returned; ``None`` where it did not.
        failure: Why it did not: out of ``time`` or ``memory``, ``killed`` from outside (twice), or ``crashed``.
    """

    value: Any = None
    failure: Failure | None = None


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C is for the run, which then ends its workers; a group of its own is killed with its child.
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._number, self._line, self._received = 0, b"", b""
        reply = self._reply(0, time.monotonic() + _START)
        if reply is None or reply[1] != "ready":
            self.kill()
            reason = f"exit status {self._process.returncode}" if reply is None else reply[2]
            raise RewardError(f"a worker process could not start: {reason}")

    def call(self, function: str, arguments: Sequence[Any], seconds: float) -> Outcome:
        """Return the outcome of one call; a worker that does not answer in time is killed.

        Args:
            function: Its name in the worker's module.
            arguments: What JSON can hold.
            seconds: Wall time within which the worker's own limits must have shown.
        """
        self._number += 1
        deadline = time.monotonic() + seconds
        self._line = json.dumps([self._number, function, list(arguments)]).encode() + b"\n"
        reply = self._reply(self._number, deadline) if self._send(self._line, deadline) else None
        if reply is None:
            overdue = time.monotonic() >= deadline
            self.kill()
            return Outcome(failure="time" if overdue else "killed")
        return Outcome(value=reply[2]) if reply[1] == "ok" else Outcome(failure=reply[1])

    def _send(self, data: bytes, deadline: float) -> bool:
        pipe, poll = self._process.stdin.fileno(), select.poll()
        poll.register(pipe, select.POLLOUT)
        while data:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                return False
        return True

    def _reply(self, number: int, deadline: float) -> list[Any] | None:
        """Return the reply to a call, ``None`` where it does not come.

        News of a child that died before may mean that it took the call with it, which is sent again.
        """
        pipe, poll = self._process.stdout.fileno(), select.poll()
        poll.register(pipe, select.POLLIN)
        while True:
            while b"\n" in self._received:
                line, self._received = self._received.split(b"\n", 1)
                reply = json.loads(line)
                if reply[0] == number:
                    return reply
                if reply[1] != "ok" and not self._send(self._line, deadline):
                    return None
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            data = os.read(pipe, 1 << 16) if ready else b""
            if not data:
                return None
            self._received += data

    def lives(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and its child at once."""
        if self._process.stdin.closed:
            return
        with contextlib.suppress(ProcessLookupError):  # both may be gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class _Crew:
    """Workers that were started, and as many threads that wait for their answers."""

    def __init__(self, command: Sequence[str], size: int, wall_seconds: float) -> None:
        self._command, self._seconds = command, wall_seconds + _GRACE
        self._owner = os.getpid()
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="grpo-lit-worker")

    def call(self, function: str, arguments: Sequence[Any]) -> Outcome:
        """Make one call; runs in ``threads``, of which there are no more than workers may be."""
        outcome = Outcome(failure="killed")
        for _ in range(_TRIES):
            worker = self._worker()
            outcome = worker.call(function, arguments, self._seconds)
            if worker.lives():
                self._idle.put(worker)
            else:
                worker.kill()
            if outcome.failure != "killed":
                break
        return outcome

    def _worker(self) -> _Worker:
        with contextlib.suppress(Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker.lives():
                    return worker
                worker.kill()
        return _Worker(self._command)

    def end(self) -> None:
        """Wait for the calls at hand and end the workers."""
        if os.getpid() == self._owner:  # a fork of the process has neither the threads nor the workers
            self.threads.shutdown(wait=True, cancel_futures=True)
            with contextlib.suppress(Empty):
                while True:
                    self._idle.get_nowait().kill()


class WorkerPool:
    """Calls functions of one module in worker processes with hard limits.

    A call that exceeds a limit, or kills its worker, fails alone; the worker is replaced in milliseconds. A call whose
    worker was killed from outside is made once more. Works from any thread and in any process, also after a fork;
    workers start when they are first needed and stay until :meth:`close`, the end of the pool or that of the process,
    however it ends: they see the end of their pipe, and a call that never returns ends at its limits.

    Args:
        file: The module, a file: importing it must be all that its functions need. A worker imports nothing else.
        workers: Most processes, and most calls at one time.
        cpu_seconds: CPU time of one call. It, not wall time, is what usually ends a call: the verdict must not depend
            on what else the machine does.
        wall_seconds: Wall time of one call.
        memory_mib: Address space of a worker [MiB], what Python and the module need included.

    Attributes:
        failures: How many calls failed, by reason.

    Raises:
        ConfigError: For a limit that is not positive.
    """

    def __init__(
        self,
        file: Path,
        workers: int = 2,
        cpu_seconds: float = 1.0,
        wall_seconds: float = 60.0,
        memory_mib: int = 1024,
    ) -> None:
        limits = {
            "workers": workers,
            "cpu_seconds": cpu_seconds,
            "wall_seconds": wall_seconds,
            "memory_mib": memory_mib,
        }
        for name, limit in limits.items():
            if not limit > 0:
                raise ConfigError(f"`{name}` expected to be > 0, but got {limit}")
        self.file = Path(file)
        self.workers, self.wall_seconds = workers, wall_seconds
        self.cpu_seconds, self.memory_mib = cpu_seconds, memory_mib
        self.failures: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the processes behind: a copy starts its own."""
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_crew", "_owner", "_finalizer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without processes."""
        vars(self).update(state)
        self._reset()

    def map(self, function: str, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Call a function once per list of arguments, on all workers at once.

        Args:
            function: Its name in the module.
            calls: Arguments of each call, what JSON can hold.

        Returns:
            An outcome per call, in order.

        Raises:
            RewardError: Where a worker cannot start.
        """
        if not calls:
            return []
        if self._owner != os.getpid():
            self._reset()  # in a fork the lock may be held by a thread that is not here
        with self._lock:
            if self._crew is None:
                limits = (str(self.cpu_seconds), str(self.wall_seconds), str(self.memory_mib))
                # -P: this folder holds a math.py, which must not be taken for the standard library's.
                command = [sys.executable, "-P", str(_PROGRAM), str(self.file), *limits]
                self._crew = _Crew(command, self.workers, self.wall_seconds)
                self._finalizer = weakref.finalize(self, self._crew.end)
            crew = self._crew
            answers = [crew.threads.submit(crew.call, function, arguments) for arguments in calls]
        try:
            outcomes = [answer.result() for answer in answers]
        finally:
            for answer in answers:  # after Ctrl-C or a worker that cannot start
                answer.cancel()
        with self._lock:
            self.failures.update(outcome.failure for outcome in outcomes if outcome.failure)
        return outcomes

    def close(self) -> None:
        """End the workers; another call would start new ones."""
        if self._owner != os.getpid():
            self._reset()
        with self._lock:
            crew, self._crew = self._crew, None
        if crew is not None:
            self._finalizer.detach()
            crew.end()
