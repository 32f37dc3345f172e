"""The endless, reproducible order in which prompts are asked."""

import hashlib
import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from grpo_lit.data.source import PromptSource
from grpo_lit.data.tally import Tally
from grpo_lit.data.template import PromptTemplate
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt


class PromptStream:
    """Passes over a source without end, each in an order of its own.

    The order depends on the seed and the epoch and on nothing else, so every rank sees the same one and takes its
    share of what :meth:`take` returns. Prompts that are too long are left out, never cut.

    Args:
        source: The prompts.
        template: How a question becomes tokens.
        tokenizer: Of the policy.
        max_prompt_tokens: Longer prompts are left out.
        seed: Of the order.
        passes_over: Told a prompt's id and the epoch, whether to go on to the next one; ``None``: never. Where it has
            gone on through as many prompts in a row as the source has, the rest of that pass is asked without it.

    Attributes:
        epoch: Which pass over the source the next prompt belongs to, unless the pass is over.
        dropped_long: Prompts left out so far as too long, in all epochs.
        passed_over: Prompts that ``passes_over`` left out since the process began.

    Raises:
        ConfigError: For an empty source, or a tokenizer that the template cannot be used with.
    """

    def __init__(
        self,
        source: PromptSource,
        template: PromptTemplate,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        seed: int = 0,
        passes_over: Callable[[str, int], bool] | None = None,
    ) -> None:
        if not len(source):
            raise ConfigError("`data.train` expected at least one prompt, but got an empty source")
        template.check(tokenizer)
        self.source, self.template, self.tokenizer = source, template, tokenizer
        self.max_prompt_tokens, self.seed = max_prompt_tokens, seed
        self._passes_over = passes_over
        #: Epoch in which no prompt is passed over any more; -1: none.
        self._asks_all_in = -1
        self._warned = False
        self.epoch = 0
        self.dropped_long = self.passed_over = 0
        self._position = 0
        self._dropped_in_epoch = 0
        #: The first of those that this process has left out of this epoch.
        self._long = Tally()
        #: Indices in the source of this epoch's prompts, in the order they are asked in.
        self.order = self._permutation()

    def __iter__(self) -> "PromptStream":
        """Return itself: the stream has one position, which :meth:`state_dict` holds."""
        return self

    def __next__(self) -> tuple[Prompt, int]:
        """Return the next prompt, rendered, and the epoch it is asked in.

        Raises:
            ConfigError: Where a whole epoch holds no prompt that is short enough.
        """
        passed_over = 0
        while True:
            if self._position == len(self.order):
                self._end_epoch()
            index = self.order[self._position]
            self._position += 1
            if passed_over == len(self.order):
                self._ask_all()
            if self._goes_on_from(index):
                passed_over += 1
                continue
            prompt = self.rendered(self.source[index])
            if len(prompt.token_ids) <= self.max_prompt_tokens:
                return prompt, self.epoch
            self.dropped_long += 1
            self._dropped_in_epoch += 1
            self._long.add(self.too_long, f"{prompt.id}: {len(prompt.token_ids)}")

    def rendered(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its token ids."""
        return self.template.render(self.tokenizer, prompt)

    @property
    def too_long(self) -> str:
        """What is wrong with a prompt that is left out for its length."""
        return f"more tokens than `data.max_prompt_tokens` ({self.max_prompt_tokens})"

    def _goes_on_from(self, index: int) -> bool:
        if self._passes_over is None or self._asks_all_in == self.epoch:
            return False
        passes = self._passes_over(self.source.prompt_id(index), self.epoch)
        self.passed_over += passes
        return passes

    def _ask_all(self) -> None:
        """Pass over nothing more in this epoch."""
        self._asks_all_in = self.epoch
        if not self._warned:
            rank_zero_warn(
                f"`data.rollout.curriculum` passed over {len(self.order)} prompts in a row, as many as there are: "
                f"what is left of epoch {self.epoch} is asked without it. Hardly a prompt has signal: change the task, "
                "or raise `data.rollout.curriculum.revisit`"
            )
        self._warned = True

    def take(self, n: int) -> list[tuple[Prompt, int]]:
        """Return the next n prompts, each with its epoch.

        Raises:
            ConfigError: Where n exceeds the source, so that one step would see a prompt twice, or where one epoch
                holds two prompts of the same id, which would draw the same samples.
        """
        if n > len(self.source):
            raise ConfigError(
                f"`data.prompts_per_rollout` expected at most the {len(self.source)} prompts of the source, but got {n}"
            )
        taken = [next(self) for _ in range(n)]
        seen: set[tuple[str, int]] = set()
        for prompt, epoch in taken:
            if (prompt.id, epoch) in seen:
                raise ConfigError(
                    f"`data.train` expected prompts with ids of their own, but got {prompt.id!r} twice in epoch "
                    f"{epoch}: sampling seeds derive from the id, so both would get the same completions"
                )
            seen.add((prompt.id, epoch))
        return taken

    @cached_property
    def probe_ids(self) -> tuple[int, ...]:
        """Tokens of the source's first prompt: a fixed text to compare two models on."""
        return self.template.render(self.tokenizer, self.source[0]).token_ids[: self.max_prompt_tokens]

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands and what it runs over, in plain types."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "dropped_long": self.dropped_long,
            "dropped_in_epoch": self._dropped_in_epoch,
            "asks_all_in": self._asks_all_in,
            "seed": self.seed,
            "size": len(self.source),
            "first_id": self.source[0].id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ConfigError: Where the state is of another seed or source: its position means nothing here, and going on
                would silently ask some prompts twice and others never.
        """
        here = self.state_dict()
        for key, name in (("seed", "data.seed"), ("size", "data.train"), ("first_id", "data.train")):
            if state[key] != here[key]:
                raise ConfigError(
                    f"`{name}` expected what the checkpoint was trained with ({key} {state[key]!r}), but got {key} "
                    f"{here[key]!r}: resume with the same prompts and seed, or start a new run from exported weights"
                )
        self.epoch, self._position = state["epoch"], state["position"]
        self.dropped_long, self._dropped_in_epoch = state["dropped_long"], state["dropped_in_epoch"]
        self._asks_all_in = state.get("asks_all_in", -1)  # absent in older checkpoints
        self.order = self._permutation()

    def _end_epoch(self) -> None:
        """Report what was left out of this epoch, and begin the next."""
        size = len(self.order)
        if self._dropped_in_epoch:
            named = ", ".join(self._long.named.get(self.too_long, []))
            report = (
                f"{self._dropped_in_epoch} of the {size} prompts of epoch {self.epoch} have {self.too_long}, such as "
                f"{named or 'some before the run was resumed'}"
            )
            if self._dropped_in_epoch == size:
                raise ConfigError(f"{report}: none is left to train on, raise it")
            rank_zero_warn(f"{report}: they were left out")
        self.epoch += 1
        self._long = Tally()
        self._position = self._dropped_in_epoch = 0
        self.order = self._permutation()

    def _permutation(self) -> list[int]:
        """Return the order of this epoch: a uniform permutation, the same on every machine."""
        digest = hashlib.blake2b(f"{self.seed}\x1f{self.epoch}".encode(), digest_size=8).digest()
        order = list(range(len(self.source)))
        random.Random(int.from_bytes(digest, "big")).shuffle(order)
        return order
