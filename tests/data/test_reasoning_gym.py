import io
import json
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

import grpo_lit
from grpo_lit.data.reasoning_gym import ReasoningGym, own_random_state, plain
from grpo_lit.data.source import PromptSource
from grpo_lit.errors import ConfigError

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
DIGITS = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}  # ten questions in all: "0 =" to "9 ="


def gym(size=50, **arguments):
    return ReasoningGym("chain_sum", size, **{"parameters": SUMS} | arguments)


def questions(source):
    return [prompt.question for prompt in source]


def test_a_prompt_holds_the_question_its_answer_and_what_a_scorer_needs():
    prompt = gym()[0]
    left, sign, right = prompt.metadata["entry"]["expression"].split()
    assert prompt.question.endswith(f"{left} {sign} {right} =")
    assert int(prompt.answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    assert prompt.domain == "chain_sum"
    assert gym(domain="math")[0].domain == "math"
    assert gym(domain="math").domains == ("math",)
    assert gym().prompt_id(2) == gym()[2].id
    assert prompt.metadata["task"] == "chain_sum"
    assert prompt.metadata["parameters"] == SUMS
    assert prompt.token_ids == ()


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_same_prompts_come_in_any_order_of_access(split):
    forward, backward = gym(split=split), gym(split=split)
    assert [backward[i] for i in reversed(range(50))] == [forward[i] for i in reversed(range(50))]
    assert forward[7] == forward[7]
    assert len(forward) == len(list(forward)) == 50


@pytest.mark.parametrize("index", [-1, 50])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError, match="0 to 49"):
        gym()[index]


@pytest.mark.parametrize(("train_seed", "heldout_seed"), [(0, 0), (0, 25), (3, 2)])
@pytest.mark.parametrize("heldout_size", [20, 200])
def test_no_question_is_in_both_splits(train_seed, heldout_seed, heldout_size):
    # Item i is made from seed + i: without the cut by text these seeds would share most of their items.
    train = questions(gym(800, seed=train_seed))
    heldout = questions(gym(heldout_size, seed=heldout_seed, split="heldout"))
    assert not set(train) & set(heldout)


def test_heldout_questions_are_distinct_and_train_keeps_the_tasks_distribution():
    assert len(set(questions(gym(200, split="heldout")))) == 200
    train = list(gym(2000))
    # Half of the task's own items have one digit (200 questions in all), so train must repeat some of them.
    # Binomial(2000, 1/2): standard deviation 22, so 5 of them are 112.
    assert abs(sum(p.metadata["entry"]["num_digits"] == 1 for p in train) - 1000) < 112
    assert len({p.id for p in train}) == 2000


def test_another_seed_gives_other_prompts():
    assert questions(gym(seed=0)) != questions(gym(seed=1000))


def test_a_task_with_too_few_questions_is_refused_with_the_number():
    total = {f"{i} =" for i in range(10)}
    source = ReasoningGym("chain_sum", 50, split="heldout", heldout_fraction=0.5, parameters=DIGITS)
    with pytest.raises(ConfigError, match=r"`size` expected at most .* got 50.*gave only") as error:
        source[0]
    found = int(str(error.value).split("gave only ")[1].split(".")[0])
    assert 0 < found < len(total)
    # Exactly that many can be had.
    enough = ReasoningGym("chain_sum", found, split="heldout", heldout_fraction=0.5, parameters=DIGITS)
    assert len(set(questions(enough))) == found


