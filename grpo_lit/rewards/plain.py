r"""Answers that are one plain number, or a word, however they are written: read exactly, without a computer algebra."""

import re
import string
from dataclasses import dataclass
from fractions import Fraction

from grpo_lit.rewards.extract import last_boxed
from grpo_lit.rewards.numeric import MAX_DIGITS, MINUS_SIGNS, THIN_SEPARATOR, only_number
from grpo_lit.rewards.units import words_beside_numbers

#: Digits from which on a decimal may stand for a fraction that has no end: 0.333333 for 1/3, but not 0.33.
MIN_DIGITS = 6

_WRAPPED = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>.+)\\\)|\\\[(?P<d>.+)\\\]|\*\*(?P<e>[^*]+)\*\*"
    r"|\\(?:mathbf|boldsymbol|bold|bm|displaystyle|mathrm)\s*\{(?P<f>[^{}]+)\}|\{(?P<g>[^{}]+)\}",
    re.DOTALL,
)
_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|operatorname)\s*\{[^{}]*\}"
_IN_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox)\s*\{([^{}]*)\}")
_SPACES = r"(?:\s|~|\\[ ,;:!]|\\quad)*"
_UNIT = re.compile(
    rf"(?<=[0-9}}.]){_SPACES}"
    r"(?:\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree|°|\\?%|[€£]"
    rf"|(?:{_TEXT}{_SPACES})+(?:\^\s*\{{?\s*[-0-9]+\s*\}}?)?"
    rf"|(?:square|cubic)?\s*(?:{words_beside_numbers()})\b(?:\s*\^\s*\{{?[23]\}}?)?"
    rf"){_SPACES}\Z"
)
_TIMES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MULTIPLE = re.compile(rf"\s*(?:\\(?:text|mbox)\s*\{{\s*)?\b({'|'.join(_TIMES)})s?\b")
_ASSIGNED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*=(?!=)")
_GROUPED = re.compile(rf"(?<![0-9.])[0-9]{{1,3}}(?:(?:{THIN_SEPARATOR}|,|\\ |[ ~])[0-9]{{3}})+(?![0-9])")
_SIGN = r"(?P<sign>[-+]?)\s*"
_INTEGER = r"\s*\{?\s*([-+]?[0-9]+)\s*\}?\s*"
_NUMBER = re.compile(rf"{_SIGN}(?P<digits>[0-9]+\.?[0-9]*|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]+)?")
_SCIENTIFIC = re.compile(r"\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*\{?\s*(-?[0-9]+)\s*\}?\Z")
_FRACTION = re.compile(
    rf"{_SIGN}(?:(?P<whole>[0-9]+)\s*(?:\\[ ,;:!]\s*)?(?=\\|\s|(?<=\s)))?"
    r"(?:\\[dt]?frac\s*(?:\{\s*(?P<n1>[-+]?[0-9]+)\s*\}|(?P<n2>[0-9]))\s*(?:\{\s*(?P<d1>[-+]?[0-9]+)\s*\}|(?P<d2>[0-9]))"
    r"|(?P<n3>[0-9]+)\s*/\s*(?P<d3>[0-9]+))"
)
_BASED = re.compile(r"([0-9A-Za-z]+)\s*_\s*\{?\s*([0-9]{1,2})\s*\}?")
_WORDS_ONLY = re.compile(r"[A-Za-z]+(?:[ '-][A-Za-z]+)*")


@dataclass(frozen=True)
class PlainNumber:
    """A number as it was written.

    Attributes:
        value: Exactly.
        places: Digits after the decimal point; ``None`` for an integer or a fraction.
        significant: Digits from the first that is not 0.
    """

    value: Fraction
    places: int | None = None
    significant: int = 0

    def equals(self, other: "PlainNumber") -> bool:
        """Return whether both are the same number, or one the digits of the other, which has no end."""
        return self.value == other.value or self._is_decimal_of(other) or other._is_decimal_of(self)

    def _is_decimal_of(self, other: "PlainNumber") -> bool:
        return (
            self.places is not None
            and other.places is None
            and self.significant >= MIN_DIGITS
            and _has_no_end(other.value)
            and abs(self.value - other.value) < Fraction(1, 10**self.places)
        )

    def __str__(self) -> str:
        """Return the number as LaTeX that means the same everywhere."""
        if self.places:
            digits = f"{abs(self.value) * 10**self.places}".rjust(self.places + 1, "0")
            return f"{'-' if self.value < 0 else ''}{digits[: -self.places]}.{digits[-self.places :]}"
        n, d = self.value.as_integer_ratio()
        return str(n) if d == 1 else rf"\frac{{{n}}}{{{d}}}"


