"""Tools of MCP servers, which are started as commands or reached at a URL."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from asyncrl.config.sections import Options
from asyncrl.environments.adapters.answers import load_reward, need
from asyncrl.environments.environment import Task, Tool, ToolEnvironment, ToolError
from asyncrl.environments.table import Named, checked
from asyncrl.errors import ConfigError
from asyncrl.util.text import describe

INSTALL = "mcp==2.3.0"
START_S = 60.0
"""Deadline for a server to start and to list its tools."""
CLOSE_S = 10.0
MAX_PAGES = 100
CONNECTION_CLOSED = -32000
"""Code of the error of a call whose connection has ended."""


def load_mcp(rest: str, options: Options, python: str | None) -> Named:
    """The tools of an MCP server, as `mcp:python server.py` or `mcp:http://HOST:PORT/mcp`. Options: `reward`, a
    function `reward(task, answer)` in place of comparing the answer with the ground truth; `per_episode`, a server for
    each."""
    name = f"mcp:{rest}"
    need(name, "mcp", INSTALL)
    if not rest.strip():
        raise ConfigError(f"environment.name = {name!r}: names no server; give mcp:COMMAND or mcp:URL")
    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
        tools = thread.submit(lambda: asyncio.run(_listed(name, rest))).result()
    if not tools:
        raise ConfigError(f"environment.name = {name!r}: the server has no tools")
    kind = type(name, (McpEnvironment,), {"target": rest, "_known": tools})
    return checked(name, kind, options)


class McpEnvironment(ToolEnvironment):
    """Episodes share a server of their host, unless each has its own. An error of a tool is an answer; a server that
    has ended fails the episodes that call it, and the next one starts another."""

    returns_at_once = True
    target: ClassVar[str]

    def __init__(self, task: Task, *, reward: str | None = None, per_episode: bool = False) -> None:
        super().__init__(task)
        self._reward = load_reward(reward)
        self._own = per_episode
        self._server: McpServer | None = None

    @classmethod
    def check_setup(cls, **options: Any) -> None:
        load_reward(options.get("reward"))

    async def reset(self) -> None:
        self._server = McpServer(self.target) if self._own else shared(self.target)
        await self._server.client()

    async def reward(self) -> Any:
        return await self.in_thread(lambda: self._reward(self.task, self.answer))

    async def close(self) -> None:
        if self._own and self._server is not None:
            await self._server.close()

    async def _run_tool(self, tool: Tool, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        assert self._server is not None
        client = await self._server.client()
        try:
            result = await client.call_tool(tool.name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            self._server.lost = True
            raise RuntimeError(f"the server has ended ({error})") from error
        if result.is_error:
            raise ToolError(_text(result))
        return _text(result)


class McpServer:
    """A connection to a server, which is started for it. It has a separate task, since it must be opened and closed
    in the same one."""

    def __init__(self, target: str) -> None:
        self.lost = False
        """True if the server has ended."""
        self._target = target
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._serve())

    async def client(self) -> Any:
        """The connection. Raises RuntimeError if there is none within START_S."""
        done, _ = await asyncio.wait({self._opened, self._task}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if self._opened in done:
            return self._opened.result()
        self.lost = True
        self._task.cancel()
        raise RuntimeError(f"{self._target} has not answered within {START_S:g} s")

    async def close(self) -> None:
        """Ends the connection, and the server that was started for it."""
        self._closing.set()
        await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def _serve(self) -> None:
        try:
            async with _connection(self._target) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # of the server's start or of its end
            self.lost = True
            if not self._opened.done():
                self._opened.set_exception(RuntimeError(f"cannot connect to {self._target}: {_cause(error)}"))


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpServer]] = WeakKeyDictionary()


def shared(target: str) -> McpServer:
    """The server of this process, which is another one when it has ended."""
    servers = _shared.setdefault(asyncio.get_running_loop(), {})
    if target not in servers or servers[target].lost:
        servers[target] = McpServer(target)
    return servers[target]


def _connection(target: str) -> Any:
    from mcp import Client, StdioServerParameters

    if target.startswith(("http://", "https://")):
        return Client(target)
    command, *arguments = shlex.split(target)
    return Client(StdioServerParameters(command=command, args=arguments, env=dict(os.environ)))


async def _listed(name: str, target: str) -> dict[str, Tool]:
    """The tools of a server. Raises ConfigError."""
    tools: dict[str, Tool] = {}
    cursor = None
    try:
        async with asyncio.timeout(START_S), _connection(target) as client:
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools |= {tool.name: _tool(tool) for tool in page.tools}
                if (cursor := page.next_cursor) is None:
                    break
    except TimeoutError:
        raise ConfigError(
            f"environment.name = {name!r}: the server has not listed its tools in {START_S:g} s"
        ) from None
    except Exception as error:  # of the command, the connection or the server
        raise ConfigError(
            f"environment.name = {name!r}: cannot list the tools of the server: {_cause(error)}"
        ) from None
    return tools


def _tool(listed: Any) -> Tool:
    function = {"name": listed.name, "description": listed.description or "", "parameters": listed.input_schema}
    return Tool(listed.name, {"type": "function", "function": function}, is_async=True)


def _text(result: Any) -> str:
    """The texts of a result; of other content only its kind, and JSON of a result that has structure only."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)


def _cause(error: BaseException) -> str:
    """Type and text of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)
