"""What holds the policy near the reference? Divergences: the per-token penalty k."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from grpo_lit.batch import TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.objectives.terms import Terms, tangent_exp
from grpo_lit.shapes import SequenceFloat, TokenFloat

#: Key of a per-domain ``beta`` for the domains that it does not name.
ANY_DOMAIN = "default"


@dataclass
class Divergence(ABC):
    """Per-token estimate of KL(policy || reference), times ``beta``.

    Args:
        beta: Coefficient, or one per domain: ``{math: 0.0, code: 0.02, default: 0.0}``. 0 pays nothing; where all are
            0, no reference model is held.
        weighting: ``ratio`` multiplies k by r = exp(logp - logp_old), which makes the gradient of k1 and k3 that of the
            next token's KL, the tokens before it held fixed, off-policy too (DeepSeek-V3.2, arXiv 2512.02556).
        normalise: ``length`` divides by the tokens of the sequence, so that long answers pay no more than short ones.
        place: ``loss`` adds beta k to the loss; ``reward`` takes beta sum_t k_t from the reward of a sequence before
            advantages are made. There k1 gives the gradient of the whole sequence's KL: what a token does to the
            tokens after it counts too, and k1's own gradient has mean 0, and drops out.
    """

    beta: float | dict[str, float] = 0.04
    weighting: Literal["none", "ratio"] = "none"
    normalise: Literal["none", "length"] = "none"
    place: Literal["loss", "reward"] = "loss"

    def __post_init__(self) -> None:
        """Refuse a coefficient that would push the policy away, and a weighting without an effect."""
        name = type(self).__name__
        for domain, beta in self._table().items():
            if not beta >= 0:
                raise ConfigError(f"`beta` of {name} expected to be >= 0, but got {beta} for domain {domain!r}")
        if self.weighting == "ratio" and self.place == "reward":
            raise ConfigError(
                f"`weighting: ratio` of {name} expected `place: loss`, but got `place: reward`: a reward has no "
                "gradient that the ratio could correct, so drop one of the two"
            )

    @property
    def pays(self) -> bool:
        """Whether any token pays."""
        return any(beta > 0 for beta in self._table().values())

    def check_domains(self, domains: Iterable[str]) -> None:
        """Refuse domains without a beta.

        Raises:
            ConfigError: One is neither named nor covered by ``default``.
        """
        table = self._table()
        missing = [domain for domain in domains if domain not in table and ANY_DOMAIN not in table]
        if missing:
            raise ConfigError(
                f"`beta` of {type(self).__name__} expected a value for domain {missing[0]!r}, but got only "
                f"{sorted(table)}: name it, or add `{ANY_DOMAIN}`"
            )

    def coefficients(self, batch: TokenBatch | Terms) -> SequenceFloat:
        """Return the beta of each sequence.

        Raises:
            ConfigError: A domain is neither named nor covered by ``default``.
        """
        table = self._table()
        # Only the domains there are: a rank without groups has none, and must not fail where the others go on.
        self.check_domains(batch.domains[i] for i in batch.domain.unique().tolist())
        values = [table.get(domain, table.get(ANY_DOMAIN, 0.0)) for domain in batch.domains]
        return torch.tensor(values, dtype=batch.sampler_logprobs.dtype, device=batch.domain.device)[batch.domain]

    def penalty(self, terms: Terms) -> TokenFloat:
        """Return what each token pays: beta k, weighted and normalised as asked."""
        k = self(terms)
        if self.weighting == "ratio":
            k = k * terms.ratio
        scale = self.coefficients(terms)
        if self.normalise == "length":
            scale = scale / terms.lengths.clamp(min=1)
        return terms.spread(scale) * k

    @abstractmethod
    def __call__(self, terms: Terms) -> TokenFloat:
        """Return k of every token, without ``beta`` and weighting."""

    def _table(self) -> dict[str, float]:
        return self.beta if isinstance(self.beta, dict) else {ANY_DOMAIN: self.beta}


@dataclass
class K1(Divergence):
    """The log-ratio itself: unbiased, of any sign.

    k1 = logp - logp_reference

    In the loss and on-policy its expected gradient is 0 (that of a score function), so it holds nothing there unless
    ratio-weighted; in the reward it is exact. Source: J. Schulman, "Approximating KL divergence" (2020).
    """

    def __call__(self, terms: Terms) -> TokenFloat:
        """Return k1 of every token."""
        return terms.logprobs - terms.reference_logprobs


@dataclass
class K2(Divergence):
    """Half the squared log-ratio: biased in value; its on-policy gradient in the loss is that of the next token's KL.

    k2 = (logp - logp_reference)^2 / 2

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """

    def __call__(self, terms: Terms) -> TokenFloat:
        """Return k2 of every token."""
        return (terms.logprobs - terms.reference_logprobs) ** 2 / 2


@dataclass
class K3(Divergence):
    """The low-variance, never negative estimate.

    k3 = exp(q) - q - 1      q = logp_reference - logp

    Unbiased in value; in the loss and on-policy its expected gradient is that of the next token's
    KL(reference || policy), the tokens before it held fixed.
    Source: J. Schulman, "Approximating KL divergence" (2020); in the loss: GRPO (arXiv 2402.03300).
    """

    def __call__(self, terms: Terms) -> TokenFloat:
        """Return k3 of every token."""
        q = terms.reference_logprobs - terms.logprobs
        return tangent_exp(q) - q - 1
