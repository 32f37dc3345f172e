"""Sharding of a model over ranks, and the whole tensors again where somebody needs them."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo_lit.errors import ConfigError
from grpo_lit.policy.policy import Policy


def decoder_layers(policy: Policy) -> list[nn.Module]:
    """Return the layers that transformers says must stay in one piece.

    Raises:
        ConfigError: The architecture names none.
    """
    names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"`trainer.strategy` expected a model whose layers can be sharded, but {type(policy.model).__name__} names "
            "none in `_no_split_modules`: use configs/strategy/ddp.yaml"
        )
    return layers


def shard(policy: Policy, mesh: DeviceMesh, reshard_after_forward: bool = True, cpu_offload: bool = False) -> None:
    """Shard a policy over a mesh: a group of parameters for each decoder layer, one for the rest.

    Args:
        policy: On every rank alike; afterwards its parameters are ``DTensor``s of which a rank holds its share.
        mesh: The data-parallel dimension; with a second dimension, shards are replicated along the first (HSDP).
        reshard_after_forward: Gather a layer again in backward.
        cpu_offload: Keep shards in CPU memory.
    """
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=offload)
    # The embeddings and the head: backward needs them at once again; a frozen policy has none and lets them go.
    frozen = not any(parameter.requires_grad for parameter in policy.parameters())
    fully_shard(policy, mesh=mesh, reshard_after_forward=frozen, offload_policy=offload)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its values; of a sharded one, all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
