"""The board's web server: the page, the list of runs, the documents of runs, and complete samples."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.launch.run_dir import is_running
from asyncrl.observe.curves import Row, decode_row, spread
from asyncrl.observe.document import RUNNING, SAMPLE_FIELDS, UNFINISHED, PageSamples, curves_of, run_document
from asyncrl.observe.page import SCRIPTS, STYLES, render_page, web_file
from asyncrl.observe.run_report import RunSummary, read_summary, trace_of
from asyncrl.observe.sample_search import RunTexts, find_group, page_samples
from asyncrl.observe.samples import FOLDER as SAMPLES
from asyncrl.observe.samples import Samples, evaluated_versions, read_evaluated
from asyncrl.observe.trackers import METRICS_FILE
from asyncrl.types import goodput_of
from asyncrl.util.text import redact

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
    """A request names an unknown thing."""


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


HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")
"""Names under which a browser may ask. Another one belongs to a site whose name leads here (DNS rebinding)."""
METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes a request on, without the token in its path, if it is one to read and has the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = TrustedHostMiddleware(self._check_token, allowed_hosts=HOSTS, www_redirect=False)
        self._inner = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, _with_headers(send))

    async def _check_token(self, scope: Scope, receive: Receive, send: Send) -> None:
        token, slash, rest = scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(errors="replace"), self._token):
            answer = JSONResponse({"error": "not found; use the address that `asyncrl board` has printed"}, 404)
        elif scope["method"] not in METHODS:
            answer = JSONResponse({"error": f"{scope['method']}: the board is read only"}, 405)
        elif not slash:
            answer = RedirectResponse(f"/{token}/")
        else:
            await self._inner({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)
            return
        await answer(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return send_with_headers


def trained_group(run_dir: Path, ticket: int) -> list[dict[str, Any]]:
    """The completions of a ticket: all if the journal has them, otherwise those that are recorded. Raises ConfigError
    if there are none, JournalError or DataError for a damaged file."""
    return _rows(find_group(run_dir, ticket, with_raw=True))


def evaluated_group(run_dir: Path, *, version: int, row: int) -> list[dict[str, Any]]:
    """The completions of a row of the evaluation data by a version. Raises ConfigError if there are none, DataError for
    a damaged file."""
    if version not in evaluated_versions(run_dir):
        raise ConfigError(f"version {version}: its evaluation is not stored")
    samples = read_evaluated(run_dir, version, rows=[row])
    if not len(samples):
        raise ConfigError(f"version {version}: row {row} was not evaluated")
    samples = samples.with_column("step", [version] * len(samples))
    return _rows(RunTexts(run_dir).add_to(samples, "eval", with_raw=True))


def _rows(samples: Samples) -> list[dict[str, Any]]:
    names = [name for name in (*SAMPLE_FIELDS, "raw") if name in samples.columns]
    rows = samples.table.select(names).to_pylist(maps_as_pydicts="strict")
    return [row | {"versions": versions} for row, versions in zip(rows, _versions(samples), strict=True)]


def _versions(samples: Samples) -> list[list[tuple[int, int]]]:
    """By completion the versions that sampled its action tokens, in their order, with the number of tokens of each;
    empty where the versions of tokens are not stored."""
    if not {"versions", "action_mask"} <= set(samples.columns):
        return [[] for _ in range(len(samples))]
    found: list[list[tuple[int, int]]] = []
    for versions, mask in zip(samples["versions"], samples["action_mask"], strict=True):
        sampled = versions[mask] if len(mask) else versions
        numbers, counts = np.unique(sampled, return_counts=True)
        found.append(list(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return found


READ_BUDGET_S = 1.0
"""Time for reading metrics before a request is answered with the rows read so far."""
LOOK_EVERY_S = 0.5
"""Least time between two looks at the files, however many pages are open."""
LEAST_PAUSE_S = 2.0
PAUSE_FACTOR = 10.0
"""Trace and samples are read again after this many times the time that it took to read them."""

_revisions = count(1)
"""Shared by all runs, so that a run that was forgotten and is read again has higher ones than before."""


class WatchedRun:
    """The document of a run. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._summary = RunSummary(run_dir)
        self._curves = curves_of(run_dir)
        self._trace: pa.Table | None = None
        self._samples: PageSamples | None = None
        self._stamps: list[Stamp] = []
        """Stamps of the files with trace and samples when they were read."""
        self._next_s = 0.0
        """Earliest time to read them again."""
        self._shown_summary: dict[str, Any] | None = None
        self._sections: dict[str, tuple[int, Any]] = {}
        """Parts of the document, with the revision in which each changed last."""
        self._revision = 0
        self._is_complete = False

    def changes(self, since: int) -> dict[str, Any]:
        """The parts of the document that have changed after this revision, and the present revision. The first answers
        have what can be read soon: as long as "is_complete" is false, there is more."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S or not self._is_complete:
                self._look()
                self._looked_s = time.monotonic()
            sections = {name: value for name, (revision, value) in self._sections.items() if revision > since}
            return {
                "revision": self._revision,
                "fraction_read": self._curves.fraction_read,
                "is_complete": self._is_complete,
                "sections": sections,
            }

    def close(self) -> None:
        """Closes the connection to the run, if there is one."""
        with self._lock:
            self._summary.close()

    def _look(self) -> None:
        summary = self._summary.read()
        changed = self._curves.read(READ_BUDGET_S)
        self._is_complete = bool(self._revision) and self._curves.fraction_read == 1.0
        if self._is_complete:
            changed |= self._read_trace_and_samples()
        if not changed and summary == self._shown_summary:
            return
        self._shown_summary = summary
        document = run_document(self._run_dir, summary, self._trace, self._samples, curves=self._curves)
        is_moving = summary["status"] == RUNNING and self._curves.num_steps
        document["progress"] = f"step {self._curves.last_step:,}" if is_moving else ""
        revision = next(_revisions)
        for name, value in document.items():
            if name not in self._sections or self._sections[name][1] != value:
                self._sections[name] = revision, value
                self._revision = revision

    def _read_trace_and_samples(self) -> bool:
        traces = sorted(self._run_dir.glob("trace.*"))
        stamps, begun_s = stamps_of([*traces, *sorted((self._run_dir / SAMPLES).glob("*"))]), time.monotonic()
        if stamps == self._stamps or begun_s < self._next_s:
            return False
        self._stamps = stamps
        self._trace = trace_of(self._run_dir) if traces else None
        self._samples = page_samples(self._run_dir) if len(stamps) > len(traces) else None
        ended_s = time.monotonic()
        self._next_s = ended_s + LEAST_PAUSE_S + PAUSE_FACTOR * (ended_s - begun_s)
        return True


Stamp = tuple[str, int, int]
"""Name, size and time of a file."""


def stamps_of(files: list[Path]) -> list[Stamp]:
    """The stamps of those files that exist."""
    stamps: list[Stamp] = []
    for file in files:
        with suppress(FileNotFoundError):
            status = file.stat()
            stamps.append((file.name, status.st_size, status.st_mtime_ns))
    return stamps


CARD_POINTS = 60
BLOCK_BYTES = 16 << 10
"""Bytes of metrics.jsonl that are read for a point of a card's curve."""
MAX_VERDICT_CHARACTERS = 300
REWARD = "reward/mean"
_STEPS = re.compile(r"^steps: (\d+)$", re.MULTILINE)
"""The number of steps in a resolved config: to parse the YAML of a hundred runs takes seconds."""


