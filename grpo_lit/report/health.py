"""Health events of runs, as a page lists them and charts mark them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lit.report.axis import along
from grpo_lit.report.drawing import Mark
from grpo_lit.report.record import Run

#: Fields of an event that hold lists, and what the page calls them.
LISTS = {"causes": "likely causes", "checks": "what to check or change", "advice": "what to check or change"}
#: Marks nearer than this share of the axis are one, so that their numbers can be read.
NEAR = 0.03


@dataclass(frozen=True)
class Episode:
    """All events of one rule in one run that say the same.

    Attributes:
        number: In the list and on the charts.
        run: Name of the run.
        rule: Name of the rule.
        step: Of the first event.
        when: Steps, in words.
        symptom: Of the first event.
        lists: Causes and advice, each with its heading.
    """

    number: int
    run: str
    rule: str
    step: int
    when: str
    symptom: str
    lists: list[tuple[str, list[str]]]


def episodes(runs: Sequence[Run]) -> list[Episode]:
    """Return the health events of runs in the order of their steps, those of one rule and metric together."""
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        for event in run.health:
            if isinstance(event.get("step"), int):
                key = (run.name, str(event.get("rule", "unnamed")), str(event.get("metric", "")))
                found.setdefault(key, []).append(event)
    ordered = sorted(found.items(), key=lambda item: min(event["step"] for event in item[1]))
    return [_episode(number, run, rule, events) for number, ((run, rule, _), events) in enumerate(ordered, 1)]


def _episode(number: int, run: str, rule: str, events: Sequence[Mapping[str, Any]]) -> Episode:
    events = sorted(events, key=lambda event: event["step"])
    first, last = events[0], events[-1]["step"]
    when = f"step {first['step']}" + (f" to {last}, {len(events)} times" if len(events) > 1 else "")
    lists = [(heading, _texts(first[key])) for key, heading in LISTS.items() if first.get(key)]
    return Episode(number, run, rule.replace("_", " "), first["step"], when, str(first.get("symptom", "")), lists)


def _texts(value: Any) -> list[str]:
    return [str(part) for part in value] if isinstance(value, list) else [str(value)]


def marks(runs: Sequence[Run], found: Sequence[Episode], over: str | None) -> list[Mark]:
    """Return where on the x-axis the episodes begin; what lies too close together shares a mark."""
    places: dict[int, float] = {}
    for run in runs:
        mine = {episode.number: episode.step for episode in found if episode.run == run.name}
        steps = {**run.scalars, "": (list(mine.values()), [0.0] * len(mine))}
        places |= dict(zip(mine, along(steps, over)[""][0], strict=True))
    width = max((x for run in runs for xs, _ in along(run.scalars, over).values() for x in xs), default=1.0)
    merged: list[tuple[float, list[int]]] = []
    for number, x in sorted(places.items(), key=lambda item: (item[1], item[0])):
        if merged and x - merged[-1][0] < NEAR * width:
            merged[-1][1].append(number)
        else:
            merged.append((x, [number]))
    return [Mark(x, _numbers(numbers)) for x, numbers in merged]


def _numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) if len(numbers) <= 3 else f"{numbers[0]}..{numbers[-1]}"
