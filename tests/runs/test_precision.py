"""Runs in bf16: what stays float32, what moves, and what a resumed run goes on with."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Letters
from transformers import AutoModelForCausalLM

from callbacks import ReferenceRefresh
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.objectives import K3, Objective
from grpo_lit.optimizers import MasterWeights, StochasticAdamW
from grpo_lit.policy.recompute import Recomputed

small = partial(AdamW, lr=1e-6, weight_decay=0.0)


class Dtypes(Callback):
    """Keeps the dtypes of what a step is made of."""

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        tensors = [*vars(batch.rollout.batch).values(), *trainer.callback_metrics.values()]
        self.seen |= {t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()}


def moved(trainer: Trainer, module: GRPOModule) -> float:
    """Return how far the weights, or their masters, have come in the mean."""
    start = dict(AutoModelForCausalLM.from_pretrained(module.checkpoint, dtype=torch.bfloat16).named_parameters())
    state = trainer.optimizers[0].state
    ends = {name: state[p].get("master", p) for name, p in module.policy.model.named_parameters()}
    gaps = torch.cat([(end.double() - start[name].double()).abs().flatten() for name, end in ends.items()])
    return float(gaps.detach().mean())


@pytest.mark.parametrize(
    ("optimizer", "far"),
    [(small, False), (partial(MasterWeights, optimizer=small), True), (partial(StochasticAdamW, lr=1e-6), True)],
)
def test_bf16_weights_move_at_a_small_learning_rate(
    make_module: Callable, make_data: Callable, make_trainer: Callable, optimizer: Callable, far: bool
) -> None:
    # Field bug A12: 1e-6 is far below the spacing of bf16 weights, those next to 0 apart.
    dtypes = Dtypes()
    module = make_module(optimizer=optimizer, objective=Objective(divergence=K3(beta=0.1)))
    trainer = make_trainer(max_steps=3, precision="bf16-true", callbacks=[dtypes])
    trainer.fit(module, datamodule=make_data(val={"letters": Letters(2, heldout=True)}))
    assert trainer.global_step == 3
    assert 1e-6 < moved(trainer, module) < 1e-5 if far else moved(trainer, module) < 1e-7
    assert {p.dtype for p in module.policy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in module.reference.parameters()} == {torch.bfloat16}
    assert dtypes.seen == {torch.float32}  # log-probs, rewards, advantages, figures
    exact = AutoModelForCausalLM.from_pretrained(module.checkpoint, dtype=torch.float32)
    for name, buffer in module.policy.model.named_buffers():
        assert torch.equal(buffer, exact.get_buffer(name)), name  # rotary frequencies above all
    assert trainer.callback_metrics["optimization/kl_reference"] < 1e-2
    assert trainer.callback_metrics["system/mismatch_abs"] < 0.1


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (partial(AdamW8bit, lr=1e-2), "32-true"),
        (partial(MasterWeights, optimizer=partial(AdamW, lr=1e-2)), "bf16-true"),
        (partial(StochasticAdamW, lr=1e-2), "bf16-true"),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, tmp_path: Path,
    optimizer: Callable, precision: str,
) -> None:  # fmt: skip
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    straight, resumed = make_module(optimizer=optimizer), make_module(optimizer=optimizer)
    make_trainer(max_steps=2, precision=precision, callbacks=[saver]).fit(straight, datamodule=make_data())
    trainer = make_trainer(max_steps=2, precision=precision)
    trainer.fit(resumed, datamodule=make_data(), ckpt_path=str(tmp_path / "saved" / "step=1.ckpt"))
    torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)
    if isinstance(trainer.optimizers[0], AdamW8bit):
        dtypes = {state["state1"].dtype for state in trainer.optimizers[0].state.values()}
        assert torch.uint8 in dtypes  # tensors of less than 4096 weights keep float32 moments


class Casts(TorchDispatchMode):
    """Counts how often each of these tensors is cast."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.counts = {tensor.data_ptr(): 0 for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.counts:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


