"""The policy's log-probs are those of each sequence alone, whatever it was packed with, for every architecture."""

import pytest
import torch
from architectures import ARCHITECTURES, COMMON, ragged_batch, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.batch import TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.policy.packing import pack_rows, plan_micro_batches
from grpo_lit.policy.policy import Policy, can_share_prefix, check_head, why_plain_rows

SHARES = {"llama", "qwen2", "qwen3", "gemma", "phi", "mixtral", "gpt2"}


def alone(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Log-probs of each sequence by itself, from full logits: the plainest way there is."""
    prompts, completions = (
        batch.prompt_ids.split(batch.prompt_lengths.tolist()),
        batch.token_ids.split(batch.lengths.tolist()),
    )
    result = []
    for group, completion in zip(batch.group.tolist(), completions, strict=True):
        ids = torch.cat([prompts[group], completion])
        log_p = (model(ids[None]).logits[0].float() / batch.temperature).log_softmax(-1)
        result.append(log_p[len(prompts[group]) - 1 : -1].gather(1, completion[:, None])[:, 0])
    return torch.cat(result)


def packed(model: PreTrainedModel, batch: TokenBatch, budget: int, share: bool, masks: bool = True) -> Tensor:
    """The same through packs, put back into batch order."""
    policy, result = Policy(model), torch.zeros(batch.tokens)
    for rows in plan_micro_batches(batch, budget, share):
        chosen = torch.tensor([i for row in rows for unit in row for i in unit.sequences])
        micro, pack = pack_rows(batch, rows, masks)
        logprobs = policy(pack, micro.token_ids, micro.temperature).logprobs
        result = result.index_put((batch.token_positions(chosen),), logprobs)
    return result


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefix_sharing_is_chosen_by_what_the_architecture_can_do(name: str) -> None:
    model = tiny_model(name)
    assert can_share_prefix(model) == (name in SHARES)
    assert why_plain_rows(model) == {"gemma2": "layers of sliding attention", "mistral": "sliding windows"}.get(name)


# Field bug B4.
@pytest.mark.parametrize("budget", [1, 20, 60, 1000])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packs_give_the_log_probs_and_gradients_of_each_sequence_alone(name: str, budget: int) -> None:
    model, batch = tiny_model(name), ragged_batch(temperature=0.7)
    weights = torch.randn(batch.tokens)
    expected = alone(model, batch)
    gradients = torch.autograd.grad((expected * weights).sum(), list(model.parameters()), allow_unused=True)
    for share, masks in {(can_share_prefix(model), True), (can_share_prefix(model), False), (False, True)}:
        got = packed(model, batch, budget, share, masks)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad((got * weights).sum(), list(model.parameters()), allow_unused=True)
        for a, b in zip(ours, gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


#: Architectures that do more to their logits than multiply, and what of it the head knows.
HEADS = {
    "granite": COMMON | {"logits_scaling": 3.0},
    "cohere": COMMON | {"logit_scale": 0.2},
    "gemma2": ARCHITECTURES["gemma2"] | {"final_logit_softcapping": 2.0},
}
UNKNOWN_HEADS = {
    "hyperclovax": COMMON | {"logits_scaling": 3.0},  # which multiplies, where Granite divides
    "recurrent_gemma": COMMON | {"logits_soft_cap": 1.0, "lru_width": 32, "block_types": ["attention"], "head_dim": 8},
}


@pytest.mark.parametrize(("name", "options"), [*ARCHITECTURES.items(), *HEADS.items()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_known_is_let_through(name: str, options: dict[str, object], dtype: torch.dtype) -> None:
    check_head(Policy(tiny_model(name, options).to(dtype)))


@pytest.mark.parametrize(("name", "options"), UNKNOWN_HEADS.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_not_known_is_refused(name: str, options: dict[str, object], dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"`model\.checkpoint` expected logits .* its head is not known here"):
        check_head(Policy(tiny_model(name, options).to(dtype)))


def test_order_of_sequences_changes_nothing() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    order = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(3))
    shuffled = packed(model, batch.select(order), 30, True)
    torch.testing.assert_close(
        shuffled, packed(model, batch, 30, True)[batch.token_positions(order)], rtol=1e-5, atol=1e-5
    )
