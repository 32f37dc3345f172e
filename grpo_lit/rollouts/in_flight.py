"""New weights in the middle of a generation: what becomes of the completions in progress."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

#: What a weight update does with completions in progress: it waits for them, or they go on across it with the keys and
#: values that the old weights left (``keep``), or with all of those computed again by the new ones (``resume``).
InFlight = Literal["wait", "keep", "resume"]

#: Puts named weights of a version into an engine, which has stopped drawing for as long as that takes.
Load = Callable[[Iterable[tuple[str, Tensor]], int], None]


@dataclass(frozen=True)
class Updates(ABC):
    """Where an engine finds new weights while it draws.

    Attributes:
        recompute: Whether keys and values of completions in progress are computed again with the new weights.
    """

    recompute: bool

    @abstractmethod
    def take(self, load: Load) -> bool:
        """Load new weights if some are there, and say whether they were; cheap where there are none.

        Args:
            load: Called with them, in the calling thread.
        """
