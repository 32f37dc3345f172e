"""Which of a run's samples a page shows, and how."""

from collections.abc import Mapping
from typing import Any

from grpo_lit.report.record import Run

#: Steps shown, spread evenly from the first to the last; groups of each, completions of each, and letters of a text.
STEPS, GROUPS, COMPLETIONS, LETTERS = 8, 4, 8, 5000
HEAD = 60


def shown(run: Run) -> dict[str, Any]:
    """Return some of a run's samples as texts, and how many there were."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        if isinstance(sample.get("step"), int):
            by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step)
    last = min(len(steps), STEPS) - 1
    chosen = [steps[round(i * (len(steps) - 1) / last)] for i in range(last + 1)] if last > 0 else steps
    groups = [_group(step, sample) for step in chosen for sample in by_step[step][:GROUPS]]
    return {"name": run.name, "groups": groups, "shown": f"{len(groups)} of {len(run.samples)} prompts"}


def _group(step: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return one prompt; the question stands for it where the prompt is a name only."""
    completions = sample.get("completions")
    completions = [c for c in completions if isinstance(c, dict)] if isinstance(completions, list) else []
    question, prompt = sample.get("question"), sample.get("prompt")
    answer = sample.get("answer")
    about = [str(prompt)] if question is not None and prompt is not None else []
    about += [] if answer is None else [f"answer {answer}"]
    left = len(completions) - COMPLETIONS
    return {
        "step": step,
        "about": _cut(", ".join(about), 300),
        "prompt": _cut(str(prompt if question is None else question), LETTERS),
        "completions": [_completion(completion) for completion in completions[:COMPLETIONS]],
        "more": f"and {left} more completions" if left > 0 else "",
    }


def _completion(completion: Mapping[str, Any]) -> dict[str, str]:
    text = str(completion.get("text", ""))
    correct = {True: "correct", False: "wrong"}.get(completion.get("correct"), "not judged")
    figures = [f"{name} {_number(completion[name])}" for name in ("reward", "advantage") if name in completion]
    figures += ["cut off"] if completion.get("finish_reason") == "length" else []
    return {
        "figures": ", ".join([correct, *figures]),
        "head": text[:HEAD] if len(text) <= HEAD else f"{text[:HEAD]} ...",
        "text": _cut(text, LETTERS),
    }


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "unknown"


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[:letters]} ... ({len(text) - letters} more letters)"
