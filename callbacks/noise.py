"""How much of a step's gradient is noise, and so how many prompts a step is worth."""

import math
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from grpo_lit.batch import TokenBatch
from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.module import GRPOModule
from grpo_lit.policy.policy import PolicyOutput
from grpo_lit.rollouts.minibatch import Minibatch


class GradientNoiseScale(RolloutCallback):
    """Logs ``optimization/noise_scale``: the number of prompts per step at which noise and gradient are equal.

        |G|^2 = (|g|^2 - sum_m |g_m|^2) / (1 - sum_m f_m^2)      V = |g|^2 - |G|^2      B_simple = B V / |G|^2

    g is the gradient of a step of B prompts before clipping, g_m the share that micro-batch m adds to it and f_m its
    share of the sequences that went through the policy. With f_m = 1 / M these are the two batch sizes B and B / M of
    the paper. V and |G|^2 are averaged over steps before they are divided, since one step says little. Well below
    B_simple twice the prompts are worth nearly half the steps; well above it they are wasted. Micro-batches are taken
    as random parts of the step, while packing puts answers of like lengths together: read it as an order of magnitude.

    It costs a norm per parameter and micro-batch, no backward. A step of one micro-batch says nothing; on two ranks
    there are always two.

    Paper: McCandlish et al., "An Empirical Model of Large-Batch Training" (https://arxiv.org/abs/1812.06162).

    Args:
        decay: Of the averages, per optimizer step.

    Raises:
        ConfigError: For a decay out of range, or weights cut over devices, where no rank sees a gradient whole.
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"`decay` of GradientNoiseScale expected 0 to below 1, but got {decay}")
        self.decay = decay
        self._signal, self._noise = 0.0, 0.0
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []
        self._sequences: list[int] = []
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """Keep the averages across a resume."""
        return {"signal": self._signal, "noise": self._noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on averaging."""
        self._signal, self._noise = state_dict["signal"], state_dict["noise"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the gradients that each backward adds."""
        module = cast("GRPOModule", pl_module)
        parameters = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
        sharded = isinstance(module.policy, FullyShardedDataParallel)
        if sharded or any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in parameters):
            raise ConfigError("`trainer.callbacks: GradientNoiseScale` expected whole weights on every rank: drop it")
        # A leaf's hook sees what one backward adds, before it is accumulated or summed over ranks.
        self._handles = [parameter.register_hook(self._add) for parameter in parameters]
        module.measurements.append(self._begin)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch no more."""
        cast("GRPOModule", pl_module).measurements.remove(self._begin)
        for handle in self._handles:
            handle.remove()

    def _begin(self, batch: TokenBatch, output: PolicyOutput) -> Rates:
        """Begin a micro-batch, or a step where there is no sequence yet."""
        if not len(batch.lengths):
            self._squares, self._sequences = [], []
        else:
            self._sequences.append(len(batch.lengths))
            self._squares.append(torch.zeros((), dtype=torch.double, device=batch.lengths.device))
        return Rates()

    def _add(self, gradient: Tensor) -> None:
        if self._squares:  # else this rank had no micro-batch yet, and the gradient is that of an idle one: 0
            self._squares[-1] += torch.linalg.vector_norm(gradient.detach()).double() ** 2

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Log the noise scale, from this step and those before."""
        prompts = len(minibatch.rollout.batch.group[minibatch.rollout.updates[minibatch.update]].unique())
        # The loss of a rank is scaled by their number, since gradients are averaged.
        own = sum(float(square) for square in self._squares) / module.ranks.world_size**2
        counts = [sum(n**2 for n in self._sequences), sum(self._sequences), prompts]
        sums = module.ranks.sum(torch.tensor([own, *map(float, counts)], dtype=torch.double)).tolist()
        norm = values["optimization/grad_norm"]
        signal = gradient_signal(norm**2, sums[0], sums[1] / sums[2] ** 2)
        if signal is None:
            if not self._warned:
                rank_zero_warn(
                    "`trainer.callbacks: GradientNoiseScale` needs steps of two micro-batches or more: lower "
                    "`model.max_tokens_per_micro_batch`"
                )
            self._warned = True
            return
        keep, add = self.decay, 1 - self.decay
        self._signal = keep * self._signal + add * signal
        self._noise = keep * self._noise + add * sums[3] * (norm**2 - signal)
        scale = self._noise / self._signal if self._signal > 0 else math.nan  # noise alone so far
        module.log_at(trainer.global_step - 1, {"optimization/noise_scale": scale})


def gradient_signal(whole: float, parts: float, shares: float) -> float | None:
    """Return the unbiased estimate of the squared norm of the true gradient; it may be negative.

    Args:
        whole: |g|^2 of the step.
        parts: sum_m |g_m|^2 of its micro-batches.
        shares: sum_m f_m^2.

    Returns:
        |G|^2, or ``None`` for a step of one micro-batch.
    """
    return None if shares >= 1 else (whole - parts) / (1 - shares)
