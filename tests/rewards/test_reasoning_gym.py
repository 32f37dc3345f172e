import inspect
import re

import pytest

from grpo_lit.data.reasoning_gym import ReasoningGym
from grpo_lit.errors import ConfigError
from grpo_lit.rewards import ReasoningGymScore, RewardCombination, WeightedReward
from grpo_lit.rewards.reasoning_gym import UNSAFE_TASKS
from grpo_lit.rollout import Completion, Group, Prompt


def scores(prompt, *texts, extract="answer_tag"):
    return ReasoningGymScore(extract)(prompt, [Completion((), (), text, "stop", 0) for text in texts])


# Own scorers that look into the metadata: tuples (rearc, arc_1d), a graph without an answer of its own (graph_color
# below), json (group_anagrams), a dictionary of words made when the task is built (word_ladder).
@pytest.mark.filterwarnings("ignore:reasoning-gym's word_ladder")
@pytest.mark.parametrize("task", ["chain_sum", "rearc", "arc_1d", "group_anagrams", "word_ladder", "zebra_puzzles"])
def test_the_tasks_own_answer_scores_one_and_nonsense_less(task):
    prompt = ReasoningGym(task, 2)[1]
    right, wrong, untagged = scores(prompt, f"<answer>{prompt.answer}</answer>", "<answer>?</answer>", prompt.answer)
    assert right == 1.0
    assert wrong < 0.5
    assert untagged == 0.0


def test_a_task_without_an_answer_of_its_own_is_judged_too():
    prompt = ReasoningGym("graph_color", 1)[0]
    assert prompt.answer is None
    colors = prompt.metadata["entry"]["possible_answer"]
    right = "<answer>" + "{" + ", ".join(f'"{k}": {v}' for k, v in colors.items()) + "}</answer>"
    # graph_color gives a hundredth for a dictionary that is no colouring.
    assert scores(prompt, right, "<answer>{}</answer>", "<answer></answer>") == [1.0, 0.01, 0.0]


@pytest.mark.parametrize(
    ("extract", "text", "expected"),
    [
        ("answer_tag", "1 + 1 <answer> {answer} </answer>", 1.0),
        ("answer_tag", "{answer}", 0.0),
        ("last_line", "let me see\n{answer}\n\n", 1.0),
        ("last_line", "{answer}\nlet me see", 0.0),
        ("last_line", "", 0.0),
        ("text", "{answer}", 1.0),
    ],
)
def test_where_the_answer_stands(extract, text, expected):
    prompt = ReasoningGym("chain_sum", 1)[0]
    assert scores(prompt, text.replace("{answer}", prompt.answer), extract=extract) == [expected]


def test_partial_credit_is_not_correct():
    prompt = ReasoningGym("chain_sum", 1)[0]
    group = Group(prompt, 0, (Completion((), (), f"<answer>it is {prompt.answer}</answer>", "stop", 0),))
    RewardCombination({"task": WeightedReward(ReasoningGymScore())}).score(group)
    # chain_sum gives len(answer) / len(text) where the answer is somewhere in the text.
    assert group.rewards == [pytest.approx(len(prompt.answer) / len(f"it is {prompt.answer}"))]
    assert group.correct == [False]


def test_prompts_of_other_sources_are_not_judged():
    other = Prompt(id="a", question="q", answer="7")
    assert scores(other, "<answer>7</answer>", "") == [None, None]
    assert ReasoningGymScore().problem(other) == "no reasoning-gym task"
    assert ReasoningGymScore().problem(ReasoningGym("chain_sum", 1)[0]) is None


def test_a_scorer_that_stumbles_gives_zero():
    prompt = ReasoningGym("prime_factorization", 1)[0]
    assert scores(prompt, "<answer>no primes</answer>", f"<answer>{prompt.answer}</answer>") == [0.0, 1.0]


def test_a_scorer_that_runs_the_answer_as_code_is_refused():
    prompt = ReasoningGym("n_queens", 1)[0]
    group = Group(prompt, 0, (Completion((), (), "<answer>exit()</answer>", "stop", 0),))
    with pytest.raises(ConfigError, match="n_queens: its scorer evaluates the model's text"):
        RewardCombination({"task": WeightedReward(ReasoningGymScore())}).score(group)
    with pytest.raises(ConfigError, match="n_queens: its scorer evaluates the model's text"):
        ReasoningGymScore().problem(prompt)  # before anything is drawn


def test_every_scorer_that_evaluates_text_is_known():
    from reasoning_gym.factory import DATASETS

    evaluates = {
        name
        for name, (task, _) in DATASETS.items()
        if re.search(r"\beval\((answer|user)|parse_expr\((answer|user)", inspect.getsource(task))
    }
    assert evaluates == UNSAFE_TASKS - {"coin_flip"}
