import time

import pytest

from grpo_lit.rewards.extract import (
    after_hashes,
    answer_text,
    balanced,
    last_boxed,
    last_line,
    last_tagged,
    opened_tags,
)
from grpo_lit.rollout import Completion, Prompt


# Field bug C5: training, evaluation and the audit read answers with these functions.
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"First \boxed{5}. Wrong; it is \boxed{7}.", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{2", None),
        (r"\boxed{5} and then \boxed{7", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{\text{E}}", r"\text{E}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"} } \boxed{3} }", "3"),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_the_last_complete_box(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>5</answer> no, <answer>\n7\n</answer>", "\n7\n"),
        ("<answer>5</answer> <answer>7", "5"),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer><answer>", None),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_the_last_complete_tag(text, content):
    assert last_tagged(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("16 - 3 = 13\n#### 18", "18"),
        ("#### 70,000", "70,000"),
        ("#### 3\nno:\n#### 4 \nthe end", "4"),
        ("####5", "5"),
        ("##### 5", "5"),
        ("####", ""),
        ("### 5", None),
        ("", None),
    ],
)
def test_after_the_last_hashes(text, answer):
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    ("text", "even"),
    [
        ("", True),
        (r"\frac{1}{2}", True),
        (r"\frac{1}{2", False),
        ("}{", False),
        (r"\{1, 2\}", True),
        (r"\{", True),
        (r"\boxed{", False),
        (r"\boxed{1}", True),
    ],
)
def test_balanced_braces(text, even):
    assert balanced(text) is even


@pytest.mark.parametrize(
    ("text", "line"), [("a\nb\n\n", "b"), ("a", "a"), ("", None), (" \n ", None), ("a\n  b  ", "b")]
)
def test_the_last_line(text, line):
    assert last_line(text) == line


@pytest.mark.parametrize(
    ("prefill", "tags"),
    [
        ("<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<think>", "<think>"),
        ("[assistant]<think>\n\n</think>\n\n<answer>", "<think>\n\n</think>\n\n<answer>"),
        ("Answer: <answer>", "<answer>"),
    ],
)
def test_tags_that_the_template_wrote_belong_to_the_answer(prefill, tags):
    prompt = Prompt(id="a", question="", metadata={"prefill": prefill})
    completion = Completion((), (), "5</answer>", "stop", 0)
    assert opened_tags(prompt.metadata) == tags
    assert answer_text(prompt, completion) == tags + "5</answer>"


def test_a_prompt_without_a_template_has_no_tags():
    assert opened_tags({}) == ""


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "{", "}", r"\boxed{1}", "<answer>", "</answer>", "<think>", "\n", r"\fbox"]
)
def test_extraction_takes_linear_time(piece):
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    for extract in (last_boxed, last_tagged, last_line, after_hashes, balanced):
        extract(text)
    assert time.process_time() - started < 1
