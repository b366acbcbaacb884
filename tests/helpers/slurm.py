"""A SLURM cluster of three nodes on this machine, from Debian's packages, without installation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2", "libhwloc15",
)  # fmt: skip
FOLDER = "ASYNCRL_SLURM"
"""Environment variable with a folder for the packages; they are downloaded into an empty one."""
START_S, CALL_S = 60.0, 30.0
CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/%n.log
SlurmctldLogFile={folder}/slurmctld.log
PluginDir={library}/slurm-wlm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
InactiveLimit=0
JobRequeue=1
NodeName=n[1-3] NodeHostname={host} NodeAddr={address} Port={first}-{last} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def extract(folder: Path) -> Path | None:
    """Returns the folder with the extracted packages; None if they are not there and cannot be had."""
    root = folder / "root"
    if (root / "usr/sbin/slurmctld-wlm").exists():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True, timeout=300, check=False)
    if done.returncode:
        return None
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True, timeout=60)
    return root


def slurm_fault() -> str:
    """Returns why there is no cluster here; empty if there is."""
    if FOLDER not in os.environ:
        return f"{FOLDER} names no folder for SLURM's packages"
    return "" if extract(Path(os.environ[FOLDER])) else f"apt-get cannot download {', '.join(PACKAGES)}"


class SlurmCluster:
    """The daemons of a cluster with the nodes n1, n2 and n3, and the environment in which its commands work."""

    def __init__(self, root: Path, folder: Path, *, address: str, port: int) -> None:
        self.folder = folder
        library = root / "usr/lib/x86_64-linux-gnu"
        self.environment = {
            **os.environ,
            "PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{library}:{library / 'slurm-wlm'}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._root = root
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir(parents=True)
        user = os.environ.get("USER", "root")
        (folder / "slurm.conf").write_text(
            CONF.format(
                folder=folder, library=library, address=address, user=user, host=os.uname().nodename,
                port=port, first=port + 1, last=port + 3,
            )
        )  # fmt: skip

    def start(self) -> None:
        """Starts the daemons; returns when all nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = [f"--{name}={self.folder}/munge.{end}" for name, end in
                 (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"),
                  ("seed-file", "seed"))]  # fmt: skip
        self._start("munged", ["munged", "--foreground", "--force", *munge])
        self.wait_until((self.folder / "munge.socket").exists, what="munged")
        self._start("slurmctld", ["slurmctld-wlm", "-D", "-i"])
        for node in ("n1", "n2", "n3"):
            self.start_node(node)
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 3", what="three idle nodes")

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self._start(node, ["slurmd-wlm", "-D", "-N", node, "-d", str(self._root / "usr/sbin/slurmstepd-wlm")])

    def kill_node(self, node: str) -> None:
        """Kills a node's daemon and all its roles at once, as a loss of power does."""
        roles = [one for one in psutil.process_iter() if _node(one) == node]
        steps = {parent.pid for role in roles if (parent := role.parent()) and "slurmstepd" in parent.name()}
        daemon = self._daemons.pop(node)
        for pid in (daemon.pid, *steps, *(role.pid for role in roles)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait(CALL_S)

    def run(self, *command: str) -> str:
        """Returns the output of a command."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=CALL_S, check=False
        )
        return (done.stdout if not done.returncode else done.stderr).strip()

    def wait_until(self, condition: Callable[[], bool], *, what: str, timeout_s: float = START_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s} s"
            time.sleep(0.2)

    def close(self) -> None:
        """Ends the daemons."""
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait(CALL_S)

    def _start(self, name: str, command: list[str]) -> None:
        output = (self.folder / f"{name}.out").open("ab")
        self._daemons[name] = subprocess.Popen(
            [str(self._root / "usr/sbin" / command[0]), *command[1:]],
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output.close()


def _node(process: psutil.Process) -> str:
    """The node of a role's process; empty for others."""
    try:
        return process.environ().get("SLURMD_NODENAME", "") if "python" in process.name() else ""
    except psutil.Error:
        return ""
