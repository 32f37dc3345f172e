"""One vLLM server as the learner sees it: its address, the weights it holds, and what went wrong with it."""

import asyncio
import logging
import ssl
from functools import cache
from typing import Any, Literal

import httpx
from jaxtyping import UInt8
from torch import Tensor

from grpo_lit.errors import EngineError
from grpo_lit.rollouts.patience import KeyRefusedError, Patience, ServerError
from grpo_lit.rollouts.server_link import Links, ServerLink, together
from grpo_lit.rollouts.server_process import ServerProcess

# One line for each request otherwise.
logging.getLogger("httpx").setLevel(logging.WARNING)
_GENERATE = "/inference/v1/generate"
#: Idle connections are kept for less long than the server keeps them, 5 s: it would close one just as it is used [s].
_KEEP_ALIVE = 2.0
#: How long a server that is out may take to say that it is back: every weight update waits for it [s].
_BACK = 10.0
#: What a weight update does with completions in progress: it waits for them; it aborts them, and they are drawn anew;
#: they go on behind the keys and values they have; or these are computed again with the new weights.
Pause = Literal["wait", "abort", "keep", "resume"]
#: What a version is called while some weights are new and some are not.
INCOMPLETE = "incomplete"


@cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates that this machine trusts; reading them takes a while."""
    return ssl.create_default_context()


class Server:
    """Speaks vLLM's RL interfaces to one server. Everything but the constructor runs in one event loop.

    Args:
        url: Its address.
        key: Shown with every request.
        patience: How long to wait for it.
        capacity: Most completions it is asked for at a time.
        process: Its process, where the learner has started it.
    """

    def __init__(
        self,
        url: str,
        key: str,
        patience: Patience,
        capacity: int,
        process: ServerProcess | None = None,
    ) -> None:
        self.url, self.patience, self.capacity = url.rstrip("/"), patience, capacity
        #: Version of the weights it has completely; ``None``: it is out, and asked for nothing.
        self.version: str | None = None
        #: All versions that it has sampled with.
        self.history: list[str] = []
        #: Completions that wait for it.
        self.load = 0
        #: Requests that failed since one succeeded.
        self.strikes = 0
        self.last_error = "it was not asked yet"
        self.recovering = asyncio.Lock()
        self._process = process
        self._link: ServerLink | None = None
        self._slots = asyncio.Semaphore(capacity)
        self._out = asyncio.Event()
        # All but completions go over connections of their own: an update is not to fail because an idle one was closed.
        self._client, self._sampling_client = (
            httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"},
                limits=httpx.Limits(max_keepalive_connections=idle, keepalive_expiry=_KEEP_ALIVE),
                trust_env=False,  # a proxy would see the key
                verify=_certificates(),
            )
            for idle in (0, capacity)
        )

    def join(self, version: str) -> None:
        """Take it in: it has these weights."""
        self.version, self.strikes = version, 0
        self._out.clear()

    @property
    def is_alive(self) -> bool:
        """Whether its process runs, as far as anybody here can know."""
        return self._process is None or self._process.is_alive()

    def leave(self, why: str) -> None:
        """Take it out, and give up what it was asked for."""
        if self._process is not None and not self._process.is_alive():
            why = f"{why}; its process has ended, and said last:\n{self._process.last_words()}"
        self.version, self.last_error = None, why
        self._out.set()
        self._unlink()

    async def call(self, method: str, path: str, timeout: float, **content: Any) -> Any:
        """Ask for anything, and return the answer read from JSON; ``None`` where it is empty.

        Args:
            method: ``GET`` or ``POST``.
            path: Route, query included.
            timeout: Until the answer is there [s].
            **content: ``json`` or ``params``.

        Raises:
            ServerError: No answer, or one that says that the server is in trouble.
            EngineError: The server understood and refuses; asking again would not help.
        """
        client = self._sampling_client if path == _GENERATE else self._client
        try:
            response = await asyncio.wait_for(client.request(method, path, timeout=None, **content), timeout)
        except TimeoutError:
            raise ServerError(f"no answer to {path} within {timeout:g} s", is_late=True) from None
        except httpx.HTTPError as error:
            raise ServerError(f"{path}: {type(error).__name__}: {error}", is_gone=True) from error
        status, text = response.status_code, response.text
        if status == 401:
            raise KeyRefusedError(
                f"`api_key_variable` expected the variable to hold the key that {self.url} was started with, but it "
                "refused the key (401): start server and learner with the same one"
            )
        if status >= 500 or status in (408, 429):
            raise ServerError(f"{path}: status {status}: {text[:500]}")
        if status >= 400:
            raise EngineError(f"vLLM's server {self.url} refused {path} with status {status}: {text[:500]}")
        try:
            return response.json() if text else None
        except ValueError:
            raise ServerError(f"{path}: an answer that is no JSON: {text[:100]!r}") from None

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for a completion, with at most ``capacity`` at a time, until the server is taken out.

        Raises:
            ServerError: No sound answer, or the server was taken out meanwhile.
        """
        answer = asyncio.ensure_future(self._generate(body))
        out = asyncio.ensure_future(self._out.wait())
        try:
            await asyncio.wait({answer, out}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ServerError(f"it was taken out: {self.last_error}")
        finally:
            answer.cancel()  # closes the connection, upon which vLLM aborts the request
            out.cancel()

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._slots:
            return await self.call("POST", _GENERATE, self.patience.request_s, json=body)

    async def held_version(self) -> str:
        """Return the version of its weights, as it says itself."""
        return (await self.call("GET", "/weight_info", self.patience.health_s))["weight_version"]

    async def check_health(self) -> None:
        """Raise an error unless its engine lives."""
        health_s = self.patience.health_s
        await self.call("GET", "/health", health_s if self.version is not None else min(health_s, _BACK))

    async def settings(self) -> dict[str, Any]:
        """Return what ``WorkerExtension.grpo_lit_settings`` says of its workers.

        Raises:
            EngineError: It was not started with ``scripts/serve``, or with another key.
            ServerError: It does not answer yet.
        """
        try:
            answer = await self.call(
                "POST", "/collective_rpc", self.patience.health_s, json={"method": "grpo_lit_settings"}
            )
        except KeyRefusedError:
            raise
        except (ServerError, EngineError) as error:
            if isinstance(error, ServerError) and (error.is_gone or error.is_late):
                raise
            raise EngineError(
                f"`urls` expected servers that `scripts/serve` has started, but {self.url} does not know "
                f"grpo_lit's worker: {error}"
            ) from error
        return answer["results"][0]

    async def begin_update(self, pause: Pause, links: Links | None = None) -> None:
        """Stop sampling and prepare for new weights; from here on the server calls its weights incomplete.

        Args:
            pause: What becomes of completions in progress.
            links: How weights are sent to it; ``None``: it reads them itself.
        """
        sync_s = self.patience.sync_s
        await self.check_health()
        if self._link is not None and (self.version is None or await self.held_version() != self.version):
            self._unlink()  # it was started anew, or has another learner
        self.version = None
        keeps = pause in ("keep", "resume")  # `resume` needs the requests until `finish_update` puts them back
        mode = {"mode": "keep", "clear_cache": False} if keeps else {"mode": pause}
        await self.call("POST", "/pause", sync_s, params=mode)
        await self.call("POST", "/update_weight_version", sync_s, json={"new_version": INCOMPLETE})
        try:
            await self.call("POST", "/start_weight_update", sync_s)
        except ServerError:
            await self.abandon_update()  # of a learner that ended in the middle of it
            await self.call("POST", "/start_weight_update", sync_s)
        if links is not None and self._link is None:
            await self._link_up(links)

    async def _link_up(self, links: Links) -> None:
        """Make a process group with its workers."""
        sync_s = self.patience.sync_s
        workers = (await self.call("GET", "/get_world_size", sync_s))["world_size"]
        self._link = link = links.open(self.url, workers)
        content = {"init_info": link.init_info()}
        await together(self.call("POST", "/init_weight_transfer_engine", sync_s, json=content), link.connect())

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def update(self, update_info: dict[str, Any], sent: UInt8[Tensor, "n"] | None = None) -> None:
        """Take one part of the weights.

        Args:
            update_info: A chunk as plain types.
            sent: Its bytes, where they are sent.
        """
        link, sync_s = self._link, self.patience.sync_s
        if sent is None or link is None:
            await self.call("POST", "/update_weights", sync_s, json={"update_info": update_info})
            return
        content = {"update_info": update_info | {"address": link.address}}
        await together(self.call("POST", "/update_weights", sync_s, json=content), link.send(sent))

    async def abandon_update(self) -> None:
        """Let go of an unfinished update: vLLM does so when a part of it fails."""
        try:
            await self.update({"address": "", "size": 0, "tensors": []})
        except ServerError as error:
            if error.is_gone or error.is_late:
                raise

    async def finish_update(self, version: str, pause: Pause) -> None:
        """Take the version, forget cached prefixes, and sample again.

        Args:
            version: Of the weights.
            pause: As in :meth:`begin_update`. With ``keep``, prefixes stay cached: those in use cannot be forgotten
                without the others, and requests of other weights do not find them (see :meth:`generate`).

        Raises:
            ServerError: Weights are missing, prefixes could not be forgotten, or it says another version.
        """
        sync_s = self.patience.sync_s
        await self.call("POST", "/finish_weight_update", sync_s, json={"weight_version": version})
        running = {"reset_running_requests": pause == "resume"}
        emptied = pause == "keep" or (await self.call("POST", "/reset_prefix_cache", sync_s, params=running))["success"]
        if not emptied:
            raise ServerError("it kept prefixes of the old weights in its cache: requests were still running")
        self.history.append(version)  # completions that go on may be there before the answer to this
        await self.call("POST", "/resume", sync_s)
        held = await self.held_version()
        if held != version:
            raise ServerError(f"it holds weights of version {held} after an update to {version}")
        self.join(version)

    async def close(self) -> None:
        """Close its connections."""
        if (link := self._link) is not None:
            self._link = None
            # Python's end would find its thread in C++, and abort the process.
            await asyncio.wait([asyncio.wrap_future(link.close())], timeout=_BACK / 2)
        await self._client.aclose()
        await self._sampling_client.aclose()
