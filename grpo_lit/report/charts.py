"""Which metrics stand together in a chart, and which charts in a panel."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from grpo_lit.metrics.names import COUNTERS, by_importance

ACCURACY = "held-out accuracy"
#: Panel of metrics whose names begin with no panel.
OTHER = "other"
#: Unit of shares, whose axis ends at 1.
SHARE = "share"


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: What stands above it.
        unit: Of its y-axis.
        patterns: Metrics in it, with ``*`` for anything.
    """

    title: str
    unit: str
    patterns: tuple[str, ...]


#: Charts of each panel, the most telling first: a picture has room for :data:`IN_A_ROW` of them.
PANELS: dict[str, tuple[Chart, ...]] = {
    "reward": (
        Chart("solve rate", SHARE, ("reward/correct", "reward/correct_kept", "reward/correct_dropped")),
        Chart("rewards", "mean", ("reward/total", "reward/*")),
        Chart("solve rate by domain", SHARE, ("reward/correct/*",)),
        Chart("taken off long answers", "mean", ("reward/overlong_penalty",)),
        Chart("not judged", SHARE, ("reward/unreadable_prompts", *(f"reward/*_{counter}" for counter in COUNTERS))),
    ),
    "exploration": (
        Chart("entropy", "nats", ("exploration/entropy",)),
        Chart("groups without signal", SHARE, ("exploration/zero_signal",)),
        Chart("group diversity", SHARE, ("exploration/group_diversity", "exploration/group_similarity")),
        Chart("probability of sampled tokens", SHARE, ("exploration/token_prob",)),
        Chart("solved by all samples, by none", SHARE, ("exploration/solve_all", "exploration/solve_none")),
        Chart("groups that dynamic sampling keeps", SHARE, ("exploration/accepted",)),
        Chart("groups of a rollout", "groups", ("exploration/groups", "exploration/carried", "exploration/waiting")),
        Chart("rounds of a rollout", "rounds", ("exploration/rounds",)),
        Chart("prompts passed over", SHARE, ("exploration/passed_over",)),
    ),
    "length": (
        Chart("completion length", "tokens", ("length/mean", "length/correct", "length/incorrect")),
        Chart("truncated", SHARE, ("length/truncated", "val/*/truncated", "val/*/truncated@*")),
        Chart("kept and dropped groups", "tokens", ("length/kept", "length/dropped", "length/dropped_stale")),
        Chart("ends in a loop, near the limit", SHARE, ("length/repetition", "length/overlong")),
        Chart("held-out answers", "tokens", ("val/*/length", "val/*/length@*")),
        Chart("prompts left out as long", SHARE, ("length/long_prompts",)),
    ),
    "optimization": (
        Chart("gradient norm", "before clipping", ("optimization/grad_norm",)),
        Chart("divergence", "nats", ("optimization/kl_old", "optimization/kl_reference", "optimization/kl_penalty")),
        Chart("clipped tokens", SHARE, ("optimization/clip_low", "optimization/clip_high")),
        Chart("largest ratio", "ratio", ("optimization/ratio_max",)),
        Chart("advantage", "std", ("optimization/advantage_std",)),
        Chart("loss", "", ("optimization/loss",)),
        Chart("learning rate", "", ("optimization/lr",)),
        Chart("clip range", "", ("optimization/epsilon_low", "optimization/epsilon_high")),
        Chart("skipped minibatches", "count", ("optimization/skipped",)),
        Chart("entropy bonus", "", ("optimization/entropy_coefficient",)),
        Chart("gradient noise scale", "prompts", ("optimization/noise_scale",)),
        Chart("gradients of shadow recipes", "cosine", ("shadow/cosine_*",)),
        Chart("their length", "over the trained one's", ("shadow/norm_*",)),
    ),
    "system": (
        Chart("time of a step", "s", ("system/time_rollout", "system/time_learn", "system/time_sync")),
        Chart("speed", "tokens/s", ("system/rollout_tokens_per_s", "system/learner_tokens_per_s")),
        Chart(
            "mismatch of engine and learner",
            "nats",
            ("system/mismatch_abs", "system/mismatch_kl", "system/mismatch_chi2"),
        ),
        Chart("mismatch by position", "nats", ("system/mismatch_abs_from_*",)),
        Chart("staleness", "steps", ("system/staleness_mean", "system/staleness_max")),
        Chart("waiting for each other", "s", ("system/time_wait_rollout", "system/time_wait_learner")),
        Chart("prompts that lie ready", "prompts", ("system/queue_size",)),
        Chart("dropped as too stale", SHARE, ("system/dropped_stale",)),
        Chart("stored groups", "groups", ("system/replay_size",)),
        Chart("age of stored groups", "steps", ("system/replay_age",)),
        Chart("share of stored groups in a rollout", SHARE, ("system/replay_share",)),
        Chart("corrections", SHARE, ("system/ess", "system/is_cut", "system/ess_*", "system/is_cut_*")),
        Chart("divergence of corrections", "nats", ("system/is_k3_*", "system/is_chi2_*")),
        Chart("memory", "GiB", ("system/memory_learn", "system/memory_rollout", "system/memory_engine")),
        Chart("tokens sampled", "tokens", ("system/tokens_sampled",)),
        Chart("tokens possible at a step", "tokens", ("system/kept_tokens",)),
        Chart("weight sync", "bytes", ("system/sync_bytes",)),
        Chart("whole step, overheads too", "s", ("system/time_step",)),
        Chart("rewards' time", "s", ("system/time_reward", "system/time_reward_*")),
    ),
}
IN_A_ROW = 3
#: Charts that sum a run up.
OVERVIEW = (ACCURACY, "solve rate", "entropy", "groups without signal", "completion length", "time of a step")
#: Where metrics stand whose first part is no panel.
ADOPTED = {"shadow": "optimization", "val": ACCURACY}


