"""Shadow objectives: what other recipes would have done on the same batch, without a backward of the model."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives.objective import Objective
from grpo_lit.objectives.reductions import Counts
from grpo_lit.shapes import SequenceBool, SequenceFloat, TokenFloat

_PREFIX = "_shadow"


class Shadows:
    """Extra recipes that are measured and not trained.

    Each one's loss is differentiated with respect to the log-probs only, a vector of T numbers, and held against the
    trained recipe's:

        cosine = g_s . g / (|g_s| |g|)      norm = |g_s| / |g|      g = dloss / dlogp, over the optimizer step

    They compare directions in the space of log-probs, which the shared weights of the model then mix. A shadow
    sees the sequences that the trained recipe's filters left, and its entropy bonus does not count.

    Args:
        recipes: Objective by the name it is logged under.
    """

    def __init__(self, recipes: Mapping[str, Objective]) -> None:
        self.recipes = dict(recipes)
        for name, recipe in self.recipes.items():
            if recipe.selection is not None:
                raise ConfigError(
                    f"shadow {name!r} expected no `selection`, but got {type(recipe.selection).__name__}: tokens are "
                    "selected for the trained objective only"
                )

    @property
    def needs_reference(self) -> bool:
        """Whether a shadow needs ``reference_logprobs``."""
        return any(recipe.needs_reference for recipe in self.recipes.values())

    @property
    def needs_reference_before_advantages(self) -> bool:
        """Whether a shadow needs ``reference_logprobs`` when :meth:`with_advantages` is called."""
        return any(recipe.needs_reference_before_advantages for recipe in self.recipes.values())

    def with_advantages(self, batch: TokenBatch, sum_ranks: SumRanks) -> TokenBatch:
        """Return a rollout with each shadow's advantages."""
        columns = [recipe.advantages(batch, sum_ranks) for recipe in self.recipes.values()]
        return replace(batch, shadow_advantages=_columns(columns, batch.rewards))

    def with_weights(self, batch: TokenBatch, sum_ranks: SumRanks) -> TokenBatch:
        """Return an optimizer step with each shadow's weights: 0 where its own filters leave a sequence out."""
        columns = [self._weights(recipe, view, sum_ranks) for _, recipe, view in self._views(batch)]
        return replace(batch, shadow_weights=_columns(columns, batch.rewards))

    def contributes(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences move any shadow: their log-probs are needed too."""
        moves = torch.zeros_like(batch.lengths, dtype=torch.bool)
        for _, recipe, view in self._views(batch):
            moves = moves | recipe.contributes(view)
        return moves

    def measure(self, trained: Objective, batch: TokenBatch, logprobs: TokenFloat, entropy: TokenFloat) -> Rates:
        """Return the sums behind cosine and norm of every shadow on a micro-batch.

        Args:
            trained: The objective being trained.
            batch: A micro-batch with the trained and the shadows' advantages and weights.
            logprobs: Under the policy; only their values are used.
            entropy: Of the policy at each position [nats].
        """
        rates = Rates()
        if not self.recipes:
            return rates
        gradient = _gradient(trained, batch, logprobs, entropy)
        for name, recipe, view in self._views(batch):
            other = _gradient(recipe, view, logprobs, entropy)
            for key, product in (("dot", other * gradient), ("own", other**2), ("trained", gradient**2)):
                rates.add(f"{_PREFIX}_{key}_{name}", product)
        return rates

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return ``shadow/cosine_<name>`` and ``shadow/norm_<name>`` from what :meth:`Rates.compute` made."""
        result = {}
        for name in self.recipes:
            dot, own, trained = (values[f"{_PREFIX}_{key}_{name}"] for key in ("dot", "own", "trained"))
            result[f"shadow/cosine_{name}"] = dot / (own * trained) ** 0.5 if own * trained > 0 else float("nan")
            result[f"shadow/norm_{name}"] = (own / trained) ** 0.5 if trained > 0 else float("nan")
        return result

    def _views(self, batch: TokenBatch) -> list[tuple[str, Objective, TokenBatch]]:
        """Return every shadow with the batch as it sees it."""
        return [
            (
                name,
                recipe,
                replace(
                    batch,
                    advantages=batch.shadow_advantages[:, column],
                    weights=None if batch.shadow_weights is None else batch.shadow_weights[:, column],
                    selected=None,
                ),
            )
            for column, (name, recipe) in enumerate(self.recipes.items())
        ]

    def _weights(self, recipe: Objective, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        kept = recipe.kept(batch).nonzero()[:, 0]
        seen = batch.select(kept)
        weights = torch.zeros_like(batch.rewards)
        return weights.index_copy(0, kept, recipe.weights(seen, Counts.of(seen, sum_ranks)))


def _gradient(objective: Objective, batch: TokenBatch, logprobs: TokenFloat, entropy: TokenFloat) -> TokenFloat:
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = objective.loss(batch, leaf, entropy.detach()).loss
        return torch.autograd.grad(loss, leaf)[0].double()


def _columns(columns: list[Tensor], like: SequenceFloat) -> Tensor:
    return torch.stack(columns, dim=1) if columns else like.new_zeros(len(like), 0)
