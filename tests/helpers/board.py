"""A board that is served in a thread, and made runs to show on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.observe.board import BoardServer
from asyncrl.observe.samples import TRAINED, append_rows, choose, evaluated_file
from asyncrl.types import Lease, Prompt
from tests.helpers.replay import make_group, small_config

STOP_S = 20.0


class Client:
    """Asks a board."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        self.port, self.token = parts.port, parts.path.strip("/")

    def request(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers (lower case) of the answer to a path as it stands."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def get(self, path: str, *, status: int = 200) -> Any:
        """The JSON at a path below the token."""
        got, body, _ = self.request(f"/{self.token}/{path}")
        assert got == status, body
        return json.loads(body)


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    """A board over this folder, until the end of the block."""
    server = BoardServer(folder, 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Client(server.address)
    finally:
        server.stop()
        thread.join(STOP_S)
        assert not thread.is_alive()


def rows_of(steps: int, *, first: int = 1, reward: float = 0.5) -> list[dict[str, float]]:
    """Metrics of steps in which the reward rises to `reward`."""
    return [
        {
            "step": step, "reward/mean": reward * (1 - 0.5 ** (step / 20)), "learner/tokens": 100.0,
            "learner/entropy": 1.0 / step, "learner/step_s": 0.25, "learner/wait_s": 0.1, "staleness/mean": 1.5,
            "time/elapsed_s": 0.5 * step, "throughput/trained_tokens_per_s": 200.0,
        }
        for step in range(first, first + steps)
    ]  # fmt: skip


def append_metrics(run_dir: Path, rows: list[dict[str, float]]) -> None:
    """Appends rows, as a run does."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def made_run(folder: Path, *, steps: int = 40, reward: float = 0.5, **summary: Any) -> Path:
    """A run of `steps` steps without trace and samples; with a summary only if something is in it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(small_config(run="made", steps=max(steps, 1)).to_yaml())
    append_metrics(folder, rows_of(steps, reward=reward))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def add_samples(run_dir: Path, *, steps: int = 6, completion_tokens: int = 4) -> None:
    """Adds samples of steps, and of evaluations of the versions 0 and 5, with a tokenizer to read them."""
    make_tokenizer().save_pretrained(run_dir / "model")
    config = small_config(run=run_dir.name, steps=40, model__path=str(run_dir / "model"))
    (run_dir / "config.yaml").write_text(config.to_yaml())
    for step in range(1, steps + 1):
        prompt = Prompt(step, np.arange(3, dtype=np.int32), "1", "test")
        group = make_group(Lease(step, 0, prompt), 0, rewards=(0.0, 1.0), completion_tokens=(completion_tokens, 2))
        for member in group.trajectories:
            member.tokens[:] = 4 + np.arange(len(member.tokens)) % 8
        append_rows(run_dir / "samples" / TRAINED, choose([group], step=step))
        for version in (0, 5):
            append_rows(evaluated_file(run_dir, version), choose([group], step=version).select([0]))
