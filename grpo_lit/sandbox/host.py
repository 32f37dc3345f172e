"""The training process's side: starts the processes of a program, waits for their reports, and ends them."""

import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from grpo_lit.sandbox import folders, frames
from grpo_lit.sandbox.limits import Limits

#: What the children see: no secrets, no paths, one thread per library.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: The library may not be installed where it is run from; ``-I`` looks nowhere else.
_ROOT = str(Path(__file__).parents[2])
#: Longest that an interpreter may take to start on a busy machine [s].
_START_SECONDS = 120.0
_START = "import sys; sys.path.insert(0, {root!r}); from grpo_lit.sandbox.{module} import main; main({fd})"


class SandboxError(RuntimeError):
    """Programs cannot be run here, through no fault of theirs."""


@dataclass(frozen=True)
class Run:
    """How one run of a program ended.

    Attributes:
        end: ``exit``, or the limit it broke: ``time``, ``output``, ``disk``.
        code: Its exit status; negative: the signal that ended it.
        stdout: What it printed.
        cut: What it was cut off from: ``network``, ``processes``, ``files``.
    """

    end: str
    code: int
    stdout: str
    cut: tuple[str, ...]


def run_script(program: str, inputs: Sequence[str], limits: Limits, deadline: float) -> Iterator[Run]:
    """Run a program once for each text on its standard input; ends early where the time is over.

    Args:
        program: Python source.
        inputs: What each run reads.
        limits: Of each run.
        deadline: Of all runs together, on the clock of ``time.monotonic`` [s].

    Raises:
        SandboxError: Where a run could not be confined.
    """
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(_started("stage"))
        job = {"program": program, "limits": asdict(limits), "inputs": list(inputs)}
        frames.send(channel, job, frames.MAX_JOB_BYTES)
        for _ in inputs:
            report = _next(channel, deadline)
            if report is None:
                return
            yield _run(report)


def run_tests(
    program: str, tests: Sequence[str], limits: Limits, deadline: float, entry_point: str | None = None
) -> tuple[list[bool], tuple[str, ...] | None]:
    """Run test code against the functions of a program, in another process than the program's.

    Args:
        program: Python source.
        tests: Test code, each piece a test of its own with a fresh run of the program.
        limits: Of each run of the program.
        deadline: Of all tests together, on the clock of ``time.monotonic`` [s].
        entry_point: Name of the function under test, needed only where it is a builtin's too.

    Returns:
        Which tests passed, and what the program was cut off from (``None`` where it never got to run).

    Raises:
        SandboxError: Where a run could not be confined.
    """
    nonce = secrets.token_hex(16)
    passed, cut = [False] * len(tests), None
    with contextlib.ExitStack() as stack:
        pairs = [tuple(stack.enter_context(end) for end in socket.socketpair()) for _ in tests]
        ends = [[end.fileno() for end in side] for side in zip(*pairs, strict=True)] or [[], []]
        stage = stack.enter_context(_started("stage", ends[0]))
        judge = stack.enter_context(_started("judge", ends[1]))
        for pair in pairs:  # whoever waits for the end of a process must hold no end of its channel open
            for end in pair:
                end.close()
        played = {"program": program, "limits": asdict(limits), "channels": ends[0]}
        frames.send(stage, played, frames.MAX_JOB_BYTES)
        # The test code's own time is that of all tests together.
        whole = replace(limits, cpu_seconds=limits.cpu_seconds * max(len(tests), 1))
        job = {"tests": list(tests), "channels": ends[1], "limits": asdict(whole), "entry_point": entry_point}
        frames.send(judge, {**job, "nonce": nonce}, frames.MAX_JOB_BYTES)
        for _ in tests:
            report = _next(judge, deadline)
            if report is None or report["nonce"] != nonce:
                break
            passed[report["test"]] = report["passed"]
            if (run := _next(stage, deadline)) is not None:
                cut = _run(run).cut
    return passed, cut


def _run(report: dict[str, Any]) -> Run:
    if not report["confined"]:
        raise SandboxError("a process could not be confined and ran nothing: are its limits enough for Python?")
    return Run(report["end"], report["code"], report["stdout"], tuple(report["cut"]))


def _next(channel: socket.socket, deadline: float) -> Any:
    """Return the next report, or ``None`` where none comes in time."""
    channel.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        return frames.receive(channel)
    except (EOFError, OSError):  # ended by its limits, or out of time
        return None


@contextlib.contextmanager
def _started(module: str, fds: Sequence[int] = ()) -> Iterator[socket.socket]:
    """Start one of the children in a session and an empty folder of its own, and end it with all that it started."""
    try:
        _clean_up()
        folder, held = folders.make()
    except OSError as error:
        raise SandboxError(f"no temporary folder could be made: {error}") from error
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START.format(root=_ROOT, module=module, fd=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno(), *fds],
                start_new_session=True,
            )
        try:
            # Whoever does not get so far was ended by no program: scoring 0 would hide a broken installation.
            if _next(ours, time.monotonic() + _START_SECONDS) != "ready":
                raise SandboxError(f"`{sys.executable} -I` did not start grpo_lit.sandbox.{module}")
            yield ours
        finally:
            _end(process)
    finally:
        ours.close()
        folders.remove(folder)
        os.close(held)


@functools.cache
def _clean_up() -> None:
    """Remove what earlier runs left, once per process."""
    folders.remove_stale()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child, its session and every descendant, wherever it went."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        root.suspend()  # starts nothing more while its descendants are counted
        for descendant in root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
