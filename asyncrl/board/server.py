"""The board's web server: the page, the list of runs, the documents of runs, and complete samples."""

from __future__ import annotations

import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.board.cards import RunList
from asyncrl.board.guard import HOST, Guard
from asyncrl.board.samples import evaluated_group, trained_group
from asyncrl.board.watched import WatchedRun
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.page import SCRIPTS, STYLES, render_page, web_file

MAX_WATCHED = 16
"""Runs whose documents are kept: as many as are compared on two pages."""
BOARD_SCRIPTS = (*SCRIPTS, "board.js")
TOKEN_BYTES = 16
MAX_CONNECTIONS = 64
STOP_S = 2


class Board:
    """The answers to requests. Names in a request are looked up among the runs that the folder has, and
    never become paths."""

    def __init__(self, folder: Path) -> None:
        self._runs = RunList(folder)
        self._lock = threading.Lock()
        self._watched: OrderedDict[str, WatchedRun] = OrderedDict()
        self._reading = threading.Lock()

    def page(self, request: Request) -> Response:
        return Response(render_page("board.html.j2", styles=STYLES, scripts=BOARD_SCRIPTS), media_type="text/html")

    def web(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*STYLES, *BOARD_SCRIPTS):
            raise NotFoundError(f"{name}: no such file")
        return Response(web_file(name), media_type="text/css" if name.endswith(".css") else "text/javascript")

    def runs(self, request: Request) -> Response:
        return _json({"runs": self._runs.cards()})

    def run(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isdecimal() or len(since) > 15:
            raise ConfigError(f"since = {since[:30]!r}: must be a revision, as in an earlier answer")
        return _json(self._watch(request.path_params["name"]).changes(int(since)))

    def group(self, request: Request) -> Response:
        run_dir = self._path(request.path_params["name"])
        with self._reading:  # a journal is read at a time
            return _json({"samples": trained_group(run_dir, request.path_params["ticket"])})

    def evaluated(self, request: Request) -> Response:
        run_dir, values = self._path(request.path_params["name"]), request.path_params
        with self._reading:
            return _json({"samples": evaluated_group(run_dir, version=values["version"], row=values["row"])})

    def close(self) -> None:
        """Closes the connections to live runs."""
        with self._lock:
            for watched in self._watched.values():
                watched.close()
            self._watched.clear()

    def _path(self, name: str) -> Path:
        path = self._runs.paths().get(name)
        if path is None:
            raise NotFoundError(f"{name}: there is no such run any more")
        return path

    def _watch(self, name: str) -> WatchedRun:
        path = self._path(name)
        with self._lock:
            if name not in self._watched:
                self._watched[name] = WatchedRun(path)
            self._watched.move_to_end(name)
            while len(self._watched) > MAX_WATCHED:
                self._watched.popitem(last=False)[1].close()
            return self._watched[name]


class NotFoundError(ConfigError):
    """A request names what is not there."""


def board_app(board: Board) -> Starlette:
    """The web application, without its guard."""
    routes = [
        Route("/", _answered(board.page)),
        Route("/web/{name}", _answered(board.web)),
        Route("/runs", _answered(board.runs)),
        Route("/run/{name}", _answered(board.run)),
        Route("/run/{name}/group/{ticket:int}", _answered(board.group)),
        Route("/run/{name}/evaluated/{version:int}/{row:int}", _answered(board.evaluated)),
    ]
    return Starlette(routes=routes)


def _answered(handle: Callable[[Request], Response]) -> Callable[[Request], Any]:
    """The handler, in a thread; an error of asyncrl is its answer."""

    async def answer(request: Request) -> Response:
        try:
            return await run_in_threadpool(handle, request)
        except AsyncrlError as error:
            return _json({"error": str(error)}, 404 if isinstance(error, NotFoundError) else 400)

    return answer


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def listen(port: int) -> socket.socket:
    """A listening socket on the loopback interface, with port 0 at any free port. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: {error.strerror}; give another one, or leave it out for a free one"
        ) from None
    return listener


def check_folder(folder: Path) -> None:
    """Raises ConfigError if the folder is not there, or is that of one run."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: there is no such folder; give the one that has the runs (runs_dir, by default runs/), or start "
            "a run first"
        )
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: is the folder of one run; give the one above it, {folder.absolute().parent}")


class BoardServer:
    """A board on an open port, which `run` serves until `stop`, or Ctrl-C in the main thread."""

    def __init__(self, folder: Path, port: int) -> None:
        """Raises ConfigError as `check_folder` and `listen` do."""
        check_folder(folder)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._listener = listen(port)
        self.address = f"http://{HOST}:{self._listener.getsockname()[1]}/{token}/"
        self._board = Board(folder)
        self._server = uvicorn.Server(uvicorn.Config(
            Guard(board_app(self._board), token), http="h11", ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=STOP_S,
        ))  # fmt: skip

    def run(self) -> None:
        try:
            with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
                self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
            self._board.close()

    def stop(self) -> None:
        """Ends `run`, soon."""
        self._server.should_exit = True


def serve_board(folder: Path, port: int, console: Console) -> None:
    """Serves the board until Ctrl-C. Raises ConfigError as `BoardServer` does."""
    server = BoardServer(folder, port)
    console.print(f"board      {server.address}", highlight=False, soft_wrap=True)
    console.print("for this machine only; Ctrl-C ends it", highlight=False)
    server.run()
