import pytest
from jsonargparse import ArgumentParser

from grpo_lit.data.template import PromptTemplate
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt

SUM = Prompt(id="sum/0", question="3 + 4 =", answer="7", metadata={"task": "chain_sum"})
THINKING_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)


def text_of(tokenizer, prompt):
    return tokenizer.decode(prompt.token_ids)


def test_the_tokens_are_those_of_apply_chat_template(tokenizer):
    rendered = PromptTemplate(system="Be brief.", user="Solve: {question}").render(tokenizer, SUM)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Solve: 3 + 4 ="}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert rendered.token_ids == tuple(expected)
    assert all(type(token) is int for token in rendered.token_ids)


def test_the_prompt_is_otherwise_unchanged(tokenizer):
    rendered = PromptTemplate().render(tokenizer, SUM)
    assert (rendered.id, rendered.question, rendered.answer, rendered.domain) == ("sum/0", "3 + 4 =", "7", "default")
    assert rendered.metadata["task"] == "chain_sum"
    assert SUM.metadata == {"task": "chain_sum"}
    assert SUM.token_ids == ()


def test_without_a_system_message_none_is_sent(tokenizer):
    text = text_of(tokenizer, PromptTemplate().render(tokenizer, SUM))
    assert text == "<|im_start|>user\n3 + 4 =<|im_end|>\n<|im_start|>assistant\n"


# Field bug B7: plain strings need no chat template.
def test_plain_text_gets_the_tokenizers_own_special_tokens(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=None, bos=True)
    rendered = PromptTemplate(user="Q: {question} A:", chat=False).render(tokenizer, SUM)
    assert rendered.token_ids == tuple(tokenizer("Q: 3 + 4 = A:")["input_ids"])
    assert rendered.token_ids[0] == tokenizer.bos_token_id
    assert text_of(tokenizer, rendered) == "<s>Q: 3 + 4 = A:"


def test_a_chat_prompt_has_no_second_beginning_of_sequence(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    assert PromptTemplate().render(tokenizer, SUM).token_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("question", ["{x} {0} {question}", "{", "}}{{", "{% raw %}", "\\frac{1}{2} %s"])
def test_braces_in_questions_and_instructions_stay(tokenizer, question):
    prompt = Prompt(id="a", question=question)
    rendered = PromptTemplate(user="Use \\boxed{}. {question} {% x %}").render(tokenizer, prompt)
    assert f"Use \\boxed{{}}. {question} {{% x %}}<|im_end|>" in text_of(tokenizer, rendered)


def test_the_prefill_opens_the_answer_and_is_noted(tokenizer):
    rendered = PromptTemplate(prefill="<think>").render(tokenizer, SUM)
    assert text_of(tokenizer, rendered).endswith("<|im_start|>assistant\n<think>")
    assert rendered.metadata["prefill"].endswith("<think>")
    plain = PromptTemplate(chat=False, prefill=" <think>").render(tokenizer, SUM)
    assert text_of(tokenizer, plain) == "3 + 4 = <think>"
    assert plain.metadata["prefill"] == " <think>"


def test_what_the_chat_template_itself_opens_is_noted_too(make_tokenizer):
    # Templates of reasoning models write <think> as part of the generation prompt, so completions lack it.
    tokenizer = make_tokenizer(THINKING_TEMPLATE)
    rendered = PromptTemplate(prefill="Well,").render(tokenizer, SUM)
    assert text_of(tokenizer, rendered) == "[user]3 + 4 =[assistant]<think>\nWell,"
    assert rendered.metadata["prefill"] == "[assistant]<think>\nWell,"
    # A <think> in the question was not written by the template.
    asked = PromptTemplate().render(make_tokenizer(), Prompt(id="a", question="What does <think> mean?"))
    assert "<think>" not in asked.metadata["prefill"]


def test_a_template_that_ignores_the_generation_prompt_has_no_opening(make_tokenizer):
    tokenizer = make_tokenizer("{% if add_generation_prompt %}go{% else %}stop{% endif %} {{ messages[0]['content'] }}")
    assert PromptTemplate().render(tokenizer, SUM).metadata["prefill"] == ""


# Field bug B7.
@pytest.mark.parametrize("chat_template", [None, "", {"tool_use": "x", "rag": "y"}])
def test_chat_without_a_chat_template_says_what_to_set(make_tokenizer, chat_template):
    tokenizer = make_tokenizer(chat_template)
    for refuse in (PromptTemplate().check, lambda t: PromptTemplate().render(t, SUM)):
        with pytest.raises(ConfigError, match=r"`data\.template\.chat` expected .*set `data\.template\.chat: false`"):
            refuse(tokenizer)
    PromptTemplate(chat=False).check(tokenizer)


def test_a_dictionary_of_templates_needs_a_default(make_tokenizer):
    tokenizer = make_tokenizer({"default": "{{ messages[0]['content'] }}", "tool_use": "x"})
    assert text_of(tokenizer, PromptTemplate().render(tokenizer, SUM)) == "3 + 4 ="


def test_a_chat_template_that_refuses_a_system_message_is_named(make_tokenizer):
    tokenizer = make_tokenizer(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    with pytest.raises(ConfigError, match=r"System role not supported.*`data\.template\.user`"):
        PromptTemplate(system="Be brief.").render(tokenizer, SUM)
    assert text_of(tokenizer, PromptTemplate().render(tokenizer, SUM)) == "x"


# Field bug B7.
def test_a_tokenizer_without_a_padding_token_works(tokenizer):
    assert tokenizer.pad_token is None
    assert PromptTemplate().render(tokenizer, SUM).token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user": "Solve this"}, r"`data\.template\.user` expected a text with \{question\}"),
        ({"user": "Solve { question }"}, r"`data\.template\.user`"),
        ({"system": "Be brief.", "chat": False}, r"`data\.template\.system` expected to be absent"),
    ],
)
def test_a_template_that_would_drop_text_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PromptTemplate(**arguments)


def test_a_prompt_of_no_tokens_is_refused(make_tokenizer):
    with pytest.raises(ConfigError, match="prompt empty/0 gave no tokens"):
        PromptTemplate(chat=False).render(make_tokenizer(None), Prompt(id="empty/0", question=""))


def test_the_yaml_shape():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data.template", type=PromptTemplate | None, default=None)
    config = parser.parse_string("data: {template: {user: 'Solve: {question}', prefill: <think>}}")
    assert parser.instantiate(config).data.template == PromptTemplate(user="Solve: {question}", prefill="<think>")
