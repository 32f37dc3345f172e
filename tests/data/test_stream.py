import io
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lit.data.source import PromptSource
from grpo_lit.data.stream import PromptStream
from grpo_lit.data.template import PromptTemplate
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt, sample_seed


class Questions(PromptSource):
    """Prompts of these texts; with ``chat: false`` and a byte-level tokenizer a question has one token per letter."""

    def __init__(self, texts, ids=None):
        self.texts = texts
        self.ids = ids or [f"q/{i}" for i in range(len(texts))]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return Prompt(id=self.ids[index], question=self.texts[index])


def letters(n):
    return Questions([chr(ord("a") + i) for i in range(n)])


@pytest.fixture(scope="session")
def stream(make_tokenizer):
    tokenizer = make_tokenizer()

    def build(source, seed=0, max_prompt_tokens=5):
        return PromptStream(source, PromptTemplate(chat=False), tokenizer, max_prompt_tokens, seed)

    return build


def asked(taken):
    return [(prompt.id, epoch) for prompt, epoch in taken]


def test_every_epoch_asks_everything_once_in_an_order_of_its_own(stream):
    taken = asked(stream(letters(10)).take(10)), asked(stream(letters(10)).take(10))
    assert taken[0] == taken[1]
    s = stream(letters(10))
    epochs = [asked(s.take(10)) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == [(f"q/{i}", number) for i in range(10)]
    orders = {tuple(i for i, _ in epoch) for epoch in epochs}
    assert len(orders) == 3
    assert asked(stream(letters(10), seed=1).take(10)) != epochs[0]


def test_epochs_of_neighbouring_seeds_do_not_coincide(stream):
    # A permutation from seed + epoch would make epoch 1 of seed 0 equal epoch 0 of seed 1.
    s = stream(letters(10), seed=0)
    s.take(10)
    assert [i for i, _ in asked(s.take(10))] != [i for i, _ in asked(stream(letters(10), seed=1).take(10))]


def test_prompts_come_rendered(tokenizer):
    s = PromptStream(letters(3), PromptTemplate(prefill="<think>"), tokenizer, 100)
    prompt, epoch = next(s)
    assert epoch == 0
    assert tokenizer.decode(prompt.token_ids).endswith(f"{prompt.question}<|im_end|>\n<|im_start|>assistant\n<think>")
    assert len(s.probe_ids) > 1


def test_taking_and_iterating_are_one_sequence(stream):
    s = stream(letters(6))
    mixed = [*s.take(2), next(s), *s.take(3), *[p for p, _ in zip(s, range(3), strict=False)]]
    # `zip` draws one more from neither: it stops when range ends, after one prompt too many.
    straight = stream(letters(6))
    assert asked(mixed) == asked([next(straight) for _ in range(9)])


@pytest.mark.parametrize("before", [0, 4, 9, 10, 11, 25])
def test_stop_and_resume_gives_the_same_sequence(stream, before):
    straight = stream(letters(10))
    expected = asked([next(straight) for _ in range(before + 30)])
    first = stream(letters(10))
    head = asked([next(first) for _ in range(before)])
    resumed = stream(letters(10))
    resumed.load_state_dict(through_checkpoint(first.state_dict()))
    assert head + asked([next(resumed) for _ in range(30)]) == expected
    assert resumed.state_dict() == straight.state_dict()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda x: min(x) <= 5),
    before=st.integers(0, 30),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=50, deadline=None)
def test_stop_and_resume_with_long_prompts(stream, lengths, before, seed):
    source = Questions(["x" * n for n in lengths])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight, first, resumed = (stream(source, seed) for _ in range(3))
        expected = [next(straight) for _ in range(before + 10)]
        head = [next(first) for _ in range(before)]
        resumed.load_state_dict(through_checkpoint(first.state_dict()))
        assert head + [next(resumed) for _ in range(10)] == expected
    assert resumed.dropped_long == straight.dropped_long
    assert all(len(prompt.token_ids) <= 5 for prompt, _ in expected)
    assert len({(p.id, e) for p, e in expected}) == len(expected)


def through_checkpoint(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda stream: stream(letters(9)), r"`data\.train` expected .*size 10.*size 9"),
        (lambda stream: stream(letters(10), seed=1), r"`data\.seed` expected .*seed 0.*seed 1"),
        (
            lambda stream: stream(Questions(["a"] * 10, [f"other/{i}" for i in range(10)])),
            r"`data\.train` .*'q/0'.*'other/0'",
        ),
    ],
)
def test_a_state_of_another_run_is_refused(stream, other, message):
    state = stream(letters(10)).state_dict()
    with pytest.raises(ConfigError, match=message):
        other(stream).load_state_dict(state)


