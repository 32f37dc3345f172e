"""Models load without dropout and whole; every mistake is one message that names the key and the fix."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, BertConfig, BertModel, GenerationConfig

from grpo_lit.data.checks import check_room
from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import (
    NO_LIMIT,
    context_length,
    join_stop_tokens,
    load_model,
    load_tokenizer,
    resolve_checkpoint,
    silence_modules,
    steady_length,
    stop_token_ids,
)

IDS = torch.tensor([[7, 120, 33, 4, 255, 60, 2, 9]])
NOISY = {
    "llama": {"attention_dropout": 0.2},
    "qwen2": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gemma2": {"attention_dropout": 0.2},
    "phi": {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "mixtral": {"attention_dropout": 0.2, "router_jitter_noise": 0.3},
    "gpt2": {},  # its own defaults are 0.1 three times
}


@pytest.fixture
def folder(tiny_model_path, tmp_path) -> Path:
    """A copy to write to."""
    return Path(shutil.copytree(tiny_model_path, tmp_path / "model"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# Randomness. Field bug A11.


@pytest.mark.parametrize("architecture", NOISY)
@torch.no_grad()
def test_two_forward_passes_in_training_mode_agree_exactly(architecture, tiny_folder):
    path = tiny_folder(architecture, **NOISY[architecture])
    model = load_model(str(path)).train()
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    # Some code asks the configuration at every forward pass instead of the module.
    assert not [name for name in NOISY[architecture] if getattr(model.config, name)]


@pytest.mark.parametrize("architecture", ["gpt2", "phi", "mixtral"])
@torch.no_grad()
def test_without_that_care_they_do_not(architecture, tiny_model):
    model = tiny_model(architecture, **NOISY[architecture]).train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_dropout_written_into_the_code_is_silenced_too(tiny_folder, monkeypatch):
    monkeypatch.setattr("grpo_lit.policy.checkpoint.silence_config", lambda config: None)  # it knows nothing of it
    model = load_model(str(tiny_folder("gpt2"))).train()
    assert torch.equal(model(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_dropout_of_an_adapter_is_silenced_too(tiny_model_path):
    adapter = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(load_model(str(tiny_model_path)), adapter).train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)
    silence_modules(model)
    assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_what_is_not_a_probability_stays(tiny_folder):
    config = load_model(str(tiny_folder("mixtral"))).config
    assert (config.num_experts_per_tok, config.rms_norm_eps > 0, config.use_cache) == (2, True, True)


# The model itself.


@torch.no_grad()
def test_weights_are_those_of_the_folder(tiny_model_path, tiny_model):
    loaded, made = load_model(str(tiny_model_path)), tiny_model("llama")
    assert loaded.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in made.state_dict().items())


def test_weights_saved_in_bfloat16_become_float32_masters(tiny_model, tmp_path):
    tiny_model("llama").bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in load_model(str(tmp_path)).parameters()} == {torch.float32}
    assert {p.dtype for p in load_model(str(tmp_path), dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_soft_capped_attention_is_computed_with_its_cap(tiny_folder, tiny_model):
    path = tiny_folder("gemma2", attn_logit_softcapping=0.5)
    model = load_model(str(path))
    assert model.config._attn_implementation == "eager"
    right = tiny_model("gemma2", attn_logit_softcapping=0.5, attn_implementation="eager")(IDS).logits
    wrong = tiny_model("gemma2", attn_logit_softcapping=0.5, attn_implementation="sdpa")(IDS).logits
    torch.testing.assert_close(model(IDS).logits, right)
    assert (right - wrong).abs().max() > 1e-3  # SDPA drops the cap in silence: the reason for all this
    with pytest.raises(ConfigError, match="`attn_implementation` expected eager or auto for gemma2"):
        load_model(str(path), attn_implementation="sdpa")


def test_everything_else_uses_sdpa(tiny_model_path):
    assert load_model(str(tiny_model_path)).config._attn_implementation == "sdpa"
    assert load_model(str(tiny_model_path), attn_implementation="eager").config._attn_implementation == "eager"


def test_missing_weights_are_refused_rather_than_drawn_at_random(tiny_model_path, tmp_path):
    AutoModel.from_pretrained(tiny_model_path).save_pretrained(tmp_path)  # the trunk without its head
    with pytest.raises(ConfigError, match=r"`model.checkpoint` .*weights without lm_head.weight"):
        load_model(str(tmp_path))


# Mistakes.


def refusal(checkpoint: str | Path, load=load_model) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(checkpoint))
    message = str(caught.value)
    assert message.startswith("`model.checkpoint` expected ")
    assert len(message) < 500
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "name", ["no/such", "gpt2-of-nobody", "./none", "/no/such/folder", "a/b/c", "x.gguf", "", "???"]
)
@pytest.mark.parametrize("load", [load_model, load_tokenizer, stop_token_ids, context_length])
def test_what_does_not_exist_is_refused_at_once(name, load):
    start = time.perf_counter()
    message = refusal(name, load)
    assert repr(name) in message
    assert "`scripts/fetch_model`" in message
    assert time.perf_counter() - start < 5  # transformers' own tries of the hub take 24 s and more


def test_a_hub_id_without_a_hub_says_why():
    assert "HF_HUB_OFFLINE is set" in refusal("no/such")


def test_a_folder_without_configuration(tmp_path):
    assert "a folder without config.json" in refusal(tmp_path)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "no file named model.safetensors" in refusal(folder)


def test_a_folder_with_cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refusal(folder)


def test_a_git_lfs_pointer_instead_of_weights(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refusal(folder)


def test_a_folder_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "a folder without tokenizer" in refusal(folder, load_tokenizer)


def test_an_unknown_architecture(folder):
    edit(folder / "config.json", model_type="nothing_known")
    assert "nothing_known" in refusal(folder)


def test_a_model_for_another_task(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=20, **sizes)).save_pretrained(tmp_path)
    refusal(tmp_path)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert "a file" in refusal(tmp_path / "notes.txt")
    (tmp_path / "broken.gguf").write_bytes(b"nothing of the kind")
    refusal(tmp_path / "broken.gguf")


# Tokenizer, stop tokens, context.


def test_the_tokenizer_is_the_folders(tiny_model_path, tiny_tokenizer):
    text = "<|im_start|>user\n3 + 4 = ✓<|im_end|>\n"
    loaded = load_tokenizer(str(tiny_model_path))
    assert loaded(text).input_ids == tiny_tokenizer(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text


# Field bug B2.
def test_stop_tokens_are_the_union_of_both_sources(tiny_model_path):
    assert stop_token_ids(str(tiny_model_path)) == (2, 3)  # the tokenizer's is 2; generation_config.json lists 2 and 3


@pytest.mark.parametrize(("listed", "stops"), [([3, 5], (2, 3, 5)), (5, (2, 5)), (None, (2,)), (2, (2,))])
def test_stop_tokens_of_every_form(tiny_tokenizer, listed, stops):
    assert join_stop_tokens(tiny_tokenizer, GenerationConfig(eos_token_id=listed)) == stops


def test_stop_tokens_without_generation_config(folder):
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=[2, 7])
    assert stop_token_ids(str(folder)) == (2, 7)


def test_a_model_that_could_never_stop_is_refused(folder):
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert "end-of-sequence token" in refusal(folder, stop_token_ids)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, NO_LIMIT),
        (None, NO_LIMIT),
    ],
)
def test_positions_mean_the_same_up_to_a_length(folder, rope, length):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 8.0}
    if rope is not None:
        longer = factors if rope["rope_type"] == "longrope" else {}
        edit(folder / "config.json", rope_parameters={"rope_theta": 1e4} | longer | rope)
    assert steady_length(str(folder)) == length
    check_room(str(folder), 32, 32)
    if length == 64:
        with pytest.raises(ConfigError, match=r"`data\.max_prompt_tokens`.* expected at most 64, but got 32 \+ 33"):
            check_room(str(folder), 32, 33)


def test_context_length(tiny_folder, folder):
    assert context_length(str(folder)) == 512
    assert context_length(str(tiny_folder("gpt2"))) == 512
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert context_length(str(folder)) == NO_LIMIT


def test_a_folder_is_its_own_address(folder, monkeypatch):
    assert resolve_checkpoint(str(folder)) == str(folder)
    monkeypatch.chdir(folder.parent)
    assert resolve_checkpoint("model") == "model"  # a local folder wins over a hub id of that name


def test_a_gguf_file_is_resolved_to_its_folder(tmp_path, monkeypatch):
    (tmp_path / "some.gguf").touch()
    monkeypatch.setattr("grpo_lit.policy.checkpoint.converted_gguf", lambda file: file.with_suffix(""))
    assert resolve_checkpoint(str(tmp_path / "some.gguf")) == str(tmp_path / "some")
