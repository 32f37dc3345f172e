import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.format import TAGS, ThinkAnswerFormat
from grpo_lit.rollout import Completion, Prompt


def score(text, prefill="", **arguments):
    prompt = Prompt(id="a", question="", metadata={"prefill": prefill})
    return ThinkAnswerFormat(**arguments)(prompt, [Completion((), (), text, "stop", 0)])[0]


@pytest.mark.parametrize(
    "text",
    [
        "<think>\na\nb\n</think>\n<answer>9</answer>",
        "<think></think><answer></answer>",
        "  \n<think>a < b > c <b>bold</b> <thinking></think>\n\n<answer>\n9\n</answer>\n ",
        "<think>a</think><answer>9</answer><|im_end|>",
        "<think>a</think><answer>9</answer>\n<|endoftext|>\n",
    ],
)
def test_the_whole_format_earns_full_marks(text):
    assert score(text) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("9", 0.0),
        ("<think>", 0.25),
        ("<think>a", 0.25),
        ("<answer>9</answer>", 0.5),
        ("<think>a</think>", 0.5),
        ("<think>a</think> 9", 0.5),
        ("a</think><answer>9</answer>", 0.75),
        ("<think>a<answer>9</answer>", 0.75),
        # All four tags, yet not the format: three quarters at most.
        ("<answer>9</answer><think>a</think>", 0.75),
        ("</answer><answer></think><think>", 0.75),
        ("Sure! <think>a</think><answer>9</answer>", 0.75),
        ("<think>a</think> so <answer>9</answer>", 0.75),
        ("<think>a</think><answer>9</answer> done", 0.75),
        ("<think>a<answer>9</answer></think>", 0.75),
        # A tag that occurs twice earns nothing.
        ("<think>a</think><think>b</think><answer>9</answer>", 0.5),
        ("<think>a</think><answer>8</answer><answer>9</answer>", 0.5),
        ("<think><think>a</think><answer>9</answer>", 0.75),
        ("</think><think>", 0.5),
        ("<THINK>a</THINK><answer>9</answer>", 0.5),
    ],
)
def test_partial_credit(text, expected):
    assert score(text) == expected


@pytest.mark.parametrize(
    "text", ["</think><think>", "<think>a</think><think>b</think><answer>9</answer>", "<think>a</think> 9"]
)
def test_all_or_nothing(text):
    assert score(text, tag_credit=0.0) == 0.0
    assert score("<think>a</think><answer>9</answer>", tag_credit=0.0) == 1.0


@pytest.mark.parametrize("prefill", ["<think>", "<|im_start|>assistant\n<think>\n", "<think>\nLet me see."])
def test_a_tag_that_the_template_wrote_counts(prefill):
    assert score("reasoning</think>\n<answer>9</answer>", prefill) == 1.0
    assert score("reasoning</think>\n<answer>9</answer><|im_end|>", prefill) == 1.0
    assert score("reasoning", prefill) == 0.25
    # Written once more by the model, it is there twice.
    assert score("<think>reasoning</think>\n<answer>9</answer>", prefill) == 0.75


def test_a_prefill_without_tags_changes_nothing():
    assert score("<think>a</think><answer>9</answer>", "<|im_start|>assistant\n") == 1.0
    assert score("a</think><answer>9</answer>", "<|im_start|>assistant\n") == 0.75


@given(st.lists(st.sampled_from([*TAGS, " ", "a", "<", "\n"]), max_size=9))
def test_only_the_format_earns_full_marks(pieces):
    text = "".join(pieces)
    value = score(text)
    tags = [piece for piece in pieces if piece in TAGS]
    # An independent reading: the four tags in order, and white space only outside of the two blocks.
    before, _, rest = text.partition("<think>")
    between = rest.partition("</think>")[2].partition("<answer>")[0]
    after = rest.partition("</answer>")[2]
    right = tags == list(TAGS) and not (before + between + after).strip()
    assert (value == 1.0) == right
    assert 0 <= value <= 1


@pytest.mark.parametrize("piece", [*TAGS, "<", "<think>a", " ", "<think></think>", "<|im_end|>", "\n<"])
@pytest.mark.parametrize(
    ("start", "end"), [("", ""), ("<think>", "x"), ("<think>", "</think><answer>"), ("", "</answer>")]
)
def test_200_kb_take_linear_time(piece, start, end):
    text = start + piece * (200_000 // len(piece)) + end
    started = time.process_time()
    score(text)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("credit", [-0.1, 0.3])
def test_a_credit_out_of_range_is_refused(credit):
    with pytest.raises(ConfigError, match=r"`tag_credit` expected 0 to 0\.25"):
        ThinkAnswerFormat(credit)
