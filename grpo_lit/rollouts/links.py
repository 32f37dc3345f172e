"""Weights by broadcast: one small process group per server, so that a server that fails breaks its own group only.

The learner is rank 0 of each group and the server's workers are the other ranks. The groups are none of
torch.distributed's default group, which may be the learner's own: each has a store of its own. Bytes go over Gloo
between CPUs and over NCCL between CUDA devices, unencrypted and unauthenticated as always with torch.distributed.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from jaxtyping import UInt8
from torch import Tensor

from grpo_lit.rollouts.serve import is_this_machine
from grpo_lit.rollouts.staging import Chunk, Stage, StagedTensor, views

#: What the address of a chunk begins with that comes through a group; the group's name follows.
LINK_PREFIX = "group:"
#: A process group of NCCL reads these when it is made. Without them a failed peer or a late one would end this whole
#: process; with them the error goes to whoever waits.
_NCCL_VARIABLES = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


#: The environment is one for all threads, and links are made in several at a time.
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Meeting:
    """What the members of a group must know to find each other: plain types, sent over the control channel.

    Attributes:
        name: Of this group: there is no other of that name.
        host: Where the learner listens.
        port: Where it listens.
        size: Members: the learner and the server's workers.
        backend: What carries the bytes.
        timeout_s: How long a member waits for another one [s].
    """

    name: str
    host: str
    port: int
    size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float

    @property
    def timeout(self) -> timedelta:
        """How long a member waits for another one."""
        return timedelta(seconds=self.timeout_s)


class Link:
    """One member of a group. The constructor waits for the others.

    Args:
        meeting: Where they meet.
        rank: Its own; the learner is 0.
        device: Where its bytes lie.
        listening: The learner's socket at the meeting's address.

    Raises:
        RuntimeError: The others did not come in time, or one broke off.
    """

    def __init__(
        self, meeting: Meeting, rank: int, device: torch.device, listening: socket.socket | None = None
    ) -> None:
        self.address, self.device = LINK_PREFIX + meeting.name, device
        store = torch.distributed.TCPStore(
            meeting.host,
            meeting.port,
            is_master=listening is not None,
            timeout=meeting.timeout,
            wait_for_workers=False,
            # A socket of the store's own would listen on every address of this machine.
            master_listen_fd=None if listening is None else listening.detach(),
        )
        # NCCL would wait for a member that never comes until this process ends; the store does not.
        store.set(str(rank), "")
        store.wait([str(member) for member in range(meeting.size)], meeting.timeout)
        self._is_nccl = meeting.backend == "nccl"
        # Of its own: on one stream, the bytes of a server that hangs would hold up those of all others.
        self._stream = torch.cuda.Stream(device) if self._is_nccl else None
        self._group: Any = (_nccl_group if self._is_nccl else _gloo_group)(meeting, rank, store)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects with the first bytes

    def broadcast(self, memory: UInt8[Tensor, "n"]) -> None:
        """Send the learner's bytes to all, or receive them, and wait until they are there.

        Raises:
            RuntimeError: A member is gone, or did not take part in time. The group is of no use from then on.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the process group was ended")
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):  # of None: nothing
            group.broadcast([memory], options).wait()

    def close(self) -> None:
        """Leave the group; whoever waits for this member in it gets an error. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None and self._is_nccl:
            group.abort()


def _gloo_group(meeting: Meeting, rank: int, store: torch.distributed.Store) -> Any:
    host = meeting.host if rank == 0 else host_towards(meeting.host, meeting.port)
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = meeting.timeout
    options._devices = [gloo.create_device(hostname=host)]  # its own choice is the address of this machine's name
    return gloo(store, rank, meeting.size, options)


def _nccl_group(meeting: Meeting, rank: int, store: torch.distributed.Store) -> Any:
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = meeting.timeout
    with _LOCK, _environment(_NCCL_VARIABLES):
        return nccl(store, rank, meeting.size, options)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def host_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches another one: nothing is sent.

    Raises:
        OSError: There is no way to it.
    """
    if is_this_machine(host):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def read_link(chunk: Chunk, link: Link | None) -> Iterator[tuple[str, Tensor]]:
    """Receive a chunk and yield its names and tensors, as views of memory of their own.

    Args:
        chunk: What the sender said of it.
        link: The receiver's.

    Raises:
        ValueError: The sender means another group: this server was started anew, or serves another learner by now.
        RuntimeError: The sender is gone, or late.
    """
    if link is None or chunk.address != link.address:
        raise ValueError("the weights come through a process group that this server is not in")
    memory = torch.empty(chunk.size, dtype=torch.uint8, device=link.device)
    if chunk.size:
        link.broadcast(memory)
    yield from views(chunk, memory)


class ProcessGroupStage(Stage):
    """A stage that is broadcast: no memory is shared, and what of it is not filled is not sent.

    Args:
        dtype: Matrices are cast to it.
        device: Where it lies: the sender's CUDA device with NCCL, the host's memory with Gloo.
        stage_bytes: As for :class:`Stage`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, **options: int) -> None:
        super().__init__(dtype, **options)
        self.device = device

    def _allocate(self, size: int) -> tuple[UInt8[Tensor, "n"], str]:
        return torch.empty(size, dtype=torch.uint8, device=self.device), LINK_PREFIX

    def _chunk(self, staged: list[StagedTensor]) -> Chunk:
        self._finish_copies()
        return Chunk(self._address, staged[-1].offset + staged[-1].size, staged)

    def to_send(self, chunk: Chunk) -> UInt8[Tensor, "n"]:
        """Return the bytes of a chunk."""
        return self._view(0, chunk.size)
