"""Runs in bf16: what stays float32, what moves, and what a resumed run goes on with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from toys import Letters
from transformers import AutoModelForCausalLM

from grpo_lit.module import GRPOModule
from grpo_lit.objectives import K3, Objective
from grpo_lit.optimizers import MasterWeights, StochasticAdamW

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
    return float(gaps.mean())


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
