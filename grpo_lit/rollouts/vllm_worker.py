"""What runs inside vLLM's worker process: it takes weights from the stage, and ends when the learner is gone.

vLLM imports this module because :class:`VLLMEngine` names :class:`WorkerExtension` as ``worker_extension_cls``. The
import registers the weight transfer back end with vLLM's factory and starts the watch over the learner. Not imported by
the learner, which may have no vLLM.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_lit.rollouts.links import LINK_PREFIX, Link, Meeting, read_link
from grpo_lit.rollouts.staging import Chunk, read_stage
from grpo_lit.rollouts.vllm_process import LEARNER_PID, wait_for_end

#: Name of the back end in ``WeightTransferConfig``.
BACKEND = "grpo_lit_stage"


class WorkerExtension:
    """What is added to vLLM's worker; naming it makes vLLM import this module."""

    model_config: ModelConfig  # the worker's own, and so is its device
    device: torch.device

    def grpo_lit_settings(self) -> dict[str, Any]:
        """Return what a learner elsewhere must know of this worker, and check, before it asks for completions."""
        return {
            "device": self.device.type,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "max_length": self.model_config.max_model_len,
            "vocabulary": self.model_config.get_vocab_size(),
        }


@dataclass
class StageInitInfo(WeightTransferInitInfo):
    """Where to meet a learner that sends weights through a process group: a :class:`Meeting` as plain types.

    Attributes:
        name: Of the group.
        host: Where the learner listens.
        port: Where it listens.
        size: Members of the group.
        backend: ``gloo`` or ``nccl``.
        timeout_s: How long to wait for another member [s].
    """

    name: str
    host: str
    port: int
    size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


@dataclass
class StageUpdateInfo(WeightTransferUpdateInfo):
    """One :class:`Chunk` as plain types.

    Attributes:
        address: Where the stage is.
        size: Its bytes.
        tensors: What lies in it.
    """

    address: str
    size: int
    tensors: list[dict[str, Any]]


class StageWeightTransfer(WeightTransferEngine[StageInitInfo, StageUpdateInfo]):
    """Loads the weights of a stage in checkpoint format, through vLLM's layerwise reload.

    On CPU vLLM packs the linear layers and empties the originals; the layerwise reload restores, loads and packs again.
    """

    init_info_cls = StageInitInfo
    update_info_cls = StageUpdateInfo
    _link: Link | None = None

    def init_transfer_engine(self, init_info: StageInitInfo) -> None:
        """Join a learner's process group, and leave that of the one before.

        Learners with another transport do not ask for it: each chunk says where it lies.
        """
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        device = self.device if init_info.backend == "nccl" else torch.device("cpu")
        self._link = Link(Meeting(**vars(init_info)), 1 + rank, device)

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._received: set[str] = set()
        self._loaded: set[str] = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StageUpdateInfo) -> None:
        """Load one chunk.

        Raises:
            ValueError: It is empty: the learner gives up the update, and vLLM lets go of one only when it fails.
        """
        if not update_info.tensors:
            raise ValueError("the learner gave up this weight update")
        chunk = Chunk.from_dict(update_info.address, update_info.size, update_info.tensors)
        self._received.update(tensor.name for tensor in chunk.tensors)
        load_weights = cast("Callable[[Iterable[tuple[str, Tensor]]], set[str] | None]", self.model.load_weights)
        try:
            # vLLM holds tensors back until their layer is complete, and the next chunk overwrites this one: copy.
            loaded = load_weights(_copies(self._read(chunk)))
        except BaseException:
            self.shutdown()  # so that the learner need not wait until it is late
            raise
        # A few of vLLM's models do not say what they loaded: nothing can be found missing then.
        self._loaded |= {name for name, _ in self.model.named_parameters()} if loaded is None else loaded

    def finish_weight_update(self) -> None:
        """Process what is left, and refuse an incomplete update.

        Raises:
            ValueError: Parameters of the model got no weight.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied_layers(self.model, self._loaded):
            layer.quant_method.process_weights_after_loading(layer)
        missing = missing_names(self.model, self._loaded, self._received)
        if missing and self.model_config.quantization is None:
            raise ValueError(f"no weights came for {', '.join(missing)}")

    def _read(self, chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
        if chunk.address.startswith(LINK_PREFIX):
            return read_link(chunk, self._link)
        return read_stage(chunk, self.device)

    def shutdown(self) -> None:
        """Leave the learner's process group, the only thing that is held beyond an update."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


def _copies(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.clone()) for name, tensor in weights)


def _names_of_parameters(model: nn.Module) -> list[set[str]]:
    """Return the names of each parameter: more than one where it is tied."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return list(names.values())


def tied_layers(model: nn.Module, loaded: set[str]) -> list[Any]:
    """Return the layers that got their weight through another one's name, as a tied head does.

    On CPU such a head keeps a packed copy of the old weight until it is processed again.
    """
    names = set().union(*(tied - loaded for tied in _names_of_parameters(model) if tied & loaded))
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in sorted(names)]
    return [layer for layer in layers if hasattr(layer, "quant_method")]


def missing_names(model: nn.Module, loaded: set[str], received: set[str]) -> list[str]:
    """Return, sorted, the parameters that got no weight or only part of one.

    Args:
        model: vLLM's model.
        loaded: Names of its parameters that ``load_weights`` reports.
        received: Names that were sent.
    """
    missing = set().union(*(names for names in _names_of_parameters(model) if not names & loaded))
    # A fused parameter (qkv_proj) counts as loaded as soon as one of its parts is: look for the others.
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for name in loaded:
            if f".{fused}." in name:
                siblings = {name.replace(f".{fused}.", f".{part}.") for part in parts}
                missing |= siblings - received if siblings & received else set()
    return sorted(missing)


def _end_with(learner: int) -> None:
    """Wait for the learner's end, then end this process and vLLM's engine process above it.

    vLLM does not notice a learner that was killed: its engine would keep the memory and spin for ever.
    """
    parent = os.getppid()
    wait_for_end(learner)
    if parent != learner and os.getppid() == parent:  # with several workers: vLLM's engine process lies between
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def watch_learner() -> None:
    """Start the watch over the learner named in the environment, if one is."""
    learner = os.environ.get(LEARNER_PID)
    if learner is not None:
        threading.Thread(target=_end_with, args=(int(learner),), daemon=True, name="grpo-lit-watch").start()


WeightTransferEngineFactory.register_engine(BACKEND, StageWeightTransfer)
watch_learner()