def clean(text: str) -> str:
    """Return an answer without what only dresses it: a box, math delimiters, bold face, a full stop at the end."""
    text = text.translate(MINUS_SIGNS).strip()
    for _ in range(4):
        inner = last_boxed(text) if text.startswith(("\\boxed", "\\fbox")) else None
        match = _WRAPPED.fullmatch(text) if inner is None else None
        if match:
            inner = match[match.lastgroup]
        if inner is None:
            break
        text = inner.strip()
    # Not a regex: `[\s.,;]+\Z` takes quadratic time on a long run of spaces that does not end the text.
    return text if text.endswith("...") else text.rstrip(string.whitespace + ".,;")


def plain_number(text: str) -> PlainNumber | None:
    """Return the number that the whole of an answer is; ``None`` for anything else.

    Args:
        text: As :func:`clean` left it. The table of what is read stands at
            :class:`grpo_lit.rewards.math.MathEquivalence`.
    """
    if len(text) > MAX_DIGITS:
        return None
    text = _ASSIGNED.sub("", text, count=1).strip() if _ASSIGNED.match(text) else text
    text = re.sub(r"\A([-+]?)\s*\\?[$€£]\s*", r"\1", text)
    times = _MULTIPLE.search(text)
    if times:
        text = text[: times.start()] + (
            text[times.end() :].replace("}", "", 1) if "{" in times[0] else text[times.end() :]
        )
    text = _UNIT.sub("", text).strip()
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", "", match[0]), text)
    number = _fraction(text) or _decimal(text)
    if number is None or times is None:
        return number
    return PlainNumber(number.value * _TIMES[times[1]])


def _fraction(text: str) -> PlainNumber | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    n, d = int(match["n1"] or match["n2"] or match["n3"]), int(match["d1"] or match["d2"] or match["d3"])
    if d == 0:
        return None
    value = Fraction(n, d)
    if match["whole"]:
        if not 0 < n < d:
            return None  # ``2\frac{5}{3}`` is a product
        value += int(match["whole"])
    return PlainNumber(-value if match["sign"] == "-" else value)


def _decimal(text: str) -> PlainNumber | None:
    scientific = _SCIENTIFIC.search(text)
    if scientific:
        text = f"{text[: scientific.start()]}e{scientific[1]}"
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits = match["digits"].rstrip(".")
    value = only_number(f"{match['sign']}{digits}{match['exponent'] or ''}")
    if value is None:
        return None
    places = len(digits.partition(".")[2])
    if match["exponent"] or not places:
        return PlainNumber(value)
    return PlainNumber(value, places, len(digits.replace(".", "").lstrip("0")))


def _has_no_end(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest > 1


def assigned_name(text: str) -> str | None:
    """Return ``x`` of ``x = 5``, ``None`` where nothing is assigned."""
    match = _ASSIGNED.match(text)
    return match[0].rstrip("= ").strip() if match else None


def word(text: str) -> tuple[str, bool] | None:
    r"""Return an answer that is words, in lower case, and whether LaTeX marks it as text; ``None`` for anything else.

    ``\text{(C)}`` is ``("c", True)``, ``Evelyn`` is ``("evelyn", False)``; a small letter is a variable.
    """
    bare = _IN_TEXT.sub(r"\1", text)
    marked = bare != text
    bare = re.sub(r"\A\(\s*(.*?)\s*\)\Z", r"\1", " ".join(bare.split())).strip(" .")
    letters = not marked and all(len(part) == 1 for part in bare.split()) and not bare.isupper()
    if letters or not _WORDS_ONLY.fullmatch(bare):
        return None
    return bare.casefold(), marked


def based(text: str) -> tuple[str, int] | None:
    """Return digits and base of ``52_8``; ``None`` for anything else."""
    match = _BASED.fullmatch(text)
    return (match[1].upper(), int(match[2])) if match and 2 <= int(match[2]) <= 36 else None
