"""ZeRO-3: weights that DeepSpeed cuts over ranks, tensor by tensor, and the whole ones where somebody needs them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.nn import Parameter

from grpo_lit.policy.checkpoint import resolve_checkpoint
from grpo_lit.policy.policy import Policy


def size(parameter: Tensor) -> int:
    """Return how many numbers a parameter holds on all ranks together."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@torch.no_grad()
def partition(policy: Policy, config: dict[str, Any], device: torch.device, checkpoint: str | None = None) -> None:
    """Leave a rank its share of each weight, as :class:`deepspeed.zero.Init` does of modules that it sees made.

    Source: S. Rajbhandari et al., "ZeRO" (https://arxiv.org/abs/1910.02054).

    Args:
        policy: Of :func:`grpo_lit.policy.checkpoint.empty_model`, or whole on every rank.
        config: DeepSpeed's.
        device: Where buffers are to lie; of the shards the configuration says it.
        checkpoint: Folder of safetensors files to fill an empty model from, one module at a time: no rank ever holds
            more than that, and the first rank alone reads; see :func:`grpo_lit.policy.sharding.can_read_shards`.
    """
    import deepspeed  # an extra

    dtype = next(policy.parameters()).dtype
    read = None if checkpoint is None else _reader(policy, checkpoint)
    first: Any = None
    for module in policy.modules():
        parameters = [part for part in module._parameters.values() if part is not None]
        if read is not None:  # tied weights become one parameter again
            module._parameters.update({name: read(p) for name, p in module._parameters.items() if p is not None})
            parameters = [part for part in module._parameters.values() if part is not None]
        if first is not None:
            first.convert_to_zero_parameters(param_list=parameters)
        elif parameters:
            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=config, dtype=dtype)
            first = parameters[0]
    for name, buffer in policy.named_buffers():
        owner, _, last = name.rpartition(".")
        policy.get_submodule(owner)._buffers[last] = buffer.to(device)
    # Read by the head, and not in a forward of their own module.
    output = policy.model.get_output_embeddings()
    for parameter in output.parameters(recurse=False):
        deepspeed.zero.register_external_parameter(policy.head, parameter)


def gathered_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a partitioned model under the names of its state dict, gathered module by module.

    All ranks must go along.
    """
    import deepspeed  # an extra

    for place, module in model.named_modules():
        own = {name: part for name, part in module._parameters.items() if part is not None}
        with deepspeed.zero.GatheredParameters(list(own.values()), enabled=bool(own)):
            held = {name: part.detach().clone() for name, part in own.items()}
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        held |= {name: part for name, part in module._buffers.items() if name in kept and part is not None}
        yield from ((f"{place}.{name}".removeprefix("."), tensor) for name, tensor in held.items())


def _reader(policy: Policy, checkpoint: str) -> Callable[[Parameter], Parameter]:
    """Return what makes a real parameter of one on the meta device, the same one for the same; rank 0 gives it values.

    DeepSpeed hands out the first rank's values as it cuts a parameter.
    """
    places: dict[str, Path] = {}
    for file in sorted(Path(resolve_checkpoint(checkpoint)).glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            places |= dict.fromkeys(content.keys(), file)
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    made: dict[int, Parameter] = {}

    def read(parameter: Parameter) -> Parameter:
        if id(parameter) not in made:
            name = names[id(parameter)]
            if distributed.get_rank() == 0:
                with safe_open(places[name], framework="pt") as content:
                    tensor = content.get_tensor(name).to(parameter.dtype)
            else:
                tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
            made[id(parameter)] = Parameter(tensor, requires_grad=parameter.requires_grad)
        return made[id(parameter)]

    return read
