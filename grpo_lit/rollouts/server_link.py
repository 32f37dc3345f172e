"""The learner's ends of the process groups with its servers: none of them can stop the learner, or another one."""

import asyncio
import atexit
import ipaddress
import secrets
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
from jaxtyping import UInt8
from torch import Tensor

from grpo_lit.rollouts.links import LINK_PREFIX, Link, Meeting, host_towards
from grpo_lit.rollouts.patience import ServerError

T = TypeVar("T")

#: How long the end of the process waits for threads that are in a group [s].
_LAST_WAIT = 2.0
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def link_device(workers: Iterable[str], shared: bool) -> torch.device:
    """Return where the learner's bytes lie: on its CUDA device if NCCL can carry them to every server.

    Args:
        workers: Types of the servers' devices.
        shared: Whether the servers may be on the learner's device, between which NCCL carries nothing.
    """
    if not shared and torch.cuda.is_available() and set(workers) == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class Links:
    """How servers are linked to this learner.

    Attributes:
        host: Address at which this machine is reached; ``None``: the one that it shows each server.
        device: Where the bytes that are sent lie.
        timeout_s: Until a server has come, and until it has taken what is sent [s].
    """

    host: str | None
    device: torch.device
    timeout_s: float

    def open(self, url: str, workers: int) -> "ServerLink":
        """Listen for the workers of a server.

        Raises:
            ServerError: It cannot be reached, or this machine has no such address.
        """
        parts = urlsplit(url)
        try:
            host = self.host or host_towards(str(parts.hostname), parts.port or 80)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            key = "urls" if self.host is None else "transport_host"
            raise ServerError(
                f"`{key}` expected an address by which this machine and the server reach each other, but got "
                f"{self.host or url}: {error}"
            ) from error
        if ipaddress.ip_address(listening.getsockname()[0]).is_unspecified:
            listening.close()
            raise ServerError(f"`transport_host` expected one address of this machine, but got all: {self.host}")
        backend: Literal["gloo", "nccl"] = "nccl" if self.device.type == "cuda" else "gloo"
        port = listening.getsockname()[1]
        meeting = Meeting(secrets.token_hex(8), host, port, workers + 1, backend, self.timeout_s)
        return ServerLink(meeting, self.device, listening)


class ServerLink:
    """The learner's end of one server's group.

    Args:
        meeting: Where they meet.
        device: Where the bytes that are sent lie.
        listening: Socket at the meeting's address.
    """

    def __init__(self, meeting: Meeting, device: torch.device, listening: socket.socket) -> None:
        self.meeting, self.address = meeting, LINK_PREFIX + meeting.name
        self._device, self._listening = device, listening
        self._link: Link | None = None

    def init_info(self) -> dict[str, Any]:
        """Return what the server's workers must know."""
        return asdict(self.meeting)

    async def connect(self) -> None:
        """Wait for the server's workers.

        Raises:
            ServerError: They did not come.
        """
        self._link = await self._in_time(partial(Link, self.meeting, 0, self._device, self._listening))

    async def send(self, memory: UInt8[Tensor, "n"]) -> None:
        """Send bytes to every worker of the server.

        Raises:
            ServerError: One is gone, or late.
        """
        if self._link is None:
            raise ServerError("its process group was ended")
        if memory.numel():
            await self._in_time(partial(self._link.broadcast, memory))

    async def _in_time(self, work: Callable[[], T]) -> T:
        timeout = self.meeting.timeout_s
        try:
            return await asyncio.wait_for(asyncio.wrap_future(_in_thread(work)), timeout)
        except TimeoutError:
            raise ServerError(f"its process group did not answer within {timeout:g} s", is_late=True) from None
        except RuntimeError as error:
            raise ServerError(f"its process group broke: {str(error)[:500]}") from None

    def close(self) -> "Future[None]":
        """End the group, and return what says that it has ended; a send that hangs ends when it is late."""
        link, self._link = self._link, None
        self._listening.close()  # unless the store has it by now
        return _in_thread(lambda: None if link is None else link.close())


def _in_thread(work: Callable[[], T]) -> "Future[T]":
    """Run something in a thread that nobody waits for at the end of the process, as for those of asyncio."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # from here on it can not be cancelled, and always gets a result

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised in the loop that waits)
            traceback.clear_frames(error.__traceback__)  # they hold the group, its sockets and what is sent
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name="grpo-lit-link")
    _threads.add(thread)
    thread.start()
    return answer


@atexit.register
def _wait_for_threads() -> None:
    """Let threads end whose group has just ended: one that comes back while Python goes down aborts the process."""
    until = time.monotonic() + _LAST_WAIT
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))


async def together(*steps: Coroutine[Any, Any, None]) -> None:
    """Do all steps at the same time; the first error ends the others.

    Raises:
        BaseException: That of the first step that failed.
    """
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
