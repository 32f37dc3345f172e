"""The norm of a step's gradients under any strategy, and an end for those that no step is made with."""

import math
from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from grpo_lit.strategies.deepspeed import DeepSpeed


def clip_gradients(strategy: Strategy, policy: nn.Module, parameters: Sequence[Tensor], limit: float | None) -> float:
    """Scale gradients so that their norm is at most ``limit``, and return what it was; all ranks must call.

    norm = sqrt(sum over all parameters of all ranks of g^2)

    Args:
        strategy: Of the run.
        policy: Being trained.
        parameters: Of its optimizer.
        limit: ``None``: no clipping.
    """
    if isinstance(strategy, DeepSpeed):  # clips as it steps
        return strategy.gradient_norm()
    bound = math.inf if limit is None else limit
    if isinstance(policy, FullyShardedDataParallel):  # a rank's own tensors say nothing of the others' shards
        return float(policy.clip_grad_norm_(bound))
    total = torch.nn.utils.clip_grad_norm_(parameters, bound)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def drop_gradients(strategy: Strategy) -> None:
    """Forget gradients that are kept elsewhere than at their parameters."""
    if isinstance(strategy, DeepSpeed):
        strategy.drop_gradients()
