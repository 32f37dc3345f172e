"""The process that a program runs in front of: it starts a fresh, confined process for each test, and ends it.

What a test expects never comes here, so that a program has nothing to find: printed output goes back to be compared,
and the test code that calls the program's functions runs in another process (:mod:`grpo_lit.sandbox.judge`).
"""

import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from grpo_lit.sandbox import folders, frames, player
from grpo_lit.sandbox.limits import Limits, confine, protect

#: How often the folder's size is looked at [s].
_LOOK_SECONDS = 0.1


def main(channel_fd: int) -> None:
    """Take one job and do it: ``program``, ``limits``, and either ``inputs`` or ``channels``.

    Each of ``inputs`` is what one test writes to standard input. Each of ``channels`` is a socket on which a test calls
    the program's functions. Every run is answered by a message, as :func:`_run` returns it.
    """
    protect()
    channel = socket.socket(fileno=channel_fd)
    frames.send(channel, "ready")
    job = frames.receive(channel, frames.MAX_JOB_BYTES)
    limits = Limits(**job["limits"])
    for i, text in enumerate(job.get("inputs", [])):
        frames.send(channel, _run(job["program"], i, limits, text=text))
    for i, fd in enumerate(job.get("channels", [])):
        result = _run(job["program"], i, limits, fd=fd)
        os.close(fd)
        frames.send(channel, result)


def _run(program: str, test: int, limits: Limits, text: str = "", fd: int | None = None) -> dict[str, Any]:
    """Run the program once, in a process and an empty folder of its own."""
    folder = f"test{test}"
    os.mkdir(folder)
    stdin = os.memfd_create("stdin")
    with os.fdopen(os.dup(stdin), "wb") as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    (reports, report), (output, stdout) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _play(program, folder, limits, (stdin, stdout, report), fd)
    for used in (stdin, report, stdout):
        os.close(used)
    # Until the program starts, its process runs no line of it: this wait ends.
    with os.fdopen(reports, "rb") as file:
        ready, *cut = file.read().decode().split() or [""]
    result = _watch(pid, output, folder, limits)
    os.close(output)
    folders.remove(folder)
    return {**result, "confined": bool(ready), "cut": cut}


def _play(program: str, folder: str, limits: Limits, fds: tuple[int, int, int], fd: int | None) -> NoReturn:
    """Become the process that runs the program."""
    os.setpgid(0, 0)
    os.chdir(folder)
    stdin, stdout, report = fds
    for number, at in ((stdin, 0), (stdout if fd is None else os.open(os.devnull, os.O_WRONLY), 1)):
        os.dup2(number, at)
    highest = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2**10)
    keep = sorted({report} if fd is None else {report, fd})
    for low, high in zip([3, *(number + 1 for number in keep)], [*keep, min(highest, 2**16)], strict=True):
        os.closerange(low, high)
    os.write(report, " ".join(["ready", *confine(limits)]).encode())
    os.close(report)
    code = player.run(program, socket.socket(fileno=fd) if fd is not None else None)
    os._exit(code & 0xFF)


def _watch(pid: int, output: int, folder: str, limits: Limits) -> dict[str, Any]:
    """Return how a run ended: ``end`` (as of ``host.Run``), ``code`` and what it printed as ``stdout``."""
    deadline = time.monotonic() + limits.seconds
    exited = os.pidfd_open(pid)
    printed, end, looked = b"", "exit", time.monotonic()
    waiting = [output, exited]
    while exited in waiting:
        ready, _, _ = select.select(waiting, [], [], max(min(deadline - time.monotonic(), _LOOK_SECONDS), 0))
        if time.monotonic() >= looked + _LOOK_SECONDS:
            looked = time.monotonic()
            if folders.exceeds(folder, limits.disk_mib * 2**20):
                end = "disk"
                break
        if not ready and time.monotonic() >= deadline:
            end = "time"
            break
        if output in ready:
            part = os.read(output, 2**16)
            printed += part
            if not part:
                waiting.remove(output)
            if len(printed) > limits.output_kib * 2**10:
                end = "output"
                break
        elif exited in ready:
            waiting.remove(exited)
    os.close(exited)
    _end(pid)
    _, status = os.waitpid(pid, 0)
    _reap()
    if end == "exit" and folders.exceeds(folder, limits.disk_mib * 2**20):  # written since the last look
        end = "disk"
    return {"end": end, "code": os.waitstatus_to_exitcode(status), "stdout": printed.decode(errors="replace")}


def _end(pid: int) -> None:
    """Kill a run with all that it started; it is not reaped yet, so that its number is still its own."""
    for kill, number in ((os.killpg, pid), (os.kill, pid)):
        try:
            kill(number, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # already gone


def _reap() -> None:
    """Kill whoever left its group: this process inherits them all (see :func:`protect`)."""
    children = f"/proc/self/task/{os.getpid()}/children"
    while os.path.exists(children):
        with open(children) as file:
            left = file.read().split()
        if not left:
            return
        for pid in left:
            _end(int(pid))
            os.waitpid(int(pid), 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
