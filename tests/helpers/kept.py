"""What a forward pass keeps for its backward."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def kept_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes of what autograd keeps of a forward pass, each storage once and no weight."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()  # what autograd keeps, it keeps while this lives
    assert output is not None
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)
