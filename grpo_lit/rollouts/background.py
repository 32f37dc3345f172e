"""An event loop in a thread of its own, for callers that are no coroutines."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from grpo_lit.errors import EngineError

T = TypeVar("T")
#: How long what is being cancelled may take [s].
_GRACE = 10.0
#: How often a thread that waits looks at something else [s].
_LOOK = 0.02


class BackgroundLoop:
    """Runs coroutines for threads that wait for them; ``close`` may come from another thread meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="grpo-lit-servers")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], look: Callable[[], object] | None = None) -> T:
        """Return what a coroutine returns.

        Args:
            coroutine: What is waited for.
            look: Called in this thread again and again meanwhile; it may run other coroutines, and an error of it ends
                the first one.

        Raises:
            EngineError: The loop was closed before it was done.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise EngineError("the engine was closed before it could answer") from None
        try:
            while look is not None and not concurrent.futures.wait([future], _LOOK).done:
                look()
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineError("the engine was closed before it could answer") from None
        except BaseException:  # Ctrl-C too: nothing goes on behind the caller's back
            future.cancel()
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel whatever is running, and end the thread.

        Args:
            last: Runs when everything else has ended.
        """
        try:
            asyncio.run_coroutine_threadsafe(self._end_with(last), self._loop).result(_GRACE)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GRACE)
            self._loop.close()

    async def _end_with(self, last: Coroutine[Any, Any, None]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await last
