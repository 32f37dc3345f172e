"""A policy small enough to enumerate: a few tokens, a few steps, one logit per (prompt, prefix, token).

Token 0 ends a completion. A completion is truncated at ``max_length`` tokens. With 3 tokens and length 3 there are 7
prefixes and 15 completions of each prompt, and everything about them is a finite sum, taken in float64.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_lit.batch import TokenBatch, segment_indices
from grpo_lit.errors import ConfigError
from grpo_lit.shapes import TokenInt

#: The token that ends a completion.
EOS = 0

#: What the rewards say of a completion: (prompt, tokens) -> one score per reward.
Scorer = Callable[[int, tuple[int, ...]], tuple[float, ...]]


def count_and_stop(prompt: int, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Score the default task: say token 1 exactly ``prompt + 1`` times (1 point), and stop (1 point).

    Prompt 0 has right answers of several lengths, prompt 1 is harder.
    """
    stops = tokens[-1] == EOS
    return float(stops and tokens.count(1) == prompt + 1), float(stops)


@dataclass(frozen=True)
class World:
    """Prompts, completions and their rewards.

    Axes: ``X`` prompts, ``Y`` completions of a prompt, ``C`` contexts (a prompt and a prefix), ``V`` tokens.

    Attributes:
        vocabulary: V, the end token included.
        max_length: Most tokens of a completion.
        prompts: X; every prompt is drawn equally often.
        scorer: What the rewards say; the total reward is the sum.
        score_names: Names of the rewards.
    """

    vocabulary: int = 3
    max_length: int = 3
    prompts: int = 1
    scorer: Scorer = count_and_stop
    score_names: tuple[str, ...] = ("correct", "stops")

    def __post_init__(self) -> None:
        """Refuse a world without a choice."""
        for name, least in (("vocabulary", 2), ("max_length", 1), ("prompts", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"`{name}` of the lab expected to be >= {least}, but got {value}")

    @cached_property
    def prefixes(self) -> tuple[tuple[int, ...], ...]:
        """Return everything that can be said before a token: no end token, shorter than ``max_length``."""
        words = range(1, self.vocabulary)
        return tuple(p for n in range(self.max_length) for p in itertools.product(words, repeat=n))

    @cached_property
    def completions(self) -> tuple[tuple[int, ...], ...]:
        """Return all completions, those that stop and those that are cut."""
        words = range(1, self.vocabulary)
        stopped = [(*prefix, EOS) for prefix in self.prefixes]
        return (*stopped, *itertools.product(words, repeat=self.max_length))

    @cached_property
    def lengths(self) -> Int[Tensor, "Y"]:
        """Return the tokens of each completion."""
        return torch.tensor([len(c) for c in self.completions])

    @cached_property
    def scores(self) -> Float[Tensor, "X Y K"]:
        """Return what each reward says of each completion."""
        table = [[self.scorer(x, completion) for completion in self.completions] for x in range(self.prompts)]
        return torch.tensor(table, dtype=torch.float64)

    @property
    def rewards(self) -> Float[Tensor, "X Y"]:
        """Return the total reward of each completion."""
        return self.scores.sum(-1)

    @property
    def contexts(self) -> int:
        """C."""
        return self.prompts * len(self.prefixes)

    def random_logits(self, scale: float, seed: int) -> Float[Tensor, "C V"]:
        """Return normal logits of a standard deviation."""
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(self.contexts, self.vocabulary, dtype=torch.float64, generator=generator)

    @cached_property
    def _flat_tokens(self) -> TokenInt:
        """Return the tokens of all completions, one after the other."""
        return torch.tensor([token for completion in self.completions for token in completion])

    @cached_property
    def _next_prefix(self) -> Int[Tensor, "P V"]:
        """Return the prefix that a prefix and a token make; 0 after the last token, where none is asked for."""
        index = {prefix: n for n, prefix in enumerate(self.prefixes)}
        table = [[index.get((*prefix, token), 0) for token in range(self.vocabulary)] for prefix in self.prefixes]
        return torch.tensor(table)

    def tokens(self, completion: Int[Tensor, "S"]) -> TokenInt:
        """Return the tokens of these completions, one completion after the other."""
        return self._flat_tokens[segment_indices(self.lengths, completion)]

    def token_contexts(self, prompt: Int[Tensor, "S"], token_ids: TokenInt, lengths: Int[Tensor, "S"]) -> TokenInt:
        """Return in which context every token of these completions was said."""
        start = lengths.cumsum(0) - lengths
        result = torch.empty_like(token_ids)
        prefix, left = torch.zeros_like(start), torch.arange(len(lengths))
        for t in range(self.max_length):
            alive = lengths[left] > t
            left, prefix = left[alive], prefix[alive]
            result[start[left] + t] = prompt[left] * len(self.prefixes) + prefix
            prefix = self._next_prefix[prefix, token_ids[start[left] + t]]
        return result

    def completion_logprobs(self, logits: Float[Tensor, "C V"]) -> Float[Tensor, "X Y"]:
        """Return the log-probability of every completion of every prompt, with gradient."""
        prompt, completion = torch.meshgrid(
            torch.arange(self.prompts), torch.arange(len(self.completions)), indexing="ij"
        )
        lengths, tokens = self.lengths[completion.flatten()], self.tokens(completion.flatten())
        logprobs = logits.log_softmax(-1)[self.token_contexts(prompt.flatten(), tokens, lengths), tokens]
        owner = torch.repeat_interleave(torch.arange(prompt.numel()), lengths)
        return logprobs.new_zeros(prompt.numel()).index_add(0, owner, logprobs).view(prompt.shape)

    def expected_reward(self, logits: Float[Tensor, "C V"]) -> Float[Tensor, ""]:
        """Return J = mean_x sum_y pi(y|x) R(x, y), with gradient."""
        return (self.completion_logprobs(logits).exp() * self.rewards).sum(-1).mean()

    def policy_gradient(self, logits: Float[Tensor, "C V"]) -> Float[Tensor, "C V"]:
        """Return the exact gradient of J."""
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(self.expected_reward(leaf), leaf)[0]

    def divergence(self, first: Float[Tensor, "C V"], second: Float[Tensor, "C V"]) -> Float[Tensor, ""]:
        """Return KL(first || second) between whole completions, the mean over prompts [nats]."""
        logprobs, other = self.completion_logprobs(first), self.completion_logprobs(second)
        return (logprobs.exp() * (logprobs - other)).sum(-1).mean()

    def batch(self, prompt: Int[Tensor, "N"], members: Int[Tensor, "N G"], policies: "Policies") -> TokenBatch:
        """Return groups of completions as the learner gets them, in float64.

        Args:
            prompt: Prompt of each group.
            members: Completion of each member of each group.
            policies: Who drew them, who is the old policy, who is the reference.
        """
        groups, size = members.shape
        group = torch.repeat_interleave(torch.arange(groups), size)
        owner, completion = prompt[group], members.flatten()
        lengths, tokens = self.lengths[completion], self.tokens(completion)
        contexts = self.token_contexts(owner, tokens, lengths)

        def of(logits: Tensor | None) -> Tensor | None:
            return None if logits is None else logits.log_softmax(-1)[contexts, tokens]

        old = policies.current if policies.old is None else policies.old
        return TokenBatch(
            prompt_ids=prompt,
            prompt_lengths=torch.ones_like(prompt),
            group=group,
            token_ids=tokens,
            lengths=lengths,
            sampler_logprobs=policies.sampler.log_softmax(-1)[contexts, tokens],
            rewards=self.rewards[owner, completion],
            scores=self.scores[owner, completion],
            domain=torch.zeros_like(owner),
            weight_version=torch.zeros_like(owner),
            old_logprobs=of(policies.old),
            reference_logprobs=of(policies.reference),
            old_entropy=entropy_of(old)[contexts],
            truncated=tokens[lengths.cumsum(0) - 1] != EOS,
            score_names=self.score_names,
        )


@dataclass(frozen=True)
class Policies:
    """Logits of every policy that a loss may look at.

    Attributes:
        current: The policy being trained.
        sampler: The policy that drew the completions.
        old: The old policy; ``None`` while it is the current one.
        reference: The reference; ``None`` where no KL asks for it.
    """

    current: Float[Tensor, "C V"]
    sampler: Float[Tensor, "C V"]
    old: Float[Tensor, "C V"] | None = None
    reference: Float[Tensor, "C V"] | None = None


def entropy_of(logits: Float[Tensor, "C V"]) -> Float[Tensor, "C"]:
    """Return the entropy of the next token in every context [nats]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
