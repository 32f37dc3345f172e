"""Two gloo processes that stay: starting Python, torch and a process group takes longer than most of what they do."""

import contextlib
import os
import pickle
import socket
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
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable, *arguments: Any, seconds: float = 120, **options: Any) -> list[Any]:
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

    def attempt(self, function: Callable, *arguments: Any, seconds: float = 120, **options: Any) -> list[Any]:
        """Return for each rank its result in a tuple, or what it failed with, or None where it ended or hung."""
        if not self._processes:
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
        """Kill both."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        paths = os.pathsep.join([str(REPO), str(REPO / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
        common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": paths}
        with Listener() as listener:
            listener._listener._socket.settimeout(START)  # a process that ends before it comes would be waited for
            for rank in range(RANKS):
                own = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(RANKS)}
                with (self.folder / f"rank{rank}.log").open("w") as log:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, __file__, str(listener.address)],
                            env={**os.environ, **common, **own},
                            stdout=log,
                            stderr=log,
                        )
                    )
                try:
                    self._connections.append(listener.accept())  # one after the other, in the order of ranks
                except TimeoutError:
                    self.end()
                    raise AssertionError(f"rank {rank} did not start: {self.logs()[rank]}") from None


def serve(address: str) -> None:
    """Do what the other end asks for, until it is gone."""
    import importlib
    import traceback

    with Client(address) as connection:
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
    serve(sys.argv[1])
