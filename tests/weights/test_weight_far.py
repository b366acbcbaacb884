"""A version to receivers on other hosts, over links that are slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOSTS = ["unshare", "-Urnmpu", "--mount-proc", "--fork", "--kill-child"]
"""Runs a command in namespaces of its own, which end with it."""
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_over_slow_links_the_chain_takes_less_than_half_the_time_of_the_tree() -> None:
    """64 MB from one host to four others over 400 Mb/s, where each link carries the bytes once."""
    bridge = "ip link add hosts type bridge && tc qdisc add dev lo root tbf rate 1mbit burst 9kb latency 1ms"
    probe = subprocess.run([*HOSTS, "sh", "-c", bridge], capture_output=True, text=True, timeout=20, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces with a bridge and tbf here: {probe.stderr.strip()}")
    command = [*HOSTS, sys.executable, str(Path(__file__).with_name("far_members.py")), "gloo", "auto"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tree_s, chain_s = (min(found[name]["seconds"]) for name in ("gloo", "auto"))
    print(f"tree {tree_s:.2f} s, chain {chain_s:.2f} s")
    assert [found[name]["used"] for name in ("gloo", "auto")] == ["gloo", "chain"]
    assert chain_s <= 0.45 * tree_s, found
