"""What a data module keeps in a checkpoint when several ranks each hold a part of it."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rewards.combination import RewardCombination
from grpo_lit.rollout import Group, Sampling

#: Parts of the state that differ from rank to rank.
PER_RANK = ("collector", "rollout")


def gathered(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the state of all ranks in plain types; all ranks must call."""
    mine = {name: _plain(state[name]) for name in PER_RANK}
    return {**{name: value for name, value in state.items() if name not in PER_RANK}, "ranks": ranks.gather(mine)}


def own_share(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return what this rank takes up of a state that :func:`gathered` wrote, on any number of ranks.

    Raises:
        ConfigError: A rollout was in progress on another number of ranks: its minibatches cannot be dealt out anew.
    """
    if "ranks" not in state:  # written before several ranks were told apart
        return {**state, "collector": _groups_rebuilt(state.get("collector"))}
    parts = state["ranks"]
    if len(parts) == ranks.world_size:
        mine = parts[ranks.rank]
        return {**state, "rollout": mine["rollout"], "collector": _groups_rebuilt(mine["collector"])}
    if any(part["rollout"] is not None for part in parts):
        raise ConfigError(
            f"the checkpoint was written in the middle of a rollout on {len(parts)} ranks: resume it on as many, or "
            "take one from between two rollouts (a step that `data.num_updates` times `data.num_epochs` divides)"
        )
    return {**state, "rollout": None, "collector": _dealt([part["collector"] for part in parts], ranks)}


def sampled_as(rewards: RewardCombination, sampling: Sampling) -> dict[str, Any]:
    """Return what log-probs and totals of stored groups depend on, in plain types."""
    weights = {name: float(part.weight) for name, part in rewards.rewards.items()}
    return {"rewards": weights, "sampling": dict(vars(sampling))}


def without_groups(collector: dict[str, Any]) -> dict[str, Any]:
    """Return the state with no group in it, and say so: their log-probs and totals are of other settings."""
    replay = collector["replay"] or {"groups": {}, "entries": []}
    if collector["waiting"]["serials"] or replay["entries"]:
        rank_zero_warn(
            "stored groups of the checkpoint are dropped: they were made with other `data.sampling` or `data.rewards`"
        )
    state = {**collector, "waiting": {"serials": [], "versions": [], "drawn": [], "groups": {}}}
    if state["replay"] is not None:
        state["replay"] = {"entries": [], "groups": {}}
    return state


def _dealt(parts: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Return the state that all ranks share, with every ``world_size``-th group."""

    def dealt(groups: list[dict[int, Any]]) -> dict[int, Any]:
        every = {serial: group for part in groups for serial, group in part.items()}
        return {serial: every[serial] for serial in sorted(every)[ranks.rank :: ranks.world_size]}

    state = {**parts[0], "waiting": {**parts[0]["waiting"], "groups": dealt([p["waiting"]["groups"] for p in parts])}}
    if state["replay"] is not None:
        state["replay"] = {**state["replay"], "groups": dealt([part["replay"]["groups"] for part in parts])}
    return _groups_rebuilt(state)


def _groups_rebuilt(collector: dict[str, Any] | None) -> dict[str, Any] | None:
    if collector is None:
        return None
    state = {**collector, "waiting": {**collector["waiting"], "groups": _rebuilt(collector["waiting"]["groups"])}}
    if state["replay"] is not None:
        state["replay"] = {**state["replay"], "groups": _rebuilt(state["replay"]["groups"])}
    return state


def _rebuilt(groups: dict[int, Any]) -> dict[int, Group]:
    return {serial: Group.from_state_dict(group) for serial, group in groups.items()}


def _plain(value: Any) -> Any:
    """Return the same with every group written out."""
    if isinstance(value, Group):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
