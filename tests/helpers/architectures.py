"""Tiny models of many architectures that are not drawn too small to tell positions apart, and a batch for them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_lit.batch import TokenBatch
from grpo_lit.rollout import Completion, Group, Prompt

VOCABULARY = 50
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 8},
    "gemma2": COMMON | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma": COMMON | {"head_dim": 8},
    "phi": {**COMMON, "num_key_value_heads": 4},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": COMMON | {"sliding_window": 5},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}


def tiny_model(name: str, options: dict[str, object] | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(options or ARCHITECTURES[name]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():  # the default initialisation is too small to tell positions apart
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def ragged_batch(temperature: float = 1.0) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    groups = []
    for n, (prompt, lengths) in enumerate([(5, [4, 9, 1, 0]), (2, [3, 3]), (7, [12, 2, 6]), (1, [5])]):
        samples = tuple(Completion(tokens(k), (-1.0,) * k, "", "stop", 0) for k in lengths)
        groups.append(Group(Prompt(str(n), "", token_ids=tokens(prompt)), 0, samples, rewards=[1.0] * len(lengths)))
    return TokenBatch.from_groups(groups, temperature)
