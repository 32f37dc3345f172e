"""Numeric exact match."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.extract import answer_text, last_boxed, last_tagged
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt

#: Numbers with more digits, or a power of ten beyond this, are not read: exact arithmetic on them takes for ever
#: (``1e999999999`` has a billion digits).
MAX_DIGITS = 1000

_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
_THIN_SEPARATOR = re.compile(r"(?<=[0-9])(?:\\[,!;]|\{,\}|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))")
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}%])[-+])?                    # "10-3" is a difference, not 10 and -3
    \\?[$€£]?
    (?P<digits>
        (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?
        | (?<![0-9.])\.[0-9]+                        # ".5", but not the end of "...5" or of "1.2.3"
    )
    (?: [eE](?P<exponent>[-+]?[0-9]+)(?![0-9A-Za-z])
        | /(?P<denominator>[0-9]+)(?![0-9]|\.[0-9]|/[0-9])
    )?
    """,
    re.VERBOSE,
)


class NumericMatch(Reward):
    r"""1 where the completion's number equals the prompt's answer exactly, else 0.

    Numbers are compared as fractions, never as floats. What counts as equal:

    - ``1,234``, ``1{,}234``, ``1\,234`` (a thin or no-break space too) = 1234; but ``1 234`` is 1 and 234;
    - ``7.0``, ``007``, ``+7``, ``7.``, ``**7**``, ``$7``, ``7 cm``, ``x=7`` = 7; but 7.0000001 is not;
    - ``-0`` = 0, ``-$5`` = ``$-5`` = -5, also with a unicode minus; but ``10-3`` is 10 and 3;
    - ``.5`` = ``1/2`` = ``\frac{1}{2}``; but ``2/4`` is no number, nor is a division that comes out even: repeating
      the question ``28/7`` must earn nothing. Nor are mixed numbers (``2 2/3``) read;
    - ``1e3`` = 1000; but ``1e999999999`` is no number;
    - ``28%`` = 28; but it is not 0.28.

    A prompt whose answer is not one number is no evidence about its completions: the reward abstains, with one warning,
    and counts such prompts in ``unreadable``.

    Args:
        extract: Where the number stands: ``last_number`` of the text; ``answer_tag``, the last complete
            ``<answer>...</answer>``; ``boxed``, the last complete ``\boxed{...}``. The latter two must hold one
            number (after the last ``=``, if there is one), so that listing many guesses earns nothing.
    """

    def __init__(self, extract: Literal["last_number", "answer_tag", "boxed"] = "last_number") -> None:
        self.extract = extract
        self.unreadable = 0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 1 or 0 for each completion, or ``None`` for all where the prompt's answer is not a number."""
        gold = None if prompt.answer is None else only_number(prompt.answer)
        if gold is None:
            if not self.unreadable:
                rank_zero_warn(
                    f"NumericMatch abstains on prompt {prompt.id}, and on all like it: its answer {prompt.answer!r} is "
                    "not one number"
                )
            self.unreadable += 1
            return [None] * len(completions)
        return [self._score(self._number(answer_text(prompt, completion)), gold) for completion in completions]

    def _score(self, number: Fraction | None, gold: Fraction) -> float:
        return float(number == gold)

    def _number(self, text: str) -> Fraction | None:
        if self.extract == "last_number":
            return last_number(text)
        region = last_tagged(text) if self.extract == "answer_tag" else last_boxed(text)
        return None if region is None else only_number(region)


class NumericCloseness(NumericMatch):
    """How near the completion's number is to the prompt's answer.

    score = max(0, 1 - |number - answer| / scale), and 0 without a number

    Where right answers are rare, exact match leaves most groups without signal; this one tells a near miss from a
    far one. It is no measure of correctness: give it a small weight beside :class:`NumericMatch`.

    Args:
        scale: Distance from which on nothing is earned.
        extract: Where the number stands; see :class:`NumericMatch`.
    """

    def __init__(
        self, scale: float = 10.0, extract: Literal["last_number", "answer_tag", "boxed"] = "last_number"
    ) -> None:
        if not scale > 0:
            raise ConfigError(f"`scale` of NumericCloseness expected to be > 0, but got {scale}")
        super().__init__(extract)
        self.scale = Fraction(scale)

    def _score(self, number: Fraction | None, gold: Fraction) -> float:
        return 0.0 if number is None else float(max(Fraction(0), 1 - abs(number - gold) / self.scale))


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number in the text; ``None`` without one, or where it cannot be read."""
    last = None
    for last in _NUMBER.finditer(_normal(text)):  # noqa: B007 (the last match is what is wanted)
        pass
    return None if last is None else _value(last)


def only_number(text: str) -> Fraction | None:
    """Return the value of the one number after the last ``=``; ``None`` where there is none or several."""
    found = list(_NUMBER.finditer(_normal(text).rpartition("=")[2]))
    return _value(found[0]) if len(found) == 1 else None


def _normal(text: str) -> str:
    """Write minus signs, thousands separators and LaTeX fractions in one way."""
    text = _THIN_SEPARATOR.sub(",", text.translate(_MINUS_SIGNS))
    return _LATEX_FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    """Return ``a/b``, apart from a number just before it: ``2\\frac{1}{2}`` is not 21/2."""
    apart = " " if match.string[max(match.start() - 1, 0) : match.start()].isdigit() else ""
    return f"{apart}{match[1] or match[2]}/{match[3] or match[4]}"


def _value(match: re.Match[str]) -> Fraction | None:
    digits, exponent, denominator = match["digits"].replace(",", ""), match["exponent"] or "0", match["denominator"]
    if max(len(digits), len(denominator or "")) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if denominator is None:
        return sign * Fraction(digits) * Fraction(10) ** int(exponent)
    if "." in digits or int(denominator) < 2 or math.gcd(int(digits), int(denominator)) > 1:
        return None
    return Fraction(sign * int(digits), int(denominator))
