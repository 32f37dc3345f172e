"""The training prompts on their way into a rollout: none that is held out, none that no reward could judge."""

import time
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.data.heldout import HeldOut
from grpo_lit.data.stream import PromptStream
from grpo_lit.data.tally import Tally, described
from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rewards.combination import RewardCombination
from grpo_lit.rollout import Prompt

#: Time for the look at the prompts before the run [s]; the prompts beyond it are looked at when they are drawn.
SECONDS = 10.0
#: Prompts between two looks at the clock.
CHUNK = 100
#: Most domains whose solve rates are logged apart.
MOST_DOMAINS = 64


class Screen:
    """Takes prompts from the stream, and leaves out those that nothing can be learnt from.

    Args:
        stream: The prompts.
        held_out: What must not be trained on.
        rewards: Who has to judge.

    Attributes:
        domains: Names of the prompts' domains, as far as the source tells or :meth:`inspect` has seen them.
        unreadable: Prompts left out so far since no reward could judge them.
    """

    def __init__(self, stream: PromptStream, held_out: HeldOut, rewards: RewardCombination) -> None:
        self.stream, self.held_out, self.rewards = stream, held_out, rewards
        self.domains = tuple(sorted(stream.source.domains or ()))
        self.unreadable = 0

    def inspect(self, ranks: Ranks, wanted: int = 1) -> None:
        """Look at the prompts in the order they will be asked in, for a while, and report what will be left out.

        Args:
            ranks: All processes, each of which must call: they look at the same prompts.
            wanted: Prompts of a rollout.

        Raises:
            ConfigError: A question is held out too, or fewer prompts than a rollout wants are left.
        """
        order, source = self.stream.order, self.stream.source
        started, looked_at, seen = time.monotonic(), 0, set[str]()
        unreadable, long = Tally(), Tally()
        for start in range(0, len(order), CHUNK):
            prompts = [source[i] for i in order[start : start + CHUNK]]
            self.held_out.refuse(prompts)
            for prompt in prompts:
                if reason := self.rewards.problem(prompt):
                    unreadable.add(reason, described(prompt))
                elif (tokens := len(self.stream.rendered(prompt).token_ids)) > self.stream.max_prompt_tokens:
                    long.add(self.stream.too_long, f"{prompt.id}: {tokens}")
            seen |= {prompt.domain for prompt in prompts}
            looked_at += len(prompts)
            if float(ranks.max(torch.tensor(time.monotonic() - started))) > SECONDS:
                break
        if source.domains is None:
            self.domains = tuple(sorted(seen))
        self._report(unreadable, long, looked_at, len(order))
        bad = float(unreadable.total + long.total)
        left = len(order) - int(ranks.max(torch.tensor(bad)))  # the same on every rank: all end, or none
        if left < wanted:
            raise ConfigError(
                f"`data.prompts_per_rollout` expected at most the {left} prompts of `data.train` that can be asked, "
                f"but got {wanted}: mend the ones that the warnings name, or lower it"
            )

    def _report(self, unreadable: Tally, long: Tally, looked_at: int, size: int) -> None:
        if unreadable.total == looked_at:
            raise ConfigError(
                f"`data.rewards.correct` expected a reward that can judge prompts of `data.train`, but got "
                f"{self.rewards.correct!r}, which can judge none of {looked_at}: {unreadable}"
            )
        rest = f". Of {size} prompts, {looked_at} were looked at; the others are when they are drawn"
        for tally, what in (
            (unreadable, f"cannot be judged by the reward {self.rewards.correct!r}"),
            (long, "are too long"),
        ):
            if tally.total:
                rank_zero_warn(
                    f"data.train: {tally.total} of {looked_at} prompts ({tally.total / looked_at:.1%}) {what} and are "
                    f"never asked: {tally}{rest if looked_at < size else ''}"
                )

    def take(self, count: int, ranks: Ranks) -> list[tuple[Prompt, int]]:
        """Return new prompts with their epochs, at most one pass over the source; all ranks must call.

        Args:
            count: How many.
            ranks: All processes: what one of them cannot judge, none asks.

        Raises:
            ConfigError: A question is held out too, or a whole pass holds no prompt that can be judged.
        """
        size = len(self.stream.source)
        taken: list[tuple[Prompt, int]] = []
        tried, wanted = 0, min(count, size)
        while len(taken) < wanted and tried < size:
            prompts = self.stream.take(min(wanted - len(taken), size - tried))
            tried += len(prompts)
            self.held_out.refuse(prompt for prompt, _ in prompts)
            bad = ranks.max(torch.tensor([float(self.rewards.problem(prompt) is not None) for prompt, _ in prompts]))
            taken += [pair for pair, is_bad in zip(prompts, bad.tolist(), strict=True) if not is_bad]
        self.unreadable += tried - len(taken)
        if not taken:
            raise ConfigError(
                f"`data.rewards.correct` expected a reward that can judge prompts of `data.train`, but got "
                f"{self.rewards.correct!r}, which can judge none of {tried} that were drawn in a row"
            )
        return taken


def logged_apart(name: str, domains: Sequence[str]) -> Sequence[str]:
    """Return the domains whose solve rates say more than that of all prompts: none where there is one, or too many.

    Args:
        name: Of the prompts, for a warning.
        domains: Theirs.
    """
    if len(domains) > MOST_DOMAINS:
        rank_zero_warn(
            f"{name} has {len(domains)} domains, more than {MOST_DOMAINS}: no solve rate is logged for each. Is "
            "`fields.domain` the right column?"
        )
    return domains if 1 < len(domains) <= MOST_DOMAINS else ()
