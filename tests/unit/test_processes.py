from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.util.processes import normal_priority, use_batch_scheduling

HELPERS = """
import os, sys
from asyncrl.util.processes import HelperContext

CODE = '''
import os, sys
from asyncrl.util.processes import become_helper
become_helper(os.getppid())
print(bool(sys.flags.safe_path), os.environ.get("PYTHONSAFEPATH"), flush=True)
'''
print("script", flush=True)
process = HelperContext().Process(target=exec, args=(CODE,))
process.start()
process.join(50)
print(process.exitcode)
"""
"""A script that starts a helper, without a guard of its main module."""


def in_thread(what: Callable[[], None]) -> None:
    """Scheduling belongs to a thread: the tests' stays as it is."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            what()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    if found:
        raise found[0]


def test_threads_leave_the_core_with_those_that_they_start() -> None:
    def check() -> None:
        use_batch_scheduling()
        policies = [os.sched_getscheduler(0)]
        in_thread(lambda: policies.append(os.sched_getscheduler(0)))
        assert policies == [os.SCHED_BATCH, os.SCHED_BATCH]

    in_thread(check)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_at_once_lasts_as_long_as_it_is_needed() -> None:
    def check() -> None:
        use_batch_scheduling()
        with pytest.raises(KeyError), normal_priority():
            assert os.sched_getscheduler(0) == os.SCHED_OTHER
            raise KeyError
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_thread(check)


def test_at_once_leaves_others_alone() -> None:
    with normal_priority():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_files_of_the_working_folder_shadow_no_module_in_helpers(tmp_path: Path) -> None:
    """Nor do they in a process that is started without -P, as by the script `asyncrl`; the script itself runs once."""
    script, folder = tmp_path / "bin" / "script.py", tmp_path / "working"
    script.parent.mkdir()
    folder.mkdir()
    for name in ("selectors", "socket", "tempfile"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    script.write_text(HELPERS)
    found = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout.split()) == (0, ["script", "True", "None", "0"]), found.stderr
