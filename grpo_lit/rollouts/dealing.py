"""A rollout in progress, dealt out anew: what is left of it is trained on by another number of ranks."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.rollouts.minibatch import Rollout


def dealt(parts: Sequence[Rollout], rank: int, world_size: int) -> Rollout:
    """Return a rank's share of a rollout that other ranks have begun to train on.

    Advantages, filters and old log-probs are each sequence's own by then, and the optimizer steps are made of prompts
    over all ranks, so that nothing depends on which of them holds a prompt: a share is every ``world_size``-th one,
    with the steps that its sequences were in.

    Args:
        parts: What each of the ranks held.
        rank: Whose share.
        world_size: Of how many.
    """
    held = [_numbered(part.batch) for part in parts]
    owners = {int(prompt): i for i, batch in enumerate(held) for prompt in batch.prompt.unique()}
    steps = [_in_step(part) for part in parts]
    nothing = torch.zeros(0, dtype=torch.long)
    pieces, chosen = [held[0].select(nothing)], [steps[0][:, nothing]]
    for prompt in sorted(owners)[rank::world_size]:
        batch, in_step = held[owners[prompt]], steps[owners[prompt]]
        sequences = (batch.prompt == prompt).nonzero()[:, 0]
        pieces.append(batch.select(sequences))
        chosen.append(in_step[:, sequences])
    updates = [step.nonzero()[:, 0] for step in torch.cat(chosen, 1)]
    return Rollout((), joined(pieces), parts[0].plan, updates)


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Return one batch with the sequences of all, one batch after the other.

    Args:
        batches: Of one rollout; their domains may differ.
    """
    domains = tuple(sorted({name for batch in batches for name in batch.domains}))
    if any(batch.versions is not None for batch in batches):
        batches = [replace(batch, versions=batch.token_versions) for batch in batches]
    firsts = accumulate((len(batch.prompt_lengths) for batch in batches), initial=0)
    same = [
        replace(
            _with_kept(batch) if any(other.kept_counts is not None for other in batches) else batch,
            group=batch.group + first,
            domain=torch.tensor([domains.index(name) for name in batch.domains])[batch.domain],
            domains=domains,
            sample=None,  # the groups that they stand in are not kept
        )
        for batch, first in zip(batches, firsts, strict=False)
    ]
    columns = {field.name: [getattr(batch, field.name) for batch in same] for field in fields(TokenBatch)}
    tensors: dict[str, Any] = {
        name: torch.cat(column) for name, column in columns.items() if isinstance(column[0], Tensor)
    }
    return replace(same[0], **tensors)


def _numbered(batch: TokenBatch) -> TokenBatch:
    """Return a batch whose prompts have numbers over all ranks, as that of one rank may not."""
    return batch if batch.prompt is not None else replace(batch, prompt=batch.group)


def _in_step(part: Rollout) -> Tensor:
    """Return for each optimizer step which sequences are in it [steps, S]."""
    member = torch.zeros(len(part.updates), len(part.batch.lengths), dtype=torch.bool)
    for row, sequences in zip(member, part.updates, strict=True):
        row[sequences] = True
    return member


def _with_kept(batch: TokenBatch) -> TokenBatch:
    """Return a batch that says of every token what was possible, though everything was."""
    if batch.kept_counts is not None:
        return batch
    return replace(batch, kept_ids=torch.zeros(0, dtype=torch.int32), kept_counts=torch.zeros_like(batch.token_ids))
