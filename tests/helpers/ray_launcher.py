"""Starts a cluster of this machine by RayLauncher and a role that fails and one that is killed; prints what it saw."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from asyncrl.launch.placement import RoleResources
from asyncrl.launch.ray_launcher import RayLauncher
from asyncrl.launch.worker import RoleSpec
from tests.helpers.replay import loopback_endpoints, small_config


def main(folder: str) -> None:
    config = small_config(runs_dir=folder, launch__cluster="ray", launch__start_timeout_s=60.0)
    with closing(RayLauncher()) as launcher:
        launcher.acquire(config)
        own, host = launcher.hosts()
        resources = RoleResources(host.cpus, threads=1, host=host.name)
        spec = RoleSpec("generator", 0, folder, loopback_endpoints(1), (), 8, host=host.name)
        fails, killed = launcher.start(spec, resources), launcher.start(spec, resources)
        immortal = launcher.kill([killed])
        late = launcher.wait([fails], 60.0)
        seen = {
            "hosts": [own.name, own.replay_only, host.name],
            "left": [role.name for role in (*immortal, *late, *launcher.end(grace_s=1.0))],
            "ended": [fails.code, fails.cause()],
            "told": launcher.describe(),
        }
    seen["files"] = sorted(file.name for file in Path(folder).iterdir())
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
