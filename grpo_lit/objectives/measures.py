"""What is logged of a loss: the same names in every micro-batch and on every rank."""

import math
from collections.abc import Mapping

from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives.corrections import CorrectionOutput
from grpo_lit.objectives.surrogates import SurrogateOutput
from grpo_lit.objectives.terms import Terms, bounded
from grpo_lit.shapes import TokenBool, TokenFloat

#: Names that start so are sums for :func:`derived` and are not logged themselves.
HELPER = "_"
_WEIGHT, _SQUARE = "_is_weight", "_is_weight_squared"


def measure(
    terms: Terms,
    surrogate: SurrogateOutput,
    corrections: Mapping[str, CorrectionOutput],
    factor: TokenFloat,
    counted: TokenBool,
) -> Rates:
    """Return the rates of one micro-batch; every mean is over the counted tokens.

    Args:
        terms: The micro-batch.
        surrogate: The surrogate's output on it.
        corrections: Each correction's output by its class name.
        factor: Product of their weights.
        counted: Tokens that the rates are over. They must not depend on what else went through the policy (an entropy
            bonus, a shadow), or a controller that reads a rate would see it jump as it switches the bonus on.
    """
    rates = Rates()
    log_ratio = bounded(terms.log_ratio.detach()[counted])
    rates.add("optimization/clip_low", surrogate.clipped_low[counted])
    rates.add("optimization/clip_high", surrogate.clipped_high[counted])
    rates.add("optimization/kl_old", _k3(log_ratio))
    rates.maximum("optimization/ratio_max", log_ratio.exp())
    rates.add("exploration/entropy", terms.entropy[counted])
    rates.add("exploration/token_prob", terms.old_logprobs[counted].exp())
    gap = (terms.old_logprobs - terms.sampler_logprobs)[counted]
    rates.add("system/mismatch_abs", gap.abs())
    rates.add("system/mismatch_kl", _k3(bounded(gap)))
    rates.add("system/mismatch_chi2", _chi2(bounded(gap)))
    if corrections:
        _add_weight(rates, "", factor[counted])
        any_cut = sum((out.cut.long() for out in corrections.values()), factor.new_zeros(len(factor)).long()) > 0
        rates.add("system/is_cut", any_cut[counted])
    for name, out in corrections.items():
        _add_weight(rates, f"_{name}", out.weight[counted])
        rates.add(f"system/is_cut_{name}", out.cut[counted])
        rates.add(f"system/is_k3_{name}", _k3(bounded(out.log_ratio[counted])))
        rates.add(f"system/is_chi2_{name}", _chi2(bounded(out.log_ratio[counted])))
    return rates


def derived(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values to log: helpers dropped, and effective sample sizes made of them.

    ESS = (E w)^2 / E w^2, the share of the tokens that the weighted ones are worth; 0 when every weight is 0.
    """
    logged = {name: value for name, value in values.items() if not name.startswith(HELPER)}
    for name, square in values.items():
        if name.startswith(_SQUARE):
            suffix = name.removeprefix(_SQUARE)
            mean = values[_WEIGHT + suffix]
            logged[f"system/ess{suffix}"] = mean**2 / square if square else (math.nan if math.isnan(mean) else 0.0)
    return logged


def _add_weight(rates: Rates, suffix: str, weight: TokenFloat) -> None:
    rates.add(_WEIGHT + suffix, weight)
    rates.add(_SQUARE + suffix, weight.double() ** 2)


def _k3(log_ratio: TokenFloat) -> TokenFloat:
    """Estimate of KL(denominator || numerator) from samples of the denominator, the log-ratio within bounds."""
    return log_ratio.exp() - log_ratio - 1


def _chi2(log_ratio: TokenFloat) -> TokenFloat:
    """Estimate of the chi-square divergence E[rho^2] - 1 from samples of the denominator."""
    return (2 * log_ratio.double()).exp() - 1
