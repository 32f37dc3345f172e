"""Tensors handed from one process to another through memory, or a folder, that both see: no pickled tensors."""

import base64
import dataclasses
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import UInt8
from torch import Tensor

from grpo_lit.errors import EngineError

#: Memory that the two processes share unless one tensor alone needs more [bytes].
STAGE_BYTES = 256 * 2**20
#: Tensors start at multiples of it, so that any dtype can be viewed in place [bytes].
_ALIGNMENT = 64
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class StagedTensor:
    """Where one tensor lies in the stage.

    Attributes:
        name: Its name in the state dict.
        dtype: Its dtype as torch calls it, such as ``bfloat16``.
        shape: Its shape.
        offset: First byte in the stage.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Chunk:
    """What the receiver must know to read one stage full of tensors: plain types, sent over its control channel.

    Attributes:
        address: Where the stage is, in the words of its kind.
        size: Bytes of the stage.
        tensors: What lies in it.
    """

    address: str
    size: int
    tensors: list[StagedTensor]

    def to_dict(self) -> dict[str, object]:
        """Return plain types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, address: str, size: int, tensors: list[dict[str, object]]) -> "Chunk":
        """Rebuild what :meth:`to_dict` gave."""
        return cls(address, size, [StagedTensor(**tensor) for tensor in tensors])  # type: ignore[arg-type]


