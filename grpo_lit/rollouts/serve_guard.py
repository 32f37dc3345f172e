"""The lock on a server's door.

``vllm serve --api-key`` guards a few path prefixes; the routes that pause a server, replace its weights or run code in
its workers are open to anybody who reaches the port. This middleware asks for the key on every path but ``/health``.
"""

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

#: Where the server's process finds its key.
KEY_VARIABLE = "GRPO_LIT_SERVER_KEY"
#: What anybody may ask: whether the server is up, and nothing else.
OPEN_PATHS = ("/health",)
#: As one finds by guessing is no key.
MIN_KEY_LENGTH = 16

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to whoever does not show the key as a bearer token.

    Args:
        app: What is guarded.

    Raises:
        ValueError: There is no key to ask for: nothing is served then.
    """

    def __init__(self, app: _App) -> None:
        self._app, key = app, os.environ.get(KEY_VARIABLE, "")
        if len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"`{KEY_VARIABLE}` expected a key of at least {MIN_KEY_LENGTH} characters in the environment"
            )
        self._expected = _digest(b"Bearer " + key.encode())

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass on what shows the key."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._shows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _shows_key(self, scope: _Message) -> bool:
        shown = [value for name, value in scope.get("headers", []) if name == b"authorization"]
        # Digests: they are of one length, and the comparison takes as long whatever they are.
        return len(shown) == 1 and secrets.compare_digest(_digest(shown[0]), self._expected)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
