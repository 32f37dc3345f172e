"""Two gloo processes that stay: starting Python, torch and a process group takes longer than most of what they do.

torchrun starts them, as it would on a cluster.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
RANKS = 2
#: How long a rank is given that the other one has left alone by failing or ending [s].
ALONE = 15.0
#: How long a process may take to say that it is there [s].
START = 60.0


class Pair:
    """Calls functions on two ranks at once; started by the first call, and anew after one that failed.

    Args:
        folder: For the logs ``rank0.log`` and ``rank1.log``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._torchrun: subprocess.Popen | None = None
        self._connections: list[Connection] = []
        self._pids: list[int] = []

    def __call__(self, function: Callable, *arguments: Any, seconds: float = 240, **options: Any) -> list[Any]:
        """Return what each rank's call returns; none may fail.

        Args:
            function: Of a module in ``tests/helpers``; called with the arguments on both ranks.
            arguments: Anything that pickles.
            seconds: How long it may take.
            options: Keyword arguments.
        """
        answers = self.attempt(function, *arguments, seconds=seconds, **options)
        failures = [answer for answer in answers if not isinstance(answer, tuple)]
        assert not failures, "\n".join([*map(str, failures), *self.logs()])
        return [answer[0] for answer in answers]

    def attempt(self, function: Callable, *arguments: Any, seconds: float = 240, **options: Any) -> list[Any]:
        """Return for each rank its result in a tuple, or what it failed with, or None where it ended or hung."""
        if self._torchrun is None:
            self._start()
        call = pickle.dumps((function.__module__, function.__qualname__, arguments, options))
        for connection in self._connections:
            connection.send_bytes(call)
        answers: list[Any] = [None] * RANKS
        waiting, until = dict(enumerate(self._connections)), time.monotonic() + seconds
        while waiting and (left := until - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), left)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                with contextlib.suppress(EOFError):
                    answers[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
                if not isinstance(answers[rank], tuple):
                    until = min(until, time.monotonic() + ALONE)
        if not all(isinstance(answer, tuple) for answer in answers):
            self.end()
        return answers

    def logs(self) -> list[str]:
        """Return the end of what each rank wrote to its standard error."""
        return [(self.folder / f"rank{rank}.log").read_text()[-6000:] for rank in range(RANKS)]

    def end(self) -> None:
        """Kill both, and torchrun."""
        for connection in self._connections:
            connection.close()
        if self._torchrun is not None:
            self._torchrun.kill()
            self._torchrun.wait()
        for pid in self._pids:  # children of torchrun, which waited for them if they had ended
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._torchrun, self._connections, self._pids = None, [], []

    def _start(self) -> None:
        paths = os.pathsep.join([str(REPO), str(REPO / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--nproc-per-node", str(RANKS)]
        with Listener() as listener, (self.folder / "torchrun.log").open("a") as log:
            self._torchrun = subprocess.Popen(
                [*torchrun, __file__, str(listener.address), str(self.folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                stdout=log,
                stderr=log,
            )
            listener._listener._socket.settimeout(START)  # a process that ends before it comes would be waited for
            try:
                connections = [listener.accept() for _ in range(RANKS)]
            except TimeoutError:
                self.end()
                raise AssertionError(f"a rank did not start: {(self.folder / 'torchrun.log').read_text()}") from None
        ranks = {(said := connection.recv())[0]: (connection, said[1]) for connection in connections}
        self._connections, self._pids = ([ranks[rank][i] for rank in range(RANKS)] for i in (0, 1))


def serve(address: str, folder: str) -> None:
    """Do what the other end asks for, until it is gone."""
    import importlib
    import traceback

    rank = int(os.environ["RANK"])
    with Path(folder, f"rank{rank}.log").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    with Client(address) as connection:
        connection.send((rank, os.getpid()))
        while True:
            try:
                module, name, arguments, options = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            function = getattr(importlib.import_module(module), name)
            try:
                answer = (function(*arguments, **options),)
            except (Exception, SystemExit):  # noqa: BLE001 (told to the other end)
                answer = traceback.format_exc()
                print(answer, file=sys.stderr, flush=True)
            connection.send_bytes(pickle.dumps(answer))


def leave_alone(last_words: str) -> None:
    """End the second rank, while the first one waits for it."""
    if os.environ["LOCAL_RANK"] == "1":
        print(last_words, file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(600)


if __name__ == "__main__":
    serve(*sys.argv[1:])
