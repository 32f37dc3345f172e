"""The collector: asks prompts until a rollout is full of groups worth learning from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.callback import RolloutHooks
from grpo_lit.metrics.rates import Rates
from grpo_lit.metrics.rollout import has_signal, rollout_rates, solve_rate
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Group, Sampling
from grpo_lit.rollouts.dynamic import DynamicSampling
from grpo_lit.rollouts.queue import Asked, RolloutQueue, Take
from grpo_lit.rollouts.replay import Entry, ReplayBuffer


@dataclass
class Collected:
    """The groups of a rollout.

    Attributes:
        groups: Those of this rank.
        places: Where each stands in the rollout over all ranks.
        size: Groups of the rollout over all ranks.
        rates: What to log, this rank's share.
        solved: Share of right samples by prompt id, of all prompts asked on all ranks.
        tokens: Completion tokens drawn for it over all ranks, those of dropped groups included.
    """

    groups: list[Group]
    places: list[int]
    size: int
    rates: Rates
    solved: dict[str, float]
    tokens: int


@dataclass
class _Pool:
    """Groups by serial number on their way into a rollout: what every rank knows, and what this one holds.

    Attributes:
        serials: Their numbers.
        versions: Weights that sampled each.
        drawn: Number of the rollout that each was drawn for.
        mine: Those that this rank holds.
    """

    serials: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    mine: dict[int, Group] = field(default_factory=dict)

    def add(self, serial: int, version: int, drawn: int) -> None:
        self.serials.append(serial)
        self.versions.append(version)
        self.drawn.append(drawn)

    def keep(self, chosen: Sequence[bool]) -> "_Pool":
        kept = _Pool()
        for serial, version, drawn in compress(zip(self.serials, self.versions, self.drawn, strict=True), chosen):
            kept.add(serial, version, drawn)
        kept.mine = {serial: self.mine[serial] for serial in kept.serials if serial in self.mine}
        return kept


class Collector:
    """Fills rollouts with scored groups; every rank makes the same decisions.

    All groups of a run are numbered over all ranks, in the order their prompts were taken. What decides (signal,
    priority, solve rate) is summed over ranks by that number, so the outcome is the same on any number of ranks.

    Args:
        queue: Hands out groups.
        reward_names: Names of the rewards, for the rates.
        dynamic: Keep groups with signal only; ``None``: keep all.
        replay: Stands in for missing signal; ``None``: nothing does.

    Attributes:
        domains: Domains whose solve rates are logged apart; the same on every rank.
    """

    def __init__(
        self,
        queue: RolloutQueue,
        reward_names: Sequence[str],
        dynamic: DynamicSampling | None = None,
        replay: ReplayBuffer | None = None,
    ) -> None:
        self.queue, self.reward_names, self.dynamic, self.replay = queue, list(reward_names), dynamic, replay
        self.probe = dynamic.probe if dynamic else None
        self.domains: Sequence[str] = ()
        self._next_serial = 0
        self._waiting = _Pool()
        self._rollouts = self._tokens = 0

    def first_round(self, wanted: int, after: int = 0) -> int:
        """Return how many prompts the first round of a coming rollout will ask, as far as can be told now.

        Args:
            wanted: Groups of the rollout over all ranks.
            after: Rollouts before it; the groups that wait now go into the first.
        """
        missing = max(wanted - (0 if after else len(self._waiting.serials)), 0)
        return self.dynamic.prompts(missing, asked=0, accepted=0) if self.dynamic else missing

    def collect(
        self,
        wanted: int,
        take: Take,
        sampling: Sampling,
        ranks: Ranks,
        version: int,
        hooks: RolloutHooks | None = None,
        oldest: int | None = None,
    ) -> Collected:
        """Return the groups of one rollout; all ranks must call.

        Args:
            wanted: Groups over all ranks.
            take: Returns that many new prompts with their epochs, the same on every rank.
            sampling: How completions are drawn.
            ranks: All processes.
            version: ``global_step`` of the weights that will be trained on it.
            hooks: Callbacks that see groups, and may shape rewards.
            oldest: Groups that older weights sampled are dropped; ``None``: none are.
        """
        hooks = hooks or RolloutHooks()
        rates, solved = self._figures_of([]), dict[str, float]()
        for name in self.queue.sampler.rewards.counters():
            rates.add(f"reward/{name}", torch.zeros(0))
        pool = self._carried_over(oldest, rates)
        carried, rounds, rates_of_all, tokens = len(pool.serials), 0, list[float](), self._tokens
        while rounds < (self.dynamic.max_rounds if self.dynamic else 1) and len(pool.serials) < wanted:
            missing = wanted - len(pool.serials)
            asked, accepted = len(rates_of_all), len(pool.serials) - carried
            count = self.dynamic.prompts(missing, asked, accepted) if self.dynamic else missing
            got = self.queue.ask(count, take, sampling, ranks, oldest)
            rates_of_all += self._sift(got, ranks, pool, rates, hooks)
            solved |= {p.id: rate for (p, _), rate in zip(got.prompts, rates_of_all[asked:], strict=True)}
            rounds += 1
        first = [i < wanted for i in range(len(pool.serials))]
        self._waiting = pool.keep([not yes for yes in first])
        pool = pool.keep(first)
        replayed = self._replay(wanted, pool, ranks, version) if self.replay is not None else 0
        if self.dynamic is not None and len(pool.serials) < wanted:
            rank_zero_warn(
                f"the rollout of step {version} holds {len(pool.serials)} of {wanted} groups: of {len(rates_of_all)} "
                f"prompts asked in {rounds} rounds, {rates_of_all.count(0.0)} were solved by no sample and "
                f"{rates_of_all.count(1.0)} by all. Change the task, or raise "
                "`data.rollout.dynamic_sampling.max_rounds`"
            )
        figures = {"rounds": rounds, "carried": carried, "replayed": replayed, "version": version}
        self._log(rates, pool, {name: float(value) for name, value in figures.items()})
        places = [place for place, serial in enumerate(pool.serials) if serial in pool.mine]
        groups = [pool.mine[pool.serials[place]] for place in places]
        self._rollouts += 1
        hooks.groups_kept(groups)
        return Collected(groups, places, len(pool.serials), rates, solved, self._tokens - tokens)

    def _carried_over(self, oldest: int | None, rates: Rates) -> _Pool:
        """Return the groups in waiting that may still be trained on, and count those that have got too stale."""
        drawn_since = self._rollouts - (self.dynamic.max_age if self.dynamic else 0)
        pool = self._waiting.keep([drawn >= drawn_since for drawn in self._waiting.drawn])
        fresh = [oldest is None or version >= oldest for version in pool.versions]
        if self.queue.settings is not None:
            lost = pool.keep([not yes for yes in fresh])
            lengths = [len(c.token_ids) for group in lost.mine.values() for c in group.completions]
            _count_stale(rates, len(lost.serials), 0, lengths)
            rates.add("system/queue_size", torch.tensor([float(self.queue.ready)]))
        return pool.keep(fresh)

    def _sift(self, got: Asked, ranks: Ranks, pool: _Pool, rates: Rates, hooks: RolloutHooks) -> list[float]:
        """Add the groups worth keeping to ``pool``, figures of all to ``rates``.

        Returns:
            The solve rate of every prompt, over all ranks.
        """
        mine, groups = list(got.groups), list(got.groups.values())
        samples = sum(len(group.completions) for group in groups)
        if self.probe is not None:
            # Groups that went on after it were scored twice, the second time as a whole.
            samples += self.probe * sum(len(group.completions) > self.probe for group in groups)
        for name, count in got.counts.items():
            rates.add(f"reward/{name}", torch.tensor([float(count)]), count=samples)
        if self.queue.settings is not None:
            _count_stale(rates, got.too_stale, len(got.prompts), got.dropped)
        hooks.groups_scored(groups)
        worth, right = (torch.zeros(len(got.prompts), dtype=torch.float64) for _ in range(2))
        drawn = sum(len(c.token_ids) for group in groups for c in group.completions) + sum(got.dropped)
        self._tokens += int(ranks.sum(torch.tensor(drawn)))
        for i, group in got.groups.items():
            worth[i] = self.dynamic is None or self.dynamic.shows_signal(group)
            right[i] = solve_rate(group)
        rates.merge(self._figures_of([(group, bool(worth[i])) for i, group in zip(mine, groups, strict=True)]))
        worth, right = ranks.sum(worth), ranks.sum(right)
        kept = worth.nonzero()[:, 0].tolist()
        for i in kept:
            pool.add(self._next_serial + i, got.versions[i], self._rollouts)
        pool.mine |= {self._next_serial + i: group for i, group in got.groups.items() if worth[i]}
        self._next_serial += len(got.prompts)
        return right.tolist()

    def _figures_of(self, groups: Sequence[tuple[Group, bool]]) -> Rates:
        """Return the rates of groups just drawn, each with whether it is kept; the names are always the same."""
        drawn = [group for group, _ in groups]
        if self.probe is not None:
            # Groups that showed no signal have no other samples: over all of them, the kept ones would weigh more.
            drawn = [group.first(self.probe) for group in drawn]
        rates = rollout_rates(drawn, self.reward_names, self.domains)
        if self.dynamic is not None:
            sizes = torch.tensor([float(len(group.completions)) for group, _ in groups])
            kept_ones = torch.tensor([float(kept) for _, kept in groups])
            rates.add("exploration/accepted", sizes * kept_ones, count=float(sizes.sum()))
            for name, wanted in (("kept", True), ("dropped", False)):
                side = [group for group, kept in groups if kept == wanted]
                lengths = [float(len(c.token_ids)) for group in side for c in group.completions]
                rates.add(f"length/{name}", torch.tensor(lengths))
                rates.add(f"reward/correct_{name}", torch.tensor([solve_rate(group) for group in side]))
        return rates

    def _replay(self, wanted: int, pool: _Pool, ranks: Ranks, version: int) -> int:
        """Put stored groups in the place of missing ones and of those without signal; store the new ones.

        Returns:
            How many stored groups there are now in the rollout, over all ranks.
        """
        buffer = cast("ReplayBuffer", self.replay)
        signal, priority = (torch.zeros(len(pool.serials), dtype=torch.float64) for _ in range(2))
        for i, serial in enumerate(pool.serials):
            if serial in pool.mine:
                signal[i] = has_signal(pool.mine[serial].rewards)
                priority[i] = buffer.settings.priority(pool.mine[serial])
        signal, priority = ranks.sum(signal), ranks.sum(priority)
        idle = (signal == 0).nonzero()[:, 0].tolist()
        new = [Entry(pool.serials[i], pool.versions[i], float(priority[i])) for i in signal.nonzero()[:, 0].tolist()]
        mine = {e.serial: pool.mine[e.serial] for e in new if e.serial in pool.mine}
        entries, groups = buffer.take(wanted - len(pool.serials) + len(idle), version)
        buffer.add(new, mine)
        pool.mine |= groups
        for entry, place in zip_longest(entries, idle[: len(entries)]):
            if place is None:
                pool.add(entry.serial, entry.version, self._rollouts)
            else:
                pool.serials[place], pool.versions[place] = entry.serial, entry.version
        return len(entries)

    def _log(self, rates: Rates, pool: _Pool, figures: dict[str, float]) -> None:
        """Add what is the same on every rank."""
        rates.maximum("system/tokens_sampled", torch.tensor([float(self._tokens)]))
        if self.dynamic is not None:
            rates.add("exploration/groups", torch.tensor([float(len(pool.serials))]))
            rates.add("exploration/rounds", torch.tensor([figures["rounds"]]))
            rates.add("exploration/carried", torch.tensor([figures["carried"]]))
            rates.add("exploration/waiting", torch.tensor([float(len(self._waiting.serials))]))
        if self.replay is not None:
            rates.add("system/replay_size", torch.tensor([float(len(self.replay))]))
            rates.add("system/replay_age", torch.tensor([self.replay.mean_age(int(figures["version"]))]))
            rates.add("system/replay_share", torch.tensor([figures["replayed"]]), count=max(len(pool.serials), 1))

    def state_dict(self) -> dict[str, Any]:
        """Return what the next rollout depends on; plain types, but for the groups themselves."""
        waiting = self._waiting
        return {
            "next_serial": self._next_serial,
            "rollouts": self._rollouts,
            "tokens": self._tokens,
            "waiting": {
                "serials": list(waiting.serials),
                "versions": list(waiting.versions),
                "drawn": list(waiting.drawn),
                "groups": dict(waiting.mine),
            },
            "replay": None if self.replay is None else self.replay.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._next_serial = state["next_serial"]
        # Not counted in older checkpoints: what waits there was drawn for the last rollout.
        self._tokens, self._rollouts = state.get("tokens", 0), state.get("rollouts", 0)
        waiting = state["waiting"]
        serials, versions = list(waiting["serials"]), list(waiting["versions"])
        drawn = list(waiting.get("drawn", [self._rollouts - 1] * len(serials)))
        self._waiting = _Pool(serials, versions, drawn, dict(waiting["groups"]))
        if self.replay is not None and state["replay"] is not None:
            self.replay.load_state_dict(state["replay"])


def _count_stale(rates: Rates, dropped: int, kept: int, lengths: Sequence[int]) -> None:
    """Add how many groups of all ranks were dropped as too stale, how many were not, and this rank's lengths."""
    rates.add("system/dropped_stale", torch.tensor([1.0] * dropped + [0.0] * kept))
    rates.add("length/dropped_stale", torch.tensor(lengths, dtype=torch.float64))
