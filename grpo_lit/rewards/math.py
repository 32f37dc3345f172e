"""Mathematical equivalence."""

import re
from collections.abc import Hashable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.rewards.extract import after_hashes, answer_text, balanced, last_boxed, last_line, last_tagged
from grpo_lit.rewards.numeric import last_number, without_separators
from grpo_lit.rewards.plain import PlainNumber, assigned_name, based, clean, plain_number, word
from grpo_lit.rewards.reward import Reward
from grpo_lit.rewards.workers import WorkerPool
from grpo_lit.rollout import Completion, Prompt

Extract = Literal["boxed", "answer_tag", "hashes", "last_line", "last_number"]

#: Longer expressions, or deeper ones, are not read: the parser takes seconds for 200 braces in each other.
MAX_LENGTH = 2000
MAX_DEPTH = 30
#: Golds whose readability is remembered.
_REMEMBERED = 10_000

_SPACED_DIGITS = re.compile(r"[0-9]\s+[0-9]")
_COMMAND = re.compile(r"\\(?:text|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_EXTRACTORS = {"boxed": last_boxed, "answer_tag": last_tagged, "hashes": after_hashes, "last_line": last_line}


class MathEquivalence(Reward):
    r"""1 where the completion's answer is mathematically equal to the prompt's, else 0.

    The gold answer may be the answer itself, a solution that ends in a box, or one that ends in ``#### 18``. One plain
    number on both sides is compared here, exactly, as fractions; anything else goes, gold first, to math-verify
    (https://github.com/huggingface/Math-Verify) in worker processes with hard limits on time and memory. What counts as
    equal:

    ===================================================================  ==============================================
    gold or answer                                                       is
    ===================================================================  ==============================================
    ``1,234`` ``1{,}234`` ``1\,234`` ``1,\!234`` ``1 234`` ``1\ 234``    1234; but ``1,2`` and ``1, 234`` are sets
    ``7.0`` ``007`` ``+7`` ``7.`` ``**7**`` ``$7$`` ``{7}`` ``x = 7``    7; but 7.0000001 is not
    ``$7`` ``\$7`` ``7 cm`` ``7\text{ cm}^2`` ``7^\circ`` ``7 degrees``  7: units are not compared
    ``28%`` ``28\%``                                                     28; it is not 0.28
    ``3 million`` ``2 dozen``                                            3000000, 24
    ``1e3`` ``1.5\times 10^{3}``                                         1000, 1500
    ``.5`` ``1/2`` ``2/4`` ``\frac12`` ``\frac{1}{2}``                   0.5
    ``2 2/3`` ``2\frac{2}{3}``                                           8/3, mixed numbers
    ``0.333333``                                                         1/3: six right digits stand for a number that
                                                                         has no end, also ``1.41421`` for ``\sqrt{2}``;
                                                                         but ``0.33`` and ``3.14`` stand for themselves
    ``52_8``                                                             ``52_8`` and ``52``; not ``52_9``
    ``(x+1)^2`` ``2\sqrt{3}`` ``x^2+1``                                  any form of the same expression
    ``\{1, 2\}`` ``2, 1`` ``1 \pm \sqrt{2}``                             sets, in any order
    ``(1, 2)`` ``[0, \infty)`` ``\begin{pmatrix}1\\2\end{pmatrix}``      tuples, intervals and matrices, in order;
                                                                         decimals in them to six places
    ``x < 3`` as the gold                                                ``(-\infty, 3)``; not the other way round
    ``y = 2x + 3``                                                       ``2x + 3``
    ``\text{Evelyn}`` ``\text{(C)}``                                     ``Evelyn``, ``C``: words, in any case
    ===================================================================  ==============================================

    An expression that evaluates to the answer is equal to it: where the question is itself an expression (``3 + 4``),
    repeating it earns full marks. Use :class:`grpo_lit.rewards.NumericMatch` there.

    A gold answer that cannot be read (empty, or bare words like ``yes``) is no evidence: the reward abstains, with one
    warning. An answer too long, too deep or too large to be evaluated (``9^{9^{9^9}}``), and one that exceeds a limit,
    scores 0 and is counted.

    Args:
        extract: Where the answer stands: ``boxed``, the last complete ``\boxed{...}`` or ``\fbox{...}``;
            ``answer_tag``, the last complete ``<answer>...</answer>``; ``hashes``, after the last ``####``;
            ``last_line`` that is not blank; ``last_number`` of the text, for golds that are plain numbers. Boxes inside
            are opened.
        workers: Most processes of this reward on this rank; they start when they are first needed.
        cpu_seconds: CPU time of one comparison; 0.01 is usual.
        memory_mib: Address space of a worker [MiB].

    Attributes:
        unreadable: Prompts whose gold answer could not be read.
        refused: Answers that were not evaluated.
        killed: Answers whose comparison exceeded a limit.

    Raises:
        ConfigError: For a limit that is not positive.
    """

    def __init__(
        self, extract: Extract = "boxed", workers: int = 2, cpu_seconds: float = 1.0, memory_mib: int = 1024
    ) -> None:
        self.extract = extract
        self.unreadable = self.refused = self.killed = 0
        self._pool = WorkerPool(
            Path(__file__).with_name("equivalence.py"), workers, cpu_seconds=cpu_seconds, memory_mib=memory_mib
        )
        self._readable: dict[str, bool] = {}

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 1 or 0 for each completion, or ``None`` for all where the prompt's answer cannot be read."""
        gold = gold_answer(prompt.answer)
        if not self.readable(prompt.answer):
            if not self.unreadable:
                rank_zero_warn(
                    f"MathEquivalence abstains on prompt {prompt.id}, and on all like it: its answer "
                    f"{prompt.answer!r:.80} is no mathematical expression; write words as \\text{{...}}"
                )
            self.unreadable += 1
            return [None] * len(completions)
        texts = [answer_text(prompt, completion) for completion in completions]
        if self.extract == "last_number":
            number = plain_number(gold).value
            return [float(last_number(text) == number) for text in texts]
        answers = [clean(self._region(text)) for text in texts]
        verdicts = {answer: quick_verdict(gold, answer) for answer in answers}
        verdicts |= self._compared(gold, [answer for answer, verdict in verdicts.items() if verdict is None], prompt.id)
        return [float(verdicts[answer]) for answer in answers]

    def problem(self, prompt: Prompt) -> str | None:
        """Return what keeps the prompt's answer from being compared with others."""
        return None if self.readable(prompt.answer) else "an answer that is no mathematical expression"

    def answer(self, prompt: Prompt, completion: Completion) -> Hashable | None:
        """Return the answer's value if it is one plain number, else the answer without what only sets its type.

        Two forms of one expression, such as ``(x+1)^2`` and ``x^2+2x+1``, vote apart: no computer algebra is asked.
        """
        text = answer_text(prompt, completion)
        return last_number(text) if self.extract == "last_number" else canonical(clean(self._region(text)))

    def readable(self, answer: str | None) -> bool:
        """Return whether completions can be judged by this gold answer."""
        gold = gold_answer(answer)
        known = self._readable.get(gold)
        if known is None:
            if len(self._readable) >= _REMEMBERED:
                self._readable.clear()
            known = self._readable[gold] = self._can_read(gold)
        return known

    def counters(self) -> dict[str, int]:
        """Return how many prompts and answers could not be judged."""
        return {"unreadable": self.unreadable, "refused": self.refused, "killed": self.killed}

    def close(self) -> None:
        """End the worker processes; a later comparison starts them anew."""
        self._pool.close()

    def _can_read(self, gold: str) -> bool:
        words = word(gold)
        if plain_number(gold) is not None:
            return True
        if self.extract == "last_number" or not gold or (words and not words[1]) or _out_of_bounds(gold):
            return False
        return bool(words or based(gold) or self._pool.map("readable", [[_plain_form(gold)]])[0].value)

    def _region(self, text: str) -> str:
        found = _EXTRACTORS[self.extract](text)
        if found is None:
            return ""
        inner = last_boxed(found)
        return found if inner is None else inner

    def _compared(self, gold: str, answers: list[str], prompt: str) -> dict[str, bool]:
        """Return math-verify's verdict of each answer."""
        judged = [answer for answer in answers if not _out_of_bounds(answer)]
        outcomes = self._pool.map("equivalent", [[_plain_form(gold), _plain_form(answer)] for answer in judged])
        killed = [outcome.failure for outcome in outcomes if outcome.failure]
        if killed and not self.killed:
            # What was killed is not shown: printing an expression of such a size may take for ever.
            rank_zero_warn(
                f"MathEquivalence: a comparison on prompt {prompt} was ended ({killed[0]}); such answers score 0 and "
                "are counted in `killed`"
            )
        self.killed += len(killed)
        self.refused += len(answers) - len(judged) + sum(outcome.value == "refused" for outcome in outcomes)
        return dict.fromkeys(answers, False) | {
            answer: outcome.value == "equal" for answer, outcome in zip(judged, outcomes, strict=True)
        }


def gold_answer(answer: str | None) -> str:
    """Return the answer that a gold text gives: after its last ``####``, in its last box, or all of it, cleaned."""
    if answer is None:
        return ""
    boxed, marked = last_boxed(answer), after_hashes(answer)
    return clean(answer if boxed is None and marked is None else boxed if marked is None else marked)


def canonical(answer: str) -> Hashable | None:
    """Return one form for many ways to write a cleaned answer, without computer algebra; ``None`` for no answer."""
    if not answer or not balanced(answer):
        return None
    number, words = plain_number(answer), word(answer)
    if number is not None:
        return number.value
    return words[0] if words else based(answer) or _compact(answer)


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Return whether two cleaned answers are equal where no computer algebra is needed to tell, else ``None``."""
    if not answer or not balanced(answer):
        return False
    if gold != answer and _SPACED_DIGITS.search(answer) and plain_number(answer) is None:
        return False  # without its space, ``1 0`` would be 10
    if _compact(gold) == _compact(answer):
        return True
    words, given = word(gold), word(answer)
    if words:
        return given is not None and given[0] == words[0]
    if given and given[1]:
        return False  # math-verify would take ``\text{E}`` for Euler's number
    if _names_differ(gold, answer):
        return False
    known, given_base = based(gold), based(answer)
    if known:
        return known == given_base or known[0] == _compact(answer).upper()
    expected, given_number = plain_number(gold), _number_of(answer, given_base)
    return expected.equals(given_number) if expected and given_number else None


def _number_of(answer: str, digits: tuple[str, int] | None) -> PlainNumber | None:
    if digits is None:
        return plain_number(answer)
    try:
        return PlainNumber(Fraction(int(*digits)))
    except ValueError:  # ``x_1``, or a digit that the base does not have
        return None


def _names_differ(gold: str, answer: str) -> bool:
    """Return whether ``x = 5`` stands against ``y = 5``, or ``R`` against ``r``, which math-verify takes for equal."""
    one, other = assigned_name(gold), assigned_name(answer)
    if one and other and one != other:
        return True
    letters, given = _letters(gold), _letters(answer)
    return letters != given and letters.casefold() == given.casefold()


def _letters(text: str) -> str:
    return "".join(
        sorted({letter for letter in _COMMAND.sub("", text) if letter.isalpha()}, key=lambda x: (x.lower(), x))
    )


def _plain_form(answer: str) -> str:
    """Return a number in the one form that math-verify reads right, anything else as it is but for ``1\\,234``."""
    number = plain_number(answer)
    return without_separators(answer) if number is None else str(number)


def _compact(text: str) -> str:
    return (
        re.sub(r"\s|\\[,;:! ]|\\left(?![a-z])|\\right(?![a-z])", "", text)
        .replace("dfrac", "frac")
        .replace("tfrac", "frac")
    )


def _out_of_bounds(text: str) -> bool:
    depth = deepest = 0
    for character in text if len(text) <= MAX_LENGTH else "":
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return len(text) > MAX_LENGTH or deepest > MAX_DEPTH
