"""What a data module keeps in a checkpoint when several ranks each hold a part of it."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.ranks import Ranks
from grpo_lit.rewards.combination import RewardCombination
from grpo_lit.rollout import Group, Prompt, Sampling
from grpo_lit.rollouts.asynchronous import Drawn, Round
from grpo_lit.rollouts.dealing import dealt
from grpo_lit.rollouts.minibatch import Rollout

#: Parts of the state that differ from rank to rank.
PER_RANK = ("collector", "rollout")
#: A queue without anything in it, as in checkpoints made before there was one.
NO_QUEUE: dict[str, Any] = {"handed_out": 0, "rounds": []}


def gathered(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the state of all ranks in plain types; all ranks must call."""
    mine = {name: _plain(state[name]) for name in PER_RANK}
    rounds = state["queue"]["rounds"]
    mine["drawn"] = [_drawn_state(part) for part in rounds]
    asked = [[{"prompt": dict(vars(prompt)), "epoch": epoch} for prompt, epoch in part.prompts] for part in rounds]
    shared = {name: value for name, value in state.items() if name not in PER_RANK}
    return {**shared, "queue": {**state["queue"], "rounds": asked}, "ranks": ranks.gather(mine)}


def own_share(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return what this rank takes up of a state that :func:`gathered` wrote, on any number of ranks.

    Groups, prompts on their way, and what is left of a rollout in progress are dealt out anew where the number is
    another: all that is decided about them is decided over all ranks.
    """
    # "ranks" is not in checkpoints written before several ranks were told apart.
    parts = state.get("ranks") or [{"rollout": state["rollout"], "collector": state.get("collector"), "drawn": []}]
    state = {**state, "queue": _queue_rebuilt(state.get("queue", NO_QUEUE), parts, ranks)}
    if len(parts) == ranks.world_size:
        mine = parts[ranks.rank]
        return {**state, "rollout": mine["rollout"], "collector": _groups_rebuilt(mine["collector"])}
    rollout = None
    if parts[0]["rollout"] is not None:  # on every rank or on none
        begun = [Rollout.from_state_dict(part["rollout"]) for part in parts]
        rollout = dealt(begun, ranks.rank, ranks.world_size).state_dict()
    return {**state, "rollout": rollout, "collector": _dealt([part["collector"] for part in parts], ranks)}


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


def asked_again(queue: dict[str, Any]) -> dict[str, Any]:
    """Return the state with nothing drawn for its prompts: they are asked again, under other settings."""
    return {**queue, "rounds": [Round(part.prompts) for part in queue["rounds"]]}


def _drawn_state(part: Round) -> dict[str, Any] | None:
    """Return what this rank has drawn of a round; ``None`` while it is not done."""
    drawn = part.outcome
    if drawn is None:
        return None
    groups = zip(part.mine, drawn.groups, strict=True)
    return {"version": drawn.version, "groups": {place: group.state_dict() for place, group in groups}}


def _queue_rebuilt(queue: dict[str, Any], parts: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Return the queue with this rank's share of the groups in it; what some rank had not drawn, all draw again."""
    rounds = []
    for i, asked in enumerate(queue["rounds"]):
        pairs = [
            (Prompt(**{**pair["prompt"], "token_ids": tuple(pair["prompt"]["token_ids"])}), pair["epoch"])
            for pair in asked
        ]
        part, drawn = Round(pairs, range(ranks.rank, len(pairs), ranks.world_size)), [p["drawn"][i] for p in parts]
        if all(one is not None for one in drawn):
            groups = {place: group for one in drawn for place, group in one["groups"].items()}
            mine = [Group.from_state_dict(groups[place]) for place in part.mine]
            part.drawn = Drawn(mine, min(one["version"] for one in drawn))
        rounds.append(part)
    return {**queue, "rounds": rounds}


def _dealt(parts: list[dict[str, Any] | None], ranks: Ranks) -> dict[str, Any] | None:
    """Return the state that all ranks share, with every ``world_size``-th group."""
    if parts[0] is None:
        return None

    def every_nth(groups: list[dict[int, Any]]) -> dict[int, Any]:
        every = {serial: group for part in groups for serial, group in part.items()}
        return {serial: every[serial] for serial in sorted(every)[ranks.rank :: ranks.world_size]}

    waiting = every_nth([part["waiting"]["groups"] for part in parts])
    state = {**parts[0], "waiting": {**parts[0]["waiting"], "groups": waiting}}
    if state["replay"] is not None:
        state["replay"] = {**state["replay"], "groups": every_nth([part["replay"]["groups"] for part in parts])}
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
