"""The board's web server: the page, the list of runs, the documents of runs, and complete samples."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict
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
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.launch.run_dir import is_running
from asyncrl.observe.curves import Row, decode_row, spread
from asyncrl.observe.document import REWARD, RUNNING, UNFINISHED, PageSamples, curves_of, run_document, sample_rows
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
STOP_S = 2


class Board:
    """The answers to requests. Names in a request are looked up among the runs that the folder has, and
    never become paths."""

    def __init__(self, folder: Path) -> None:
        self._runs = RunList(folder)
        self._lock = threading.Lock()
        self._watched: OrderedDict[str, WatchedRun] = OrderedDict()
        self._reading = threading.Lock()

    def app(self, token: str) -> Starlette:
        """The web application, whose addresses begin with the token."""
        routes = [
            Route("/", self.page),
            Route("/web/{name}", self.web),
            Route("/runs", self.runs),
            Route("/run/{name}/since/{revision:int}", self.run),
            Route("/run/{name}/group/{ticket:int}", self.group),
            Route("/run/{name}/evaluated/{version:int}/{row:int}", self.evaluated),
        ]
        return Starlette(
            routes=[Mount(f"/{token}", routes=routes)],
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
                Middleware(GZipMiddleware, compresslevel=1),
            ],
            exception_handlers={404: _not_found, NotFoundError: _not_found, AsyncrlError: _refused},
        )

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
        return _json(self._watch(request.path_params["name"]).since(request.path_params["revision"]))

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


def _not_found(request: Request, error: Exception) -> Response:
    known = isinstance(error, NotFoundError)
    return _json({"error": str(error) if known else "not found; use the address that `asyncrl board` has printed"}, 404)


def _refused(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 400)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


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
    """A board on an open port of the loopback interface, which `run` serves until `stop`, or Ctrl-C in the main
    thread."""

    def __init__(self, folder: Path, port: int) -> None:
        """With port 0 at any free port. Raises ConfigError as `check_folder` does, and for a port that is taken."""
        check_folder(folder)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        try:
            self._listener = socket.create_server((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror}; give another one, or leave it out for a free one"
            ) from None
        self.address = f"http://{HOST}:{self._listener.getsockname()[1]}/{token}/"
        self._board = Board(folder)
        self._server = uvicorn.Server(uvicorn.Config(
            self._board.app(token), http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, headers=HEADERS, timeout_graceful_shutdown=STOP_S,
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
HEADERS = [
    ("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
     "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),  # the address has the token
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
]  # fmt: skip


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
    rows = sample_rows(samples)
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


LOOK_EVERY_S = 0.5
"""Least time between two looks at the files, however many pages are open."""
LEAST_PAUSE_S = 2.0
PAUSE_FACTOR = 10.0
"""Trace and samples are read again after this many times the time that it took to read them."""

_revisions = count(1)
"""Shared by all runs, so that a run that was forgotten and is read again has other ones than before."""


class WatchedRun:
    """The document of a run. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._looked_s = -math.inf
        self._summary = RunSummary(run_dir)
        self._curves = curves_of(run_dir)
        self._trace: pa.Table | None = None
        self._samples: PageSamples | None = None
        self._stamps: list[Stamp] = []
        """Stamps of the files with trace and samples when they were read."""
        self._next_s = 0.0
        """Earliest time to read them again."""
        self._shown_summary: dict[str, Any] | None = None
        self._document: dict[str, Any] = {}
        self._revision = 0

    def since(self, revision: int) -> dict[str, Any]:
        """The present revision, and the document unless it is the one of the given revision."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                self._look()
                self._looked_s = time.monotonic()
            document = None if revision == self._revision else self._document
            return {"revision": self._revision, "document": document}

    def close(self) -> None:
        """Closes the connection to the run, if there is one."""
        with self._lock:
            self._summary.close()

    def _look(self) -> None:
        summary = self._summary.read()
        changed = self._curves.read()
        changed |= self._read_trace_and_samples()
        if changed or summary != self._shown_summary:
            self._shown_summary, self._revision = summary, next(_revisions)
            self._document = run_document(self._run_dir, summary, self._trace, self._samples, curves=self._curves)

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
_STEPS = re.compile(r"^steps: (\d+)$", re.MULTILINE)
"""The number of steps in a resolved config: to parse the YAML of a hundred runs takes seconds."""


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
    rewards, last = dict[float, float](), Row()
    if file.is_file():
        with file.open("rb") as content:
            span = os.fstat(content.fileno()).st_size - BLOCK_BYTES
            for number in range(CARD_POINTS if span > 0 else 1):
                content.seek(begin := number * max(span, 0) // (CARD_POINTS - 1))
                for line in content.read(BLOCK_BYTES).splitlines(keepends=True)[1 if begin else 0 :]:
                    if line.endswith(b"\n") and REWARD in (row := decode_row(line)):
                        rewards[row["step"]], last = row[REWARD], row
    ordered = [rewards[step] for step in sorted(rewards)]
    return spread(ordered, CARD_POINTS), last


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
