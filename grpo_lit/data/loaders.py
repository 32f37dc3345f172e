"""What Lightning iterates over: minibatches of fresh rollouts, and answers to held-out prompts."""

from collections.abc import Callable, Iterator, Sequence

from grpo_lit.data.evaluation import EvaluationBatch
from grpo_lit.rollout import Prompt
from grpo_lit.rollouts.minibatch import Minibatch


class RolloutLoader:
    """An endless stream of minibatches with a length.

    The length matters: Lightning prefetches one batch from a loader without one, and that rollout would be drawn with
    the weights before last.

    Args:
        draw: Returns the next minibatch; called only when the one before has been trained on.
        steps_per_epoch: What Lightning shall call an epoch: optimizer steps of one pass over the prompts.
    """

    def __init__(self, draw: Callable[[], Minibatch], steps_per_epoch: int) -> None:
        self._draw, self._steps = draw, steps_per_epoch

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Minibatch]:
        while True:
            yield self._draw()

    def state_dict(self) -> dict[str, int]:
        """Return nothing: the data module's state holds the position, and Lightning asks loaders for this method."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing; see :meth:`state_dict`."""


class EvaluationLoader:
    """Held-out prompts of one data set, answered when iterated, some at a time.

    Args:
        prompts: This rank's prompts, each with its place in the set.
        answer: Returns the answers to some prompts.
        prompts_per_batch: How many to hand over at a time.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        answer: Callable[[Sequence[tuple[int, Prompt]]], EvaluationBatch],
        prompts_per_batch: int,
    ) -> None:
        self._prompts, self._answer, self._size = prompts, answer, prompts_per_batch

    def __len__(self) -> int:
        # One batch even of no prompts: every rank must come to the end of the loop, where figures are gathered.
        return max(-(-len(self._prompts) // self._size), 1)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for start in range(0, max(len(self._prompts), 1), self._size):
            yield self._answer(self._prompts[start : start + self._size])