class Point(msgspec.Struct):
    """The fields of a row that the curve of a card is made of; others are not decoded."""

    step: int
    reward: float | None = msgspec.field(name=REWARD, default=None)


def point_of(line: bytes) -> Point:
    """The point of a row. Raises ValueError."""
    try:
        return msgspec.json.decode(line, type=Point)
    except msgspec.DecodeError:
        row = decode_row(line)  # it may have NaN, which msgspec refuses
        return Point(int(row["step"]), row.get(REWARD))


def card_of(run_dir: Path, *, running: bool) -> dict[str, Any]:
    """A run in the list: its state, its last step and its rewards. The time that it takes does not depend on the run's
    length."""
    metrics, config = run_dir / METRICS_FILE, run_dir / "config.yaml"
    summary = read_summary(run_dir) or {"status": RUNNING if running else UNFINISHED}
    rewards, last = list[float](), dict[str, float]()
    try:
        rewards, last = sampled_rewards(metrics)
    except ValueError as error:
        summary.setdefault("error", f"{metrics}: a line is not JSON: {error}")
    tenth = max(1, len(rewards) // 10)
    first_reward, last_reward = summary.get("reward_first"), summary.get("reward_last")
    if rewards and (first_reward is None or last_reward is None):
        first_reward, last_reward = fmean(rewards[:tenth]), fmean(rewards[-tenth:])
    steps = _STEPS.search(config.read_text(encoding="utf-8", errors="replace"))
    verdict = summary.get("error") or summary.get("bottleneck") or ""
    return {
        "name": run_dir.name,
        "status": summary.get("status", UNFINISHED),
        "verdict": redact(verdict)[:MAX_VERDICT_CHARACTERS],
        "step": summary.get("steps", int(last["step"]) if last else None),
        "steps": int(steps[1]) if steps else None,
        "reward": None if first_reward is None else (first_reward, last_reward),
        "tokens_per_s": summary.get("tokens_per_s", last.get("throughput/trained_tokens_per_s")),
        "goodput": summary.get("goodput", goodput_of(last)).get("total"),
        "alarms": int(last.get("collapse/alarms", 0)),
        "updated_s": max(time_ns for _, _, time_ns in stamps_of([metrics, config])) / 1e9,
        "curve": rewards,
    }


def sampled_rewards(file: Path) -> tuple[list[float], Row]:
    """At most CARD_POINTS rewards from blocks that are evenly spread over the file, and the last row with one. Raises
    ValueError if a line is not JSON."""
    rewards, last_line = dict[int, float](), b""
    if file.is_file():
        with file.open("rb") as content:
            span = os.fstat(content.fileno()).st_size - BLOCK_BYTES
            for number in range(CARD_POINTS if span > 0 else 1):
                content.seek(begin := number * max(span, 0) // (CARD_POINTS - 1))
                for line in content.read(BLOCK_BYTES).splitlines(keepends=True)[1 if begin else 0 :]:
                    if line.endswith(b"\n") and (point := point_of(line)).reward is not None:
                        rewards[point.step], last_line = point.reward, line
    ordered = [rewards[step] for step in sorted(rewards)]
    return spread(ordered, CARD_POINTS), decode_row(last_line) if last_line else {}


class RunList:
    """The runs in a folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Any, dict[str, Any]]] = {}
        """Stamps of the files, and the card made of them, by name."""

    def paths(self) -> dict[str, Path]:
        """The folders of runs by name. Raises ConfigError if the folder cannot be read."""
        try:
            with os.scandir(self._folder) as entries:
                paths = {entry.name: Path(entry.path) for entry in entries if entry.is_dir()}
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot be read: {error.strerror}") from None
        return {name: path for name, path in sorted(paths.items()) if (path / "config.yaml").is_file()}

    def cards(self) -> list[dict[str, Any]]:
        """The cards of all runs, by name."""
        with self._lock:
            paths = self.paths()
            self._known = {name: self._card(name, path) for name, path in paths.items()}
            return [card for _, card in self._known.values()]

    def _card(self, name: str, path: Path) -> tuple[Any, dict[str, Any]]:
        running = is_running(path)
        state = running, stamps_of([path / file for file in ("config.yaml", "summary.json", METRICS_FILE)])
        known = self._known.get(name)
        return known if known is not None and known[0] == state else (state, card_of(path, running=running))
