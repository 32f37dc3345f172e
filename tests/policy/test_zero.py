"""The output layer's weights are read where ZeRO-3 has them; DeepSpeed itself is in tests/runs/test_zero.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.packing import Pack
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.zero import size


@pytest.mark.parametrize("tied", [True, False])
def test_the_heads_weight_may_be_gone_outside_of_its_forward_and_backward(
    tiny_folder: Callable[..., Path], tied: bool
) -> None:
    """Emptied at every other moment, as DeepSpeed does; of tied ones the embedding's forward has them too."""
    policy = Policy(load_model(str(tiny_folder("llama", tie_word_embeddings=tied))), entropy_gradient=True)
    ids, targets = torch.tensor([[5, 80, 120, 33]]), torch.tensor([80, 120, 33])
    pack = Pack(ids, torch.arange(4)[None], layout=None, predictor=torch.arange(3))

    def backward() -> Tensor:
        output = policy(pack, targets, 1.0)
        (output.logprobs.sum() + output.entropy.sum()).backward()
        return output.logprobs.detach()

    expected = backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    policy.zero_grad()
    weight = policy.model.get_output_embeddings().weight
    whole, empty, seen = weight.data, torch.empty(0), []

    def gather(*_: Any) -> None:
        seen.append("gathered")
        weight.data = whole

    def release(*_: Any) -> None:
        weight.data = empty

    class Gathering(torch.autograd.Function):  # before backward, as DeepSpeed's hooks on outputs
        @staticmethod
        def forward(ctx: Any, output: Tensor) -> Tensor:
            return output.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            gather()
            return gradient

    for module in (policy.head, policy.model.get_input_embeddings()) if tied else (policy.head,):
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
    policy.head.register_forward_hook(lambda module, args, outputs: tuple(map(Gathering.apply, outputs)))
    release()
    torch.testing.assert_close(backward(), expected)
    assert len(seen) == (4 if tied else 3)
    for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_size_of_a_cut_weight_is_the_whole_ones() -> None:
    cut = torch.nn.Parameter(torch.empty(0))
    cut.ds_numel = 12
    assert [size(cut), size(torch.empty(3, 4))] == [12, 12]
