"""The tokens that were possible at each step, read from vLLM's log-probs.

With ``logprobs_mode="processed_logprobs"`` a token that top-k, top-p or min-p ruled out has log-prob -inf: of enough
likeliest tokens, the finite ones are those that were possible. vLLM also has a sampling mask of its own
(``return_sampling_mask``), which holds the same; it is not used, because its CPU model runner does not offer it, and
because an engine that is started with it refuses greedy and unlimited requests, which evaluation makes.
"""

import math
from typing import TYPE_CHECKING

from grpo_lit.errors import EngineError
from grpo_lit.rollout import KeptTokens, Sampling

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs


def logprobs_to_ask(sampling: Sampling, vocabulary: int) -> int:
    """Return how many of the likeliest tokens to list beside the drawn one.

    More than ``top_k``: every token whose logit equals the k-th is possible too, and bfloat16 logits often are equal.
    """
    if not sampling.truncates:
        return 0
    return min(vocabulary, sampling.top_k + max(32, sampling.top_k // 2))


def kept_tokens(found: "FlatLogprobs", vocabulary: int) -> KeptTokens:
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
