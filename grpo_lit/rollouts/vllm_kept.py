"""Completions, and the tokens that were possible at each of their steps, read from vLLM's log-probs.

With ``logprobs_mode="processed_logprobs"`` a token that top-k, top-p or min-p ruled out has log-prob -inf: of enough
likeliest tokens, the finite ones are those that were possible. vLLM also has a sampling mask of its own
(``return_sampling_mask``), which holds the same; it is not used, because its CPU model runner does not offer it, and
because an engine that is started with it refuses greedy and unlimited requests, which evaluation makes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from grpo_lit.errors import EngineError
from grpo_lit.rollout import Completion, FinishReason, KeptTokens, Sampling

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

#: What vLLM's servers write for -inf and NaN, which JSON has not [nats].
_NOT_FINITE = -9999.0


@dataclass
class ListedLogprobs:
    """Log-probs of a server's answer, laid out as vLLM's ``FlatLogprobs``.

    Attributes:
        start_indices: Of each step's first entry, the drawn token.
        end_indices: Behind each step's last entry.
        token_ids: At each step the drawn token, then the likeliest, the drawn one again among them.
        logprobs: Of each of these [nats].
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, content: Iterable[dict[str, Any]]) -> "ListedLogprobs":
        """Read ``choices[0].logprobs.content`` of ``/inference/v1/generate``.

        The drawn token of a sound model is possible, so that one without a finite log-prob comes from NaN logits.
        """
        found = cls()
        for step in content:
            found.start_indices.append(len(found.token_ids))
            found.token_ids.append(step["token_id"])
            found.logprobs.append(math.nan if step["logprob"] == _NOT_FINITE else step["logprob"])
            for listed in step["top_logprobs"]:
                found.token_ids.append(listed["token_id"])
                found.logprobs.append(-math.inf if listed["logprob"] == _NOT_FINITE else listed["logprob"])
            found.end_indices.append(len(found.token_ids))
        return found


def logprobs_to_ask(sampling: Sampling, vocabulary: int) -> int:
    """Return how many of the likeliest tokens to list beside the drawn one.

    More than ``top_k``: every token whose logit equals the k-th is possible too, and bfloat16 logits often are equal.
    """
    if not sampling.truncates:
        return 0
    return min(vocabulary, sampling.top_k + max(32, sampling.top_k // 2))


def kept_tokens(found: Union["FlatLogprobs", ListedLogprobs], vocabulary: int) -> KeptTokens:
    """Return the tokens that were possible at each step of a completion.

    Args:
        found: At each step the drawn token, then the likeliest in descending order, the drawn one again among them.
        vocabulary: How many tokens there are.

    Raises:
        EngineError: More tokens were possible at a step than are listed.
    """
    steps = []
    for start, end in zip(found.start_indices, found.end_indices, strict=True):
        listed = list(zip(found.token_ids[start:end], found.logprobs[start:end], strict=True))
        if listed[-1][1] > -math.inf and len(listed) <= vocabulary:
            raise EngineError(
                f"`data.sampling.top_k` expected at most {len(listed) - 1} tokens to be possible at a step, but got "
                "more: many logits equal the k-th. Set the engine's `dtype` to float32, or change `data.sampling.top_k`"
            )
        steps.append(sorted({token for token, logprob in listed if logprob > -math.inf}))
    return KeptTokens.of(steps)


def completion_of(
    tokens: tuple[int, ...],
    found: Union["FlatLogprobs", ListedLogprobs],
    text: str,
    sampling: Sampling,
    vocabulary: int,
    stops: Sequence[int],
    version: int,
) -> Completion:
    """Return a completion as an engine hands it out.

    Args:
        tokens: Those drawn.
        found: At each step the drawn token's log-prob, then those of the likeliest.
        text: The tokens, decoded.
        sampling: How they were drawn.
        vocabulary: How many tokens there are.
        stops: Tokens that end a completion.
        version: Of the weights.
    """
    logprobs = tuple(found.logprobs[i] if sampling.temperature > 0 else 0.0 for i in found.start_indices)
    kept = kept_tokens(found, vocabulary) if sampling.truncates else None
    reason: FinishReason = "stop" if tokens and tokens[-1] in stops else "length"
    return Completion(tokens, logprobs, text, reason, version, kept)
