"""A server with the part of MLflow's REST interface that a run uses.

Started with `python -m tests.helpers.mlflow_server FOLDER PORT`. It can be killed and started again in the same
folder: what it has acknowledged is in `requests.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

REQUESTS = "requests.jsonl"


class Handler(BaseHTTPRequestHandler):
    """Answers as MLflow does for one experiment with one run."""

    folder: Path

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        endpoint = urlsplit(self.path).path.partition("/mlflow/")[2]
        info = {
            "run_id": "run", "run_uuid": "run", "experiment_id": "1", "status": "RUNNING", "run_name": "run",
            "artifact_uri": (self.folder / "artifacts").as_uri(), "lifecycle_stage": "active",
        }  # fmt: skip
        answer: dict[str, Any] = {}
        match endpoint:
            case "experiments/get-by-name":
                answer = {"experiment": {"experiment_id": "1", "name": "asyncrl", "lifecycle_stage": "active"}}
            case "runs/create" | "runs/get":
                answer = {"run": {"info": info, "data": {}}}
            case "runs/update":
                answer = {"run_info": info}
            case "metrics/get-history":
                (key,) = parse_qs(urlsplit(self.path).query)["metric_key"]
                answer = {"metrics": [point for point in logged_points(self.folder) if point["key"] == key]}
        with (self.folder / REQUESTS).open("a") as file:
            file.write(json.dumps([endpoint, body]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def logged_points(folder: Path) -> list[dict[str, Any]]:
    """The points of metrics that the server has taken, in their order."""
    lines = [json.loads(line) for line in (folder / REQUESTS).read_text().splitlines()]
    return [point for endpoint, body in lines if endpoint == "runs/log-batch" for point in body.get("metrics", [])]


def logged_steps(folder: Path) -> list[int]:
    """The steps of the rows that the server has taken, in their order."""
    return [int(point["step"]) for point in logged_points(folder) if point["key"] == "reward/mean"]


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
