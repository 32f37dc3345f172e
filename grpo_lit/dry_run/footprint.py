"""Bytes that a model takes, from its configuration: no weight is read, and no memory taken for one."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.policy import head
from grpo_lit.policy.checkpoint import empty_model
from grpo_lit.policy.offload import WORTH_MOVING, is_weight
from grpo_lit.policy.packing import Pack
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.recompute import recompute
from grpo_lit.policy.sharding import decoder_layers

#: Bytes per parameter of optimizers whose states cannot be made without memory: two float32 numbers, as Adam's.
_ASSUMED_STATE = 8


@dataclass(frozen=True)
class Sizes:
    """Shapes whose bytes are spread over ranks, or are on every rank.

    Attributes:
        sharded: Of tensors that FSDP2 cuts along their first axis, with bytes of an element.
        replicated: Bytes that every rank holds.
    """

    sharded: tuple[tuple[torch.Size, int], ...]
    replicated: int = 0

    @classmethod
    def of(cls, tensors: Sequence[Tensor], like: Sequence[torch.Size] | None = None) -> "Sizes":
        """Return the sizes of tensors.

        Args:
            tensors: Parameters, gradients or states.
            like: Only a tensor of one of these shapes is cut; ``None``: all are.
        """
        cut = [t for t in tensors if like is None or t.shape in like]
        rest = sum(t.nbytes for t in tensors if not (like is None or t.shape in like))
        return cls(tuple((t.shape, t.element_size()) for t in cut), rest)

    def bytes(self, world_size: int = 1, rank: int = 0) -> int:
        """Return the bytes of a rank; the first has the most.

        Args:
            world_size: Ranks that the tensors are cut for.
            rank: Which of them.
        """
        total = self.replicated
        for shape, size in self.sharded:
            rows = shape[0] if shape else 1
            chunk = math.ceil(rows / world_size)
            own = min(max(rows - rank * chunk, 0), chunk)
            total += own * (math.prod(shape[1:]) if shape else 1) * size
        return total

    @property
    def elements(self) -> int:
        """How many numbers there are of what is cut."""
        return sum(math.prod(shape) for shape, _ in self.sharded)


@dataclass(frozen=True)
class Footprint:
    """What a policy takes.

    Attributes:
        parameters: Of one copy of the model.
        gradients: Of its trainable parameters.
        states: Of the optimizer.
        assumed_states: Whether those are a guess.
        layers: Parameters of each decoder layer [bytes].
        rest: Of all others: embeddings, last norm, head [bytes].
        tensors: How many the state dict has.
    """

    parameters: Sizes
    gradients: Sizes
    states: Sizes
    assumed_states: bool
    layers: tuple[int, ...]
    rest: int
    tensors: int

    @classmethod
    def of(cls, module: GRPOModule, dtype: torch.dtype = torch.float32) -> "Footprint":
        """Measure a module, whose policy becomes one without memory.

        Args:
            module: Made, and not set up.
            dtype: Of its weights.

        Raises:
            ConfigError: It trains an adapter.
        """
        if module.adapter is not None:
            raise ConfigError("`model.adapter` expected none in a dry run, which knows whole models only: drop it here")
        module.policy = policy = Policy(empty_model(module.checkpoint, dtype)).train()
        parameters = list(policy.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        states, assumed = _states(module, trained)
        layers = tuple(sum(p.nbytes for p in layer.parameters()) for layer in decoder_layers(policy))
        return cls(
            parameters=Sizes.of(parameters),
            gradients=Sizes.of(trained),
            states=states,
            assumed_states=assumed,
            layers=layers,
            rest=sum(p.nbytes for p in parameters) - sum(layers),
            tensors=len(policy.model.state_dict()),
        )


def _states(module: GRPOModule, trained: Sequence[nn.Parameter]) -> tuple[Sizes, bool]:
    """Return what the optimizer keeps, and whether that is a guess."""
    made: Any = module.configure_optimizers()["optimizer"]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    try:
        made.step()
    except RuntimeError:  # it looks at values, or has kernels of its own, as bitsandbytes
        return Sizes(tuple((parameter.shape, _ASSUMED_STATE) for parameter in trained)), True
    finally:
        made.zero_grad()
    tensors = [value for state in made.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Sizes.of(tensors, [parameter.shape for parameter in trained]), False


@dataclass(frozen=True)
class Activations:
    """What a micro-batch takes of a forward pass for its backward.

    Attributes:
        held: Where the policy computes [bytes].
        moved: What waits in the machine's memory instead [bytes].
    """

    held: int
    moved: int = 0


def activations(module: GRPOModule, pack: Pack, autocast: torch.dtype | None = None) -> Activations:
    """Return what the policy keeps of a micro-batch for its backward, and the buffers of its head.

    The forward pass runs on tensors that have shapes and no memory; what autograd keeps of it is added up. With
    gradient checkpointing one layer is made anew at a time; of what is moved to the machine's memory, one layer's part
    is made, or back, at a time. The head recomputes its logits: before that it holds a chunk of them, and the gradients
    of its weight and of the hidden states. That is what lives at once; allocators take some more, and kernels of a CUDA
    device keep other things than a CPU's.

    Args:
        module: Measured by :meth:`Footprint.of`.
        pack: The micro-batch.
        autocast: Precision of products, where it is not the parameters'.
    """
    policy, fake = module.policy, FakeTensorMode(allow_non_fake_inputs=True)
    layers, least = len(decoder_layers(policy)), float(WORTH_MOVING) if module.activation_offload else math.inf
    with fake:
        policy.to_empty(device="cpu")
        if module.gradient_checkpointing == "norms":
            recompute(policy.model, "norms")
        kept, moved = _kept(policy, pack, autocast, least)
        layer = moved // layers
        if module.gradient_checkpointing is True:
            recompute(policy.model, True)
            kept, layer = _kept(policy, pack, autocast)[0], kept // layers
    weight = policy.model.get_output_embeddings().weight
    tokens, (vocabulary, width) = len(pack.predictor), weight.shape
    once = max(layer, head.CHUNK_BYTES, 4 * vocabulary)  # logits are gone when the last layer is made again
    return Activations(kept + 2 * tokens * width * weight.element_size() + once + weight.nbytes, moved)


def _kept(policy: Policy, pack: Pack, autocast: torch.dtype | None, least: float = math.inf) -> tuple[int, int]:
    """Return the bytes that autograd keeps of a forward pass, each storage once and no parameter's, and moved ones.

    Those are copies of the tensors of at least so many bytes, as :func:`grpo_lit.policy.offload.offloaded` makes them.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*policy.parameters(), *policy.buffers())}
    stay: dict[int, Tensor] = {}
    moved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata in own:
            return tensor
        if tensor.nbytes >= least and not is_weight(tensor):
            moved.append(tensor)
        else:
            stay[tensor.untyped_storage()._cdata] = tensor
        return tensor

    precision = torch.autocast("cpu", autocast) if autocast else nullcontext()
    with precision, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.last_hidden(pack)
    return sum(tensor.untyped_storage().nbytes() for tensor in stay.values()), sum(tensor.nbytes for tensor in moved)


def cache_bytes(checkpoint: str, tokens: int, element: int) -> int:
    """Return the bytes of keys and values that transformers holds of a sequence when its last token is drawn.

    They are those of a forward pass on tensors without memory: grouped heads and sliding windows count as they are.

    Args:
        checkpoint: The model.
        tokens: Of the sequence, prompt and completion; the last one is not read.
        element: Bytes of a number.
    """
    model = empty_model(checkpoint)
    cache = DynamicCache(config=model.config)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.to_empty(device="cpu")
        ids = torch.zeros(1, max(tokens - 1, 1), dtype=torch.long)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    held = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    # Keys and values, or the state of a recurrent layer; beside them lie counters.
    return element * sum(tensor.numel() for tensor in held if tensor.is_floating_point())
