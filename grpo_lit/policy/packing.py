"""Micro-batches under a token budget, and the packs in which a transformer sees them.

A *unit* is a prompt followed by the completions that share it. In a pack the prompt stands once::

    row:       p0 p1 p2 | a0 a1 | b0 b1 b2        prompt, first completion, second completion
    position:   0  1  2    3  4    3  4  5        a completion continues from the prompt's end
    branch:     0  0  0    1  1    2  2  2        it sees branch 0 and its own, never a sibling

The last token of a completion is never an input: nothing is predicted from it. The first token of every completion is
predicted from the prompt's last position. Several units may lie in one row; they do not see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo_lit.batch import TokenBatch


@dataclass(frozen=True)
class Unit:
    """A prompt with some of its completions.

    Attributes:
        sequences: Indices of the completions in the batch.
        size: Input tokens: the prompt once, and every completion without its last token.
    """

    sequences: tuple[int, ...]
    size: int


Rows = list[list[Unit]]


@dataclass(frozen=True)
class Pack:
    """What a transformer is given, and where to read its answer.

    Attributes:
        input_ids: Tokens, rows padded at the right.
        position_ids: Position of each token in its own sequence.
        branch: 0 in a prompt, 1, 2, ... in its completions; -1 in padding. ``None``: one sequence a row, plain causal.
        unit: Which unit of the row a token belongs to.
        predictor: For each completion token of the batch, the flat position (row * L + column) that predicts it.
    """

    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"]
    branch: Int[Tensor, "R L"] | None
    unit: Int[Tensor, "R L"] | None
    predictor: Int[Tensor, "T"]

    def to(self, device: torch.device | str) -> "Pack":
        """Return the same pack on ``device``."""
        moved = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)

    def attention_mask(self) -> Bool[Tensor, "R 1 L L"] | None:
        """Return who may look at whom: [row, 1, query, key]; ``None`` for plain causal rows."""
        if self.branch is None:
            return None
        query, key = self.branch[:, :, None], self.branch[:, None, :]
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        same_unit = self.unit[:, :, None] == self.unit[:, None, :]
        allowed = same_unit & ((key == 0) | (key == query)) & (columns[None, :] <= columns[:, None])
        # Padding looks at itself: a softmax over nothing is NaN, and NaN spreads through backward.
        return (allowed | torch.eye(len(columns), dtype=torch.bool, device=columns.device))[:, None]


def plan_micro_batches(batch: TokenBatch, budget: int, share_prefix: bool) -> list[Rows]:
    """Split a batch into micro-batches of at most ``budget`` input tokens, padding included.

    Units go in descending size, each into the first row with room, so that rows of a micro-batch are about equally
    wide. A group that is over the budget by itself is split, its prompt repeated; a single sequence over the budget
    gets a micro-batch of its own.

    Args:
        batch: Sequences to place; all of them are placed once.
        budget: Most tokens of a micro-batch (rows * columns).
        share_prefix: One copy of a prompt for its completions, and several units a row; else one sequence a row.
    """
    prompt_lengths, lengths = batch.prompt_lengths.tolist(), batch.lengths.tolist()
    by_group = groupby(
        sorted(range(len(lengths)), key=batch.group.tolist().__getitem__), key=batch.group.tolist().__getitem__
    )
    units = []
    for group, members in by_group:
        prompt = prompt_lengths[group]
        if share_prefix:
            units += _split_group(list(members), prompt, lengths, budget)
        else:
            units += [Unit((i,), prompt + max(lengths[i] - 1, 0)) for i in members]
    units.sort(key=lambda unit: -unit.size)
    micro_batches: list[Rows] = []
    room: list[int] = []  # of each row of the open micro-batch
    for unit in units:
        fits = next((r for r, free in enumerate(room) if free >= unit.size), None) if share_prefix else None
        if fits is not None:
            micro_batches[-1][fits].append(unit)
            room[fits] -= unit.size
            continue
        width = micro_batches[-1][0][0].size if micro_batches else 0
        if micro_batches and width * (len(room) + 1) <= budget:
            micro_batches[-1].append([unit])
            room.append(width - unit.size)
        else:
            micro_batches.append([[unit]])
            room = [0]
    return micro_batches


def _split_group(members: Sequence[int], prompt: int, lengths: Sequence[int], budget: int) -> list[Unit]:
    units: list[Unit] = []
    open_unit = Unit((), prompt)
    for i in members:
        extra = max(lengths[i] - 1, 0)
        if open_unit.sequences and open_unit.size + extra > budget:
            units.append(open_unit)
            open_unit = Unit((), prompt)
        open_unit = Unit((*open_unit.sequences, i), open_unit.size + extra)
    return [*units, open_unit]


def pack_rows(batch: TokenBatch, rows: Rows) -> tuple[TokenBatch, Pack]:
    """Return the sequences of one micro-batch, and the pack whose ``predictor`` follows their token order."""
    sequences = [i for row in rows for unit in row for i in unit.sequences]
    micro = batch.select(torch.tensor(sequences, dtype=torch.long, device=batch.lengths.device))
    prompts = micro.prompt_ids.split(micro.prompt_lengths.tolist())
    completions = micro.token_ids.split(micro.lengths.tolist())
    group = micro.group.tolist()
    width = max(sum(unit.size for unit in row) for row in rows)
    shape = (len(rows), width)
    input_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    branch, unit_ids = torch.full(shape, -1), torch.full(shape, -1)
    predictor: list[Tensor] = []
    done = 0
    for r, row in enumerate(rows):
        column = 0
        for u, unit in enumerate(row):
            prompt = prompts[group[done]]
            unit_ids[r, column : column + unit.size] = u
            end = column + len(prompt)
            input_ids[r, column:end], branch[r, column:end] = prompt, 0
            position_ids[r, column:end] = torch.arange(len(prompt))
            last = r * width + end - 1
            for b in range(len(unit.sequences)):
                inputs = completions[done][:-1]
                start, end = end, end + len(inputs)
                input_ids[r, start:end], branch[r, start:end] = inputs, b + 1
                position_ids[r, start:end] = len(prompt) + torch.arange(len(inputs))
                first = torch.full((min(len(completions[done]), 1),), last)
                predictor += [first, r * width + torch.arange(start, end)]
                done += 1
            column = end
    plain = all(len(row) == 1 and len(row[0].sequences) == 1 for row in rows)
    flat = torch.cat(predictor) if predictor else torch.zeros(0, dtype=torch.long)
    if plain:
        # Padding continues the positions: a restart at 0 would read as a second packed sequence.
        position_ids = torch.arange(width).expand(shape).contiguous()
        return micro, Pack(input_ids, position_ids, None, None, flat)
    return micro, Pack(input_ids, position_ids, branch, unit_ids, flat)
