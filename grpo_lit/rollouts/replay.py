"""The replay buffer: groups that taught something, to stand in for groups that would not."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Group


@dataclass(frozen=True)
class Replay:
    """Settings of the replay buffer.

    A group with signal is stored whole, with the log-probs and the weight version it was sampled with, once it has been
    trained on. It comes back where a rollout lacks a group with signal; the ratio then compares with the weights that
    sampled it. Among those of allowed age and use, the highest priority comes first, the newest one of equals:

        priority = std(rewards) * (1 - mean(correct))^hardness

    Sources: prioritised experience replay (https://arxiv.org/abs/1511.05952) for the idea of a priority; the age bound
    is the staleness bound of asynchronous RL (https://arxiv.org/abs/2505.24298).

    Args:
        capacity: Groups held over all ranks; the lowest priority makes room, the oldest one of equals.
        max_age: Optimizer steps after which a group is dropped: the bound on staleness, whatever a rollout's steps.
        max_uses: How often a group comes back.
        hardness: 0 looks at the spread of rewards only; larger prefers groups in which few were right.

    Raises:
        ConfigError: For a number out of range.
    """

    capacity: int = 256
    max_age: int = 8
    max_uses: int = 1
    hardness: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a buffer that could hold or give nothing."""
        for name, bound in {"capacity": 1, "max_age": 1, "max_uses": 1, "hardness": 0}.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(
                    f"`data.rollout.replay.{name}` expected to be >= {bound}, but got {getattr(self, name)}"
                )

    def priority(self, group: Group) -> float:
        """Return how much a group is worth keeping; 0 for one without signal."""
        rewards = [reward for reward in group.rewards if reward is not None]
        judged = [flag for flag in group.correct if flag is not None]
        if len(rewards) < 2:
            return 0.0
        solved = sum(judged) / len(judged) if judged else 0.0
        return statistics.stdev(rewards) * (1 - solved) ** self.hardness


@dataclass
class Entry:
    """What every rank knows of a stored group.

    Attributes:
        serial: The group's number in the run.
        version: Weights that sampled it.
        priority: See :class:`Replay`.
        uses: How often it has come back.
    """

    serial: int
    version: int
    priority: float
    uses: int = 0


class ReplayBuffer:
    """Entries that are the same on every rank, and the groups of those that this rank holds.

    Args:
        settings: Capacity, age, priority.
    """

    def __init__(self, settings: Replay) -> None:
        self.settings = settings
        self.entries: list[Entry] = []
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        """Return how many groups all ranks hold."""
        return len(self.entries)

    def add(self, entries: Sequence[Entry], groups: dict[int, Group]) -> None:
        """Store groups; the least wanted ones make room.

        Args:
            entries: Of the new groups of all ranks, the same on each.
            groups: Those of them that this rank holds, by serial.
        """
        self._groups |= {serial: group.copied() for serial, group in groups.items()}  # callbacks may yet change theirs
        self.entries = sorted([*self.entries, *entries], key=_first_wanted)[: self.settings.capacity]
        self._forget()

    def take(self, count: int, version: int) -> tuple[list[Entry], dict[int, Group]]:
        """Return groups to train on; those whose uses are up leave the buffer.

        Args:
            count: At most so many, over all ranks.
            version: The weights now: older entries than ``max_age`` are dropped.

        Returns:
            Entries over all ranks, most wanted first, and the groups of those that this rank holds, by serial.
        """
        self.drop_old(version)
        taken = self.entries[:count]
        groups = {e.serial: self._groups[e.serial].copied() for e in taken if e.serial in self._groups}
        for entry in taken:
            entry.uses += 1
        self.entries = [entry for entry in self.entries if entry.uses < self.settings.max_uses]
        self._forget()
        return taken, groups

    def drop_old(self, version: int) -> None:
        """Forget groups that older weights sampled than ``max_age`` steps allow."""
        self.entries = [entry for entry in self.entries if version - entry.version <= self.settings.max_age]
        self._forget()

    def mean_age(self, version: int) -> float:
        """Return the mean age of the entries [optimizer steps]; 0 without any."""
        return statistics.fmean(version - entry.version for entry in self.entries) if self.entries else 0.0

    def _forget(self) -> None:
        held = {entry.serial for entry in self.entries}
        self._groups = {serial: group for serial, group in self._groups.items() if serial in held}

    def state_dict(self) -> dict[str, Any]:
        """Return plain types, but for the groups themselves: writing them out is left to a checkpoint."""
        return {"entries": [asdict(entry) for entry in self.entries], "groups": dict(self._groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` wrote."""
        self.entries = [Entry(**entry) for entry in state["entries"]]
        self._groups = dict(state["groups"])


def _first_wanted(entry: Entry) -> tuple[float, int]:
    return (-entry.priority, -entry.serial)
