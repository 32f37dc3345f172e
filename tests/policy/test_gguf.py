"""A GGUF file becomes a plain float32 folder that computes what the model it was written from computes."""

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lit.policy.gguf import converted_gguf, model_cache, new_folder

NAMES = {  # of one llama layer, Hugging Face to GGUF
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Hugging Face rotates the two halves of a head, GGUF neighbouring pairs: row (half, i) becomes row (i, half)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(model, tokenizer, file: Path, quantization: gguf.GGMLQuantizationType) -> None:
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_token_list([*vocabulary[:-1], "ĠĠ"])  # a run of two spaces is a token of its own
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(tokenizer) - 4))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    state = model.state_dict()
    weights = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for i in range(config.num_hidden_layers):
        weights |= {f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}" for ours, theirs in NAMES.items()}
    for theirs, ours in weights.items():
        tensor = state[f"{ours}.weight"].clone()
        if theirs.endswith(("attn_q", "attn_k")):
            tensor = interleaved(tensor, config.num_attention_heads)
        kind = quantization if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{theirs}.weight", gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_LIT_MODELS", str(tmp_path_factory.mktemp("cache")))
        yield model_cache()


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", seed=3)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, model, tiny_tokenizer) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(model, tiny_tokenizer, file, gguf.GGMLQuantizationType.F32)
    return file


@pytest.fixture(scope="module")
def folder(cache, gguf_file) -> Path:
    return converted_gguf(gguf_file)


IDS = torch.tensor([[7, 120, 33, 4, 255, 60, 2]])


@torch.no_grad()
def test_the_folder_computes_what_the_source_computes(folder, model):
    again = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)
    assert again.dtype == torch.float32


def test_the_folder_is_a_plain_model_that_can_be_saved_again(folder, tmp_path):
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert getattr(again.config, "quantization_config", None) is None
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").exists()


@torch.no_grad()
def test_quantised_weights_come_out_as_float32_near_the_source(cache, tmp_path, model, tiny_tokenizer):
    write_gguf(model, tiny_tokenizer, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    again = AutoModelForCausalLM.from_pretrained(converted_gguf(tmp_path / "tiny.gguf"))
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        # Q8_0 keeps 127 steps of the largest value of each block of 32, and rounds: half a step off at most
        # (and the step itself is a float16, 2^-11 off at most, over 127 steps).
        assert (after[name] - weight).abs().max() <= weight.abs().max() * (0.5 / 127 + 2**-11) + 1e-6, name
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_stop_tokens_padding_and_context_survive(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|pad|>", 512)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


def test_the_chat_template_survives(folder, tiny_tokenizer):
    chat = [{"role": "user", "content": "3 + 4 ="}]
    ours, theirs = (
        t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for t in (AutoTokenizer.from_pretrained(folder), tiny_tokenizer)
    )
    assert ours == theirs == "<|im_start|>user\n3 + 4 =<|im_end|>\n<|im_start|>assistant\n"


def test_smollm_cuts_at_digits_before_anything_else(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # GPT-2's rule alone would cut "a", " ", " 12" and never see the two spaces side by side.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("a  12\n").input_ids) == "a  12\n"


def test_a_file_is_converted_once_until_it_changes(folder, gguf_file, tmp_path):
    assert converted_gguf(gguf_file) == folder
    (folder / "witness").touch()
    assert (converted_gguf(gguf_file) / "witness").exists()
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(gguf_file.read_bytes())
    assert converted_gguf(copy) != folder


def test_an_interrupted_folder_leaves_nothing(tmp_path):
    def interrupted() -> None:
        with new_folder(tmp_path / "model") as unfinished:
            (unfinished / "config.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_the_first_wins(tmp_path):
    with new_folder(tmp_path / "model") as late:
        (late / "config.json").write_text("late")
        with new_folder(tmp_path / "model") as early:
            (early / "config.json").write_text("early")
    assert (tmp_path / "model" / "config.json").read_text() == "early"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_the_cache_lies_in_the_clone(monkeypatch):
    monkeypatch.delenv("GRPO_LIT_MODELS", raising=False)
    assert model_cache() == Path(__file__).parents[2] / ".cache" / "models"
    monkeypatch.setenv("GRPO_LIT_MODELS", "~/elsewhere")
    assert model_cache() == Path.home() / "elsewhere"
