"""Adapters train beside weights that never change; what is published and exported computes what the policy does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.errors import ConfigError
from grpo_lit.policy.adapter import LoRA, merge, published_weights, save_adapter
from grpo_lit.policy.borrowed import AdapterSnapshot, WithoutAdapter
from grpo_lit.policy.packing import Pack
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.precision import hold_casts
from grpo_lit.policy.quantization import NF4
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.transformers import TransformersEngine

IDS = torch.tensor([[5, 80, 120, 33, 9, 10]])
PACK = Pack(IDS, torch.arange(6)[None], layout=None, predictor=torch.arange(5))


def says(model: Callable[..., object]) -> Tensor:
    return model(PACK, IDS[0, 1:], 1.0).logprobs.detach()


def adapted(model: PreTrainedModel, adapter: LoRA, seed: int = 1) -> Policy:
    """Return a policy whose adapter is no longer 0."""
    policy = Policy(model)
    adapter.inject(model)
    policy.adapted = True
    move(policy, seed)
    return policy


@torch.no_grad()
def move(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


# Conv1D holds its weight transposed; the experts of a mixture are no linear layers.
@pytest.mark.parametrize(
    ("architecture", "variant"), [("llama", "lora"), ("gpt2", "dora"), ("mixtral", "rslora"), ("qwen2", "dora")]
)
def test_published_merged_and_exported_weights_compute_what_the_policy_does(
    tiny_model: Callable, tmp_path: Path, architecture: str, variant: str
) -> None:
    """Field bug E5: names are the model's own."""
    plain = tiny_model(architecture)
    policy = adapted(tiny_model(architecture), LoRA(4, variant=variant))
    expected = says(policy)
    assert (says(Policy(tiny_model(architecture))) - expected).abs().max() > 0.1
    published = dict(published_weights(policy.model))
    assert published.keys() == plain.state_dict().keys()
    plain.load_state_dict(published)
    torch.testing.assert_close(says(Policy(plain)), expected, rtol=1e-5, atol=1e-5)
    save_adapter(policy.model, "somewhere", tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(architecture), tmp_path)
    logprobs = loaded(IDS).logits[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    merge(policy.model)
    assert policy.model.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(says(policy), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "scale"), [("lora", 8 / 4), ("rslora", 8 / 2)])  # alpha / r, alpha / sqrt r
def test_each_sync_gives_an_engine_base_plus_scale_b_a_and_leaves_the_base_alone(
    tiny_model: Callable, tiny_model_path: Path, variant: str, scale: float
) -> None:
    """Field bug E5: never delivered, merged twice, or the base not as it was."""
    engine = TransformersEngine(dtype="bfloat16", device="cpu")
    engine.start(EngineModel(str(tiny_model_path), (2,), 64))
    base = tiny_model("llama").bfloat16().state_dict()
    policy = adapted(tiny_model("llama").bfloat16(), LoRA(4, 8.0, variant=variant))
    for sync in range(100):
        move(policy, seed=sync)
        published = dict(published_weights(policy.model))
        engine.load_weights(published.items(), version=sync)
        held = engine._loaded.state_dict()
        assert held.keys() == published.keys()
        parts = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        for name, weight in published.items():
            stem = name.removesuffix("weight")
            expected = base[name].double()
            if f"{stem}lora_A.default.weight" in parts:
                a, b = (parts[f"{stem}lora_{side}.default.weight"].double() for side in "AB")
                expected = expected + scale * b @ a
                assert weight.dtype == torch.float32
            torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(held[name], weight.bfloat16())
    left = {n.replace(".base_layer", ""): t for n, t in policy.model.state_dict().items() if ".lora_" not in n}
    assert left.keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in left.items())


def test_what_is_trained_in_full_is_published_too(tiny_model: Callable) -> None:
    """Field bug E5: modules_to_save are dropped."""
    policy = adapted(tiny_model("llama", tie_word_embeddings=False), LoRA(4, modules_to_save=("lm_head",)))
    trained = policy.model.get_output_embeddings().weight
    before = tiny_model("llama", tie_word_embeddings=False).lm_head.weight
    published = dict(published_weights(policy.model))
    assert torch.equal(published["lm_head.weight"], trained)
    assert not torch.equal(published["lm_head.weight"], before)


