"""The flat, ragged tensors of one optimizer step.

Completion tokens of all sequences lie one after the other in a vector of T tokens; nothing is padded, so there is no
mask to forget. A worked example, two completions of one prompt, the second of them empty::

    prompt_ids [3] = 12 9 31     prompt_lengths [1] = 3
    token_ids  [2] = 31 2        lengths        [2] = 2 0      group [2] = 0 0      sequence [2] = 0 0
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_lit.rollout import Completion, Group
from grpo_lit.shapes import SequenceBool, SequenceFloat, SequenceInt, TokenBool, TokenFloat, TokenInt

#: Sums a tensor over all ranks; the identity on one process.
SumRanks = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KeptTensors:
    """The tokens that the sampler left possible at each step; see :class:`grpo_lit.rollout.KeptTokens`.

    Attributes:
        ids: Possible tokens, step after step.
        counts: How many of them belong to each completion token; 0: the whole vocabulary was possible.
    """

    ids: Int[Tensor, "E"]
    counts: TokenInt


@dataclass(frozen=True)
class TokenBatch:
    """S sequences of N prompts, T completion tokens in all.

    Attributes:
        prompt_ids: Prompts, one after the other, each once however many completions it has.
        prompt_lengths: Tokens of each prompt.
        group: Which prompt each sequence answers.
        token_ids: Completion tokens.
        lengths: Completion tokens of each sequence; 0 is allowed.
        sampler_logprobs: The engine's log-prob of each token [nats].
        rewards: Total reward of each sequence.
        scores: Each reward component of each sequence, NaN where it abstained.
        domain: Index into ``domains`` of each sequence.
        weight_version: ``global_step`` of the weights that sampled each sequence, or the first of its tokens.
        advantages: Set by the objective before the first update on a rollout.
        weights: The reduction's weight of each sequence; set per optimizer step.
        old_logprobs: Log-probs under the old policy; ``None`` while they equal the current ones.
        reference_logprobs: Log-probs under the frozen reference; ``None`` where no KL asks for them.
        old_entropy: Entropy of the old policy at each token [nats]; ``None`` unless a selection asks for it.
        selected: Tokens whose surrogate trains; ``None``: all.
        truncated: Whether each sequence ran into the length limit.
        masked: Whether a callback left each sequence out of the loss; ``None``: none of them.
        sample: Where each sequence's completion stands among all completions of the groups; ``None``: unknown.
        stale: Whether older weights than this rollout's sampled each sequence: its old policy is the sampler.
        own: Whether each sequence's old policy is the policy itself, whatever ``old_logprobs`` holds; ``None``: no.
        prompt: Index of each sequence's prompt in the rollout, over all ranks; ``None``: ``group``, on one rank.
        shadow_advantages: Advantages of each shadow objective, one column each.
        shadow_weights: Weights of each shadow objective.
        kept_ids: Tokens that the sampler left possible, step after step; ``None``: all of them, everywhere.
        kept_counts: How many of those belong to each token; 0: the whole vocabulary was possible.
        versions: ``global_step`` of the weights that sampled each token; ``None``: each its sequence's.
        temperature: Sampling temperature, for every log-prob of this batch.
        domains: Names of the domains.
        score_names: Names of the columns of ``scores``.
    """

    prompt_ids: Int[Tensor, "P"]
    prompt_lengths: Int[Tensor, "N"]
    group: SequenceInt
    token_ids: TokenInt
    lengths: SequenceInt
    sampler_logprobs: TokenFloat
    rewards: SequenceFloat
    scores: Float[Tensor, "S K"]
    domain: SequenceInt
    weight_version: SequenceInt
    advantages: SequenceFloat | None = None
    weights: SequenceFloat | None = None
    old_logprobs: TokenFloat | None = None
    reference_logprobs: TokenFloat | None = None
    old_entropy: TokenFloat | None = None
    selected: TokenBool | None = None
    truncated: SequenceBool | None = None
    masked: SequenceBool | None = None
    sample: SequenceInt | None = None
    stale: SequenceBool | None = None
    own: SequenceBool | None = None
    prompt: SequenceInt | None = None
    shadow_advantages: Float[Tensor, "S M"] | None = None
    shadow_weights: Float[Tensor, "S M"] | None = None
    kept_ids: Int[Tensor, "E"] | None = None
    kept_counts: TokenInt | None = None
    versions: TokenInt | None = None
    temperature: float = 1.0
    domains: tuple[str, ...] = ("default",)
    score_names: tuple[str, ...] = ()

    @property
    def sequence(self) -> TokenInt:
        """Which sequence each token belongs to [T]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    @property
    def token_versions(self) -> TokenInt:
        """``global_step`` of the weights that sampled each token."""
        return self.weight_version[self.sequence] if self.versions is None else self.versions

    @property
    def kept(self) -> KeptTensors | None:
        """What log-probs are normalised over; ``None``: the whole vocabulary, everywhere."""
        return None if self.kept_ids is None else KeptTensors(self.kept_ids, self.kept_counts)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @classmethod
    def from_groups(cls, groups: Sequence[Group], temperature: float, score_names: Sequence[str] = ()) -> "TokenBatch":
        """Flatten groups; samples whose reward is ``None`` or NaN are left out, as if never drawn.

        Args:
            groups: Scored groups.
            temperature: The one they were sampled at.
            score_names: Columns of ``scores``, the same on every rank.

        Raises:
            ValueError: A sampled token is not among those that were possible.
        """
        domains = tuple(sorted({g.prompt.domain for g in groups})) or ("default",)
        rows = [(n, i) for n, g in enumerate(groups) for i, reward in enumerate(g.rewards) if _is_known(reward)]
        completions = [groups[n].completions[i] for n, i in rows]
        starts = list(accumulate((len(g.completions) for g in groups), initial=0))
        scores = [[_nan_if_none(groups[n].scores[name][i]) for name in score_names] for n, i in rows]
        kept = _kept(completions)
        crossed = any(c.versions is not None for c in completions)
        return cls(
            prompt_ids=_ints([t for g in groups for t in g.prompt.token_ids]),
            prompt_lengths=_ints([len(g.prompt.token_ids) for g in groups]),
            group=_ints([n for n, _ in rows]),
            token_ids=_ints([t for c in completions for t in c.token_ids]),
            lengths=_ints([len(c.token_ids) for c in completions]),
            sampler_logprobs=_floats([p for c in completions for p in c.logprobs]),
            rewards=_floats([groups[n].rewards[i] for n, i in rows]),
            scores=_floats(scores).reshape(len(rows), len(score_names)),
            domain=_ints([domains.index(groups[n].prompt.domain) for n, _ in rows]),
            weight_version=_ints([c.weight_version for c in completions]),
            truncated=torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool),
            masked=torch.tensor([bool(groups[n].masked) and groups[n].masked[i] for n, i in rows], dtype=torch.bool),
            sample=_ints([starts[n] + i for n, i in rows]),
            kept_ids=None if kept is None else kept.ids,
            kept_counts=None if kept is None else kept.counts,
            versions=_ints([v for c in completions for v in c.token_versions]) if crossed else None,
            temperature=temperature,
            domains=domains,
            score_names=tuple(score_names),
        )

    def token_positions(self, sequences: SequenceInt) -> Int[Tensor, "t"]:
        """Return where the tokens of these sequences lie in T, in the order given."""
        return segment_indices(self.lengths, sequences)

    def select(self, sequences: SequenceInt) -> "TokenBatch":
        """Return these sequences only, in the order given, with the prompts they need and no others."""
        tokens = self.token_positions(sequences)
        groups, group = torch.unique(self.group[sequences], return_inverse=True)
        per_token = (
            "token_ids",
            "sampler_logprobs",
            "old_logprobs",
            "reference_logprobs",
            "old_entropy",
            "selected",
            "kept_counts",
            "versions",
        )
        per_sequence = (
            "lengths",
            "rewards",
            "scores",
            "domain",
            "weight_version",
            "advantages",
            "weights",
            "truncated",
            "masked",
            "sample",
            "stale",
            "own",
            "prompt",
            "shadow_advantages",
            "shadow_weights",
        )
        picked: dict[str, Any] = {name: _pick(getattr(self, name), tokens) for name in per_token}
        picked |= {name: _pick(getattr(self, name), sequences) for name in per_sequence}
        if self.kept_ids is not None:
            picked["kept_ids"] = self.kept_ids[segment_indices(self.kept_counts, tokens)]
        return replace(
            self,
            prompt_ids=self.prompt_ids[segment_indices(self.prompt_lengths, groups)],
            prompt_lengths=self.prompt_lengths[groups],
            group=group,
            **picked,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TokenBatch":
        """Return the same batch on ``device``."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def segment_indices(lengths: Int[Tensor, "A"], segments: Int[Tensor, "B"]) -> Int[Tensor, "C"]:
    """Return the flat positions of the chosen segments, in the order given.

    Example: ``segment_indices(tensor([2, 3, 1]), tensor([2, 0])) == tensor([5, 0, 1])``.
    """
    starts = (lengths.cumsum(0) - lengths)[segments]
    chosen = lengths[segments]
    offset = torch.repeat_interleave(starts - (chosen.cumsum(0) - chosen), chosen)
    return torch.arange(len(offset), device=lengths.device) + offset


def _pick(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]


def _kept(completions: Sequence[Completion]) -> KeptTensors | None:
    """Return the kept tokens of all completions, one after the other; ``None`` where nothing was ever impossible."""
    if all(c.kept is None for c in completions):
        return None
    counts = [c.kept.counts if c.kept is not None else (0,) * len(c.token_ids) for c in completions]
    packed = b"".join(c.kept.ids for c in completions if c.kept is not None)
    kept = KeptTensors(
        torch.from_numpy(np.frombuffer(packed, dtype=np.int32).copy()), _ints([n for part in counts for n in part])
    )
    token_ids = _ints([t for c in completions for t in c.token_ids])
    owner = torch.repeat_interleave(torch.arange(len(token_ids)), kept.counts)
    is_kept = (kept.counts == 0).index_fill(0, owner[kept.ids == token_ids[owner]], True)
    if not bool(is_kept.all()):
        token = int(token_ids[~is_kept][0])
        raise ValueError(
            f"`kept` expected every sampled token among those that were possible, but token {token} is not"
        )
    return kept


def _is_known(reward: float | None) -> bool:
    return reward is not None and not math.isnan(reward)


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _floats(values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
