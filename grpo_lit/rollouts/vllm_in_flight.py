"""Completions of ``vllm.LLM`` that go on across a weight update."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt


def drawn_stepwise(
    llm: "LLM",
    prompts: "Sequence[TokensPrompt]",
    parameters: "Sequence[SamplingParams]",
    before_step: Callable[[], object],
) -> "list[RequestOutput]":
    """Return what ``llm.generate`` returns, with a call between any two steps that bring tokens.

    vLLM's process runs ahead meanwhile: what it has drawn before a pause comes after it, with its own weights' version.

    Args:
        llm: Nothing else is asked of it.
        prompts: What to draw.
        parameters: Of each.
        before_step: May pause, change and resume it.
    """
    llm.enqueue(prompts, parameters, use_tqdm=False)
    finished: list[RequestOutput] = []
    while llm.llm_engine.has_unfinished_requests():
        before_step()
        finished += [output for output in llm.llm_engine.step() if output.finished]  # type: ignore[misc]
    return sorted(finished, key=lambda output: int(output.request_id))


def versions_of(spans: Iterable[tuple[str, int, int]]) -> list[int]:
    """Return the weight version of each token of a completion.

    Args:
        spans: vLLM's name of a version (a number, and behind a dash whatever tells runs apart), the first token that it
            sampled, and the first that it did not, without gaps.
    """
    return [int(name.partition("-")[0]) for name, start, end in spans for _ in range(start, end)]
