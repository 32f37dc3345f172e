import pytest

from grpo_lit.audit.judge import Judge, distinct_prompts
from grpo_lit.audit.samples import Sample
from grpo_lit.rewards import MultipleChoice, NumericMatch, Reward
from grpo_lit.rollout import Prompt


class FoundAnywhere(Reward):
    """Pays for the answer wherever it stands, as a careless verifier does; and fails, or abstains, when told to."""

    def __init__(self):
        self.unreadable = 3  # from another run

    def __call__(self, prompt, completions):
        texts = [completion.text for completion in completions]
        if "fail" in texts:
            raise ZeroDivisionError("told to")
        if "abstain" in texts:
            self.unreadable += 1
            return [None] * len(texts)
        return [float(prompt.answer in text) for text in texts]


def sample(text, correct, answer="18", question="9 + 9 ="):
    return Sample(Prompt(id=f"{question}{text}", question=question, answer=answer), text, correct)


def test_every_kind_of_finding_is_told_apart():
    samples = [
        sample("18", True),
        sample("17", False),
        sample("118", False),  # passes, and should not
        sample("eighteen", True),  # right, and does not pass
        sample("abstain", True),
        sample("fail", False),
    ]
    steps = []
    audit = Judge(FoundAnywhere(), 1.0, lambda: steps.append(1)).audit("rows.jsonl", samples, prompts=0)
    assert [(f.kind, f.completion, f.score) for f in audit.findings] == [
        ("false positive", "118", 1.0),
        ("false negative", "eighteen", 0.0),
        ("abstention", "abstain", None),
        ("error", "fail", None),
    ]
    assert "ZeroDivisionError: told to" in audit.findings[3].reason
    assert (audit.rows, audit.correct, audit.mistakes) == (6, 3, 3)
    assert audit.counters == {"unreadable": 1}
    assert len(audit.seconds) == len(steps) == 6
    assert audit.hollow == []


@pytest.mark.parametrize(("correct_at", "mistakes"), [(1.0, 0), (0.4, 1)])
def test_from_which_score_on_a_completion_passes(correct_at, mistakes):
    class Half(Reward):
        def __call__(self, prompt, completions):
            return [0.5] * len(completions)

    audit = Judge(Half(), correct_at, lambda: None).audit("rows.jsonl", [sample("17", False)], prompts=0)
    assert audit.mistakes == mistakes


def test_a_careless_verifier_pays_for_spam_and_a_careful_one_does_not():
    samples = [sample("18", True), sample("7", True, answer="7", question="3 + 4 =")]
    careless = Judge(FoundAnywhere(), 1.0, lambda: None).audit("rows.jsonl", samples, prompts=5)
    scores = {score.kind: score for score in careless.hollow}
    assert scores["empty"].full == scores["format only"].full == 0
    # Two prompts, four places, three ways to write a list.
    assert (scores["spam in one place"].completions, scores["spam in one place"].full) == (24, 24)
    assert scores["spam in one place"].mean == 1.0
    assert "18" in scores["spam in one place"].example
    careful = Judge(NumericMatch("boxed"), 1.0, lambda: None).audit("rows.jsonl", samples, prompts=5)
    assert careful.hollow_full == 0
    assert careful.mistakes == 2  # no boxes in the samples


def test_guessing_a_letter_earns_its_share_and_is_no_hole():
    answers = "AABD"
    samples = [sample(a, True, answer=a, question=f"question {n}") for n, a in enumerate(answers)]
    audit = Judge(MultipleChoice("boxed"), 1.0, lambda: None).audit("rows.jsonl", samples, prompts=10)
    means = {score.kind: score.mean for score in audit.hollow}
    assert {kind: mean for kind, mean in means.items() if kind.startswith("guess")} == {
        "guess A": 0.5,
        "guess B": 0.25,
        "guess C": 0.0,
        "guess D": 0.25,
    }
    assert audit.hollow_full == 0


def test_equal_prompts_count_once():
    samples = [sample("1", True), sample("2", False), sample("1", True, question="?")]
    assert [prompt.question for prompt in distinct_prompts(samples)] == ["9 + 9 =", "?"]
