"""Runs that train an adapter: the model's own weights never change, and checkpoints and engines get what they need."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from callbacks import ReferenceRefresh
from grpo_lit.errors import ConfigError
from grpo_lit.export import export
from grpo_lit.module import GRPOModule
from grpo_lit.objectives import K3, Objective
from grpo_lit.policy.adapter import LoRA
from grpo_lit.policy.quantization import NF4


@pytest.fixture
def fit(make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path) -> Callable:
    """``fit(3, quantization=NF4())``: a module after 3 steps, a checkpoint after each in ``saved``."""

    def run(steps: int, precision: str = "32-true", ckpt_path: Path | None = None, **changes: Any) -> GRPOModule:
        module = make_module(**{"adapter": LoRA(rank=4), **changes})
        saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(max_steps=steps, precision=precision, callbacks=[saver], num_sanity_val_steps=0)
        trainer.fit(module, datamodule=make_data(num_updates=2), ckpt_path=ckpt_path)
        assert trainer.global_step == steps
        return module

    return run


def trained_of(module: GRPOModule) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("32-true", {"old_policy": "weights", "gradient_checkpointing": True}),
        ("bf16-mixed", {"adapter": LoRA(rank=2, variant="dora", target_modules=("q_proj", "down_proj"))}),
        ("bf16-true", {"quantization": NF4(), "old_policy": "weights"}),
    ],
)
def test_an_adapted_run_trains_and_resumes(fit: Callable, tmp_path: Path, precision: str, changes: dict) -> None:
    settings = {"objective": Objective(divergence=K3(beta=0.1)), **changes}
    straight = fit(3, precision, **settings)
    metrics = straight.trainer.callback_metrics
    assert metrics["optimization/kl_reference"] > 0
    assert metrics["optimization/ratio_max"] == pytest.approx(1.0, abs=1e-5)  # the first update on its rollout
    # The engine holds what is published: float32, of the very base that the learner computes with.
    assert metrics["system/mismatch_abs"] < (1e-5 if precision == "32-true" else 0.05)
    published = sum(tensor.nbytes for _, tensor in straight.named_weights())
    assert metrics["system/sync_bytes"] == published
    assert {tensor.dtype for tensor in trained_of(straight).values()} == {torch.float32}

    stopped = tmp_path / "saved" / "step=1.ckpt"
    state = torch.load(stopped, weights_only=True)
    models = {"policy"} | ({"old_policy"} if "old_policy" in changes else set())
    assert {name.split(".")[0] for name in state["state_dict"]} == models
    assert all("lora_" in name for name in state["state_dict"] if name.startswith("policy."))
    resumed = fit(3, precision, ckpt_path=stopped, **settings)
    torch.testing.assert_close(trained_of(resumed), trained_of(straight), rtol=0, atol=0)


def test_the_base_is_untouched_and_exports_compute_what_was_trained(fit: Callable, tmp_path: Path) -> None:
    module = fit(2)
    start = AutoModelForCausalLM.from_pretrained(module.checkpoint, dtype=torch.float32)
    base = {n.replace(".base_layer", ""): t for n, t in module.policy.model.state_dict().items() if "lora_" not in n}
    assert all(torch.equal(base[name], tensor) for name, tensor in start.state_dict().items())
    ids = torch.tensor([[5, 80, 120, 33, 200, 7]])
    expected = module.policy.model(ids).logits
    assert (start(ids).logits - expected).abs().max() > 1e-2
    checkpoint = tmp_path / "saved" / "step=2.ckpt"
    merged = AutoModelForCausalLM.from_pretrained(export(checkpoint, tmp_path / "merged"))
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
    folder = export(checkpoint, tmp_path / "adapter", adapter=True)
    assert (folder / "adapter_model.safetensors").stat().st_size < 100_000
    for written in (tmp_path / "merged", folder):  # for every reader, weights too
        assert len({file.stat().st_mode for file in written.iterdir()}) == 1
    torch.testing.assert_close(PeftModel.from_pretrained(start, folder)(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_another_adapter_or_of_whole_weights_is_refused(
    fit: Callable, tiny_folder: Callable, tmp_path: Path
) -> None:
    fit(1)
    saved = tmp_path / "saved" / "step=1.ckpt"
    for settings in ({"adapter": LoRA(rank=2)}, {"adapter": None}):
        with pytest.raises(ConfigError, match=r"`model\.adapter` expected.*rank 4"):
            fit(2, ckpt_path=saved, **settings)
    with pytest.raises(ConfigError, match=r"`model\.quantization` expected.*none, but got double"):
        fit(2, ckpt_path=saved, quantization=NF4())
    # Another model of the same shape, under its own name or under the one that the adapter was trained beside.
    other = str(tiny_folder("llama", seed=1))
    with pytest.raises(ConfigError, match=r"`model\.checkpoint` expected the model .* adapter was trained beside"):
        fit(2, ckpt_path=saved, checkpoint=other)
    state = torch.load(saved)
    state["grpo_lit"]["checkpoint"] = other
    torch.save(state, tmp_path / "moved.ckpt")
    with pytest.raises(ConfigError, match=f"`checkpoint` expected {other}, .* holds other weights now"):
        export(tmp_path / "moved.ckpt", tmp_path / "merged")
    fit(1, adapter=None)
    with pytest.raises(ConfigError, match=r"--adapter.*model\.adapter"):
        export(tmp_path / "saved" / "step=1-v1.ckpt", tmp_path / "adapter", adapter=True)


def test_an_export_of_4_bit_weights_computes_what_was_trained(fit: Callable, tmp_path: Path) -> None:
    module = fit(1, quantization=NF4())
    ids = torch.tensor([[5, 80, 120, 33, 200, 7]])
    merged = AutoModelForCausalLM.from_pretrained(export(tmp_path / "saved" / "step=1.ckpt", tmp_path / "merged"))
    torch.testing.assert_close(merged(ids).logits, module.policy.model(ids).logits, rtol=1e-5, atol=1e-4)


def test_contradictions_are_refused(make_module: Callable, make_data: Callable, make_trainer: Callable) -> None:
    with pytest.raises(ConfigError, match=r"`model\.quantization` expected `model\.adapter`"):
        make_module(quantization=NF4())
    with pytest.raises(ConfigError, match=r"model\.reference_dtype: nf4.*model\.adapter.*contradict"):
        make_module(adapter=LoRA(), reference_dtype="nf4")
    module = make_module(adapter=LoRA(rank=2), objective=Objective(divergence=K3(beta=0.1)))
    with pytest.raises(ConfigError, match=r"ReferenceRefresh.*model\.adapter.*contradict"):
        make_trainer(callbacks=[ReferenceRefresh()]).fit(module, datamodule=make_data())


@pytest.fixture
def mesh() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    distributed.destroy_process_group()


def test_shards_of_adapted_or_4_bit_weights_are_refused(make_module: Callable, mesh: Any) -> None:
    for changes, key in (({"adapter": LoRA()}, r"model\.adapter"), ({"reference_dtype": "nf4"}, "nf4")):
        module = make_module(**changes)
        module._device_mesh = mesh
        with pytest.raises(ConfigError, match=rf"{key}.*FSDP2.*contradict"):
            module.configure_model()
