"""Multiple choice."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.rewards.extract import answer_text, last_boxed, last_line, last_tagged
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

#: Marks of emphasis, and LaTeX that only sets type: what they hold is what counts.
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|rm|bf)\b|[*_`~${}]")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|and),?\s+)?(?:(?:the|my)\s+)?(?:(?:correct|right|best|final)\s+)*"
    r"(?:(?:answer|option|choice)\s*(?:is|=|:)?\s*:?\s*)+(?:(?:option|choice)\s+)?",
    re.IGNORECASE,
)
_LOOSE = re.compile(r"(?<=[(\[])\s+|\s+(?=[.,:;)\]])")
_EMPHASIS = re.compile(r"[*_`]")
#: The phrase that announces an answer, anywhere in running text.
_ANNOUNCED = re.compile(
    r"\b(?:answer|option|choice)\b(?:\s+(?:is|should be|must be|would be)\b|\s*[:=])(?:\s+(?:option|choice)\b)?[\s:]*",
    re.IGNORECASE,
)
#: A letter, alone or before its option's text or a reason: ``A``, ``(A)``, ``[A]``, ``A)``, ``A: four``, ``A because``.
_LETTER = re.compile(
    r"[(\[]?([A-Za-z])(?:[)\]]|(?=[.:,;]|\s*$|\s+[-\u2013\u2014]\s|\s+(?:because|since|as|which)\b))"
    r"[.:,;]?\s*(?:[-\u2013\u2014]\s+)?"
)
#: A further letter that is meant as one: in brackets, or a capital on its own, but for "A dog" and "I think".
_FURTHER = re.compile(
    r"[(\[][A-Za-z][)\]]|(?<![\w'])[A-Z]\)|(?<![\w'])(?:[B-HJ-Z](?![\w'])|[AI](?![\w']|\s+(?!(?:is|are|or|and)\b)[a-z]))"
)


class MultipleChoice(Reward):
    r"""1 where the completion names the right option and no other, else 0.

    The prompt's answer is the letter of the right option. ``metadata`` may hold the options' texts, as a list (A, B,
    ...) or by letter. What counts as naming option B, "4":

    - ``B``, ``b``, ``B.``, ``B)``, ``(B)``, ``[B]``, ``**B**``, ``$B$``, ``\text{B}``, ``option B``;
    - ``B) 4``, ``B: 4``: a letter before a text, but if that is another option's text, nothing is earned;
    - ``4``: the option's text alone, without regard to case, white space and a full stop at the end.

    Naming several letters (``A or B``, ``A, B``, ``(A)(B)``) earns nothing, and so does a letter that is no option.

    Args:
        extract: Where the answer stands. ``answer_tag``: in the last complete ``<answer>...</answer>``. ``boxed``: in
            the last complete ``\boxed{...}``. ``last_line``: in the last line that is not blank, unless the line
            before it names another option just so. ``announced``: in the first of these that there is: box, tag, the
            rest of the line after the last "answer is", "answer:", "option is" or the like, last line.
        options: Key of ``metadata`` that holds the options' texts; they are not needed to judge letters.

    A prompt whose answer is no option, or whose options are neither a list nor a mapping of texts, is no evidence about
    its completions: the reward abstains, with one warning, and counts such prompts in ``unreadable``.
    """

    def __init__(
        self,
        extract: Literal["announced", "answer_tag", "boxed", "last_line"] = "announced",
        options: str = "options",
    ) -> None:
        self.extract, self.options = extract, options
        self.unreadable = 0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 1 or 0 for each completion, or ``None`` for all where the prompt cannot be judged."""
        texts = self._texts(prompt)
        gold = None if texts is None else chosen(prompt.answer or "", texts)
        if gold is None:
            if not self.unreadable:
                rank_zero_warn(
                    f"MultipleChoice abstains on prompt {prompt.id}, and on all like it, which has "
                    f"{self.problem(prompt)}: answer {prompt.answer!r:.80}, options "
                    f"{prompt.metadata.get(self.options, 'A to Z')!r:.200}"
                )
            self.unreadable += 1
            return [None] * len(completions)
        return [float(self._choice(answer_text(prompt, completion), texts) == gold) for completion in completions]

    def problem(self, prompt: Prompt) -> str | None:
        """Return what keeps the prompt's answer from being one of its options."""
        texts = self._texts(prompt)
        if texts is None:
            return f"options that are neither a list of at most {len(LETTERS)} texts nor texts by letter"
        return "an answer that is not one of the options" if chosen(prompt.answer or "", texts) is None else None

    def answer(self, prompt: Prompt, completion: Completion) -> str | None:
        """Return the letter of the one option that the completion names."""
        texts = self._texts(prompt)
        return None if texts is None else self._choice(answer_text(prompt, completion), texts)

    def counters(self) -> dict[str, int]:
        """Return how many prompts could not be judged."""
        return {"unreadable": self.unreadable}

    def _choice(self, text: str, texts: Mapping[str, str]) -> str | None:
        region: str | None
        if self.extract == "answer_tag":
            region = last_tagged(text)
        elif self.extract == "boxed":
            region = last_boxed(text)
        elif self.extract == "last_line":
            region = _last_line(text, texts)
        else:
            found = (last_boxed(text), last_tagged(text), _announced(text), _last_line(text, texts))
            region = next((part for part in found if part is not None), None)
        return None if region is None else chosen(region, texts)

    def _texts(self, prompt: Prompt) -> dict[str, str] | None:
        """Return the options by letter; ``None`` where they are neither a list nor a mapping."""
        options: Any = prompt.metadata.get(self.options, [])
        if isinstance(options, Mapping):
            return {str(letter).strip().upper(): str(text) for letter, text in options.items()}
        if isinstance(options, Sequence) and not isinstance(options, str) and len(options) <= len(LETTERS):
            return dict(zip(LETTERS, map(str, options), strict=False))
        return None


