"""Nobody without the key gets through, whatever the path. Needs no vLLM."""

import asyncio

import pytest

from grpo_lit.rollouts.serve_guard import KEY_VARIABLE, KeyGuard

KEY = "a key of twenty letters"
RIGHT = (b"authorization", f"Bearer {KEY}".encode())


async def app(scope, receive, send) -> None:
    await send({"type": "passed"})


async def receive() -> dict:
    return {}


def ask(monkeypatch, path: str, *headers: tuple[bytes, bytes], kind: str = "http", **scope: object) -> list[dict]:
    """Return what was sent back; what the guarded app sends is ``{"type": "passed"}``."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    sent = []

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(KeyGuard(app)({"type": kind, "path": path, "headers": list(headers), **scope}, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/update_weights", "/pause", "/collective_rpc", "/inference/v1/generate", "/nowhere"])
def test_the_key_opens_every_path_and_nothing_else_does(monkeypatch, path):
    assert ask(monkeypatch, path, RIGHT) == [{"type": "passed"}]
    wrong = [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", f"Bearer {KEY}x".encode())],
        [(b"authorization", "Bearer \xff".encode("latin-1"))],
        [(b"x-api-key", KEY.encode())],
        [RIGHT, (b"authorization", b"Bearer wrong")],
    ]
    for headers in wrong:
        assert ask(monkeypatch, path, *headers)[0]["status"] == 401


@pytest.mark.parametrize("path", ["/health", "/health/", "/healthy", "//health", "/v1/../health", "/HEALTH"])
def test_health_alone_is_open(monkeypatch, path):
    passed = ask(monkeypatch, path) == [{"type": "passed"}]
    assert passed == (path == "/health")


def test_no_method_and_no_protocol_leads_around_it(monkeypatch):
    assert ask(monkeypatch, "/pause", method="OPTIONS")[0]["status"] == 401
    assert ask(monkeypatch, "/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(monkeypatch, "/v1/realtime", RIGHT, kind="websocket") == [{"type": "passed"}]
    assert ask(monkeypatch, "", kind="lifespan") == [{"type": "passed"}]  # the server's own start


@pytest.mark.parametrize("key", [None, "", "short"])
def test_without_a_key_there_is_no_guard(monkeypatch, key):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ValueError, match=f"`{KEY_VARIABLE}` expected a key of at least 16 characters"):
        KeyGuard(app)
