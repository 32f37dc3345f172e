"""Operations counted by hand, and by going over every pair that attends."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_lit.batch import TokenBatch
from grpo_lit.bench.flops import ModelWork, matmul_flops_per_second, step_flops
from grpo_lit.bench.settings import SMOLLM2_135M
from grpo_lit.rollout import Completion, Group, Prompt


def batch_of(*groups: tuple[int, list[int]]) -> TokenBatch:
    made = []
    for n, (prompt, lengths) in enumerate(groups):
        samples = tuple(Completion((5,) * k, (-1.0,) * k, "", "stop", 0) for k in lengths)
        made.append(Group(Prompt(str(n), "", token_ids=(4,) * prompt), 0, samples, rewards=[1.0] * len(lengths)))
    return TokenBatch.from_groups(made, temperature=1.0)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_llama_by_hand(tied: bool) -> None:
    sizes = {"vocab_size": 11, "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 3, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    work = ModelWork.of(model)
    # q 6 * 8, k and v 6 * 4, o 8 * 6; gate, up and down 6 * 10 each; three layers. Two operations for each weight.
    assert work.per_token == 2 * 3 * (48 + 24 + 24 + 48 + 180)
    # q k^T and p v: 2 operations for each of 2 heads * 4, in three layers.
    assert work.per_pair == 2 * 2 * 8 * 3
    assert work.per_output == 2 * 11 * 6


def test_smollm2_has_the_weights_that_its_name_says() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2_135M))
    assert model.num_parameters() == 134_515_008


def test_each_number_of_a_step_by_itself() -> None:
    # Prompts of 3 and 2; completions of 4, 1, 0 and 2 tokens: inputs 3 + 3 + 0 + 0 and 2 + 1, 7 outputs.
    batch = batch_of((3, [4, 1, 0]), (2, [2]))
    assert step_flops(ModelWork(1.0, 0.0, 0.0), batch) == 3 * 9
    assert step_flops(ModelWork(0.0, 0.0, 1.0), batch) == 3 * 7
    assert step_flops(ModelWork(1.0, 0.0, 1.0), batch, forwards=1) == 4 * 16
    pairs = 0
    for prompt, lengths in ((3, [4, 1, 0]), (2, [2])):
        pairs += sum(1 for query in range(prompt) for key in range(prompt) if key <= query)
        for k in lengths:
            pairs += sum(prompt + own + 1 for own in range(max(k - 1, 0)))
    assert step_flops(ModelWork(0.0, 1.0, 0.0), batch) == 3 * pairs


def test_samples_of_a_prompt_pay_for_it_once() -> None:
    one, two = batch_of((9, [5])), batch_of((9, [5, 5]))
    work = ModelWork(1.0, 0.0, 0.0)
    assert step_flops(work, two) - step_flops(work, one) == 3 * 4


def test_a_matrix_product_has_a_rate() -> None:
    rate = matmul_flops_per_second(64, torch.float32, torch.device("cpu"))
    assert 1e6 < rate < 1e15
