"""The arms' processes, as the benchmark sees them."""

import json
import select
import subprocess
import sys
import tempfile
from typing import Any

import psutil

from grpo_lit.bench.settings import Settings

_GIB = 2.0**30
#: How often a waiting call looks at the machine's memory [s].
_LOOK = 0.2
#: How long a process may take to end by itself [s].
_GRACE = 5.0


class ArmError(RuntimeError):
    """An arm ended without an answer."""


class ArmProcess:
    """A worker with one arm; see :mod:`grpo_lit.bench.worker`.

    A session of its own keeps Ctrl-C from it: whoever started it ends it.

    Args:
        name: Of the arm.
        settings: Of the benchmark.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.min_free_gib = name, settings.min_free_gib
        self.errors = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_lit.bench.worker", name, json.dumps(settings.to_plain())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Wait for models and optimizer.

        Raises:
            ArmError: It cannot be measured like this.
        """
        self._answer()

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            ArmError: The process ended, by itself or for want of memory.
        """
        try:
            self.process.stdin.write(json.dumps({"action": action, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.communicate()
        self.errors.close()

    def _answer(self) -> dict[str, Any]:
        while not select.select([self.process.stdout], [], [], _LOOK)[0]:
            if self.process.poll() is not None:
                raise self._ended()
            free = psutil.virtual_memory().available / _GIB
            if free < self.min_free_gib:
                held = psutil.Process(self.process.pid).memory_info().rss / _GIB
                self.process.kill()
                raise ArmError(f"ended at {held:.1f} GiB, with {free:.1f} GiB of memory left on this machine")
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        values = json.loads(line)
        if "error" in values:
            raise ArmError(values["error"])
        return values

    def _ended(self) -> ArmError:
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        said = "out of memory?" if code == -9 else (lines[-1] if lines else "it said nothing")
        return ArmError(f"ended with status {code}: {said}")
