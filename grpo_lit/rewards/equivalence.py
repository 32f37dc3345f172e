"""What a worker of :class:`grpo_lit.rewards.math.MathEquivalence` runs: is an answer equal to the gold one?

Loaded by path in a process of its own (:mod:`grpo_lit.rewards.workers`), never imported: sympy may hang, and its
printing of an expression may never return, so nothing here prints, logs or returns one.
"""

import math
import re
from functools import lru_cache
from typing import Any, Literal

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Float, Pow, Product, Rational, Sum, exp, gamma, nan
from sympy.core.numbers import Number
from sympy.functions.combinatorial.factorials import CombinatorialFunction, binomial

Verdict = Literal["equal", "different", "refused"]

#: An expression whose evaluation may meet a number with more digits is refused unevaluated: ``9^{9^{9^9}}`` has more
#: than could be stored, and an answer to a question has few.
MAX_DIGITS = 20_000.0
#: Terms of a sum or factors of a product that may have to be added up one by one.
MAX_TERMS = 10_000.0
#: Digits from which on a decimal may stand for a number that has no end: 0.333333 for 1/3, but not 0.33.
MIN_DIGITS = 6

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_DECIMAL = re.compile(r"[-+]?([0-9]*)\.([0-9]+)")
#: Evaluated while it is parsed, before its size can be told.
_EAGER = re.compile(r"binom\s*\{\s*[0-9]{5,}|[0-9]{5,}\s*!")
_PRECISION = 50


def readable(gold: str) -> bool:
    """Return whether the gold answer can be parsed at all, and evaluated."""
    return not _EAGER.search(gold) and _parsed(gold) is not None and _digits(_parsed(gold)) <= MAX_DIGITS


def equivalent(gold: str, answer: str) -> Verdict:
    """Return math-verify's verdict, gold first; decimals are held to this project's own rule.

    Args:
        gold: The right answer; LaTeX.
        answer: What to judge; LaTeX with balanced braces.

    Returns:
        ``equal``, ``different``, or ``refused`` where evaluating it could take for ever.
    """
    if _EAGER.search(answer):
        return "refused"
    expected, given = _parsed(gold), _parsed(answer)
    if expected is None or given is None:
        return "different"
    if not max(_digits(expected), _digits(given)) <= MAX_DIGITS:
        return "refused"
    for decimal, other in ((gold, given), (answer, expected)):
        if _DECIMAL.fullmatch(decimal):
            return "equal" if _is_decimal_of(decimal, other) else "different"
    return "equal" if verify(expected, given, timeout_seconds=None) else "different"


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    found = parse(rf"\boxed{{{text}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _is_decimal_of(decimal: str, other: Any) -> bool:
    """Return whether a decimal is exactly the other number, or its digits, :data:`MIN_DIGITS` of them at least.

    math-verify rounds both to six places, for which 0.0000001 is 0 and 7.0000001 is 7.
    """
    if isinstance(other, Eq):
        other = other.rhs
    if not getattr(other, "is_number", False):
        return False
    difference = abs((other - Rational(decimal)).evalf(_PRECISION))
    if not difference.is_Number or difference is nan:
        return False
    if difference < 10 ** (10 - _PRECISION):
        return True
    whole, places = _DECIMAL.fullmatch(decimal).groups()
    return len((whole + places).lstrip("0")) >= MIN_DIGITS and bool(difference < Rational(1, 10 ** len(places)))


def _digits(expression: Any) -> float:
    """Return an upper bound of the digits of any number that evaluating the expression may meet.

    Symbols count as one digit, so that ``x^{10^9}`` is as large as ``9^{10^9}``: it would be multiplied out.
    """
    if isinstance(expression, Number):
        return _digits_of_number(expression)
    if hasattr(expression, "flat"):  # a matrix
        return max((_digits(entry) for entry in expression.flat()), default=1.0)
    parts = [_digits(part) for part in getattr(expression, "args", ())]
    if not parts:
        return 1.0
    if isinstance(expression, Pow | exp) and expression.args[-1].free_symbols:
        return max(parts)  # ``2^{n+1}`` is no number yet
    if isinstance(expression, Pow):
        return max(*parts, parts[0] * _value(expression.args[1], parts[1]))
    if isinstance(expression, exp):
        return max(parts[0], _value(expression.args[0], parts[0]))
    if isinstance(expression, binomial):
        return max(*parts, _value(expression.args[0], parts[0]))
    if isinstance(expression, CombinatorialFunction | gamma):
        return max(*parts, _value(expression.args[0], parts[0]) * parts[0]) if len(parts) > 1 else _factorial(parts[0])
    if isinstance(expression, Sum | Product):
        terms = max((_value(bound, _digits(bound)) for limit in expression.limits for bound in limit[1:]), default=1.0)
        return math.inf if MAX_TERMS < terms < math.inf else max(parts)
    # A product has the digits of its factors together; a sum, or any other function, has no more than that.
    return sum(parts) if expression.is_Mul or expression.is_Add else max(parts)


def _digits_of_number(number: Any) -> float:
    if not number.is_finite:
        return 1.0
    if isinstance(number, Float):
        return max(1.0, abs(float(number._mpf_[2] + number._mpf_[3])) * math.log10(2))
    return max(1.0, (max(abs(number.p), number.q).bit_length()) * math.log10(2))


def _value(expression: Any, digits: float) -> float:
    """Return an upper bound of the size of an exponent."""
    if isinstance(expression, Number) and expression.is_finite and digits < 300:
        return abs(float(expression))
    return 10.0**digits if digits < 300 else math.inf


def _factorial(digits: float) -> float:
    return 10.0**digits * digits if digits < 300 else math.inf
