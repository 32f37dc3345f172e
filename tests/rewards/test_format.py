import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lit.errors import ConfigError
from grpo_lit.rewards.format import TAGS, RegexFormat, ThinkAnswerFormat, TokenFormat
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
    """Field bug C9."""
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
    """Field bug C9."""
    assert score(text, tag_credit=0.0) == 0.0
    assert score("<think>a</think><answer>9</answer>", tag_credit=0.0) == 1.0


@pytest.mark.parametrize("prefill", ["<think>", "<|im_start|>assistant\n<think>\n", "<think>\nLet me see."])
def test_a_tag_that_the_template_wrote_counts(prefill):
    """Field bug C9."""
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
    """Field bug C9."""
    text = start + piece * (200_000 // len(piece)) + end
    started = time.process_time()
    score(text)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("credit", [-0.1, 0.3])
def test_a_credit_out_of_range_is_refused(credit):
    with pytest.raises(ConfigError, match=r"`tag_credit` expected 0 to 0\.25"):
        ThinkAnswerFormat(credit)


# ---------------------------------------------------------------- regular expressions

THINK = r"<think>.*</think>.*\S.*"
ONCE = ["<think>", "</think>"]


def fits(pattern, text, prefill="", **arguments):
    prompt = Prompt(id="a", question="", metadata={"prefill": prefill})
    return RegexFormat(pattern, **arguments)(prompt, [Completion((), (), text, "stop", 0)])[0]


@pytest.mark.parametrize(
    ("text", "prefill", "expected"),
    [
        ("<think>\na\nb\n</think>\n<answer>9</answer>", "", 1.0),
        ("reasoning</think>\nanswer", "<|im_start|>assistant\n<think>\n", 1.0),
        ("reasoning</think>\nanswer<|im_end|>", "<|im_start|>assistant\n<think>\n", 1.0),
        (" <think>a</think>b \n<|im_end|>\n", "", 1.0),
        ("reasoning</think>\nanswer", "", 0.0),
        ("<think>a</think><think>b</think>c", "", 0.0),
        ("</think><think>", "", 0.0),
        ("<think>a</think>", "", 0.0),
        ("<think>a", "", 0.0),
        ("x<think>a</think>b", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_a_regex_for_thinking_before_the_answer(text, prefill, expected):
    """Field bug C9."""
    assert fits(THINK, text, prefill, once=ONCE) == expected


def test_the_whole_text_must_match_unless_a_part_is_asked_for():
    assert fits("[0-9]+", "7 apples") == 0.0
    assert fits("[0-9]+", "7 apples", match="search") == 1.0
    # A pattern that closes its own ends, as those found in print do.
    assert (
        fits("^<think>\\n.*?\\n</think>\\n<answer>.*?</answer>$", "<think>\na\nb\n</think>\n<answer>9</answer>") == 1.0
    )
    assert fits("^b", "a\nb", match="search") == 0.0
    assert fits("(?m)^b", "a\nb", match="search") == 1.0


def test_the_dot_takes_line_breaks_unless_told():
    assert fits("a.b", "a\nb") == 1.0
    assert fits("(?-s:a.b)", "a\nb") == 0.0


def test_a_pattern_that_backtracks_is_given_up_and_counted():
    reward = RegexFormat("(a+)+b", timeout=0.1)
    completions = [Completion((), (), text, "stop", 0) for text in ("a" * 5000, "aab", "a" * 5000)]
    started = time.process_time()
    with pytest.warns(UserWarning, match="gave up on a text of 5000 characters after 0.1 s") as caught:
        assert reward(Prompt(id="a", question=""), completions) == [0.0, 1.0, 0.0]
    assert len(caught) == 1
    assert reward.timeouts == 2
    assert time.process_time() - started < 2


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<think>a</think>", " ", "a\n"])
@pytest.mark.parametrize("once", [[], ONCE])
def test_200_kb_end_in_time_whatever_the_pattern(piece, once):
    """Field bug C9."""
    started = time.process_time()
    fits(r"<think>.*?</think>\s*<answer>.*?</answer>", piece * (200_000 // len(piece)), once=once)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "(a"}, r"`pattern` expected a regular expression, but got '\(a'"),
        ({"pattern": "a", "once": [""]}, "`once` expected texts"),
        ({"pattern": "a", "timeout": 0.0}, "`timeout` of RegexFormat expected to be > 0"),
    ],
)
def test_a_regex_that_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RegexFormat(**arguments)


# ---------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def thinker(tiny_folder):
    """A tokenizer to which <think> is a special token, which decoded text lacks, and </think> an ordinary one."""
    from transformers import AutoTokenizer

    folder = tiny_folder("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.add_tokens(["</think>"])
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer


@pytest.mark.parametrize(
    ("text", "prefill", "expected"),
    [
        ("<think>a</think>b", "", 1.0),
        ("<think></think>", "", 1.0),
        ("x<think>a\nb</think>b<|im_end|>", "", 1.0),
        ("a</think>b", "<|im_start|>assistant\n<think>\n", 1.0),
        ("b", "<|im_start|>assistant\n<think>\n\n</think>\n\n", 1.0),
        ("<think>a</think>b", "<think>", 0.0),
        ("a</think>b", "", 0.0),
        ("<think>a", "", 0.0),
        ("</think><think>", "", 0.0),
        ("<think>a</think><think>b</think>c", "", 0.0),
        ("<think><think>a</think>", "", 0.0),
        ("<think>a</think></think>", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_one_opening_token_before_one_closing_token(thinker, text, prefill, expected):
    """Field bug C9."""
    folder, tokenizer = thinker
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = Prompt(id="a", question="", metadata={"prefill": prefill})
    # The decoded text plays no part.
    completion = Completion(ids, (0.0,) * len(ids), tokenizer.decode(ids, skip_special_tokens=True), "stop", 0)
    assert TokenFormat(folder)(prompt, [completion]) == [expected]


def test_the_characters_of_a_tag_in_several_tokens_are_no_tag(thinker):
    folder, tokenizer = thinker
    ids = tuple(i for c in "<think>a</think>b" for i in tokenizer(c, add_special_tokens=False)["input_ids"])
    completion = Completion(ids, (0.0,) * len(ids), "<think>a</think>b", "stop", 0)
    assert TokenFormat(folder)(Prompt(id="a", question=""), [completion]) == [0.0]


def test_tags_that_are_no_tokens_are_refused(thinker):
    folder, _ = thinker
    with pytest.raises(
        ConfigError, match="`opening` of TokenFormat expected one token of the tokenizer, but got '<plan>'"
    ):
        TokenFormat(folder, opening="<plan>")
    with pytest.raises(ConfigError, match="`closing` of TokenFormat expected another tag than `opening`"):
        TokenFormat(folder, closing="<think>")
    with pytest.raises(ConfigError):
        TokenFormat("no/such/folder")
    with pytest.raises(ConfigError, match="`tokenizer` of TokenFormat expected a folder or hub id, but got none"):
        TokenFormat()
