"""A server that speaks vLLM's RL interfaces without vLLM, and fails as it is told."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_lit.rollouts.links import LINK_PREFIX, Link, Meeting, read_link
from grpo_lit.rollouts.staging import Chunk, read_stage

KEY = "a key of twenty letters"
VOCABULARY = 260
#: What a request may do to the server instead of being answered; numbers are HTTP statuses.
Deed = str | int | None


def tokens_of(prompt: list[int], seed: int, count: int) -> list[int]:
    """What the fake model samples: decided by prompt and seed alone."""
    return [(sum(prompt) + 7 * seed + i) % VOCABULARY for i in range(count)]


class FakeVLLM:
    """One server on a port of this machine.

    Args:
        deed: Told the body of each generation and how many came before; returns what happens instead of an answer:
            ``die``, ``drop`` (the connection), ``freeze`` (every route), ``hang``, ``slow``, ``abort``, ``stale``,
            ``across`` (half of the tokens when the next weights are there), an HTTP status, or ``None``.
        fails_at: Routes that answer with status 500.
        port: To listen at; 0: any.
    """

    def __init__(
        self,
        deed: Callable[[dict[str, Any], int], Deed] = lambda body, count: None,
        fails_at: tuple = (),
        port: int = 0,
    ) -> None:
        self.deed, self.fails_at = deed, set(fails_at)
        self.settings = {"device": "cpu", "dtype": "float32", "logprobs_mode": "processed_logprobs", "max_length": 64}
        self.settings["vocabulary"] = VOCABULARY
        self.version, self.is_updating, self.is_paused, self.key = "default", False, False, KEY
        self.link: Link | None = None
        self.calls: list[str] = []
        self.queries: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.answered: list[dict[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.most_at_once = self._at_once = 0
        self._lock, self.released = threading.Lock(), threading.Event()
        self.crossing = threading.Event()
        self.is_frozen = False
        self._connections: set[Any] = set()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                fake._connections.add(self.connection)

            def do_GET(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                path, fake.queries = urlsplit(self.path).path, [*fake.queries, self.path]
                if path != "/health" and self.headers.get("authorization") != f"Bearer {fake.key}":
                    status, answer = 401, {"error": "Unauthorized"}
                else:
                    try:
                        status, answer = fake.answer(path, body)
                    except ConnectionAbortedError:
                        self.connection.shutdown(socket.SHUT_RDWR)
                        self.close_connection = True
                        return
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(OSError):  # whoever asked has given up
                    self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = path.strip("/")
        if self.is_frozen:
            self.released.wait(30)
        if name not in ("health", "weight_info"):
            self.calls.append(name)
        if name in self.fails_at:
            return 500, {"error": f"{name} is told to fail"}
        if name == "inference/v1/generate":
            return self._generate(body)
        return self._control(name, body)

    def _control(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        if name == "weight_info":
            return 200, {"weight_version": self.version}
        if name == "collective_rpc":
            return 200, {"results": [self.settings]}
        if name == "get_world_size":
            return 200, {"world_size": 1}
        if name == "init_weight_transfer_engine":
            self.link = Link(Meeting(**body["init_info"]), 1, torch.device("cpu"))
        if name == "update_weight_version":
            self.version = body["new_version"]
        if name == "start_weight_update":
            if self.is_updating:
                return 500, {"error": "already active"}
            self.is_updating, self.weights = True, {}
        if name == "update_weights":
            if not self.is_updating or not body["update_info"]["tensors"]:
                self.is_updating = False
                return 500, {"error": "no update, or given up"}
            chunk = Chunk.from_dict(**body["update_info"])
            by_link = chunk.address.startswith(LINK_PREFIX)
            read = read_link(chunk, self.link) if by_link else read_stage(chunk, torch.device("cpu"))
            self.weights |= {name: tensor.clone() for name, tensor in read}
        if name == "finish_weight_update":
            self.version, self.is_updating = body["weight_version"], False
        if name in ("pause", "resume"):
            self.is_paused = name == "pause"
        return 200, {"success": True}

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            deed = self.deed(body, len(self.asked))
            self.asked.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if deed == "die":
                self.die()
            if deed == "drop":
                raise ConnectionAbortedError
            self.is_frozen |= deed == "freeze"
            if deed in ("hang", "freeze"):
                self.released.wait(30)
            if deed == "slow":
                time.sleep(0.05)
            spans = [(self.version, 0)]
            if deed == "across":
                self.crossing.set()
                while (self.version in (spans[0][0], "incomplete") or self.is_paused) and not self.released.is_set():
                    time.sleep(0.002)
                spans.append((self.version, body["sampling_params"]["max_tokens"] // 2))
            if isinstance(deed, int):
                return deed, {"error": f"status {deed} as told"}
            return 200, self._sampled(body, deed, spans)
        finally:
            self._at_once -= 1

    def _sampled(self, body: dict[str, Any], deed: Deed, spans: list[tuple[str, int]]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        tokens = tokens_of(body["token_ids"], sampling.get("seed", 0), sampling["max_tokens"])
        spans = [("stale", 0)] if deed == "stale" else spans
        ends = [start for _, start in spans[1:]] + [len(tokens)]
        if deed != "hang":
            self.answered.append(body)
        choice = {
            "token_ids": tokens,
            "finish_reason": "abort" if deed == "abort" else "length",
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(spans, ends, strict=True)
            ],
            "logprobs": {"content": [{"token_id": t, "logprob": -t / 100, "top_logprobs": []} for t in tokens]},
        }
        prompt_logprobs = [None] + [{str(t): {"logprob": -t / 100}} for t in body["token_ids"][1:]]
        return {"choices": [choice], "prompt_logprobs": prompt_logprobs}

    def die(self) -> None:
        """Close the port and every connection, as a killed process does."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.released.set()

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
