"""What becomes of one request, and of those that share its prompt, on their way through several servers."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from grpo_lit.rollouts.server import Server


@dataclass(eq=False)
class PromptGroup:
    """Requests of one prompt: they go to one server, which computes their prefix once."""

    server: Server


@dataclass
class Tries:
    """What one request has been through: how often each server failed it, and which ones were late."""

    count: Counter[Server] = field(default_factory=Counter)
    late: set[Server] = field(default_factory=set)


def indices_by_key(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of equal keys, in the order in which each key comes first."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def first_error(errors: ExceptionGroup) -> Exception:
    """Return the first error of a group, however deep it lies."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, ExceptionGroup) else error
