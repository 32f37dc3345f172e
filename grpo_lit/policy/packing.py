"""Micro-batches under a token budget, and the packs in which a transformer sees them.

A *unit* is a prompt followed by the completions that share it. In a pack the prompt stands once::

    row:       p0 p1 p2 | a0 a1 | b0 b1 b2        prompt, first completion, second completion
    position:   0  1  2    3  4    3  4  5        a completion continues from the prompt's end

The last token of a completion is never an input: nothing is predicted from it. The first token of every completion is
predicted from the prompt's last position. The units of a micro-batch lie in one row without padding; who sees whom is
in the pack's layout (see attention).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import groupby

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.policy.attention import Branch, Layout, make_layout


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
        layout: Which tokens of the one row make each sequence. ``None``: one sequence a row, plain causal.
        predictor: For each completion token of the batch, the flat position (row * L + column) that predicts it.
    """

    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"]
    layout: Layout | None
    predictor: Int[Tensor, "T"]

    def to(self, device: torch.device | str) -> "Pack":
        """Return the same pack on ``device``."""
        moved = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)


def plan_micro_batches(batch: TokenBatch, budget: int, share_prefix: bool) -> list[Rows]:
    """Split a batch into micro-batches of at most ``budget`` input tokens, padding included.

    Units that share prompts are spread evenly over as few micro-batches as hold them. Single sequences go in descending
    size, so that rows of a micro-batch are about equally wide. A group that is over the budget by itself is split, its
    prompt repeated; a single sequence over the budget gets a micro-batch of its own.

    Args:
        batch: Sequences to place; all of them are placed once.
        budget: Most tokens of a micro-batch (rows * columns).
        share_prefix: One copy of a prompt for its completions, and all units in one row; else one sequence a row.
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
    if share_prefix:
        return [[row] for row in _even_rows(units, budget)]
    micro_batches: list[Rows] = []
    for unit in units:
        if micro_batches and micro_batches[-1][0][0].size * (len(micro_batches[-1]) + 1) <= budget:
            micro_batches[-1].append([unit])
        else:
            micro_batches.append([[unit]])
    return micro_batches


def _even_rows(units: Sequence[Unit], budget: int) -> Rows:
    """Return rows of at most ``budget`` tokens, few and about equally long; units come in descending size."""
    first_fit: Rows = []
    #: Rows that some unit may yet fit into, and the tokens in each, so that many rows are not searched for every unit.
    unfilled: dict[int, int] = {}
    for unit in units:
        place = next((i for i, size in unfilled.items() if size + unit.size <= budget), len(first_fit))
        if place == len(first_fit):
            first_fit.append([])
        first_fit[place].append(unit)
        unfilled[place] = unfilled.get(place, 0) + unit.size
        if unfilled[place] + units[-1].size > budget:  # the smallest
            del unfilled[place]
    even: Rows = [[] for _ in first_fit]
    sizes = [(0, i) for i in range(len(even))]  # a heap: the shortest row comes first, and of equal ones the first
    for unit in units:
        size, place = sizes[0]
        even[place].append(unit)
        heapreplace(sizes, (size + unit.size, place))
    return even if all(_size(row) <= budget or len(row) == 1 for row in even) else first_fit


def _size(row: Sequence[Unit]) -> int:
    return sum(unit.size for unit in row)


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


def pack_rows(batch: TokenBatch, rows: Rows, masks: bool = True) -> tuple[TokenBatch, Pack]:
    """Return the sequences of one micro-batch, and the pack whose ``predictor`` follows their token order.

    Args:
        batch: The sequences.
        rows: Several hold one sequence each; one alone may hold anything.
        masks: See :func:`grpo_lit.policy.attention.make_layout`.
    """
    sequences = [i for row in rows for unit in row for i in unit.sequences]
    micro = batch.select(torch.tensor(sequences, dtype=torch.long, device=batch.lengths.device))
    prompts = micro.prompt_ids.split(micro.prompt_lengths.tolist())
    completions = micro.token_ids.split(micro.lengths.tolist())
    group = micro.group.tolist()
    width = max(_size(row) for row in rows)
    shape = (len(rows), width)
    input_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    branches: list[Branch] = []
    predictor: list[Tensor] = []
    done = 0
    for r, row in enumerate(rows):
        end = 0
        for unit in row:
            prompt, column = prompts[group[done]], end
            end = column + len(prompt)
            input_ids[r, column:end], position_ids[r, column:end] = prompt, torch.arange(len(prompt))
            last = r * width + end - 1
            for _ in unit.sequences:
                inputs = completions[done][:-1]
                start, end = end, end + len(inputs)
                input_ids[r, start:end] = inputs
                position_ids[r, start:end] = len(prompt) + torch.arange(len(inputs))
                branches.append(Branch((column, len(prompt)), (start, len(inputs))))
                first = torch.full((min(len(completions[done]), 1),), last)
                predictor += [first, r * width + torch.arange(start, end)]
                done += 1
    flat = torch.cat(predictor) if predictor else torch.zeros(0, dtype=torch.long)
    if all(len(row) == 1 and len(row[0].sequences) == 1 for row in rows):
        # Padding continues the positions: a restart at 0 would read as a second packed sequence.
        position_ids = torch.arange(width).expand(shape).contiguous()
        return micro, Pack(input_ids, position_ids, None, flat)
    return micro, Pack(input_ids, position_ids, make_layout(branches, width, masks), flat)
