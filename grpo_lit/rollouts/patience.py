"""How long a learner waits for vLLM servers, and what it calls what went wrong with one."""

from dataclasses import dataclass

from grpo_lit.errors import ConfigError, EngineError


@dataclass(frozen=True)
class Patience:
    """How long the learner waits for servers, and how often it asks again.

    Attributes:
        start_s: Until a server answers at all [s].
        request_s: Until a completion is there, time in the server's queue included [s].
        sync_s: Until a server has taken one part of new weights, or has finished what it was sampling [s].
        health_s: Between health checks, and until one is answered [s].
        retries: How often a request is sent again to the same server, and a server looked for that does not answer.
        backoff_s: Before the first retry [s]; doubled for each further one.

    Raises:
        ConfigError: A time is not positive, or ``retries`` is negative.
    """

    start_s: float = 600.0
    request_s: float = 1800.0
    sync_s: float = 600.0
    health_s: float = 30.0
    retries: int = 3
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values that would never let a server answer."""
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("retries", "backoff_s")):
                raise ConfigError(f"`patience.{name}` expected a positive number, but got {value}")

    def pause_before(self, retry: int) -> float:
        """Return how long to wait before a retry, counted from 0 [s]."""
        return self.backoff_s * 2.0**retry


class KeyRefusedError(EngineError):
    """The key is not the server's."""


class ServerError(Exception):
    """A server did not do what it should; another one, or a later try, may.

    Args:
        message: What happened.
        is_gone: Whether there was no answer at all: nobody listens, or the connection broke.
        is_late: Whether the answer did not come in time.
    """

    def __init__(self, message: str, is_gone: bool = False, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_gone, self.is_late = is_gone, is_late
