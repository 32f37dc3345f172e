"""Attention over shared-prefix packs: every sequence sees its prompt and itself, and nothing else is computed.

A pack holds each prompt once, so the keys of a sequence do not lie side by side. They are gathered, sequences of about
equal length together. With masks, a prompt attends once and a completion's rows have the completion's queries alone::

    pack       p0 p1 p2 a0 a1 b0            two completions of one prompt
    keys       p0 p1 p2                     queries  p0 p1 p2     causal
    keys       p0 p1 p2 a0 a1               queries  a0 a1        key j is seen by query i where j <= 3 + i
               p0 p1 p2 b0  .                        b0  .        padding comes last, where nobody looks

Without, every row is a whole sequence under SDPA's causal kernel, and a prompt's own output is read off the first row
that holds it: more products, but no mask, which CUDA's kernels for long sequences do not take.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import sdpa_mask

from grpo_lit.policy.cpu_attention import attend, fits

#: Name under which transformers knows :func:`packed_attention`.
PACKED = "grpo_lit_packed"
#: Rows of a table are at least this share of its longest: the others have tables of their own, which pad them less.
SHORTEST_SHARE = 0.75


@dataclass(frozen=True)
class Table:
    """Rows of one attention: columns of the pack, 0 after a row's end.

    Attributes:
        keys: A sequence each.
        queries: The columns of it whose output is computed.
        mask: Whether a query sees a key; ``None``: queries are keys, and each sees those up to itself.
    """

    keys: Int[Tensor, "B W"]
    queries: Int[Tensor, "B Q"]
    mask: Bool[Tensor, "B 1 Q W"] | None = None

    def to(self, device: torch.device | str) -> "Table":
        """Return the same table on ``device``."""
        mask = None if self.mask is None else self.mask.to(device)
        return Table(self.keys.to(device), self.queries.to(device), mask)

    @cached_property
    def bias(self) -> Float[Tensor, "B Q W"]:
        """What to add to scores in bf16: 0 where a query sees a key, -inf where not."""
        rows, width = self.keys.shape
        seen = torch.ones(width, width, dtype=torch.bool).tril()[None] if self.mask is None else self.mask[:, 0]
        bias = torch.full(seen.shape, float("-inf"), dtype=torch.bfloat16).masked_fill_(seen, 0.0)
        return bias.expand(rows, -1, -1)


@dataclass(frozen=True)
class Layout:
    """Which tokens of a pack make each sequence.

    Attributes:
        tables: Of sequences of about equal length.
        source: Where each column's output lies in the queries of all tables, one row after the other.
    """

    tables: tuple[Table, ...]
    source: Int[Tensor, "L"]

    def to(self, device: torch.device | str) -> "Layout":
        """Return the same layout on ``device``."""
        return Layout(tuple(table.to(device) for table in self.tables), self.source.to(device))


#: First column and number of columns of tokens that lie side by side.
Span = tuple[int, int]


@dataclass(frozen=True)
class Branch:
    """A sequence in a pack: a prompt, and the columns that continue it.

    Attributes:
        prompt: Columns of the prompt.
        inputs: Columns of the completion's inputs.
    """

    prompt: Span
    inputs: Span


@dataclass(frozen=True)
class _Row:
    """A row of a table.

    Attributes:
        before: Keys that every query sees.
        own: Queries, which are the keys after those.
    """

    before: Span
    own: Span

    @property
    def keys(self) -> int:
        return self.before[1] + self.own[1]


def make_layout(branches: list[Branch], columns: int, masks: bool) -> Layout:
    """Return the layout of a pack of this many columns.

    Args:
        branches: All sequences.
        columns: L.
        masks: Compute a prompt's queries once, and a completion's under a mask; else those of whole sequences.
    """
    prompts = [_Row((0, 0), prompt) for prompt in dict.fromkeys(branch.prompt for branch in branches)]
    if masks:
        rows = prompts + [_Row(branch.prompt, branch.inputs) for branch in branches if branch.inputs[1]]
    else:
        longest_first = sorted(branches, key=lambda branch: -branch.inputs[1])
        alone = {branch.prompt for branch in branches} - {b.prompt for b in branches if b.inputs[1]}
        rows = [_Row(b.prompt, b.inputs) for b in longest_first if b.inputs[1]]
        rows += [row for row in prompts if row.own in alone]
    alike: dict[tuple[bool, int, int], list[_Row]] = {}
    for row in rows:
        # With masks both sides of the square are padded, without only one.
        sizes = (_class(row.own[1]) if masks else 0, _class(row.keys))
        alike.setdefault((masks and row.before[1] > 0, *sizes), []).append(row)
    source, offset, tables = torch.full((columns,), -1), 0, []
    for (masked, *_), members in alike.items():
        tables.append(_table(members, masked))
        width = tables[-1].queries.shape[1]
        for row in members:
            spans = [row.own] if masked else [row.before, row.own]
            start = offset
            for first, count in spans:
                if count and source[first] < 0:
                    source[first : first + count] = torch.arange(start, start + count)
                start += count
            offset += width
    return Layout(tuple(tables), source)


def _class(size: int) -> int:
    """Return the class of a size: two of one class are at least :data:`SHORTEST_SHARE` of each other."""
    return -1 if size < 1 else math.floor(math.log(size) / -math.log(SHORTEST_SHARE))


def _table(rows: list[_Row], masked: bool) -> Table:
    width = max(row.keys for row in rows)
    keys = torch.zeros(len(rows), width, dtype=torch.long)
    for line, row in zip(keys, rows, strict=True):
        (start, size), (first, count) = row.before, row.own
        line[:size] = torch.arange(start, start + size)
        line[size : size + count] = torch.arange(first, first + count)
    if not masked:
        return Table(keys, keys)
    queries = torch.zeros(len(rows), max(row.own[1] for row in rows), dtype=torch.long)
    for line, row in zip(queries, rows, strict=True):
        line[: row.own[1]] = torch.arange(row.own[0], row.own[0] + row.own[1])
    seen = torch.tensor([row.before[1] for row in rows])[:, None] + torch.arange(queries.shape[1])
    # Padding sees something too: a softmax over nothing is NaN, and spoils the gradient of its column.
    return Table(keys, queries, (torch.arange(width) <= seen[:, :, None])[:, None])


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
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    device = query.device.type
    if torch.is_autocast_enabled(device):  # before columns are gathered, which are more
        query, key, value = (heads.to(torch.get_autocast_dtype(device)) for heads in (query, key, value))
    products = device == "cpu" and query.dtype == torch.bfloat16
    outputs = []
    for table in layout.tables:
        q, k, v = _gathered(query, table.queries), _gathered(key, table.keys), _gathered(value, table.keys)
        held = products and fits(q, k)
        output = attend(q, k, v, table.bias, scaling) if held else _fused(q, k, v, table.mask, scaling)
        outputs.append(output.flatten(0, 1).flatten(1))
    joined = nn.functional.embedding(layout.source, torch.cat(outputs))
    return joined.view(1, len(layout.source), query.shape[1], -1), None


def _fused(
    query: Float[Tensor, "B Q A D"],
    key: Float[Tensor, "B W C D"],
    value: Float[Tensor, "B W C E"],
    mask: Bool[Tensor, "B 1 Q W"] | None,
    scaling: float,
) -> Float[Tensor, "B Q A E"]:
    q, k, v = (tokens.transpose(1, 2) for tokens in (query, key, value))
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and q.device.type != "cpu" and not use_gqa_in_sdpa(mask, k, v):
        # CUDA has no fused kernel for heads that share keys there, and would hold all scores.
        k, v, shared = repeat_kv(k, shared), repeat_kv(v, shared), 1
    output = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=shared > 1
    )
    return output.transpose(1, 2)


def _gathered(heads: Float[Tensor, "1 A L D"], table: Int[Tensor, "B W"]) -> Float[Tensor, "B W A D"]:
    # An embedding adds up the gradients of a column that is in several rows many times faster than indexing does.
    columns = heads[0].transpose(0, 1).flatten(1)
    return nn.functional.embedding(table, columns).unflatten(2, heads.shape[1::2])


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
