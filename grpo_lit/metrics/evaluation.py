"""What is logged of answers to held-out prompts."""

from collections.abc import Sequence

import torch

from grpo_lit.metrics.rates import Rates
from grpo_lit.rollout import Group


def evaluation_rates(
    name: str, greedy: Sequence[Group], sampled: Sequence[Group], k: int, domains: Sequence[str] = ()
) -> Rates:
    """Return accuracy, length and truncation rates of one held-out set.

    avg@k is the mean over prompts of the share of k samples that are correct; with k samples for every prompt that is
    the mean over samples.

    Args:
        name: The set's key under ``data.val``.
        greedy: One-answer groups at temperature 0.
        sampled: Groups of k answers at the sampling temperature; empty for k = 0.
        k: Samples per prompt.
        domains: Domains to give an accuracy of their own.
    """
    rates = Rates()
    rates.add(f"val/{name}/greedy", _flags(greedy))
    for domain in domains:
        rates.add(f"val/{name}/greedy/{domain}", _flags([g for g in greedy if g.prompt.domain == domain]))
    rates.add(f"val/{name}/length", torch.tensor([float(len(c.token_ids)) for g in greedy for c in g.completions]))
    truncated = [float(c.finish_reason == "length") for g in greedy for c in g.completions]
    rates.add(f"val/{name}/truncated", torch.tensor(truncated))
    if k:
        rates.add(f"val/{name}/avg@{k}", _flags(sampled))
    return rates


def _flags(groups: Sequence[Group]) -> torch.Tensor:
    return torch.tensor([float(flag) for g in groups for flag in g.correct if flag is not None])