def test_long_prompts_are_left_out_counted_and_reported_once_per_epoch(stream):
    # Lengths 5 (allowed, exactly), 6 and 12 (both too long).
    s = stream(Questions(["abcde", "abcdef", "x" * 12, "a"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken = asked([next(s) for _ in range(5)])
    assert sorted(taken[:4]) == [("q/0", 0), ("q/0", 1), ("q/3", 0), ("q/3", 1)]
    assert taken[4][1] == 2
    messages = [str(w.message) for w in caught]
    assert [m for m in messages if "2 of the 4 prompts of epoch 0" in m and "`data.max_prompt_tokens` (5)" in m]
    assert len(messages) == 2
    assert s.dropped_long >= 4


# Field bug B5.
def test_a_prompt_is_never_cut(stream):
    s = stream(Questions(["abcdef", "abc"]))
    with pytest.warns(UserWarning, match="1 of the 2 prompts"):
        assert {len(next(s)[0].token_ids) for _ in range(4)} == {3}


def test_the_markup_of_a_chat_counts_in_the_length_and_is_never_stripped(tokenizer):
    """Field bug B5: a chat prompt against a limit of 4, and of its own length and one less."""
    prompt = PromptTemplate().render(tokenizer, letters(1)[0])
    length = len(prompt.token_ids)
    assert tokenizer.decode(prompt.token_ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for room in (4, length - 1):
        with pytest.raises(
            ConfigError, match=rf"1 of the 1 prompts .*`data\.max_prompt_tokens` \({room}\).*q/0: {length}"
        ):
            next(PromptStream(letters(1), PromptTemplate(), tokenizer, room))
    assert next(PromptStream(letters(1), PromptTemplate(), tokenizer, length))[0].token_ids == prompt.token_ids


def test_all_prompts_too_long_is_an_error_and_not_an_endless_search(stream):
    with pytest.raises(ConfigError, match=r"4 of the 4 prompts .*`data\.max_prompt_tokens` \(5\).*raise it"):
        next(stream(Questions(["x" * 6] * 4)))


def test_an_empty_source_is_refused(stream):
    with pytest.raises(ConfigError, match="empty source"):
        stream(Questions([]))


# Field bug B7.
def test_a_tokenizer_without_chat_template_is_refused_at_once(make_tokenizer):
    with pytest.raises(ConfigError, match=r"`data\.template\.chat`"):
        PromptStream(letters(3), PromptTemplate(), make_tokenizer(None), 100)


# Field bug D1, Field bug D4.
def test_a_batch_larger_than_the_source_is_refused(stream):
    with pytest.raises(ConfigError, match="at most the 3 prompts of the source, but got 4"):
        stream(letters(3)).take(4)


# Field bug D4.
def test_equal_questions_in_one_batch_keep_ids_and_seeds_of_their_own(stream):
    taken = stream(Questions(["same", "same"])).take(2)
    assert taken[0][0].question == taken[1][0].question
    seeds = {sample_seed(0, prompt, epoch, i) for prompt, epoch in taken for i in range(4)}
    assert len(seeds) == 8


def test_two_prompts_of_one_id_in_a_batch_are_refused(stream):
    with pytest.raises(ConfigError, match="'q' twice in epoch 0"):
        stream(Questions(["a", "b"], ids=["q", "q"])).take(2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_shares_one_order(stream, ranks):
    one = asked(stream(letters(12)).take(12))
    shares = [asked(stream(letters(12)).take(12)[rank::ranks]) for rank in range(ranks)]
    assert [shares[i % ranks][i // ranks] for i in range(12)] == one


def test_where_everything_is_passed_over_the_rest_of_the_pass_is_asked_all_the_same(tokenizer):
    def build():
        return PromptStream(letters(5), PromptTemplate(chat=False), tokenizer, 5, 0, lambda prompt, epoch: True)

    s = build()
    next_to = PromptStream(letters(5), PromptTemplate(chat=False), tokenizer, 5, 0)
    epochs = [asked(next_to.take(5)) for _ in range(4)]
    with pytest.warns(
        UserWarning, match=r"5 prompts in a row.*epoch 1.*`data\.rollout\.curriculum\.revisit`"
    ) as caught:
        taken = asked([next(s) for _ in range(8)])
    # Epoch 0 is passed over whole, 1 is asked; 2 again passed over, 3 asked: no prompt comes twice in a pass.
    assert taken == epochs[1] + epochs[3][:3]
    assert len(caught) == 1
    assert s.passed_over == 10
    resumed = build()
    resumed.load_state_dict(through_checkpoint(s.state_dict()))
    assert asked([next(resumed), next(resumed)]) == epochs[3][3:]


def test_a_prompt_that_is_passed_over_is_never_made(tokenizer):
    class Dear(Questions):
        def __getitem__(self, index):
            assert index != 2
            return super().__getitem__(index)

        def prompt_id(self, index):
            return self.ids[index]

    source = Dear(["a", "b", "c", "d"])
    s = PromptStream(source, PromptTemplate(chat=False), tokenizer, 5, 0, lambda prompt, epoch: prompt == "q/2")
    assert sorted(asked([next(s) for _ in range(3)])) == [("q/0", 0), ("q/1", 0), ("q/3", 0)]


def test_a_state_of_before_the_curriculum_loads(stream):
    before = stream(letters(4))
    asked([next(before)])
    state = before.state_dict()
    del state["asks_all_in"]
    after = stream(letters(4))
    after.load_state_dict(state)
    assert asked([next(after) for _ in range(3)]) == asked([next(before) for _ in range(3)])
