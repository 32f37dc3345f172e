"""Runs that never happened: a healthy one with the noise of real ones, and one that is sick in a single way."""

from collections.abc import Callable

import numpy as np

Run = dict[str, tuple[list[int], list[float]]]
STEPS = 160
VALIDATION = 20
ONSET = 60


def healthy(seed: int) -> Run:
    """Return a run of 160 steps with two updates per rollout and a validation every 20 steps.

    It is modelled on the quickstart's: accuracy rises and jumps by .07 from step to step, entropy falls to a quarter
    of a nat, two thirds of the groups end without signal, answers grow a little, the first update clips nothing.
    """
    rng = np.random.default_rng(seed)
    t = np.arange(STEPS)
    later = t % 2  # the second update on a rollout

    def around(mean: np.ndarray | float, deviation: float) -> np.ndarray:
        return np.clip(mean + rng.normal(0, deviation, STEPS), 0, 1)

    def times(mean: np.ndarray | float, deviation: float) -> np.ndarray:
        return mean * np.exp(rng.normal(0, deviation, STEPS))

    skill = 0.1 + 0.6 * (1 - np.exp(-t / 60))
    correct, form = around(skill, 0.07), around(0.98 - 0.6 * np.exp(-t / 20), 0.02)
    run = {
        "reward/correct": correct,
        "reward/answer": correct,
        "reward/format": form,
        "reward/total": correct + 0.2 * form,
        "reward/correct/sums": correct,
        "reward/unreadable_prompts": np.zeros(STEPS),
        "reward/answer_unreadable": rng.choice([0, 0.004], STEPS, p=[0.95, 0.05]),
        "exploration/entropy": times(0.25 + 1.2 * np.exp(-t / 15), 0.2),
        "exploration/token_prob": around(0.9, 0.02),
        "exploration/zero_signal": around(0.67 - 0.3 * np.exp(-t / 10), 0.08),
        "exploration/solve_all": around(0.3, 0.08),
        "exploration/solve_none": around(0.35, 0.08),
        "exploration/group_diversity": around(0.4, 0.05),
        "length/correct": times(200 + 0.3 * t, 0.05),
        "length/incorrect": times(240 + 0.4 * t, 0.08),
        "length/mean": times(220 + 0.3 * t, 0.05),
        "length/truncated": around(0.04 + 0.25 * np.exp(-t / 10), 0.02),
        "optimization/loss": rng.normal(0, 1e-3, STEPS),
        "optimization/grad_norm": times(0.4, 0.4),
        "optimization/lr": 1e-6 * (1 - 0.9 * t / STEPS),
        "optimization/clip_low": later * times(0.002, 0.5),
        "optimization/clip_high": later * times(0.004, 0.5),
        "optimization/ratio_max": 1 + later * times(1.0, 0.8),
        "optimization/kl_old": later * times(1e-3, 0.5),
        "optimization/kl_reference": times(1e-5 + 5e-4 * t, 0.2),
        "optimization/skipped": rng.choice([0, 1], STEPS, p=[0.97, 0.03]),
        "system/mismatch_kl": times(1.2e-3, 0.3),
        "system/ess": around(0.97, 0.01),
        "system/staleness_mean": later.astype(float),
    }
    scalars: Run = {name: (t.tolist(), [float(v) for v in values]) for name, values in run.items()}
    steps = range(0, STEPS + 1, VALIDATION)
    held_out = [rng.binomial(200, 0.9 * skill[min(s, STEPS - 1)]) / 200 for s in steps]
    return scalars | {
        "val/sums/greedy": (list(steps), held_out),
        "val/sums/length": (list(steps), [210.0] * len(steps)),
    }


def changed(run: Run, name: str, value: Callable[[int, float], float], since: int = ONSET) -> Run:
    """Return a copy in which a metric's values from a step on are ``value(step, old)``, old being 0 for a new one."""
    steps, values = run.get(name, (list(range(STEPS)), [0.0] * STEPS))
    new = [float(value(step, old)) if step >= since else old for step, old in zip(steps, values, strict=True)]
    return run | {name: (steps, new)}


def with_accuracy(run: Run, accuracy: Callable[[int], float], since: int = 0, held_out: bool = True) -> Run:
    """Return a copy with another course of ``reward/correct``, its noise kept, and of what goes with it."""
    points = zip(*run["reward/correct"], strict=True)
    noise = {step: 0.5 * (value - 0.1 - 0.6 * (1 - np.exp(-step / 60))) for step, value in points}
    for name in ("reward/correct", "reward/answer", "reward/total"):
        run = changed(run, name, lambda step, _: accuracy(step) + noise[step], since)
    return changed(run, "val/sums/greedy", lambda step, _: accuracy(step), since) if held_out else run


