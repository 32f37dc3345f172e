"""Sharding of a model over ranks, and the whole tensors again where somebody needs them."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import resolve_checkpoint
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
        mesh: The data-parallel dimension.
        reshard_after_forward: Gather a layer again in backward. A frozen policy has none, and always lets layers go.
        cpu_offload: Keep the shards in the machine's memory.
    """
    frozen = not any(parameter.requires_grad for parameter in policy.parameters())
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward or frozen, offload_policy=offload)
    # The embeddings and the head: backward needs them at once again.
    fully_shard(policy, mesh=mesh, reshard_after_forward=frozen, offload_policy=offload)


@torch.no_grad()
def read_shards(policy: Policy, checkpoint: str, device: torch.device) -> None:
    """Give a sharded policy without memory its share of the weights: no rank reads more of a file than it keeps.

    Args:
        policy: Of :func:`grpo_lit.policy.checkpoint.empty_model`, sharded.
        checkpoint: Folder of safetensors files; see :func:`can_read_shards`.
        device: Where the shards are to lie.
    """
    own = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(own[name])
    weights = dict(policy.model.named_parameters())  # tied ones once, as in the file
    distributed.checkpoint.load(weights, storage_reader=HuggingFaceStorageReader(resolve_checkpoint(checkpoint)))


def can_read_shards(policy: Policy, checkpoint: str) -> bool:
    """Return whether the weights lie in safetensors files under the names and shapes that the policy gives them.

    transformers renames or joins the weights of some architectures as it reads them, which takes the whole model.
    """
    folder = Path(resolve_checkpoint(checkpoint))
    stored: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            stored |= {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118 (no mapping)
    return all(stored.get(name) == list(weight.shape) for name, weight in policy.model.named_parameters())


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its values; of a sharded one, all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
