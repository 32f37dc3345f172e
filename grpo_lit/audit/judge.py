"""Judging labelled completions, and hollow ones, by a reward."""

import statistics
import time
from collections.abc import Callable, Sequence

from grpo_lit.audit.hollow import PLACES, guesses, hollow
from grpo_lit.audit.report import Audit, Finding, HollowScore
from grpo_lit.audit.samples import Sample, completion
from grpo_lit.errors import RewardError
from grpo_lit.rewards import Reward
from grpo_lit.rewards.combination import checked_scores
from grpo_lit.rollout import Group, Prompt

#: What rewards count, by the names they share.
COUNTERS = ("unreadable", "refused", "killed")


class Judge:
    """Asks a reward and notes what it gets wrong.

    Args:
        reward: Who judges.
        correct_at: Score from which on a completion passes for correct.
        advance: Called after each labelled completion and each prompt of hollow ones.
    """

    def __init__(self, reward: Reward, correct_at: float, advance: Callable[[], None]) -> None:
        self.reward, self.correct_at, self.advance = reward, correct_at, advance

    def audit(self, file: str, samples: Sequence[Sample], prompts: int) -> Audit:
        """Judge all samples, and hollow completions of the first prompts.

        Args:
            file: Name of where the samples come from.
            samples: What to judge.
            prompts: How many questions to build hollow completions for.
        """
        result = Audit(file, type(self.reward).__name__, len(samples), sum(sample.correct for sample in samples))
        before = self._counters()
        for sample in samples:
            started = time.perf_counter()
            finding = self._finding(sample)
            result.seconds.append(time.perf_counter() - started)
            if finding is not None:
                result.findings.append(finding)
            self.advance()
        result.counters = {name: n - before[name] for name, n in self._counters().items() if n > before[name]}
        every = distinct_prompts(samples)
        result.hollow = self._hollow(every[:prompts], [prompt.answer or "" for prompt in every])
        return result

    def _counters(self) -> dict[str, int]:
        return {name: getattr(self.reward, name) for name in COUNTERS if hasattr(self.reward, name)}

    def _finding(self, sample: Sample) -> Finding | None:
        prompt = sample.prompt
        try:
            score = self._scores(prompt, [sample.text])[0]
        except RewardError as error:
            return Finding("error", prompt.id, prompt.answer, sample.text, None, str(error))
        if score is not None and (score >= self.correct_at) == sample.correct:
            return None
        kind = "abstention" if score is None else "false negative" if sample.correct else "false positive"
        return Finding(kind, prompt.id, prompt.answer, sample.text, score)

    def _scores(self, prompt: Prompt, texts: Sequence[str]) -> list[float | None]:
        group = Group(prompt, 0, tuple(completion(text) for text in texts))
        return checked_scores(type(self.reward).__name__, self.reward, group)

    def _hollow(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[HollowScore]:
        letters = guesses(answers)
        earned: dict[str, list[tuple[float, str]]] = {}
        for prompt in prompts:
            kinds = hollow(prompt, answers)
            for letter in letters:  # in every place at once: a verifier looks in one of them
                kinds[f"guess {letter}"] = ["\n".join(place(letter) for place in PLACES.values())]
            for kind, texts in kinds.items():
                scores = zip(self._scores(prompt, texts), texts, strict=True)
                earned.setdefault(kind, []).extend((score, text) for score, text in scores if score is not None)
            self.advance()
        return [self._hollow_score(kind, scores) for kind, scores in earned.items() if scores]

    def _hollow_score(self, kind: str, scores: Sequence[tuple[float, str]]) -> HollowScore:
        passed = [text for score, text in scores if score >= self.correct_at]
        mean = statistics.fmean(score for score, _ in scores)
        return HollowScore(kind, len(scores), mean, len(passed), passed[0] if passed else "")


def distinct_prompts(samples: Sequence[Sample]) -> list[Prompt]:
    """Return the prompts in order, those with equal question and answer once."""
    first: dict[tuple[str, str | None], Prompt] = {}
    for sample in samples:
        first.setdefault((sample.prompt.question, sample.prompt.answer), sample.prompt)
    return list(first.values())
