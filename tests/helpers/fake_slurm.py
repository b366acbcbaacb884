"""Commands with the names of SLURM's, which record their arguments; srun runs its command on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

SCRIPT = """\
#!{python}
import json, os, subprocess, sys
from pathlib import Path
folder, name, arguments = Path({folder!r}), Path(sys.argv[0]).name, sys.argv[1:]
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps([name, *arguments]) + "\\n")
answer = folder / f"{{name}}.answer"
if name == "srun":
    options = [one for one in arguments if one.startswith("--")]
    command = arguments[len(options):]
    nodes = next(one for one in options if one.startswith("--nodelist=")).partition("=")[2].split(",")
    environment = os.environ | {{"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}}
    if len(nodes) == 1 and "asyncrl.launch.worker" in command:
        environment["SLURMD_NODENAME"] = nodes[0]
        os.execvpe(command[0], command, environment)
    for node in nodes:
        subprocess.run(command, env=environment | {{"SLURMD_NODENAME": node}}, check=True)
elif answer.exists():
    text = json.loads(answer.read_text())
    sys.stdout.write(text["output"])
    sys.stderr.write(text["error"])
    sys.exit(text["code"])
"""
NAMES = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


class FakeSlurm:
    """The commands in a folder that is first on PATH, and what they were called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir()
        for name in NAMES:
            (folder / name).write_text(SCRIPT.format(python=sys.executable, folder=str(folder)))
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            monkeypatch.delenv(name)

    def answers(self, name: str, output: str = "", *, error: str = "", code: int = 0) -> None:
        """Sets the output of a command from now on."""
        (self._folder / f"{name}.answer").write_text(json.dumps({"output": output, "error": error, "code": code}))

    def calls(self, name: str) -> list[list[str]]:
        """Returns the arguments of each call of a command."""
        file = self._folder / "calls.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line[1:] for line in lines if line[0] == name]

    def begin_job(self, *nodes: str) -> None:
        """Makes this process one inside job 77 on the nodes, on the first of them."""
        self._monkeypatch.setenv("SLURM_JOB_ID", "77")
        self._monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-9]")
        self._monkeypatch.setenv("SLURMD_NODENAME", nodes[0])
        self.answers("scontrol", "\n".join(nodes) + "\n")
