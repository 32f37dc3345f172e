"""The data that flows from the prompt source to the learner.

A worked example, one group of two completions of one prompt::

    prompt = Prompt(id="chain_sum/7", question="3 + 4 =", answer="7", token_ids=(12, 9, 31))
    right = Completion(token_ids=(31, 2), logprobs=(-0.1, -0.3), text="7", finish_reason="stop", weight_version=0)
    wrong = Completion(token_ids=(45, 2), logprobs=(-2.1, -0.2), text="9", finish_reason="stop", weight_version=0)
    group = Group(prompt, epoch=0, completions=(right, wrong))
    group.scores = {"answer": [1.0, 0.0]}      # what each reward said
    group.rewards = [1.0, 0.0]                 # their weighted sum, which callbacks may shape
    group.correct = [True, False]              # never shaped: dynamic sampling and accuracy look here

Everything here is plain Python, so that a checkpoint can hold it and a worker process can receive it.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from grpo_lit.errors import ConfigError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question with what is needed to judge its answers.

    Attributes:
        id: Unique in its source and the same on every rank; sampling seeds derive from it.
        question: The question, before any chat template.
        answer: The ground truth a verifier compares with; ``None`` where a reward needs none.
        domain: Name that drives per-domain KL and per-domain metrics.
        token_ids: The prompt as the model sees it, chat template applied.
        metadata: Anything a reward needs, plain types only.
    """

    id: str
    question: str
    answer: str | None = None
    domain: str = "default"
    token_ids: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that top-k, top-p and min-p left possible at each step of a completion: its sampling mask, ragged.

    The learner renormalises its log-probs over them, so that sampler and learner speak of the same distribution
    (Keep Sampling Mask of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    Attributes:
        counts: How many tokens were possible at each step, the sampled one among them.
        ids: Their ids, step after step, 4 bytes each: a tuple of them would take nine times the memory.
    """

    counts: tuple[int, ...]
    ids: bytes

    def __post_init__(self) -> None:
        """Refuse ids that do not belong to the counts."""
        if len(self.ids) != 4 * sum(self.counts):
            raise ValueError(f"`ids` expected 4 bytes for each of {sum(self.counts)} tokens, but got {len(self.ids)}")

    @classmethod
    def of(cls, steps: Iterable[Sequence[int]]) -> "KeptTokens":
        """Pack one list of ids per step."""
        steps = list(steps)
        return cls(tuple(len(ids) for ids in steps), array("i", [i for ids in steps for i in ids]).tobytes())

    def steps(self) -> list[tuple[int, ...]]:
        """Return the ids of each step."""
        flat, ends = array("i", self.ids), accumulate(self.counts)
        return [tuple(flat[end - count : end]) for end, count in zip(ends, self.counts, strict=True)]


@dataclass(frozen=True)
class Completion:
    """One sampled answer: exactly the tokens that the sampler emitted, never re-encoded.

    Attributes:
        token_ids: Emitted tokens, the stop token included when there is one. May be empty.
        logprobs: The sampler's own log-prob of each token [nats], after the temperature and among the kept tokens.
        text: The tokens decoded without special tokens.
        finish_reason: ``stop`` when a stop token came (at the cap too), else ``length``.
        weight_version: ``global_step`` of the weights that sampled it; of those that sampled its first token, where it
            went on across a weight update: no token is older.
        kept: The tokens that were possible at each step; ``None``: the whole vocabulary at every step.
        versions: ``global_step`` of the weights that sampled each token; ``None``: ``weight_version``, all of them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    weight_version: int
    kept: KeptTokens | None = None
    versions: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse a completion whose log-probs, kept tokens or versions do not belong to its tokens."""
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"`logprobs` expected one value per token ({len(self.token_ids)}), but got {len(self.logprobs)}"
            )
        if self.kept is not None and len(self.kept.counts) != len(self.token_ids):
            raise ValueError(
                f"`kept` expected one set per token ({len(self.token_ids)}), but got {len(self.kept.counts)}"
            )
        if self.versions is not None:
            if len(self.token_ids) != len(self.versions):
                raise ValueError(
                    f"`versions` expected one per token ({len(self.token_ids)}), but got {len(self.versions)}"
                )
            if any(after < before for before, after in pairwise((self.weight_version, *self.versions))):
                raise ValueError(f"`versions` expected to rise from {self.weight_version}, but got {self.versions}")

    @property
    def token_versions(self) -> tuple[int, ...]:
        """``global_step`` of the weights that sampled each token."""
        return (self.weight_version,) * len(self.token_ids) if self.versions is None else self.versions

    def sampled_by(self, versions: Sequence[int]) -> "Completion":
        """Return the same completion with the version of the weights that sampled each token."""
        if not versions:
            return self
        mixed = versions[0] != versions[-1]
        return replace(self, weight_version=versions[0], versions=tuple(versions) if mixed else None)


@dataclass
class Group:
    """The completions of one prompt, and what the rewards said of them.

    Attributes:
        prompt: The question.
        epoch: Which pass over the source this is; part of the sampling seed.
        completions: The G samples.
        scores: Per reward name, G scores; ``None`` where that reward abstained.
        rewards: G weighted sums of the scores, shaped by callbacks; ``None`` drops the sample.
        correct: G flags of the verifier, kept apart from any shaping; ``None`` where nobody could tell.
        masked: G flags set by callbacks: such a sample counts in its group's baseline and is not trained on. Empty:
            none of them.
    """

    prompt: Prompt
    epoch: int
    completions: tuple[Completion, ...]
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    correct: list[bool | None] = field(default_factory=list)
    masked: list[bool] = field(default_factory=list)

    @property
    def oldest_version(self) -> int:
        """``global_step`` of the oldest weights that sampled any token of it."""
        return min(completion.weight_version for completion in self.completions)

    def first(self, count: int) -> "Group":
        """Return the group that its first samples make."""
        return Group(
            self.prompt,
            self.epoch,
            self.completions[:count],
            {name: scores[:count] for name, scores in self.scores.items()},
            self.rewards[:count],
            self.correct[:count],
            self.masked[:count],
        )

    def copied(self) -> "Group":
        """Return a group that shares nothing that can be changed."""
        return self.first(len(self.completions))

    def state_dict(self) -> dict[str, Any]:
        """Return plain types only, which ``torch.load(weights_only=True)`` accepts."""
        # Not dataclasses.asdict: it copies every token one by one.
        completions = [{**vars(c), "kept": None if c.kept is None else dict(vars(c.kept))} for c in self.completions]
        return {**vars(self), "prompt": dict(vars(self.prompt)), "completions": completions}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Group":
        """Rebuild a group written by :meth:`state_dict`."""
        prompt = Prompt(**{**state["prompt"], "token_ids": tuple(state["prompt"]["token_ids"])})
        completions = tuple(_completion(c) for c in state["completions"])
        return cls(**{**state, "prompt": prompt, "completions": completions})


def _completion(state: dict[str, Any]) -> Completion:
    kept = state.get("kept")  # checkpoints older than the field have none
    kept = None if kept is None else KeptTokens(tuple(kept["counts"]), kept["ids"])
    tokens = {name: tuple(state[name]) for name in ("token_ids", "logprobs")}
    versions = state.get("versions")  # older ones have none of these either
    versions = None if versions is None else tuple(versions)
    return Completion(**{**state, **tokens, "kept": kept, "versions": versions})


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    What ``min_p``, ``top_k`` and ``top_p`` leave possible, applied in this order after the temperature, is recorded
    with every token, and the learner renormalises over it. Greedy decoding ignores them.

    Attributes:
        temperature: Logits are divided by it, in the engine and in the learner alike. 0 is greedy: evaluation only.
        max_tokens: Most tokens of one completion.
        completions: G, the samples per prompt.
        top_k: Only the k likeliest tokens are possible; 0: all.
        top_p: Only the likeliest tokens that reach this probability together are possible; 1: all.
        min_p: Only tokens at least this fraction as likely as the likeliest one are possible; 0: all.

    Raises:
        ConfigError: For a value that leaves nothing possible, or has no meaning.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    completions: int = 8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Refuse limits out of range."""
        for name, is_sound, expected in (
            ("top_k", self.top_k >= 0, "to be >= 1, or 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "to be > 0 and <= 1 (1: all tokens)"),
            ("min_p", 0 <= self.min_p <= 1, "to be >= 0 and <= 1 (0: all tokens)"),
        ):
            if not is_sound:
                raise ConfigError(f"`data.sampling.{name}` expected {expected}, but got {getattr(self, name)}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be impossible."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def sample_seed(seed: int, prompt: Prompt, epoch: int, sample: int) -> int:
    """Return the 63-bit seed of one sample.

    It depends on the run's seed, the prompt's rank-independent id, the epoch and the sample's index, and on nothing
    else: no two samples share a stream, and any number of ranks draws the same ones.
    """
    key = f"{seed}\x1f{prompt.id}\x1f{epoch}\x1f{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def group_requests(
    prompts: Sequence[tuple[Prompt, int]], sampling: Sampling, seed: int, first: int = 0
) -> list["Request"]:
    """Return one request per sample of every (prompt, epoch), the samples of a prompt side by side.

    Args:
        prompts: Each with its epoch.
        sampling: How many samples.
        seed: The run's.
        first: Samples of each prompt that are there already.
    """
    return [
        Request(prompt.token_ids, sample_seed(seed, prompt, epoch, sample))
        for prompt, epoch in prompts
        for sample in range(first, sampling.completions)
    ]


@dataclass(frozen=True)
class Request:
    """One completion to draw: the prompt's tokens and a seed of its own."""

    prompt_ids: tuple[int, ...]
    seed: int
