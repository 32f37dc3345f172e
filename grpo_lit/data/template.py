"""How a question becomes the tokens of a prompt."""

from dataclasses import dataclass, replace

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt

#: Where the question goes. Replaced as text, since questions and instructions hold braces of their own.
PLACEHOLDER = "{question}"


@dataclass(frozen=True)
class PromptTemplate:
    """A question with its instructions, as the tokenizer's chat template or plain text writes it.

    Args:
        system: System message; ``None`` leaves the chat template's own default.
        user: User message; ``{question}`` stands for the question.
        chat: Use the tokenizer's chat template. False sends the user text as it is (base models).
        prefill: Start of the assistant's answer, such as ``<think>``; the model goes on from there.

    Raises:
        ConfigError: For a ``user`` without ``{question}``, or a ``system`` without ``chat``.
    """

    system: str | None = None
    user: str = PLACEHOLDER
    chat: bool = True
    prefill: str = ""

    def __post_init__(self) -> None:
        """Refuse what would drop the question or the system message."""
        if PLACEHOLDER not in self.user:
            raise ConfigError(f"`data.template.user` expected a text with {PLACEHOLDER} in it, but got {self.user!r}")
        if self.system is not None and not self.chat:
            raise ConfigError(
                f"`data.template.system` expected to be absent with `data.template.chat: false`, but got "
                f"{self.system!r}: write it into `data.template.user`"
            )

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a tokenizer that this template cannot be used with.

        Raises:
            ConfigError: With ``chat`` and a tokenizer without a chat template.
        """
        templates = tokenizer.chat_template
        if self.chat and (not templates or (isinstance(templates, dict) and "default" not in templates)):
            raise ConfigError(
                f"`data.template.chat` expected a tokenizer with a chat template, but got {tokenizer.name_or_path!r} "
                f"{'with several and no default' if templates else 'without one'}: set `data.template.chat: false` to "
                "send plain text (base models), or use the instruct model's tokenizer, or give the tokenizer a "
                "`chat_template`"
            )

    def render(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Prompt:
        """Return the prompt with its token ids, and with how the answer was begun for it in ``metadata["prefill"]``.

        A chat template may itself begin the answer (``<think>`` of reasoning models); ``metadata["prefill"]`` holds all
        that was written after the user's message, since a completion goes on from there and lacks it.

        Args:
            tokenizer: Of the policy. The text is tokenised once, here.
            prompt: The question.

        Raises:
            ConfigError: Where the tokenizer's template refuses these messages, or nothing is left to send.
        """
        self.check(tokenizer)
        user = self.user.replace(PLACEHOLDER, prompt.question)
        if self.chat:
            text, opening = self._chat_text(tokenizer, user)
            # As apply_chat_template(tokenize=True) does: the template has written the special tokens.
            token_ids = tokenizer(text + self.prefill, add_special_tokens=False)["input_ids"]
        else:
            opening = ""
            token_ids = tokenizer(user + self.prefill)["input_ids"]
        if not token_ids:
            raise ConfigError(f"`data.template.user` expected a text, but prompt {prompt.id} gave no tokens")
        metadata = prompt.metadata | {"prefill": opening + self.prefill}
        return replace(prompt, token_ids=tuple(token_ids), metadata=metadata)

    def _chat_text(self, tokenizer: PreTrainedTokenizerBase, user: str) -> tuple[str, str]:
        """Return the conversation up to the answer, and the part of it that opens the answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": user}]
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            asked = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
        except TemplateError as error:
            raise ConfigError(
                f"`data.template` expected messages that the tokenizer's chat template takes, but it refused them "
                f"({error}): some take no system message, whose text can go into `data.template.user`"
            ) from error
        return text, text.removeprefix(asked) if text.startswith(asked) else ""
