"""Several servers as one: who is asked, who is asked again, and who is asked no more."""

import asyncio
import secrets
import warnings
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from grpo_lit.errors import EngineError
from grpo_lit.rollouts.patience import Patience, ServerError
from grpo_lit.rollouts.server import Pause, Server
from grpo_lit.rollouts.server_link import Links
from grpo_lit.rollouts.server_requests import PromptGroup, Tries, first_error, indices_by_key

#: Between two looks at a server that is starting [s].
_LOOK = 0.5


class ServerPool:
    """Routes requests to the servers that hold the current weights.

    Each request has one try at a time and one answer; a try that fails or comes too late is given up before the next.
    A server is taken out when it stays silent, fails repeatedly or holds other weights than it should, and comes back
    with the next weight update that it takes completely.

    Args:
        servers: All of them.
        patience: How long to wait, and how often to try.
    """

    def __init__(self, servers: Sequence[Server], patience: Patience) -> None:
        self.servers, self.patience = list(servers), patience
        #: How weights are sent to the servers; ``None``: they read them themselves.
        self.links: Links | None = None
        self._updating: list[Server] = []
        self._room = asyncio.Event()
        #: Part of every version: the same step of another run is another version.
        self._owner = secrets.token_hex(4)
        #: Set unless an update is under way: until it is over, nobody knows who is in.
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def members(self) -> list[Server]:
        """The servers that are in."""
        return [server for server in self.servers if server.version is not None]

    # ------------------------------------------------------------------ start and weights

    async def start(self) -> list[dict[str, Any]]:
        """Wait until the servers answer, and return the settings of those that did.

        Raises:
            EngineError: None did, or one refuses the key or was not started for this.
        """
        found = await asyncio.gather(*(self._greeted(server) for server in self.servers))
        answered = [settings for settings in found if settings is not None]
        if not answered:
            raise self._none_left("answers")
        return answered

    async def _greeted(self, server: Server) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience.start_s
        while True:
            try:
                await server.check_health()
                return await server.settings()
            except ServerError as error:
                server.last_error = str(error)
            if not server.is_alive or loop.time() > until:
                server.leave(server.last_error)
                return None
            await asyncio.sleep(_LOOK)

    async def begin_update(self, pause: Pause) -> None:
        """Stop every server, those that were out too, and prepare it for new weights.

        With ``keep`` and ``resume`` requests may be in progress; what becomes of one that fails is decided afterwards.
        """
        self._settled.clear()
        self._updating = list(self.servers)
        await self._each(lambda server: server.begin_update(pause, self.links))

    async def update(self, update_info: dict[str, Any], sent: UInt8[Tensor, "n"] | None = None) -> None:
        """Give every server one part of the weights, all at the same time; see :meth:`Server.update`."""
        await self._each(lambda server: server.update(update_info, sent))

    async def finish_update(self, version: int, pause: Pause) -> None:
        """Take in the servers that have all of the weights."""
        await self._each(lambda server: server.finish_update(f"{version}-{self._owner}", pause))
        self._settled.set()

    async def _each(self, step: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Do one step of an update on every server that is still part of it.

        Raises:
            EngineError: None has done it.
        """

        async def done(server: Server) -> Server | None:
            try:
                await step(server)
            except (ServerError, EngineError) as error:
                self._take_out(server, str(error))
                return None
            return server

        done_by = await asyncio.gather(*(done(server) for server in self._updating))
        self._updating = [server for server in done_by if server is not None]
        if not self._updating:
            raise self._none_left("took the weights")

    # ------------------------------------------------------------------ requests

    async def answers(self, bodies: Sequence[dict[str, Any]], keys: Sequence[Hashable]) -> list[dict[str, Any]]:
        """Return one answer per request, in order.

        Args:
            bodies: Of ``/inference/v1/generate``.
            keys: Requests with equal keys go to one server.

        Raises:
            EngineError: No server is left, or a request is one that they refuse.
        """
        for server in self.servers:
            server.load = 0
        await asyncio.gather(*(self._check_version(server) for server in self.members))
        found: list[dict[str, Any]] = [{}] * len(bodies)

        async def answer(index: int, group: PromptGroup) -> None:
            found[index] = await self._answer(bodies[index], group)

        try:
            async with asyncio.TaskGroup() as watching:
                watch = watching.create_task(self._watch())
                async with asyncio.TaskGroup() as asking:
                    for members in indices_by_key(keys):
                        group = PromptGroup(await self._server_with_room())
                        group.server.load += len(members)
                        for index in members:
                            asking.create_task(answer(index, group))
                watch.cancel()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        return found

    async def answer_of_next(self, body: dict[str, Any], turn: int) -> dict[str, Any]:
        """Return one answer, of another server at each turn.

        Args:
            body: Of ``/inference/v1/generate``.
            turn: Counts the calls.
        """
        members = self.members
        if not members:
            raise self._none_left("samples")
        group = PromptGroup(members[turn % len(members)])
        group.server.load += 1
        return await self._answer(body, group)

    async def _server_with_room(self) -> Server:
        while True:
            await self._settled.wait()
            server = min(self.members, key=lambda server: server.load, default=None)
            if server is None:
                raise self._none_left("samples")
            if server.load < server.capacity:
                return server
            self._room.clear()
            await self._room.wait()

    async def _answer(self, body: dict[str, Any], group: PromptGroup) -> dict[str, Any]:
        tries, server = Tries(), group.server
        try:
            while True:
                try:
                    return await self._try(body, server)
                except ServerError as error:
                    tries.count[server] += 1
                    if error.is_late:
                        tries.late.add(server)
                    await self._note_failure(server, error)
                await self._settled.wait()
                next_one = self._place(group, tries)
                server.load, next_one.load = server.load - 1, next_one.load + 1
                server = next_one
                if tries.count[server]:
                    await asyncio.sleep(self.patience.pause_before(tries.count[server] - 1))
        finally:
            server.load -= 1
            self._room.set()

    async def _try(self, body: dict[str, Any], server: Server) -> dict[str, Any]:
        await self._settled.wait()
        version = server.version
        if version is None:
            raise ServerError("it is out")
        first = len(server.history) - 1
        # What is cached of a prefix is found by requests of the same weights alone.
        answer = await server.generate(body | {"cache_salt": version})
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "abort":
            raise ServerError("it aborted a request")
        # Those it had when it was asked, and those that have come since.
        others = {span["version"] for span in choice["weight_versions"] or []} - {*server.history[first:]}
        if others:
            self._take_out(server, f"it sampled with weights of version {min(others)} instead of {version}")
            raise ServerError(server.last_error)
        server.strikes = 0
        return answer

    def _place(self, group: PromptGroup, tries: Tries) -> Server:
        """Return who is asked next: the group's server while it will do, else the one with the least to do."""
        fit = [server for server in self.members if tries.count[server] <= self.patience.retries]
        if not fit:
            raise self._none_left("answers a request")
        if group.server not in fit or group.server in tries.late:
            group.server = min(fit, key=lambda server: (server in tries.late, server.load))
        return group.server

    # ------------------------------------------------------------------ health

    async def _watch(self) -> None:
        """Look after the servers while they sample: one whose machine is gone does not close its connections."""
        while True:
            await asyncio.sleep(self.patience.health_s)
            await asyncio.gather(*(self._check_health(server) for server in self.members))

    async def _check_health(self, server: Server) -> None:
        try:
            await server.check_health()
        except ServerError as error:
            await self._note_failure(server, ServerError(str(error), is_gone=True))

    async def _check_version(self, server: Server) -> None:
        expected = server.version
        try:
            held = await server.held_version()
        except ServerError as error:
            await self._note_failure(server, ServerError(str(error), is_gone=True))
            return
        except EngineError as error:  # started anew, with another key
            held, why = None, str(error)
        else:
            why = f"it holds weights of version {held} instead of {expected}"
        if held != expected and server.version == expected:  # else an update has begun, and finds out by itself
            self._take_out(server, why)

    async def _note_failure(self, server: Server, error: ServerError) -> None:
        if server.version is None:
            return
        server.last_error = str(error)
        if error.is_gone:
            async with server.recovering:
                expected = server.version
                returned = expected is None or await self._comes_back(server, expected)
                if not returned and server.version == expected:  # else an update has begun meanwhile
                    self._take_out(server, str(error))
            return
        server.strikes += 1
        if server.strikes > self.patience.retries:
            self._take_out(server, f"{server.strikes} requests failed in a row; the last one: {error}")

    async def _comes_back(self, server: Server, expected: str) -> bool:
        """Look for a server that broke a connection, with growing pauses; its weights must still be the same."""
        for retry in range(self.patience.retries + 1):
            if not server.is_alive:
                return False
            try:
                return await server.held_version() == expected
            except ServerError:
                await asyncio.sleep(self.patience.pause_before(retry))
            except EngineError:
                return False
        return False

    def _take_out(self, server: Server, why: str) -> None:
        server.leave(why)
        self._room.set()
        warnings.warn(
            f"vLLM's server {server.url} is out, and tried again with the next weights: {server.last_error}",
            stacklevel=2,
        )

    def _none_left(self, doing: str) -> EngineError:
        errors = "".join(f"\n  {server.url}: {server.last_error}" for server in self.servers)
        return EngineError(f"none of the vLLM servers {doing}; the last error of each:{errors}")

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(server.close() for server in self.servers))
