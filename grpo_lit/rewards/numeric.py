"""Numeric exact match."""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.extract import answer_text, last_boxed, last_tagged
from grpo_lit.rewards.reward import Reward
from grpo_lit.rewards.units import Unit, marked_powers, unit_beside
from grpo_lit.rollout import Completion, Prompt

#: Numbers with more digits, or a power of ten beyond this, are not read: exact arithmetic on them takes for ever
#: (``1e999999999`` has a billion digits).
MAX_DIGITS = 1000

#: Every way to write a minus, for ``str.translate``.
MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
#: What stands between two groups of three digits and between no other two: ``1\,234``, ``1{,}234``, ``1,\!234``.
THIN_SEPARATOR = r"(?:(?:,|\{,\})?\\!\s*|\{,\}|\\[,;:]|[\u00a0\u2009\u202f])"
_SEPARATED = re.compile(rf"(?<=[0-9]){THIN_SEPARATOR}(?=[0-9]{{3}}(?![0-9]))")
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
    r"""1 where the completion's number equals the prompt's answer, exactly or within a tolerance, else 0.

        |number - answer| <= max(absolute_tolerance, relative_tolerance * |answer|)

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
        relative_tolerance: Largest distance, as a share of the answer; 0.01 takes 99 to 101 for 100.
        absolute_tolerance: Largest distance; the larger of the two counts.
        units: ``ignore`` what stands beside a number. ``convert``: where the answer has a unit of
            :mod:`grpo_lit.rewards.units` and the completion has one, both are brought to the same: ``1.5 km`` = ``1500
            m``, and ``1.5 m`` or ``1.5 kg`` is wrong; a completion without one is taken to mean the answer's.
            ``require``: as ``convert``, and a completion without one is wrong.

    Raises:
        ConfigError: For a tolerance that is negative or not finite, or a relative one from 1 on, which takes 0 for
            anything.
    """

    def __init__(
        self,
        extract: Literal["last_number", "answer_tag", "boxed"] = "last_number",
        relative_tolerance: float = 0.0,
        absolute_tolerance: float = 0.0,
        units: Literal["ignore", "convert", "require"] = "ignore",
    ) -> None:
        if not 0 <= relative_tolerance < 1:
            raise ConfigError(f"`relative_tolerance` expected 0 or more, below 1, but got {relative_tolerance}")
        if not 0 <= absolute_tolerance < math.inf:
            raise ConfigError(f"`absolute_tolerance` expected 0 or more, but got {absolute_tolerance}")
        self.extract, self.units = extract, units
        # As written: the float 0.01 is a little more than a hundredth.
        self.relative_tolerance, self.absolute_tolerance = (
            Fraction(str(relative_tolerance)),
            Fraction(str(absolute_tolerance)),
        )
        self.unreadable = 0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 1 or 0 for each completion, or ``None`` for all where the prompt's answer is not a number."""
        gold = self._gold(prompt)
        if gold is None:
            if not self.unreadable:
                rank_zero_warn(
                    f"NumericMatch abstains on prompt {prompt.id}, and on all like it: its answer {prompt.answer!r} is "
                    "not one number"
                )
            self.unreadable += 1
            return [None] * len(completions)
        said = [self._said(prompt, completion) for completion in completions]
        return [self._score(self._in_unit_of(gold, quantity), gold.number) for quantity in said]

    def problem(self, prompt: Prompt) -> str | None:
        """Return what keeps the prompt's answer from being compared with others."""
        return "an answer that is not one number" if self._gold(prompt) is None else None

    def answer(self, prompt: Prompt, completion: Completion) -> Hashable | None:
        """Return the completion's number, where units count in the unit of the prompt's answer if that can be.

        A tolerance makes no two numbers one answer: 99.5 and 100 vote apart.
        """
        gold, said = self._gold(prompt), self._said(prompt, completion)
        if gold is None or said is None:
            return said
        number = self._in_unit_of(gold, said)
        if number is None and said.unit is not None:
            return said.number * said.unit.factor, said.unit.dimensions
        return said if number is None else number

    def counters(self) -> dict[str, int]:
        """Return how many prompts could not be judged."""
        return {"unreadable": self.unreadable}

    def _gold(self, prompt: Prompt) -> "Quantity | None":
        return None if prompt.answer is None else only_quantity(self._marked(prompt.answer))

    def _said(self, prompt: Prompt, completion: Completion) -> "Quantity | None":
        return self._quantity(self._marked(answer_text(prompt, completion)))

    def _score(self, number: Fraction | None, gold: Fraction) -> float:
        if number is None:
            return 0.0
        return float(abs(number - gold) <= max(self.absolute_tolerance, self.relative_tolerance * abs(gold)))

    def _quantity(self, text: str) -> "Quantity | None":
        if self.extract == "last_number":
            return last_quantity(text)
        region = last_tagged(text) if self.extract == "answer_tag" else last_boxed(text)
        return None if region is None else only_quantity(region)

    def _marked(self, text: str) -> str:
        return text if self.units == "ignore" else marked_powers(text)

    def _in_unit_of(self, gold: "Quantity", said: "Quantity | None") -> Fraction | None:
        """Return the completion's number, in the answer's unit where units count; ``None`` where it has none of it."""
        if said is None or self.units == "ignore" or gold.unit is None:
            return None if said is None else said.number
        if said.unit is None:
            return said.number if self.units == "convert" else None
        if said.unit.dimensions != gold.unit.dimensions:
            return None
        return said.number * said.unit.factor / gold.unit.factor


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


@dataclass(frozen=True)
class Quantity:
    """A number with its unit.

    Attributes:
        number: Its exact value.
        unit: What stands beside it; ``None`` where that is no known unit.
    """

    number: Fraction
    unit: Unit | None


def last_quantity(text: str) -> Quantity | None:
    """Return the last number in the text, with its unit; ``None`` without one, or where it cannot be read."""
    last, text = None, _normal(text)
    for last in _NUMBER.finditer(text):  # noqa: B007 (the last match is what is wanted)
        pass
    return None if last is None else _quantity(text, last)


def only_quantity(text: str) -> Quantity | None:
    """Return the one number after the last ``=``, with its unit; ``None`` where there is none or several."""
    text = _normal(text).rpartition("=")[2]
    found = list(_NUMBER.finditer(text))
    return _quantity(text, found[0]) if len(found) == 1 else None


def without_separators(text: str) -> str:
    """Return the text with digits that :data:`THIN_SEPARATOR` parts moved together."""
    return _SEPARATED.sub("", text)


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number in the text; see :func:`last_quantity`."""
    found = last_quantity(text)
    return None if found is None else found.number


def only_number(text: str) -> Fraction | None:
    """Return the value of the one number after the last ``=``; see :func:`only_quantity`."""
    found = only_quantity(text)
    return None if found is None else found.number


def _quantity(text: str, match: re.Match[str]) -> Quantity | None:
    value = _value(match)
    return None if value is None else Quantity(value, unit_beside(text, match.start(), match.end()))


def _normal(text: str) -> str:
    """Write minus signs, thousands separators and LaTeX fractions in one way."""
    text = _SEPARATED.sub(",", text.translate(MINUS_SIGNS))
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
