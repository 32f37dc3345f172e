"""Format rewards."""

import re
from collections.abc import Sequence
from typing import Literal

import regex
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import load_tokenizer
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
        if _WHOLE.fullmatch(text, 0, _end(text)):
            return 1.0
        once = sum(text.count(tag) == 1 for tag in TAGS)
        return self.tag_credit * min(once, len(TAGS) - 1)


class RegexFormat(Reward):
    r"""1 where the completion matches a regular expression, else 0.

    ``.`` matches line breaks too (``(?-s:.)`` does not). White space at both ends and an end-of-turn mark such as
    ``<|im_end|>`` are no part of the text; tags that the prompt's template wrote (``metadata["prefill"]``) are.

    An expression may take exponential time on a text that was made for it. Each match has a limit, beyond which it
    counts as no match; there is one warning, and ``timeouts`` counts them.

    Args:
        pattern: Regular expression of the ``regex`` package, which understands that of ``re``.
        match: ``full``: the whole text must match. ``search``: some part of it.
        once: Literal texts each of which must occur exactly once. A lazy ``.*?`` still runs over further tags:
            ``<think>.*?</think>.*`` matches two blocks, with ``once: ["<think>", "</think>"]`` it does not.
        timeout: CPU time that this process, all its threads together, may spend during one match [s].

    Raises:
        ConfigError: For a pattern that is no regular expression, an empty text in ``once``, or a timeout that is not
            above 0.
    """

    def __init__(
        self,
        pattern: str,
        match: Literal["full", "search"] = "full",
        once: Sequence[str] = (),
        timeout: float = 0.5,
    ) -> None:
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL | regex.VERSION0)
        except regex.error as error:
            raise ConfigError(
                f"`pattern` expected a regular expression, but got {pattern!r} ({error}): put a backslash before "
                "brackets that are meant literally"
            ) from error
        if not all(once):
            raise ConfigError(f"`once` expected texts, but got {list(once)}: take the empty one out")
        if not timeout > 0:
            raise ConfigError(f"`timeout` of RegexFormat expected to be > 0, but got {timeout}")
        self.match, self.once, self.timeout = match, tuple(once), timeout
        self.timeouts = 0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 1 or 0 for each completion."""
        return [float(self._fits(answer_text(prompt, completion))) for completion in completions]

    def counters(self) -> dict[str, int]:
        """Return how many matches exceeded the limit."""
        return {"timeouts": self.timeouts}

    def _fits(self, text: str) -> bool:
        text = text[: _end(text)].strip()
        if any(text.count(literal) != 1 for literal in self.once):
            return False
        match = self._pattern.fullmatch if self.match == "full" else self._pattern.search
        try:
            return match(text, timeout=self.timeout) is not None
        except TimeoutError:
            if not self.timeouts:
                rank_zero_warn(
                    f"RegexFormat gave up on a text of {len(text)} characters after {self.timeout} s and scored it 0: "
                    f"the pattern {self._pattern.pattern!r} backtracks, try possessive quantifiers such as `.*+`"
                )
            self.timeouts += 1
            return False


class TokenFormat(Reward):
    """1 where the opening token comes exactly once, and after it the closing token exactly once, else 0.

    Looks at token ids: a tag that the tokenizer counts as special is missing from the decoded text, where
    :class:`RegexFormat` would never see it, and the same characters in several tokens are no tag. Tags that the
    prompt's template wrote (``metadata["prefill"]``) count as written.

    Args:
        tokenizer: Folder or hub id of the model that is trained; empty: the command line takes ``model.checkpoint``.
        opening: Tag that comes first, one token of its own.
        closing: Tag that comes after it, one token of its own.

    Raises:
        ConfigError: Where the tokenizer cannot be read, or a tag is not one token, or both are the same.
    """

    def __init__(self, tokenizer: str = "", opening: str = "<think>", closing: str = "</think>") -> None:
        if not tokenizer:
            raise ConfigError("`tokenizer` of TokenFormat expected a folder or hub id, but got none: name the model's")
        words = load_tokenizer(tokenizer)
        self._names: dict[int, str] = {}
        for key, tag in (("opening", opening), ("closing", closing)):
            ids = words(tag, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise ConfigError(
                    f"`{key}` of TokenFormat expected one token of the tokenizer, but got {tag!r}, which is "
                    f"{len(ids)}: use RegexFormat or ThinkAnswerFormat, which read text"
                )
            self._names[ids[0]] = tag
        if len(self._names) != 2:
            raise ConfigError(
                f"`closing` of TokenFormat expected another tag than `opening`, but got {closing!r} twice"
            )
        self._right = [opening, closing]
        self._tag = re.compile("|".join(re.escape(tag) for tag in sorted(self._right, key=len, reverse=True)))

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 1 or 0 for each completion."""
        written = self._tag.findall(prompt.metadata.get("prefill", ""))
        return [
            float(written + [self._names[t] for t in completion.token_ids if t in self._names] == self._right)
            for completion in completions
        ]


def _end(text: str) -> int:
    """Return where the text ends without trailing white space, an end-of-turn mark, and white space before that."""
    end = len(text.rstrip())
    mark = _END_OF_TURN.search(text, max(end - 48, 0), end)
    return mark.start() if mark else end
