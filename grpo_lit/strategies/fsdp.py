"""Lightning's classic FSDP: each model a root of its own, each decoder layer a unit in it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer
from typing_extensions import override

from grpo_lit.errors import ConfigError
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.sharding import decoder_layers
from grpo_lit.strategies.reading import check_there, inspect, readable
from grpo_lit.strategies.saving import is_sharded

#: What a wrapper adds to the names of what it wraps.
_WRAPPER = "_fsdp_wrapped_module."


class FSDP(FSDPStrategy):
    """Lightning's ``FSDPStrategy`` around the policy, the reference and the old policy, one by one.

    Lightning would wrap the whole ``LightningModule``: its forward is a training step, inside which the policy runs
    forward and backward several times, and what is not in a unit of its own is freed after the first backward. Here a
    training step runs outside, and every model is used as FSDP expects. A checkpoint is one file, which rank 0 gathers
    and all strategies but DeepSpeed read. Source: Y. Zhao et al., "PyTorch FSDP" (https://arxiv.org/abs/2304.11277).

    Args:
        sharding_strategy: As in torch: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``NO_SHARD``, ``HYBRID_SHARD``.
        cpu_offload: Parameters, gradients and optimizer states wait in the machine's memory.
        process_group_backend: ``nccl``, ``gloo``, ...; ``null``: the device's.
        timeout: Of a collective.
    """

    def __init__(
        self,
        sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = "FULL_SHARD",
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        for name, part in list(model.named_children()):
            if isinstance(part, Policy):
                setattr(model, name, self._wrapped(part))
        return model

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of all models, whole, on the first rank alone."""
        with self._gathered():
            return self.model.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, numbered as one process numbers it."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._gathered():
            state = FullyShardedDataParallel.optim_state_dict(self.model, plain)
        if not self.is_global_zero:
            return state
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's share of one file.

        Raises:
            ConfigError: It is a folder of shards, missing, broken, or of another program, model or optimizer.
        """
        path = Path(self.broadcast(checkpoint_path))
        check_there(path)
        if is_sharded(path):
            raise ConfigError(
                f"`ckpt_path` expected a file for FSDP, but got {path}, a folder of shards: go on with "
                "configs/strategy/fsdp2.yaml, or with ddp.yaml or single.yaml, which then write files"
            )
        module: Any = self.lightning_module
        module.check_checkpoint(inspect(path, weights_only=weights_only))  # torch loads into the model as it reads
        with readable(path):
            return super().load_checkpoint(path, weights_only)

    def _gathered(self) -> AbstractContextManager:
        # Lightning moves to the CPU what is there already, and torch then frees what it has handed out.
        move = self.root_device.type != "cpu"
        return FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=move, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=move, rank0_only=True),
        )

    def _wrapped(self, policy: Policy) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            policy,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in decoder_layers(policy)}),
            device_id=self.root_device,  # of a CPU too, which torch does not look for by itself
            **self.kwargs,
        )


def whole_weights(policy: FullyShardedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a wrapped policy under the names of its state dict, gathered unit by unit.

    All ranks must go along.
    """
    for place, unit in policy.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        inside = [name for name, part in unit.named_modules() if name and isinstance(part, FullyShardedDataParallel)]
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            weights: dict[str, Any] = {}
            for name, tensor in unit.named_parameters(remove_duplicate=False):
                if not any(name.startswith(f"{part.replace(_WRAPPER, '')}.") for part in inside):
                    weights[f"{place}.{name}".replace(_WRAPPER, "").removeprefix(".")] = tensor.detach().clone()
        yield from weights.items()
