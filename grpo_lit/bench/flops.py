"""Floating-point work of a step, and how much of it the machine can do."""

import time
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_lit.batch import TokenBatch

#: A forward and a backward pass cost three forward passes: backward multiplies twice for each product of forward.
TRAINED = 3


@dataclass(frozen=True)
class ModelWork:
    """Floating-point operations of one forward pass, by what they are proportional to.

    Attributes:
        per_token: Of the layers: 2 for each weight that a token is multiplied with.
        per_pair: Of attention: 4 * layers * heads * head size for each query and the key that it sees.
        per_output: Of the head: 2 * V * H for each completion token.
    """

    per_token: float
    per_pair: float
    per_output: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelWork":
        """Count the weights of a dense decoder; embeddings look up and multiply nothing."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        width = config.num_attention_heads * config.head_dim
        return cls(2.0 * weights, 4.0 * config.num_hidden_layers * width, 2.0 * head.weight.numel())


def step_flops(work: ModelWork, batch: TokenBatch, forwards: int = 0) -> float:
    """Return the floating-point operations that the gradient of a step cannot do without.

    F = (3 + r) (per_token n + per_pair a + per_output T)

    T: completion tokens. n: distinct inputs, the P tokens of each prompt once and of each completion of k tokens k - 1,
    since nothing is predicted from the last. a: pairs that attend, P (P + 1) / 2 of a prompt and (k - 1) P + (k - 1) k
    / 2 of a completion. 3: forward and backward. r: further forward passes, of a reference. Padding, repeated prompts,
    logits of prompts and anything recomputed count nothing, however long they take.

    Args:
        work: Of one forward pass of the model.
        batch: The rollout.
        forwards: r.
    """
    prompt, inputs = batch.prompt_lengths.double(), (batch.lengths - 1).clamp(min=0).double()
    tokens = float(prompt.sum() + inputs.sum())
    own_prompt = prompt[batch.group]
    pairs = float((prompt * (prompt + 1) / 2).sum() + (inputs * own_prompt + inputs * (inputs + 1) / 2).sum())
    return (TRAINED + forwards) * (work.per_token * tokens + work.per_pair * pairs + work.per_output * batch.tokens)


def matmul_flops_per_second(size: int, dtype: torch.dtype, device: torch.device, tries: int = 3) -> float:
    """Return the best rate of a square matrix product [FLOP/s].

    Args:
        size: Rows and columns.
        dtype: Of both matrices.
        device: Where they are.
        tries: The fastest of these counts.
    """
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(tries + 1):  # the first one warms up
        started = now(device)
        a @ b
        best = min(best, now(device) - started)
    return 2.0 * size**3 / best


def now(device: torch.device) -> float:
    """Return the time [s], everything that was begun on the device done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
