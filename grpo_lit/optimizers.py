"""Optimizers that move bf16 weights at the learning rates of reinforcement learning, where others stand still.

A bf16 weight of 0.02 has neighbours 1e-4 away: a step of 1e-6 rounds back to where it came from, however often it is
made. Either the small steps add up in float32 (:class:`MasterWeights`), or each is rounded up as often as its size says
(:class:`StochasticAdamW`).
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import torch
from jaxtyping import BFloat16, Float32
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from typing_extensions import override


def default_optimizer(parameters: Iterable[Tensor]) -> Optimizer:
    """Return AdamW at 1e-6 without weight decay."""
    return AdamW(parameters, lr=1e-6, weight_decay=0.0)


def warn_of_lost_updates(optimizer: Optimizer) -> None:
    """Warn of bf16 weights under an optimizer that rounds each of its steps to the nearest one."""
    if isinstance(optimizer, MasterWeights | StochasticAdamW):
        return
    if any(parameter.dtype == torch.bfloat16 for group in optimizer.param_groups for parameter in group["params"]):
        rank_zero_warn(
            "trainer.precision=bf16-true: an update below 1/256 of a weight is lost; use bf16-mixed, or "
            "`model.optimizer: grpo_lit.optimizers.MasterWeights` or `StochasticAdamW`"
        )


class MasterWeights(Optimizer):
    """Any optimizer on float32 copies of bf16 weights, which are the copies rounded.

        master <- optimizer(master, float32(gradient)),   weight <- bf16(master)

    Memory of AdamW: 2 bytes a weight and 2 for its gradient, 12 for master and moments, 4 for the float32 gradient
    during the step. The gradients of several micro-batches add up in bf16, where ``bf16-mixed`` adds them in float32.
    Float32 parameters, such as those of an adapter, are their own masters. Source: P. Micikevicius et al., "Mixed
    Precision Training" (https://arxiv.org/abs/1710.03740), section 3.1.

    Args:
        params: What is trained.
        optimizer: Called with the masters. Default: AdamW at 1e-6 without weight decay.
    """

    def __init__(self, params: Iterable[Tensor], optimizer: OptimizerCallable | None = None) -> None:
        parameters = list(params)
        masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in parameters]
        self._inner = (optimizer or default_optimizer)(masters)
        self._pairs = list(zip(parameters, masters, strict=True))
        super().__init__(parameters, dict(self._inner.defaults))

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the masters, and round the weights from them."""
        loss = _result(closure)
        # Schedulers know this optimizer's groups alone.
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner |= {name: value for name, value in own.items() if name != "params"}
        for parameter, master in self._pairs:
            if master is parameter or parameter.grad is None:
                continue
            if parameter not in self.state:  # weights may have been loaded since this was built
                master.copy_(parameter)
            master.grad = parameter.grad.float()
        self._inner.step()
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            # All that a checkpoint must hold lies in one place, by the parameter that torch and Lightning know.
            self.state[parameter] = dict(self._inner.state[master])
            if master is not parameter:
                self.state[parameter]["master"] = master.detach()
                parameter.copy_(master)
                master.grad = None
        return loss

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, bit for bit."""
        super().load_state_dict(state_dict)
        _undo_casts(self, state_dict)
        for parameter, master in self._pairs:
            if parameter in self.state:
                state = self.state[parameter]
                self._inner.state[master] = {name: value for name, value in state.items() if name != "master"}
                if master is not parameter:
                    master.copy_(state["master"])


class StochasticAdamW(Optimizer):
    """AdamW whose bf16 weights are rounded up or down at random, right on average.

        P[weight = next bf16 above w] = (w - bf16 below w) / (bf16 above w - bf16 below w),   so   E[weight] = w

    Many steps of 1e-6 move a weight as far as they should in the mean, at the price of noise of the size of its last
    bit. Memory: 2 bytes a weight and 2 for its gradient, 8 for float32 moments. On float32 parameters it is AdamW to
    the last bit. The random numbers depend on seed, step and parameter alone, so replicas stay equal and a resumed run
    draws the same. Sources: I. Loshchilov and F. Hutter (https://arxiv.org/abs/1711.05101); S. Gupta et al., "Deep
    Learning with Limited Numerical Precision" (https://arxiv.org/abs/1502.02551), section 3.1.

    Args:
        params: What is trained.
        lr: Learning rate.
        betas: Decay of both moments.
        eps: Added to the root of the second one.
        weight_decay: Decoupled.
        seed: Of the rounding.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        loss, index = _result(closure), 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, group, index)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            # bf16 moments would stand still as bf16 weights do: a beta of 0.999 changes them by 1/1000.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        step, gradient = int(state["step"]), parameter.grad.float()
        weight = parameter.float()  # float32 parameters themselves
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
        if parameter.dtype == torch.bfloat16:
            weights, target = _own_share(weight), _own_share(parameter)
            rank = parameter.device_mesh.get_rank() if isinstance(parameter, DTensor) else 0
            generator = torch.Generator(weights.device).manual_seed(_seed(self._seed, step, index, rank))
            target.copy_(stochastically_rounded(weights, generator))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, bit for bit."""
        super().load_state_dict(state_dict)
        _undo_casts(self, state_dict)


def stochastically_rounded(
    values: Float32[Tensor, "*shape"], generator: torch.Generator | None = None
) -> BFloat16[Tensor, "*shape"]:
    """Return each value as one of its two bf16 neighbours, the nearer one more often: the mean is the value.

    bf16 is the upper half of float32's bits. A random lower half is added, which carries into the upper one with the
    probability that the value's own lower half stands for, and the lower half is cut off.

    Args:
        values: What is exact in bf16 stays as it is, and so does what is not finite.
        generator: Of the random numbers, on the values' device.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _result(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _own_share(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _seed(*parts: int) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest())


def _undo_casts(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put float32 state back that ``torch.optim`` has rounded to the dtype of its parameter on loading."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)