def arrange(names: Iterable[str]) -> dict[str, list[tuple[Chart, list[str]]]]:
    """Return the charts of each panel with their metrics, without those that have none.

    A metric stands in the chart that names it, else in the first with a pattern for it, else in one of its own.
    """
    rest = sorted(names)
    accuracies = by_importance(rest)
    panels: dict[str, list[tuple[Chart, list[str]]]] = {ACCURACY: [], **{panel: [] for panel in PANELS}}
    if accuracies:
        panels[ACCURACY].append((Chart(ACCURACY, SHARE, ()), accuracies))
    owners = {name: owner for name in rest if name not in accuracies and (owner := _owner(name)) is not None}
    for panel, charts in PANELS.items():
        for chart in charts:
            mine = [name for name, owner in owners.items() if owner is chart]
            if mine:
                panels[panel].append((chart, sorted(mine, key=partial(_place, chart))))
    for name in rest:
        if name not in owners and name not in accuracies:
            first, _, last = name.partition("/")
            panel = first if first in PANELS else ADOPTED.get(first, OTHER)
            panels.setdefault(panel, []).append((Chart(last.replace("_", " ") or name, "", (name,)), [name]))
    return {panel: charts for panel, charts in panels.items() if charts}


def panel_rows(names: Iterable[str]) -> list[list[tuple[Chart, list[str]]]]:
    """Return a row per panel with its first charts, their titles led by the panel's name."""
    return [
        [
            (chart if panel == ACCURACY else replace(chart, title=f"{panel}: {chart.title}"), own)
            for chart, own in charts
        ]
        for panel, charts in ((panel, charts[:IN_A_ROW]) for panel, charts in arrange(names).items())
    ]


def overview_rows(names: Iterable[str]) -> list[list[tuple[Chart, list[str]]]]:
    """Return rows of the charts that sum a run up, or of the first ones where a run has none of those."""
    every = [pair for charts in arrange(names).values() for pair in charts]
    chosen = [pair for pair in every if pair[0].title in OVERVIEW] or every[: len(OVERVIEW)]
    return [chosen[i : i + IN_A_ROW] for i in range(0, len(chosen), IN_A_ROW)]


def _owner(name: str) -> Chart | None:
    charts = [chart for charts in PANELS.values() for chart in charts]
    exact = (chart for chart in charts if name in chart.patterns)
    # The longest pattern is the most specific one: reward/*_killed before reward/*.
    fitting = [(len(p), -i) for i, chart in enumerate(charts) for p in chart.patterns if fnmatchcase(name, p)]
    return next(exact, None) or (charts[-max(fitting)[1]] if fitting else None)


def _place(chart: Chart, name: str) -> tuple[int, str]:
    return next((i for i, pattern in enumerate(chart.patterns) if fnmatchcase(name, pattern)), 0), name


def short(names: Sequence[str]) -> list[str]:
    """Return names for a legend: without the first part, which all of them share, and of ``val/<set>/`` the set too."""
    parts = [name.split("/") for name in names]
    lead = 0
    while all(len(part) > lead + 1 and part[lead] == parts[0][lead] for part in parts):
        lead += 1
    return ["/".join(part[lead:]) for part in parts]