def test_the_first_step_is_the_models_own_and_the_adapter_is_all_that_trains(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    policy = Policy(model)
    expected = says(policy)
    LoRA(rank=2).inject(model)
    assert torch.equal(says(policy), expected)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 2 * 7 * 2  # A and B of 7 linear layers in 2 blocks: all but the output layer
    policy(PACK, IDS[0, 1:], 1.0).logprobs.sum().backward()
    assert all(p.grad is not None for p in trained.values())
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)


def test_reference_and_old_policy_are_the_policy_with_other_small_weights(tiny_folder: Callable) -> None:
    from grpo_lit.policy.checkpoint import load_model

    folder = str(tiny_folder("llama", tie_word_embeddings=False))
    start = says(Policy(load_model(folder)))
    policy = Policy(load_model(folder))
    LoRA(rank=4, modules_to_save=("lm_head",)).inject(policy.model)
    reference, old_policy = WithoutAdapter(policy), AdapterSnapshot(policy)
    assert torch.equal(says(old_policy), start)
    move(policy, seed=1)
    earlier = says(policy)
    old_policy.take()
    move(policy, seed=2)
    now = says(policy)
    assert torch.equal(says(reference), start)
    assert torch.equal(says(old_policy), earlier)
    assert torch.equal(says(policy), now)  # neither has left a trace
    assert not torch.equal(earlier, now)
    assert len(set(old_policy.state_dict())) == len([p for p in policy.parameters() if p.requires_grad])
    published = dict(published_weights(policy.model))
    assert torch.equal(published["lm_head.weight"], policy.model.lm_head.modules_to_save.default.weight)


def test_an_adapter_stays_float32_when_its_model_is_converted(tiny_model: Callable) -> None:
    policy = adapted(tiny_model("llama"), LoRA(rank=2))
    snapshot, before = AdapterSnapshot(policy), says(policy)
    policy.bfloat16()
    snapshot.bfloat16()
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    assert {value.dtype for value in snapshot.parameters()} == {torch.float32}
    torch.testing.assert_close(says(policy), before, rtol=0.05, atol=0.2)


@torch.no_grad()
def test_frozen_weights_held_in_bf16_compute_what_autocast_does_to_the_last_bit(tiny_model: Callable) -> None:
    # A tied output layer, an untied one with biases, and products that are no linear layer.
    for model in (tiny_model("llama", tie_word_embeddings=True), tiny_model("phi"), tiny_model("gpt2")):
        policy = Policy(model).requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            expected = says(policy)
            hold_casts(policy, torch.bfloat16)
            assert torch.equal(says(policy), expected)
        assert torch.bfloat16 in {parameter.dtype for parameter in policy.parameters()}
        assert model.get_input_embeddings().weight.dtype == torch.float32


def test_4_bit_weights_are_published_as_what_they_stand_for(tiny_model: Callable) -> None:
    """Field bug E5: a merge is not rounded to 4 bits."""
    plain, model = tiny_model("qwen2"), tiny_model("qwen2")
    NF4(double_quantization=True).quantize(model, model.get_output_embeddings(), torch.float32)
    policy = adapted(model, LoRA(rank=4, target_modules=("q_proj", "v_proj")))
    expected = says(policy)
    published = dict(published_weights(policy.model))
    assert published.keys() == plain.state_dict().keys()
    plain.load_state_dict(published)
    torch.testing.assert_close(says(Policy(plain)), expected, rtol=1e-5, atol=1e-5)
    merge(policy.model)
    assert policy.model.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(says(policy), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"model\.adapter\.rank"),
        ({"alpha": 0.0}, r"model\.adapter\.alpha"),
        ({"target_modules": ("q_proj", "nothing")}, r"target_modules.*'nothing'.*q_proj"),
        ({"target_modules": "no.*such"}, r"target_modules.*'no\.\*such'"),
        ({"modules_to_save": ("nothing",)}, r"modules_to_save.*'nothing'"),
        ({"target_modules": ("lm_head", "q_proj")}, r"target_modules.*output layer"),
        ({"target_modules": ("embed_tokens",)}, r"target_modules.*embed_tokens.*modules_to_save"),
        ({"modules_to_save": ("lm_head",)}, r"modules_to_save.*share one weight"),
    ],
)
def test_what_cannot_be_adapted_is_refused(tiny_model: Callable, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRA(**settings).inject(tiny_model("llama", tie_word_embeddings=True))
