"""What a metric's name says of it."""

from collections.abc import Iterable

#: Kinds of held-out figures that are accuracies, in order of importance.
ACCURACIES = ("greedy", "avg", "maj", "pass")
#: What rewards count of samples that they could not judge: the last part of ``reward/<name>_<counter>``.
COUNTERS = ("unreadable", "refused", "killed", "timeouts", "broken")

#: What ``reward/`` logs beside the rewards: a reward of this name would overwrite it.
TAKEN = ("total", "correct", "correct_kept", "correct_dropped", "unreadable_prompts", "overlong_penalty")


def is_held_out(name: str) -> bool:
    """Return whether a metric was measured on held-out prompts: at step s, of the weights after s optimizer steps."""
    return name.startswith("val/")


def is_accuracy(name: str) -> bool:
    """Return whether a metric is a held-out accuracy."""
    return is_held_out(name) and name.rsplit("/", 1)[-1].split("@")[0] in ACCURACIES


def by_importance(names: Iterable[str]) -> list[str]:
    """Return the accuracies among the names: greedy ones first, then means, votes, and chances over more samples."""

    def rank(name: str) -> tuple[int, int, str]:
        kind, _, samples = name.rsplit("/", 1)[-1].partition("@")
        return ACCURACIES.index(kind), int(samples) if samples.isdigit() else 0, name

    return sorted(filter(is_accuracy, names), key=rank)
