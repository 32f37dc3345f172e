"""A run that is sick in one way is called so, and only so; a healthy one is called nothing."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from synthetic import ONSET, SICK, healthy

from grpo_lit.errors import ConfigError
from grpo_lit.health import History, Rules, diagnose
from grpo_lit.health.exploration import EntropyCollapse, EntropyExplosion, Starvation
from grpo_lit.health.length import LengthInflation, Truncation
from grpo_lit.health.optimization import ClipSaturation, DeadOptimizer, KLBlowUp, OffPolicyGap
from grpo_lit.health.reward import RewardCollapse, RewardHacking, RewardNoise, VerifierFailures
from grpo_lit.metrics.names import COUNTERS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_run_is_left_alone(seed: int) -> None:
    assert diagnose(healthy(seed), Rules().active()) == []


@pytest.mark.parametrize("seed", [7])
@pytest.mark.parametrize("sickness", SICK)
def test_each_sickness_is_named_once_and_for_what_it_is(sickness: str, seed: int) -> None:
    rule, metric, make_sick = SICK[sickness]
    events = diagnose(make_sick(healthy(seed)), Rules().active())
    assert [(event.rule, event.metric) for event in events] == [(rule, metric)]
    assert events[0].symptom
    assert len(events[0].causes) >= 2
    assert len(events[0].checks) >= 2


@pytest.mark.parametrize("sickness", ["entropy falls", "entropy explodes", "schedule at 0", "no gradient"])
def test_what_kills_a_run_is_named_within_a_few_steps(sickness: str) -> None:
    (event,) = diagnose(SICK[sickness][2](healthy(0)), Rules().active())
    assert ONSET < event.step <= ONSET + 5


def test_every_sickness_has_a_synthetic_run() -> None:
    assert {rule for rule, *_ in SICK.values()} == {rule.name for rule in Rules().all()}


def filled(**series: list[float]) -> History:
    """Return a history; ``__`` stands for the slash, and a series begins at step 0."""
    history = History()
    for name, values in series.items():
        for step, value in enumerate(values):
            history.add(step, {name.replace("__", "/"): value})
    return history


#: Rule, a series that is just healthy, and one that is just sick.
EDGES = {
    "entropy": (EntropyCollapse(), {"exploration__entropy": [0.1] * 5}, {"exploration__entropy": [0.0999] * 5}),
    "entropy median": (
        EntropyCollapse(),
        {"exploration__entropy": [0.0, 0.0, 0.5, 0.5, 0.5]},
        {"exploration__entropy": [0.0, 0.0, 0.0, 0.5, 0.5]},
    ),
    "noise of the policy": (
        EntropyExplosion(),
        {"exploration__entropy": [1.0, 3.0, 3.0, 3.0]},
        {"exploration__entropy": [1.0, 3.01, 3.01, 3.01]},
    ),
    "began as noise": (
        EntropyExplosion(),
        {"exploration__entropy": [4.0, 6.0, 6.0, 6.0]},
        {"exploration__entropy": [4.0, 6.1, 6.1, 6.1]},
    ),
    "signal": (
        Starvation(),
        {"exploration__zero_signal": [0.8] * 10},
        {"exploration__zero_signal": [0.81] * 10},
    ),
    "signal under dynamic sampling": (
        Starvation(),
        {"exploration__zero_signal": [0.9] * 10, "exploration__accepted": [0.2] * 10},
        {"exploration__zero_signal": [0.5] * 10, "exploration__accepted": [0.19] * 10},
    ),
    # 1.4826 / sqrt(2) = 1.0484: a difference of .19 is a noise of .199, one of .2 of .210
    "reward noise": (RewardNoise(), {"reward__correct": [0.5, 0.69] * 11}, {"reward__correct": [0.5, 0.7] * 11}),
    "half is lost": (
        RewardCollapse(),
        {"reward__correct": [0.6] * 5 + [0.3] * 5},
        {"reward__correct": [0.6] * 5 + [0.29] * 5},
    ),
    "nothing is left": (
        RewardCollapse(),
        {
            "reward__correct": [0.1, 0.0],
            "exploration__solve_none": [0.5, 1.0],
            "optimization__skipped": [0.0, 9.0],
        },
        {
            "reward__correct": [0.1, 0.0],
            "exploration__solve_none": [0.5, 1.0],
            "optimization__skipped": [0.0, 10.0],
        },
    ),
    "little is lost": (
        RewardCollapse(),
        {"reward__correct": [0.2] * 5 + [0.06] * 5},
        {"reward__correct": [0.2] * 5 + [0.04] * 5},
    ),
    "others rise": (
        RewardHacking(),
        {"reward__format": [0.3] * 30 + [0.5] * 30, "reward__correct": [0.5] * 60},
        {"reward__format": [0.3] * 30 + [0.51] * 30, "reward__correct": [0.5] * 60},
    ),
    "form that pays": (
        RewardHacking(),
        {"reward__format": [0.3] * 30 + [0.9] * 30, "reward__correct": [0.5] * 30 + [0.56] * 10 + [0.5] * 20},
        {"reward__format": [0.3] * 30 + [0.9] * 30, "reward__correct": [0.5] * 30 + [0.55] * 10 + [0.5] * 20},
    ),
    "nothing left to learn": (
        RewardHacking(),
        {"reward__format": [0.3] * 30 + [0.9] * 30, "reward__correct": [0.9] * 60},
        {"reward__format": [0.3] * 30 + [0.9] * 30, "reward__correct": [0.89] * 60},
    ),
    "verifier": (
        VerifierFailures(),
        {"reward__a_killed": [0.01] * 10},
        {"reward__a_killed": [0.0] * 6 + [0.011] * 4},
    ),
    "growth": (
        LengthInflation(),
        {"length__correct": [10.0] * 20, "length__incorrect": [10.0] * 10 + [15.0] * 10},
        {"length__correct": [10.0] * 20, "length__incorrect": [10.0] * 10 + [15.1] * 10},
    ),
    "growth on both sides": (
        LengthInflation(),
        {"length__correct": [10.0] * 10 + [20.0] * 10, "length__incorrect": [10.0] * 10 + [26.0] * 10},
        {"length__correct": [10.0] * 10 + [20.0] * 10, "length__incorrect": [10.0] * 10 + [26.1] * 10},
    ),
    "cut": (Truncation(), {"length__truncated": [0.5] * 10}, {"length__truncated": [0.51] * 10}),
    "clip": (
        ClipSaturation(),
        {"optimization__clip_low": [0.1] * 10, "optimization__clip_high": [0.2] * 10},
        {"optimization__clip_low": [0.1] * 10, "optimization__clip_high": [0.21] * 10},
    ),
    "clip at every other step": (
        ClipSaturation(),
        {"optimization__clip_low": [0.0] * 10, "optimization__clip_high": [0.9, 0.0, 0.0, 0.0, 0.0] * 2},
        {"optimization__clip_low": [0.0] * 10, "optimization__clip_high": [0.31, 0.0] * 5},
    ),
    "reference": (
        KLBlowUp(),
        {"optimization__kl_reference": [0.5] * 10},
        {"optimization__kl_reference": [0.51] * 10},
    ),
    "old policy": (KLBlowUp(), {"optimization__kl_old": [0.0, 0.1] * 5}, {"optimization__kl_old": [0.0, 0.11] * 5}),
    "learning rate": (DeadOptimizer(), {"optimization__lr": [1e-9] + [0.0] * 4}, {"optimization__lr": [0.0] * 5}),
    "gradient": (
        DeadOptimizer(),
        {"optimization__grad_norm": [1.1e-8] * 5},
        {"optimization__grad_norm": [1e-8] * 5},
    ),
    "skipped": (DeadOptimizer(), {"optimization__skipped": [1.0] * 5}, {"optimization__skipped": [1.0] * 4 + [2.0]}),
    "skipped at once": (DeadOptimizer(), {"optimization__skipped": [8.0]}, {"optimization__skipped": [9.0]}),
    "ratio": (
        DeadOptimizer(),
        {"optimization__ratio_max": [1.0] * 10, "system__staleness_mean": [0.0, 1.0] * 4 + [0.0, 0.0]},
        {"optimization__ratio_max": [1.0] * 10, "system__staleness_mean": [0.0, 1.0] * 5},
    ),
    "gap": (OffPolicyGap(), {"system__mismatch_kl": [0.01] * 10}, {"system__mismatch_kl": [0.0101] * 10}),
    "sample size": (OffPolicyGap(), {"system__ess": [0.5] * 10}, {"system__ess": [0.49] * 10}),
}


@pytest.mark.parametrize("edge", EDGES)
def test_the_edges_of_the_thresholds(edge: str) -> None:
    rule, just_healthy, just_sick = EDGES[edge]
    assert list(rule.find(filled(**just_healthy))) == []
    (finding,) = rule.find(filled(**just_sick))
    assert finding.metric in filled(**just_sick).names()


def test_held_out_accuracy_that_does_not_follow() -> None:
    def found(train: float, held_out: float, start: float = 0.4) -> bool:
        history = filled(reward__correct=[0.3] * 25 + [0.3 + train] * 26)
        for number in range(6):
            value = start if number < 3 else start + held_out
            history.add(10 * number, {"val/sums/greedy": value, "val/sums/length": 9.0})
        return bool(RewardHacking().find(history))

    assert found(train=0.16, held_out=0.02)
    assert not found(train=0.15, held_out=0.0)
    assert not found(train=0.4, held_out=0.03)
    assert not found(train=0.4, held_out=0.0, start=0.9)  # no room to rise


def test_one_held_out_set_that_rises_is_enough() -> None:
    history = filled(reward__correct=[0.3] * 25 + [0.7] * 26)
    for number in range(6):
        history.add(10 * number, {"val/far/greedy": 0.2, "val/near/avg@4": 0.3 + 0.05 * number})
    assert RewardHacking().find(history) == []


@pytest.mark.parametrize("points", [0, 1, 3])
def test_what_is_missing_or_short_is_no_error_and_no_sickness(points: int) -> None:
    run = {name: (steps[:points], [0.0] * points) for name, (steps, _) in healthy(0).items()}
    for left_out in run:
        assert diagnose({name: series for name, series in run.items() if name != left_out}, Rules().active()) == []


def test_a_run_of_nothing_but_failures_is_named_when_it_ends_at_once() -> None:
    """Twenty idle minibatches in a row end a run, perhaps at its second step."""
    run = {"optimization/skipped": ([0, 1], [0.0, 20.0]), "exploration/solve_none": ([0, 1], [0.6, 1.0])}
    (event,) = diagnose(run, Rules().active())
    assert (event.rule, event.step) == ("dead_optimizer", 1)
    assert event.symptom.startswith("20 of the newest 22 minibatches")
    events = diagnose(run | {"reward/correct": ([0, 1], [0.07, 0.0])}, Rules().active())
    assert {event.rule for event in events} == {"reward_collapse", "dead_optimizer"}  # it had been right before
    assert "in 20 minibatches in a row; reward/correct had been 7.0%" in str(events)
    never = diagnose(run | {"reward/correct": ([0, 1], [0.0, 0.0])}, Rules().active())
    assert {event.rule for event in never} == {"dead_optimizer"}


#: What README calls healthy, and the threshold of the rule that must say the same.
RANGES = {
    "`exploration/entropy`": lambda r: f"above {r.entropy_collapse.low:g} and below {r.entropy_explosion.high:g}",
    "`exploration/solve_all`": lambda r: f"zero_signal below {1 - r.zero_signal_starvation.share:g}",
    "`exploration/accepted`": lambda r: f"accepted above {r.zero_signal_starvation.share:g}",
    "`reward/<name>_unreadable`": lambda r: f"up to {r.verifier_failures.share:g} is noise",
    "`optimization/clip_low`": lambda r: f"both shares together below {r.clip_saturation.share:g}",
    "`optimization/kl_old`": lambda r: f"below {r.kl_blow_up.old:g}; below {r.kl_blow_up.reference:g}",
    "`system/mismatch_abs`": lambda r: f"kl below {r.off_policy_gap.kl:g}",
    "`system/ess`": lambda r: f"above {r.off_policy_gap.ess:g}",
}


@pytest.mark.parametrize("metric", RANGES)
def test_readme_and_rules_call_the_same_healthy(metric: str) -> None:
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {metric}")]
    assert RANGES[metric](Rules()) in row


def test_all_counters_of_rewards_are_known() -> None:
    counted = set()
    for file in (ROOT / "grpo_lit/rewards").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "counters" and file.stem != "combination":
                counted |= {key.value for d in ast.walk(node) if isinstance(d, ast.Dict) for key in d.keys}
    assert counted == set(COUNTERS)


def test_rules_are_called_what_their_keys_are_and_explain_every_threshold() -> None:
    rules = Rules()
    for rule in rules.all():
        assert getattr(rules, rule.name) is rule
        for field in fields(rule):
            assert f"{field.name}: " in type(rule).__doc__.split("Args:")[1], (rule.name, field.name)
            assert isinstance(field.default, (int, float))


def test_rules_can_be_turned_off_by_name() -> None:
    assert "truncation" not in [rule.name for rule in Rules(off=["truncation"]).active()]
    with pytest.raises(ConfigError, match=r"`off`.*truncation.*'lenght'"):
        Rules(off=["lenght"])


def test_the_base_configuration_holds_the_documented_thresholds_each_with_its_reason() -> None:
    text = (ROOT / "configs/base.yaml").read_text()
    (health,) = (c for c in yaml.safe_load(text)["trainer"]["callbacks"] if c["class_path"] == "callbacks.Health")
    written = health["init_args"]["rules"]
    assert set(written) == {rule.name for rule in Rules().all()}
    for name, thresholds in written.items():
        for key, value in thresholds.items():
            assert getattr(getattr(Rules(), name), key) == float(value)
        (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{name}:"))
        assert " # " in line
