"""`asyncrl launch --cluster ray://HOST`: the same command as a job of a Ray cluster elsewhere."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.console import EXIT_FAILED, EXIT_INTERRUPTED

SCHEME = "ray://"
PORT = 8265
"""Default port of the cluster's dashboard, which takes jobs."""
LEFT_OUT = ["/.git", "/.venv", "/build", "/runs", "/sweeps"]
"""The parts of the working directory that are not sent along; Ray sends 100 MB at most."""


def submit_job(address: str, arguments: Sequence[str], console: Console) -> int:
    """Submits `asyncrl launch` with these arguments to the cluster at `ray://HOST[:PORT]` and prints the job's log
    until it ends. Returns its exit code.

    Ctrl-C asks whether to stop the job; otherwise it continues. Raises ConfigError if Ray is not installed, and if the
    cluster cannot be reached or does not take the job.
    """
    try:
        from ray.job_submission import JobSubmissionClient
    except ModuleNotFoundError:
        raise ConfigError(f"--cluster {address}: Ray is not installed; pip install 'asyncrl[ray]'") from None
    url = url_of(address)
    try:
        client = JobSubmissionClient(url)
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-P", "-m", "asyncrl.cli", "launch", "--cluster", "ray", *arguments]),
            runtime_env={"working_dir": str(Path.cwd()), "excludes": LEFT_OUT},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: {error}") from None
    console.print(f"job        {job} at {url}", highlight=False, soft_wrap=True)
    try:
        asyncio.run(_follow(client, job, console))
    except KeyboardInterrupt:
        if console.input("stop the job, too? [y/N] ").strip().lower() != "y":
            console.print(f"it goes on: ray job logs --follow --address {url} {job}", highlight=False, soft_wrap=True)
            return EXIT_INTERRUPTED
        client.stop_job(job)
        asyncio.run(_follow(client, job, console))
    info = client.get_job_info(job)
    if info.driver_exit_code is None:
        raise RunError(f"job {job} ended as {info.status}: {info.message}")
    return info.driver_exit_code if info.driver_exit_code >= 0 else EXIT_FAILED


def url_of(address: str) -> str:
    """Returns the URL of the dashboard of `ray://HOST[:PORT]`. Raises ConfigError for another form."""
    host, _, port = address.removeprefix(SCHEME).partition(":")
    if not host or "/" in address.removeprefix(SCHEME) or not (port or str(PORT)).isdecimal():
        raise ConfigError(f"--cluster {address}: must be ray://HOST or ray://HOST:PORT, the port of Ray's dashboard")
    return f"http://{host}:{port or PORT}"


async def _follow(client: Any, job: str, console: Console) -> None:
    """Prints the job's log until it ends."""
    async for text in client.tail_job_logs(job):
        console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