class CountCasts(Callback):
    """Counts casts of policy and reference in the second step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.of_policy, self.of_reference = (
                Casts(
                    [p for layer in model.modules() if isinstance(layer, torch.nn.Linear) for p in layer.parameters()]
                )
                for model in (pl_module.policy, pl_module.reference)
            )
            self.of_policy.__enter__()
            self.of_reference.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.of_reference.__exit__(None, None, None)
            self.of_policy.__exit__(None, None, None)


@pytest.mark.parametrize("gradient_checkpointing", [False, "norms", True])
def test_autocast_casts_each_weight_once_a_step_and_gradients_are_the_same(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable,
    monkeypatch: pytest.MonkeyPatch, gradient_checkpointing: Recomputed,
) -> None:  # fmt: skip
    def run(**changes: Any) -> tuple[dict[str, torch.Tensor], CountCasts]:
        counts = CountCasts()
        module = make_module(
            optimizer=partial(torch.optim.SGD, lr=1.0),
            objective=Objective(divergence=K3(beta=0.1)),
            max_tokens_per_micro_batch=2,  # a micro-batch for each of 6 sequences
            gradient_checkpointing=gradient_checkpointing,
            **changes,
        )
        trainer = make_trainer(max_steps=2, precision="bf16-mixed", callbacks=[counts])
        trainer.fit(module, datamodule=make_data(prompts_per_rollout=2))
        return weights_of(module), counts

    once, counts = run()
    assert set(counts.of_policy.counts.values()) == {1}
    # Nothing is left to cast of a reference whose linear layers are held in bf16, the output layer among them.
    assert set(counts.of_reference.counts.values()) == {0}
    monkeypatch.setattr(GRPOModule, "cast_once", lambda self: nullcontext())
    often, counts = run(reference_dtype="float32")
    assert min(counts.of_policy.counts.values()) > 2
    assert min(counts.of_reference.counts.values()) > 2
    for name, tensor in often.items():
        assert torch.equal(once[name], tensor), name


def test_a_reference_may_take_less_memory_and_then_begins_at_a_small_divergence(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    def fit(held: str, steps: int = 1, **changes: Any) -> tuple[GRPOModule, float]:
        module = make_module(objective=Objective(divergence=K3(beta=0.1)), reference_dtype=held)
        saver = ModelCheckpoint(tmp_path / held, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(max_steps=steps, callbacks=[saver])
        trainer.fit(module, datamodule=make_data(), **changes)
        return module, float(trainer.callback_metrics["optimization/kl_reference"])

    gaps = [fit(held)[1] for held in ("auto", "bfloat16", "nf4")]
    assert gaps[0] == pytest.approx(0, abs=1e-9)
    assert 1e-9 < gaps[1] < 1e-3 < gaps[2] < 1
    saved = str(tmp_path / "nf4" / "step=1.ckpt")
    assert not [name for name in torch.load(saved, weights_only=True)["state_dict"] if name.startswith("reference.")]
    module, _ = fit("nf4", steps=2, ckpt_path=saved)
    assert module.trainer.global_step == 2


@pytest.mark.parametrize(
    ("held", "decay", "precision"),
    [("nf4", 0.0, "32-true"), ("bfloat16", 0.9, "32-true"), ("auto", 0.9, "bf16-true"), ("float32", 0.9, "bf16-true")],
)
def test_an_average_needs_a_float32_reference(
    make_module: Callable, make_data: Callable, make_trainer: Callable, held: str, decay: float, precision: str
) -> None:
    module = make_module(objective=Objective(divergence=K3(beta=0.1)), reference_dtype=held)
    trainer = make_trainer(precision=precision, callbacks=[ReferenceRefresh(decay=decay)])
    with pytest.raises(ConfigError, match=r"model\.reference_dtype"):
        trainer.fit(module, datamodule=make_data())


def test_an_average_is_kept_in_float32_under_autocast(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    module = make_module(objective=Objective(divergence=K3(beta=0.1)))
    callbacks = [ReferenceRefresh(every_n_steps=1, decay=0.9)]
    make_trainer(max_steps=1, precision="bf16-mixed", callbacks=callbacks).fit(module, datamodule=make_data())
    assert {parameter.dtype for parameter in module.reference.parameters()} == {torch.float32}