def chosen(text: str, texts: Mapping[str, str]) -> str | None:
    """Return the letter of the one option that a short text names; ``None`` where it names none or several.

    Args:
        text: An answer, such as ``(B)`` or ``B) 4``.
        texts: The options by letter; empty where they are not known, which allows every letter.
    """
    plain = _plain(text)
    for said in (plain, plain[match.end() :] if (match := _LEAD.match(plain)) else ""):
        if _key(said).upper() not in texts and (letter := _option_of(said, texts)):
            return letter
    match = _LETTER.match(said or plain)
    if match is None:
        return None
    letter, rest = match[1].upper(), (said or plain)[match.end() :]
    if texts and letter not in texts:
        return None
    if not _key(rest) or _key(rest) == _key(_plain(texts.get(letter, ""))):
        return letter
    return None if _FURTHER.search(rest) or _option_of(rest, texts) else letter


def _option_of(text: str, texts: Mapping[str, str]) -> str | None:
    """Return the letter of the one option whose text this is."""
    letters = [letter for letter, option in texts.items() if _key(_plain(option)) == _key(text)]
    return letters[0] if len(letters) == 1 else None


def _announced(text: str) -> str | None:
    """Return what stands after the last announcement, up to the end of its line; ``None`` without one."""
    text = _EMPHASIS.sub("", text)
    start = None
    for match in _ANNOUNCED.finditer(text):
        start = match.end() if match.end() < len(text) else start
    if start is None:
        return None
    end = text.find("\n", start)
    return text[start : end if end >= 0 else len(text)]


def _last_line(text: str, texts: Mapping[str, str]) -> str | None:
    """Return the last line, unless it ends a list of several options, each on a line."""
    line = last_line(text)
    if line is None:
        return None
    before = last_line(text[: text.rstrip().rfind("\n") + 1])
    listed = before is not None and _is_whole(before, texts) and _is_whole(line, texts)
    if listed and chosen(before, texts) != chosen(line, texts):
        return None
    box = last_boxed(line)
    return line if box is None else box


def _is_whole(line: str, texts: Mapping[str, str]) -> bool:
    """Return whether a line is an option and nothing more: its letter, with its text or without."""
    match, letter = _LETTER.match(_plain(line)), chosen(line, texts)
    rest = _key(_plain(line)[match.end() :]) if match else ""
    return letter is not None and rest in ("", _key(_plain(texts.get(letter, ""))))


def _plain(text: str) -> str:
    """Return the text on one line without what only sets its type."""
    return _LOOSE.sub("", " ".join(_STYLE.sub(" ", text).replace("\\(", "(").replace("\\)", ")").split()))


def _key(text: str) -> str:
    """Return what two texts have in common that differ in case, white space and the full stop."""
    return " ".join(text.split()).strip(" .").casefold()
