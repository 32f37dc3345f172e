"""Format rewards."""

import re
from collections.abc import Sequence

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.extract import answer_text
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

#: Any text without one of the tags. Possessive, so that the whole match takes linear time.
_NO_TAG = r"[^<]*+(?:<(?!/?(?:think|answer)>)[^<]*+)*+"
_WHOLE = re.compile(rf"\s*+<think>{_NO_TAG}</think>\s*+<answer>{_NO_TAG}</answer>\s*+")
#: Text is decoded without special tokens, but some tokenizers do not know their own end-of-turn mark as one.
_END_OF_TURN = re.compile(r"<\|[^<>|\s]{1,40}\|>\Z")


class ThinkAnswerFormat(Reward):
    r"""1 where the whole completion is ``<think>...</think> <answer>...</answer>``, else a share for every right tag.

    Full marks ask that the regex matches the whole text, each tag once, with nothing before, between or after but white
    space. Otherwise each of the four tags that occurs exactly once earns ``tag_credit``, in any order, for at most
    three tags: four tags in the wrong order or amid other text must stay below full marks.

    Tags that the prompt's template wrote (``metadata["prefill"]``) count as written.

    Args:
        tag_credit: Reward of one tag, 0 (all or nothing) to 0.25.

    Raises:
        ConfigError: For a ``tag_credit`` outside of that.
    """

    def __init__(self, tag_credit: float = 0.25) -> None:
        if not 0 <= tag_credit <= 0.25:
            raise ConfigError(
                f"`tag_credit` expected 0 to 0.25, but got {tag_credit}: tags alone must not earn full marks"
            )
        self.tag_credit = tag_credit

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 0 to 1 for each completion."""
        return [self._score(answer_text(prompt, completion)) for completion in completions]

    def _score(self, text: str) -> float:
        text = text.rstrip()
        mark = _END_OF_TURN.search(text, max(len(text) - 48, 0))
        if _WHOLE.fullmatch(text, 0, mark.start() if mark else len(text)):
            return 1.0
        once = sum(text.count(tag) == 1 for tag in TAGS)
        return self.tag_credit * min(once, len(TAGS) - 1)
