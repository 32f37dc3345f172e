"""Members of a learner's process group with a server, in threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from grpo_lit.rollouts.links import Link, Meeting

T = TypeVar("T")
CPU = torch.device("cpu")


def at_once(*steps: Callable[[], T]) -> list[T]:
    """Do all steps at the same time, and return what each returns."""
    with ThreadPoolExecutor(len(steps)) as threads:
        return [future.result() for future in [threads.submit(step) for step in steps]]


class Joining(threading.Thread):
    """A server's worker that joins a group, and then does what is asked of it.

    Args:
        meeting: Where they meet.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(daemon=True)
        self.meeting = meeting
        self.start()

    def run(self) -> None:
        self.link = Link(self.meeting, 1, CPU)

    def received(self, size: int) -> torch.Tensor:
        self.join()
        memory = torch.empty(size, dtype=torch.uint8)
        self.link.broadcast(memory)
        return memory