def wire_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor goes to a receiver whose matrices have ``dtype``; ``None``: as it is.

    Vectors (norms, biases, router corrections) cost nothing and some are kept in float32 by the receiver.
    """
    return dtype if dtype is not None and tensor.is_floating_point() and tensor.dim() > 1 else tensor.dtype


class Stage(ABC):
    """The sender's side: memory that is filled, read by the receiver, and filled again.

    Args:
        dtype: Matrices are cast to it while they are copied, so that no second full copy of the weights exists.
        stage_bytes: Size of the memory; a larger tensor makes it grow.
    """

    def __init__(self, dtype: torch.dtype, stage_bytes: int = STAGE_BYTES) -> None:
        self.dtype, self.stage_bytes = dtype, stage_bytes
        self._memory: UInt8[Tensor, "n"] | None = None
        self._address = ""

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Copy the tensors into the stage, lazily and in order.

        Args:
            weights: Names and tensors.

        Yields:
            What one filling holds. It is overwritten when the next is asked for, so let the receiver finish first.
        """
        staged: list[StagedTensor] = []
        used = 0
        for name, tensor in weights:
            dtype = wire_dtype(tensor, self.dtype)
            need = tensor.numel() * dtype.itemsize
            if staged and used + need > self._size:
                yield self._chunk(staged)
                staged, used = [], 0
            self._grow(need)
            self._view(used, need).view(dtype).view(tensor.shape).copy_(tensor.detach())
            staged.append(StagedTensor(name, str(dtype).removeprefix("torch."), list(tensor.shape), used))
            used += -(-need // _ALIGNMENT) * _ALIGNMENT
        if staged:
            yield self._chunk(staged)

    @property
    def _size(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def _view(self, start: int, count: int) -> UInt8[Tensor, "m"]:
        assert self._memory is not None
        return self._memory[start : start + count]

    def _grow(self, need: int) -> None:
        if self._memory is None or need > self._size:
            size = max(need, self.stage_bytes)
            self.close()
            self._memory, self._address = self._allocate(size)

    def _chunk(self, staged: list[StagedTensor]) -> Chunk:
        self._finish_copies()
        return Chunk(self._address, self._size, staged)

    def to_send(self, chunk: Chunk) -> UInt8[Tensor, "m"] | None:
        """Return the bytes of a chunk where the receiver can not read them, and they must be sent; else ``None``."""
        return None

    @abstractmethod
    def _allocate(self, size: int) -> tuple[UInt8[Tensor, "n"], str]:
        """Return memory and the address under which the receiver finds it."""

    def _finish_copies(self) -> None:
        """Wait until what was copied can be read by another process."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory back. Safe to call twice; a later use allocates anew."""
        self._memory, self._address = None, ""


class SharedMemoryStage(Stage):
    """A stage in anonymous shared memory: it needs no name in /dev/shm, whose size containers limit, and is gone with
    its last user, however that user died.
    """

    def __init__(self, dtype: torch.dtype, stage_bytes: int = STAGE_BYTES) -> None:
        super().__init__(dtype, stage_bytes)
        self._descriptor: int | None = None

    def _allocate(self, size: int) -> tuple[UInt8[Tensor, "n"], str]:
        self._descriptor = os.memfd_create("grpo_lit_weights")
        os.ftruncate(self._descriptor, size)
        address = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return torch.from_file(address, shared=True, size=size, dtype=torch.uint8), address

    def close(self) -> None:
        """Give the memory back. Safe to call twice; a later use allocates anew."""
        super().close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class CudaStage(Stage):
    """A stage on the sender's current CUDA device, which the receiver must use too: weights never leave it."""

    def _allocate(self, size: int) -> tuple[UInt8[Tensor, "n"], str]:
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        # The handle holds bytes and torch classes; as a string it passes any control channel.
        return memory, base64.b64encode(pickle.dumps(reduce_tensor(memory))).decode()


class SharedFileStage(Stage):
    """A stage in files of a folder that sender and receiver both see, for machines that share no memory.

    Each filling is a safetensors file of its own, whole before it has its name, and deleted before the next is written:
    the folder needs room for one of them.

    Args:
        dtype: Matrices are cast to it.
        folder: Where the files go; made if absent.
        stage_bytes: Most bytes of one file, unless one tensor alone needs more.
    """

    def __init__(self, dtype: torch.dtype, folder: Path, stage_bytes: int = STAGE_BYTES) -> None:
        super().__init__(dtype, stage_bytes)
        self.folder = folder
        self._file: Path | None = None

    def _allocate(self, size: int) -> tuple[UInt8[Tensor, "n"], str]:
        return torch.empty(size, dtype=torch.uint8), ""

    def _chunk(self, staged: list[StagedTensor]) -> Chunk:
        self._finish_copies()
        self._delete()
        content = safetensors.torch.save({tensor.name: view for tensor, view in self._views(staged)})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(".part", "weights-", self.folder)
            part = Path(name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())  # another machine may read it
                self._file = part.rename(part.with_suffix(_SUFFIX))
            except BaseException:
                part.unlink(missing_ok=True)  # no half file stays behind
                raise
        except OSError as error:
            raise EngineError(
                f"`transport_folder` expected room for {len(content) / 2**20:.1f} MiB of weights in {self.folder}, but "
                f"got {error}: free some space, or name another folder that learner and servers both see"
            ) from error
        return Chunk(str(self._file), len(content), staged)

    def _views(self, staged: list[StagedTensor]) -> Iterator[tuple[StagedTensor, Tensor]]:
        for tensor in staged:
            memory = self._view(tensor.offset, tensor.size)
            yield tensor, memory.view(getattr(torch, tensor.dtype)).view(tensor.shape)

    def _delete(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def close(self) -> None:
        """Delete the last file and give the memory back. Safe to call twice."""
        super().close()
        self._delete()


def read_stage(chunk: Chunk, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a chunk, as views: valid until the sender fills the stage again.

    Args:
        chunk: What the sender said of it.
        device: Of the receiver's model.
    """
    if chunk.address.endswith(_SUFFIX):
        yield from safetensors.torch.load_file(chunk.address, device=str(device)).items()
        return
    # Opened anew for every chunk: an address may come back with other memory behind it.
    if chunk.address.startswith("/proc/"):
        memory = torch.from_file(chunk.address, shared=True, size=chunk.size, dtype=torch.uint8)
    else:
        rebuild, arguments = pickle.loads(base64.b64decode(chunk.address))
        # Element 6 is the device's index as the sender counts devices.
        memory = rebuild(*arguments[:6], device.index or 0, *arguments[7:])
    yield from views(chunk, memory)


def views(chunk: Chunk, memory: UInt8[Tensor, "n"]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a chunk whose bytes are in memory."""
    for staged in chunk.tensors:
        part = memory[staged.offset : staged.offset + staged.size]
        yield staged.name, part.view(getattr(torch, staged.dtype)).view(staged.shape)
