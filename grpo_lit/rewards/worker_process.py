"""The program of one worker: answers calls within limits that the kernel enforces. Nothing but the standard library.

Run as ``python -P worker_process.py FILE CPU_SECONDS WALL_SECONDS MEMORY_MIB`` by
:class:`grpo_lit.rewards.workers.WorkerPool`. FILE is a module whose functions are called; it is loaded by its path,
since importing the package would load torch.

The process loads FILE once and forks a child that answers. When the child dies, it says why and forks another: a fork
of this process, which has one thread, takes milliseconds, where importing sympy again takes most of a second.

A call arrives as a line ``[number, function, arguments]`` of JSON; the answer is a line ``[number, status, value]``:

- ``ok``: the value is what the function returned;
- ``time``: the child used up its CPU or wall time. Both timers end it by a signal without a handler, which works while
  one operation of C holds the interpreter (``9**9**9**9``), and when nobody is left to kill it;
- ``memory``: it could not have the memory it asked for;
- ``killed``: somebody else killed it, as the system does when memory runs out;
- ``crashed``: anything else.

A death is always told, with number 0 between calls: a child that is killed while it waits may take a call with it,
which the pool then sends again. A call that came twice is answered once.
"""

import gc
import importlib.util
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

#: Exit status of a child whose function ran out of memory.
_OUT_OF_MEMORY = 77
_STATUS_OF_SIGNAL: dict[int, str] = {
    signal.SIGPROF: "time",
    signal.SIGALRM: "time",
    signal.SIGABRT: "memory",  # gmp and the C++ library abort where they get no memory
    signal.SIGKILL: "killed",
}


def load(file: str) -> dict[str, Callable[..., Any]]:
    """Return the names that a module defines."""
    spec = importlib.util.spec_from_file_location("worker_functions", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def send(replies: int, *reply: Any) -> None:
    """Write one line. Without a reader the work is over."""
    data = json.dumps(reply).encode() + b"\n"
    try:
        while data:
            data = data[os.write(replies, data) :]
    except BrokenPipeError:
        os._exit(0)


class Progress:
    """What the child is at, in memory that it shares with its parent."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 16)).cast("Q")

    def start(self, number: int) -> None:
        """Note that a call begins."""
        self._numbers[0] = number

    def finish(self) -> None:
        """Note that the call at hand was answered."""
        self._numbers[1] = max(self._numbers)
        self._numbers[0] = 0

    @property
    def at(self) -> int:
        """Number of the call at hand, 0 between calls."""
        return self._numbers[0]

    @property
    def done(self) -> int:
        """Number of the last call that was answered."""
        return self._numbers[1]


def answer_calls(
    functions: dict[str, Callable[..., Any]],
    calls: BinaryIO,
    replies: int,
    progress: Progress,
    limits: tuple[float, float],
) -> NoReturn:
    """Answer calls until there are no more: the child's whole life.

    Args:
        functions: What can be called.
        calls: Where calls come from.
        replies: Where answers go.
        progress: Where the parent sees what this one is at.
        limits: CPU and wall seconds of one call.
    """
    while line := calls.readline():
        number, function, arguments = json.loads(line)
        if number <= progress.done:
            continue
        progress.start(number)
        signal.setitimer(signal.ITIMER_PROF, limits[0])
        signal.setitimer(signal.ITIMER_REAL, limits[1])
        try:
            value = functions[function](*arguments)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, number, "ok", value)
        progress.finish()
    os._exit(0)


def main(file: str, cpu_seconds: str, wall_seconds: str, memory_mib: str) -> None:
    """Load the module, say so, and keep a child that answers."""
    calls, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    for kind, amount in ((resource.RLIMIT_AS, int(memory_mib) << 20), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (amount, amount))
    for timer in (signal.SIGPROF, signal.SIGALRM):  # a parent may have them blocked or ignored
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    try:
        functions = load(file)
    except ImportError as error:
        send(replies, 0, "unavailable", str(error))
        return
    send(replies, 0, "ready", None)
    # From here on the texts of others are at work: nothing of them may reach a terminal or a log.
    os.dup2(nowhere, 2)
    gc.freeze()
    progress = Progress()
    while True:
        child = os.fork()
        if child == 0:
            answer_calls(functions, calls, replies, progress, (float(cpu_seconds), float(wall_seconds)))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        reason = "memory" if status == _OUT_OF_MEMORY else _STATUS_OF_SIGNAL.get(-status, "crashed")
        number = progress.at
        progress.finish()
        send(replies, number, reason, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
