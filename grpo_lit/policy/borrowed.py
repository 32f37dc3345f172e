"""Reference and old policy of an adapted policy: the policy itself with other small weights, and no second model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from grpo_lit.policy.adapter import adapter_off
from grpo_lit.policy.policy import Policy, PolicyOutput
from grpo_lit.policy.precision import apply_but_keep


class WithoutAdapter:
    """The policy with its adapter off: the weights that the run began with. No module, so in no checkpoint.

    Args:
        policy: Adapted.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @torch.no_grad()
    def __call__(self, *args: Any) -> PolicyOutput:
        """Return what the frozen weights say; see :meth:`Policy.forward`."""
        with adapter_off(self._policy):
            return self._policy(*args)


class AdapterSnapshot(nn.Module):
    """The policy with the adapter of an earlier step, of which this holds a copy.

    Args:
        policy: Adapted.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = (policy,)  # in a tuple: its weights are not this module's
        self._names = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
        values = [parameter.detach().clone() for parameter in policy.parameters() if parameter.requires_grad]
        self.values = nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in values)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the adapter as it is now."""
        now = [parameter for parameter in self._policy[0].parameters() if parameter.requires_grad]
        for value, parameter in zip(self.values, now, strict=True):
            value.copy_(parameter)

    @override
    @torch.no_grad()
    def forward(self, *args: Any) -> PolicyOutput:
        """Return what the policy said then; see :meth:`Policy.forward`."""
        return torch.func.functional_call(self._policy[0], dict(zip(self._names, self.values, strict=True)), args)

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "AdapterSnapshot":
        apply_but_keep(self, lambda: super(AdapterSnapshot, self)._apply(fn, recurse), list(self.parameters()))
        return self
