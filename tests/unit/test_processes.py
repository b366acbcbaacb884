from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.util.processes import TURN_S, normal_priority, set_time_slice, use_batch_scheduling

SYS_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
KERNEL = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])

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


def turn_s() -> float:
    """Returns the time slice of the calling thread; 0 where the kernel decides."""
    buffer = ctypes.create_string_buffer(48)
    assert not ctypes.CDLL(None).syscall(SYS_SCHED_GETATTR[os.uname().machine], 0, buffer, 48, 0)
    return struct.unpack("IIQiIQQQ", buffer.raw)[5] / 1e9


def test_threads_leave_the_core_with_those_that_they_start() -> None:
    def check() -> None:
        use_batch_scheduling()
        policies = [os.sched_getscheduler(0)]
        in_thread(lambda: policies.append(os.sched_getscheduler(0)))
        assert policies == [os.SCHED_BATCH, os.SCHED_BATCH]

    in_thread(check)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(KERNEL < (6, 12), reason="the kernel knows no length of turns")
def test_long_turns_are_the_threads_own() -> None:
    def check() -> None:
        before_s = turn_s()
        set_time_slice()
        assert (os.sched_getscheduler(0), turn_s()) == (os.SCHED_BATCH, TURN_S)
        assert before_s != TURN_S

    in_thread(check)
    assert turn_s() != TURN_S


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


def test_a_system_that_forbids_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.util.processes.SYS_SCHED_SETATTR", {os.uname().machine: 10_000})
    with pytest.raises(OSError, match="sched_setattr: Function not implemented"):
        in_thread(set_time_slice)


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
