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

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
class Completion:
    """One sampled answer: exactly the tokens that the sampler emitted, never re-encoded.

    Attributes:
        token_ids: Emitted tokens, the stop token included when there is one. May be empty.
        logprobs: The sampler's own log-prob of each token [nats], after the temperature.
        text: The tokens decoded without special tokens.
        finish_reason: ``stop`` when a stop token came (at the cap too), else ``length``.
        weight_version: ``global_step`` of the weights that sampled it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    weight_version: int

    def __post_init__(self) -> None:
        """Refuse a completion whose log-probs do not belong to its tokens."""
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"`logprobs` expected one value per token ({len(self.token_ids)}), but got {len(self.logprobs)}"
            )


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
    """

    prompt: Prompt
    epoch: int
    completions: tuple[Completion, ...]
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    correct: list[bool | None] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return plain types only, which ``torch.load(weights_only=True)`` accepts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Group":
        """Rebuild a group written by :meth:`state_dict`."""
        prompt = Prompt(**{**state["prompt"], "token_ids": tuple(state["prompt"]["token_ids"])})
        completions = tuple(
            Completion(**{**c, "token_ids": tuple(c["token_ids"]), "logprobs": tuple(c["logprobs"])})
            for c in state["completions"]
        )
        return cls(**{**state, "prompt": prompt, "completions": completions})


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        temperature: Logits are divided by it, in the engine and in the learner alike. 0 is greedy: evaluation only.
        max_tokens: Most tokens of one completion.
        completions: G, the samples per prompt.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    completions: int = 8


def sample_seed(seed: int, prompt: Prompt, epoch: int, sample: int) -> int:
    """Return the 63-bit seed of one sample.

    It depends on the run's seed, the prompt's rank-independent id, the epoch and the sample's index, and on nothing
    else: no two samples share a stream, and any number of ranks draws the same ones.
    """
    key = f"{seed}\x1f{prompt.id}\x1f{epoch}\x1f{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def group_requests(prompts: Sequence[tuple[Prompt, int]], sampling: Sampling, seed: int) -> list["Request"]:
    """Return one request per sample of every (prompt, epoch), the samples of a prompt side by side."""
    return [
        Request(prompt.token_ids, sample_seed(seed, prompt, epoch, sample))
        for prompt, epoch in prompts
        for sample in range(sampling.completions)
    ]


@dataclass(frozen=True)
class Request:
    """One completion to draw: the prompt's tokens and a seed of its own."""

    prompt_ids: tuple[int, ...]
    seed: int
