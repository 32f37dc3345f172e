"""The reward ABC."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from grpo_lit.rollout import Completion, Prompt


class Reward(ABC):
    """Scores the completions of one prompt. Write one by subclassing it; its constructor arguments become YAML keys."""

    @abstractmethod
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return one score per completion, in order; ``None`` abstains for that completion (it is not a zero)."""

    def problem(self, prompt: Prompt) -> str | None:
        """Return what keeps this reward from judging completions of a prompt; ``None``, the default: nothing does.

        A prompt that no reward can judge is never asked. The reason is worded alike for all prompts of its kind, such
        as ``an answer that is not one number``, since prompts are counted by it.
        """
        return None

    def answer(self, prompt: Prompt, completion: Completion) -> Hashable | None:
        """Return what a completion answers, in one form for all ways to write it; ``None`` where it gives no answer.

        Majority votes count equal answers (``val/<set>/maj@k``): wrong ones must be told apart as finely as right ones.
        By default all of the text, without white space around it, so that only equal texts vote together.
        """
        return completion.text.strip() or None

    def counters(self) -> dict[str, int]:
        """Return what this reward has counted since it was made, such as answers it gave up on; nothing by default."""
        return {}

    def close(self) -> None:  # noqa: B027 (most rewards hold nothing)
        """End all processes of this reward, at any time and any number of times; a later call starts them anew."""
