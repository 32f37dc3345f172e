"""Compiled norms say what the others say."""

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters

from callbacks import CompileNorms
from grpo_lit.errors import ConfigError
from grpo_lit.policy.compiling import compile_norms

#: Lengths of rows; the second compiles for any length, the rest must not.
LENGTHS = (7, 12, 5, 30, 64)


def gradients(model: nn.Module, length: int) -> tuple[float, list[Tensor]]:
    ids = torch.arange(4, 4 + length)[None]
    model.zero_grad()
    loss = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 5].mean()
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_loss_and_gradients_are_the_same_at_every_length(tiny_model: Callable, architecture: str) -> None:
    torch._dynamo.reset()
    plain, compiled = tiny_model(architecture), tiny_model(architecture)
    names = list(compiled.state_dict())
    assert compile_norms(compiled) == sum("norm" in name for name in names)
    assert list(compiled.state_dict()) == names
    for index, length in enumerate(LENGTHS):
        (loss, got), (expected_loss, expected) = gradients(compiled, length), gradients(plain, length)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        apart = sum(float((a - b).square().sum()) for a, b in zip(got, expected, strict=True))
        assert apart**0.5 < 1e-5 * sum(float(b.square().sum()) for b in expected) ** 0.5
        if index == 1:
            made = counters["stats"]["unique_graphs"]
            assert made > 0
    assert counters["stats"]["unique_graphs"] == made


def test_a_model_without_rms_norms_is_refused(tiny_model: Callable) -> None:
    module = LightningModule()
    module.policy = tiny_model("gpt2")
    with pytest.raises(ConfigError, match="CompileNorms` expected a model with RMS norms"):
        CompileNorms().on_fit_start(Trainer(accelerator="cpu", logger=False), module)


def test_a_machine_that_cannot_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(function: Callable) -> Callable:
        raise RuntimeError("no g++ here\nand a long trace")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler \(g\+\+\), but got RuntimeError: no g\+\+ here\. Install"):
        CompileNorms().on_fit_start(Trainer(accelerator="cpu", logger=False), LightningModule())
