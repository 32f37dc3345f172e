"""Activations that wait for backward in the machine's memory instead of the device's."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Smaller tensors stay where they are: a copy takes longer to start than they take to move [bytes].
WORTH_MOVING = 2**20


@dataclass(frozen=True)
class _Moved:
    copy: Tensor
    device: torch.device


def offloaded(weights: nn.Module, device: torch.device, least: int = WORTH_MOVING) -> AbstractContextManager[None]:
    """Keep what a forward within saves for backward in the machine's memory, pinned where ``device`` is a GPU.

    Results do not change. Weights stay: they are on the device anyway, and a sharded one is not to be held whole.

    Args:
        weights: The model whose weights these are.
        device: Whose tensors are moved.
        least: Smallest tensor that is [bytes].
    """
    pinned = device.type == "cuda"
    # A shard has no memory to ask for. What shards are gathered to is a parameter, of other memory than now.
    whole = [parameter for parameter in weights.parameters() if not isinstance(parameter, DTensor)]
    stays = {parameter.untyped_storage().data_ptr() for parameter in whole}

    def pack(tensor: Tensor) -> Tensor | _Moved:
        size = tensor.numel() * tensor.element_size()
        weight = tensor.untyped_storage().data_ptr() in stays or is_weight(tensor)
        if tensor.device != device or size < least or weight:
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
        copy.copy_(tensor, non_blocking=pinned)
        return _Moved(copy, tensor.device)

    def unpack(saved: Tensor | _Moved) -> Tensor:
        return saved.copy.to(saved.device, non_blocking=True) if isinstance(saved, _Moved) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight, or what autocast made of one, which all micro-batches of a step share."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "TransposeBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return node is not None and hasattr(node, "variable")
