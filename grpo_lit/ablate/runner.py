"""Runs cells as processes, some at a time, and ends them in a way that none has to begin again."""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from grpo_lit.ablate.cells import Cell, Result
from grpo_lit.errors import ConfigError

#: Seconds between two looks at the processes.
PAUSE = 0.2


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Keep a second ablation out of a folder, as long as this one or any run that it started is alive.

    Yields:
        The descriptor that holds the lock, for runs to inherit.

    Raises:
        ConfigError: Somebody is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"`output` expected a folder of its own, but {folder} has an ablation running") from error
        yield file.fileno()


class Runner:
    """Runs cells.

    Args:
        jobs: Processes at a time.
        say: Called with each line of progress.
        keep_checkpoints: Whether finished runs keep theirs.
        lock: Descriptor that runs inherit.
    """

    def __init__(self, jobs: int, say: Callable[[str], None], keep_checkpoints: bool, lock: int) -> None:
        self.jobs, self.say, self.keep_checkpoints, self.lock = jobs, say, keep_checkpoints, lock
        self._running: dict[Cell, tuple[subprocess.Popen, TextIO, float]] = {}
        self._durations: list[float] = []

    def run(self, cells: Sequence[Cell], after_each: Callable[[], None]) -> list[Cell]:
        """Run the cells that are not finished; return those that failed.

        Args:
            cells: All of the ablation.
            after_each: Called when a cell is finished.

        Raises:
            KeyboardInterrupt: On Ctrl-C or SIGTERM, after the runs have saved where they are.
        """
        waiting = [cell for cell in cells if cell.result() is None]
        done, failed = len(cells) - len(waiting), list[Cell]()
        self._durations = [result.seconds for cell in cells if (result := cell.result())]
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.jobs:
                    self._start(waiting.pop(0), f"[{done + len(self._running) + 1}/{len(cells)}]")
                for cell in [cell for cell, (process, *_) in self._running.items() if process.poll() is not None]:
                    done += 1
                    outcome = self._finish(cell)
                    failed += [cell] if isinstance(outcome, str) else []
                    self.say(f"[{done}/{len(cells)}] {cell.title}: {self._told(outcome, cell)}{self._left(waiting)}")
                    after_each()
                time.sleep(PAUSE)
        except BaseException:
            self._stop()
            raise
        return failed

    def _start(self, cell: Cell, place: str) -> None:
        cell.begin()
        command = cell.command()
        log = (cell.folder / "log.txt").open("a", encoding="utf-8")
        # A session of its own: Ctrl-C reaches it once, from here, and its engine's processes can be ended with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(self.lock,)
        )
        self._running[cell] = (process, log, time.monotonic())
        how = "goes on" if "--ckpt_path" in command else "starts"
        self.say(f"{place} {cell.title}: {how}; log: {cell.folder / 'log.txt'}")

    def _finish(self, cell: Cell) -> Result | str:
        """Return what a run that ended has given, or why it gave nothing."""
        process, log, started = self._running.pop(cell)
        log.close()
        if process.returncode != 0:
            return f"failed ({process.returncode}): {last_line(cell.folder / 'log.txt')}"
        try:
            result = cell.finish(self.keep_checkpoints)
        except ConfigError as error:
            return f"failed: {error}"
        self._durations.append(time.monotonic() - started)
        return result

    def _told(self, outcome: Result | str, cell: Cell) -> str:
        if isinstance(outcome, str):
            return outcome
        return f"{cell.metric} {outcome.values[-1]:.1%} after {span(self._durations[-1])}"

    def _left(self, waiting: Sequence[Cell]) -> str:
        """Return how many runs are left and how long they will take, from what the finished ones took."""
        count = len(waiting) + len(self._running)
        if not count or not self._durations:
            return ""
        usual, now = sum(self._durations) / len(self._durations), time.monotonic()
        running = sum(max(usual - (now - started), 0.0) for *_, started in self._running.values())
        return f"; {count} left, about {span((len(waiting) * usual + running) / self.jobs)}"

    def _stop(self) -> None:
        """Let runs save where they are; a second Ctrl-C ends them at once."""
        if not self._running:
            return
        self.say(f"stopping: {len(self._running)} runs save where they are; Ctrl-C again ends them at once")
        processes = [process for process, *_ in self._running.values()]
        try:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever of its engine is left
                process.wait()
            for _, log, _ in self._running.values():
                log.close()
            self._running.clear()


def span(seconds: float) -> str:
    """Return a time in words."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def last_line(log: Path) -> str:
    """Return what a run said last in its log, its error if it told one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")]
    return (told or lines or ["it wrote nothing"])[-1][:300]