def _odd(value: float) -> Callable[[int, float], float]:
    return lambda step, old: value if step % 2 else old


#: Name of the sickness, rule that must name it, metric it is seen in, and how a healthy run is made sick.
SICK: dict[str, tuple[str, str, Callable[[Run], Run]]] = {
    "entropy falls": (
        "entropy_collapse",
        "exploration/entropy",
        lambda run: changed(run, "exploration/entropy", lambda step, old: old * 0.1),
    ),
    "entropy explodes": (
        "entropy_explosion",
        "exploration/entropy",
        lambda run: changed(run, "exploration/entropy", lambda step, old: 6.0 + old),
    ),
    "no signal": (
        "zero_signal_starvation",
        "exploration/zero_signal",
        lambda run: changed(run, "exploration/zero_signal", lambda step, old: 0.85 + old / 10),
    ),
    "no signal to be found": (
        "zero_signal_starvation",
        "exploration/accepted",
        lambda run: changed(run, "exploration/accepted", lambda step, old: 0.1 if step >= ONSET else 0.4, 0),
    ),
    "prompts take turns": (
        "reward_noise",
        "reward/correct",
        lambda run: changed(
            with_accuracy(run, lambda step: 0.6 + 0.14 * (-1) ** step, held_out=False),
            "reward/format",
            lambda step, old: 0.95,
            0,
        ),
    ),
    "all is forgotten": (
        "reward_collapse",
        "reward/correct",
        lambda run: with_accuracy(run, lambda step: 0.08, since=ONSET),
    ),
    "learnt by heart": (
        "reward_hacking",
        "val/sums/greedy",
        lambda run: changed(
            with_accuracy(run, lambda step: min(0.2 + 0.005 * step, 0.85), held_out=False),
            "val/sums/greedy",
            lambda step, old: 0.25 + 0.01 * (step % 3 - 1),
            0,
        ),
    ),
    "form without content": (
        "reward_hacking",
        "reward/format",
        lambda run: changed(
            with_accuracy(run, lambda step: 0.5),
            "reward/format",
            lambda step, old: 0.3 if step < ONSET else min(0.3 + 0.02 * (step - ONSET), 0.9),
            0,
        ),
    ),
    "verifier killed": (
        "verifier_failures",
        "reward/answer_killed",
        lambda run: changed(run, "reward/answer_killed", _odd(0.04)),
    ),
    "wrong answers grow": (
        "length_inflation",
        "length/incorrect",
        lambda run: changed(run, "length/incorrect", lambda step, old: old * (1 + (step - ONSET) / 60)),
    ),
    "answers never end": (
        "truncation",
        "length/truncated",
        lambda run: changed(run, "length/truncated", lambda step, old: 0.8 + old),
    ),
    "all is clipped": (
        "clip_saturation",
        "optimization/clip_high",
        lambda run: changed(run, "optimization/clip_high", _odd(0.5)),
    ),
    "far from the reference": (
        "kl_blow_up",
        "optimization/kl_reference",
        lambda run: changed(run, "optimization/kl_reference", lambda step, old: old + (step - ONSET) / 20),
    ),
    "far from the old policy": (
        "kl_blow_up",
        "optimization/kl_old",
        lambda run: changed(run, "optimization/kl_old", _odd(0.4)),
    ),
    "schedule at 0": (
        "dead_optimizer",
        "optimization/lr",
        lambda run: changed(run, "optimization/lr", lambda step, old: 0.0),
    ),
    "no gradient": (
        "dead_optimizer",
        "optimization/grad_norm",
        lambda run: changed(run, "optimization/grad_norm", lambda step, old: 0.0),
    ),
    "minibatches skipped": (
        "dead_optimizer",
        "optimization/skipped",
        lambda run: changed(run, "optimization/skipped", lambda step, old: 6.0),
    ),
    "weights lost in rounding": (
        "dead_optimizer",
        "optimization/ratio_max",
        lambda run: changed(run, "optimization/ratio_max", lambda step, old: 1 + 1e-6 * (step % 2)),
    ),
    "engine and learner apart": (
        "off_policy_gap",
        "system/mismatch_kl",
        lambda run: changed(run, "system/mismatch_kl", lambda step, old: 40 * old),
    ),
    "correction eats the sample": (
        "off_policy_gap",
        "system/ess",
        lambda run: changed(run, "system/ess", lambda step, old: 0.3 * old),
    ),
}
