"""What top-k, top-p and min-p leave possible, from their definitions, one token after the other."""

import torch
from torch import Tensor

from grpo_lit.rollout import Sampling


def possible(logits: Tensor, sampling: Sampling) -> tuple[int, ...]:
    """Return the ids, ascending, that ``sampling`` leaves possible at one step with these logits [V]."""
    probs = torch.softmax(logits.double() / sampling.temperature, -1)
    likeliest_first = probs.sort(descending=True)
    pairs = list(zip(likeliest_first.indices.tolist(), likeliest_first.values.tolist(), strict=True))
    pairs = [(token, p) for token, p in pairs if p >= sampling.min_p * pairs[0][1]]
    pairs = pairs[: sampling.top_k] if sampling.top_k else pairs
    total, before, chosen = sum(p for _, p in pairs), 0.0, []
    for token, p in pairs:
        if before < sampling.top_p:  # the token with which the mass reaches top_p is the last one
            chosen.append(token)
        before += p / total
    return tuple(sorted(chosen))
