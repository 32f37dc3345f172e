"""Attention over shared-prefix packs: every sequence sees its prompt and itself, and nothing else is computed.

A pack holds each prompt once, so the keys of a sequence do not lie side by side. They are gathered, sequences of about
equal length together, and SDPA's causal kernel does the rest: no mask, and no product of two siblings' tokens::

    pack       p0 p1 p2 a0 a1 b0            two completions of one prompt
    gathered   p0 p1 p2 a0 a1               row 0
               p0 p1 p2 b0  .               row 1; padding comes last, where causal attention does not see it

A prompt's own output is read off the first row that holds it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: Name under which transformers knows :func:`packed_attention`.
PACKED = "grpo_lit_packed"
#: A sequence shorter than this share of the longest of its table begins another one, which pads it less.
SHORTEST_SHARE = 0.75


@dataclass(frozen=True)
class Layout:
    """Which tokens of a pack make each sequence.

    Attributes:
        tables: Columns of the pack, a row for each sequence, longest first; 0 after its end.
        source: Where each column's output lies in the rows of all tables, one after the other.
    """

    tables: tuple[Int[Tensor, "_ _"], ...]
    source: Int[Tensor, "L"]

    def to(self, device: torch.device | str) -> "Layout":
        """Return the same layout on ``device``."""
        return Layout(tuple(table.to(device) for table in self.tables), self.source.to(device))


@dataclass(frozen=True)
class Branch:
    """A sequence in a pack: a prompt, and the columns that continue it.

    Attributes:
        prompt: First column and number of columns of the prompt.
        inputs: First column and number of columns of the completion's inputs.
    """

    prompt: tuple[int, int]
    inputs: tuple[int, int]

    @property
    def size(self) -> int:
        """Columns in all."""
        return self.prompt[1] + self.inputs[1]


def make_layout(branches: list[Branch], columns: int) -> Layout:
    """Return the layout of a pack of this many columns.

    Args:
        branches: All sequences. One without inputs is left out where another holds its prompt.
        columns: L.
    """
    longest_first = sorted(branches, key=lambda branch: -branch.size)
    tables: list[list[Branch]] = []
    covered: set[int] = set()
    for branch in longest_first:
        if not branch.inputs[1] and branch.prompt[0] in covered:
            continue
        covered.add(branch.prompt[0])
        if not tables or branch.size < SHORTEST_SHARE * tables[-1][0].size:
            tables.append([])
        tables[-1].append(branch)
    source, built, offset = torch.full((columns,), -1), [], 0
    for rows in tables:
        table = torch.zeros(len(rows), rows[0].size, dtype=torch.long)
        for row, branch in zip(table, rows, strict=True):
            (start, size), (first, count) = branch.prompt, branch.inputs
            row[:size] = torch.arange(start, start + size)
            row[size : size + count] = torch.arange(first, first + count)
            if source[start] < 0:
                source[start : start + size] = torch.arange(offset, offset + size)
            source[first : first + count] = torch.arange(offset + size, offset + size + count)
            offset += len(row)
        built.append(table)
    return Layout(tuple(built), source)


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "R A L D"],
    key: Float[Tensor, "R C L D"],
    value: Float[Tensor, "R C L E"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "R L A E"], None]:
    """Attend as transformers' SDPA does, and over a pack where a layout is given.

    Args:
        module: The attention layer.
        query: Rotated queries.
        key: Rotated keys; heads may be fewer than those of queries.
        value: Values.
        attention_mask: Of rows that are no pack.
        scaling: Times the products; ``None``: 1 / sqrt(D).
        layout: Of a pack, which is one row.
        kwargs: What else transformers gives its attention functions.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    shared = key.shape[1] != query.shape[1]
    outputs = []
    for table in layout.tables:
        q, k, v = (_gathered(part, table) for part in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared)
        outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
    joined = nn.functional.embedding(layout.source, torch.cat(outputs))
    return joined.view(1, len(layout.source), query.shape[1], -1), None


def _gathered(heads: Float[Tensor, "1 A L D"], table: Int[Tensor, "B W"]) -> Float[Tensor, "B A W D"]:
    # An embedding adds up the gradients of a column that is in several rows many times faster than indexing does.
    columns = heads[0].transpose(0, 1).flatten(1)
    return nn.functional.embedding(table, columns).unflatten(2, heads.shape[1::2]).transpose(1, 2)


def no_mask(like: Tensor) -> Tensor:
    """Return the mask to hand over with a layout: transformers makes none of its own beside it.

    A layer that loses the layout fails on its shape, where it would otherwise see other sequences.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=like.device)


def attend_to_packs(model: PreTrainedModel) -> None:
    """Make the layers of a model take a ``layout``; without one nothing changes."""
    model.set_attn_implementation(PACKED)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
