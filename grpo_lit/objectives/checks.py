"""Combinations of parts that contradict: refused, with both parts named, and never mended in silence."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.advantages import GDPOAdvantage
from grpo_lit.objectives.corrections import Correction
from grpo_lit.objectives.surrogates import Surrogate

if TYPE_CHECKING:
    from grpo_lit.objectives.objective import Objective


def refuse_contradictions(objective: "Objective") -> None:
    """Refuse an objective whose parts undo or repeat each other.

    Raises:
        ConfigError: Names both parts and the way out.
    """
    _ratio_paid_once(objective)
    _tokens_of_one_value(objective)
    _reward_that_is_read(objective)


def meet_rewards(objective: "Objective", rewards: Mapping[str, Any]) -> None:
    """Refuse rewards that an objective contradicts, and weigh single scores as the rewards are weighed.

    Args:
        objective: May have an advantage made from single scores.
        rewards: By name, each with its ``weight``, and ``conditional`` where it counts for correct answers only.

    Raises:
        ConfigError: Names both parts and the way out.
    """
    advantage = objective.advantage
    if not isinstance(advantage, GDPOAdvantage):
        return
    conditional = [name for name, part in rewards.items() if part.conditional]
    if conditional:
        raise ConfigError(
            f"`GDPOAdvantage` and `data.rewards.rewards.{conditional[0]}.conditional` contradict: GDPO weighs each "
            "reward by itself, whether the completion is correct or not. Drop one"
        )
    if advantage.weights is None:
        advantage.weights = {name: part.weight for name, part in rewards.items()}


def _ratio_paid_once(objective: "Objective") -> None:
    twice = [name for name, count in Counter(map(_name, objective.corrections)).items() if count > 1]
    if twice:
        raise ConfigError(f"`corrections` expected each part once, but got {twice[0]} twice: keep the stricter one")
    parts: list[Surrogate | Correction] = [objective.surrogate, *objective.corrections]
    payers = [part for part in parts if part.pays_sampler_ratio]
    if len(payers) > 1:
        first, second = payers[:2]
        raise ConfigError(
            f"{_name(first)} and {_name(second)} expected one of them to pay the ratio to the sampler, but got both: "
            "it would be squared. Drop one, or set `kept: one` on a masked form (`anchor: old` on DPPO)"
        )


def _tokens_of_one_value(objective: "Objective") -> None:
    if objective.selection is not None and objective.surrogate.level == "sequence":
        raise ConfigError(
            f"`selection` {_name(objective.selection)} expected a surrogate whose tokens have gradients of their own, "
            f"but got {_name(objective.surrogate)}, which has one value per sequence: use SequenceTokenClip, say"
        )


def _reward_that_is_read(objective: "Objective") -> None:
    divergence = objective.divergence
    if divergence is not None and divergence.place == "reward" and not objective.advantage.reads_rewards:
        raise ConfigError(
            f"{_name(divergence)} with `place: reward` expected an advantage made from the total reward, but got "
            f"{_name(objective.advantage)}, which reads single scores: use `place: loss`, or another advantage"
        )


def _name(part: object) -> str:
    return type(part).__name__