def test_a_split_without_any_question_is_refused_and_not_searched_for_ever():
    # Ten questions with hashes from 0.0053 to 0.98: these splits get none of them.
    with pytest.raises(ConfigError, match="gave only 0"):
        ReasoningGym("chain_sum", 1, split="heldout", heldout_fraction=0.002, parameters=DIGITS)[0]
    with pytest.raises(ConfigError, match="none that is not held out"):
        ReasoningGym("chain_sum", 1, heldout_fraction=0.99, parameters=DIGITS)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "chainsum"}, "did you mean chain_sum"),
        ({"task": "qqqq"}, "choose from .*chain_sum"),
        ({"task": "composite"}, "`task` expected"),
        ({"parameters": {"min_term": 2}}, "did you mean min_terms"),
        ({"parameters": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"parameters": {"min_terms": "two"}}, "`parameters` expected settings that chain_sum can work with"),
        ({"parameters": {"seed": 3}}, "set `seed` itself"),
        ({"parameters": {"size": 3}}, "set `size` itself"),
        ({"size": 0}, "`size` expected at least 1"),
        ({"heldout_fraction": 1.0}, "`heldout_fraction` expected"),
        ({"heldout_fraction": -0.1}, "`heldout_fraction` expected"),
        ({"split": "heldout", "heldout_fraction": 0.0}, "`heldout_fraction` expected"),
    ],
)
def test_bad_settings_are_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGym(**{"task": "chain_sum", "size": 5} | arguments)


def test_nothing_held_out_is_allowed_for_training():
    assert len(questions(gym(heldout_fraction=0.0))) == 50


# Tasks that prepare exactly `size` items (acre, gsm_symbolic, list_functions, word_ladder), draw from global generators
# (list_functions, pool_matrix), have integer keys or tuples to compare with (graph_color, arc_1d, rearc), numpy scalars
# (codeio, knights_knaves), or no answer (rubiks_cube).
@pytest.mark.filterwarnings("ignore:reasoning-gym's word_ladder")
@pytest.mark.parametrize(
    "task",
    [
        *["acre", "arc_1d", "codeio", "graph_color", "gsm_symbolic", "knights_knaves", "leg_counting"],
        *["list_functions", "pool_matrix", "rearc", "rubiks_cube", "word_ladder"],
    ],
)
def test_unusual_tasks_are_reproducible_and_plain(task):
    random.seed(1)
    first = ReasoningGym(task, 5, seed=2)
    kept = [first[i] for i in range(5)]
    numpy_state = np.random.get_state()
    assert [ReasoningGym(task, 5, seed=2)[i] for i in (4, 1)] == [kept[4], kept[1]]
    # The process's own generator is left alone.
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))
    for prompt in kept:
        json.dumps(prompt.metadata)
        assert loads_weights_only(prompt.metadata) == prompt.metadata
        assert prompt.answer is None or isinstance(prompt.answer, str)


@pytest.mark.parametrize("task", ["list_functions", "pool_matrix"])
def test_random_generators_are_left_alone(task):
    # Not through the source: beartype, on in tests, draws from `random` itself.
    state, numpy_state = random.getstate(), np.random.get_state()
    with own_random_state(task):
        random.seed(5)
        if task == "pool_matrix":
            np.random.seed(5)
    assert random.getstate() == state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))


def loads_weights_only(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_task_that_no_seed_can_fix_warns(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.warns(UserWarning, match="PYTHONHASHSEED=0"):
        ReasoningGym("isomorphic_strings", 1)


def test_plain_makes_numpy_and_sets_plain_and_keeps_tuples():
    value = {1: (np.float64(0.5), np.str_("a")), "s": {2, 1}, "a": np.arange(2), "n": None, "b": True, "f": 1 + 2j}
    made = plain(value)
    assert made == {1: (0.5, "a"), "s": [1, 2], "a": [0, 1], "n": None, "b": True, "f": "(1+2j)"}
    assert type(made[1][0]) is float
    assert type(made[1][1]) is str
    assert type(made["b"]) is bool


def test_a_source_survives_pickling():
    source = gym(5, split="heldout")
    assert list(pickle.loads(pickle.dumps(source))) == list(source)


def test_reasoning_gym_is_imported_only_when_used():
    # It takes a second, matplotlib included.
    sources = Path(grpo_lit.__file__).parent.rglob("*.py")
    assert not [path for path in sources if re.search(r"^(import|from) reasoning_gym", path.read_text(), re.MULTILINE)]


def test_the_yaml_shape_with_a_short_class_name():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data.train", type=PromptSource)
    config = parser.parse_string(
        """
data:
  train:
    class_path: ReasoningGym
    init_args:
      task: chain_sum
      size: 5
      split: heldout
      parameters: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}
"""
    )
    source = parser.instantiate(config).data.train
    assert list(source) == list(gym(5, split="heldout"))
