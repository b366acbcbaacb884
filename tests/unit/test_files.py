from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.util.files import replace_file


def test_a_file_is_replaced_with_what_is_left_of_a_killed_write_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    (tmp_path / ".file.new").write_text("half of")
    replace_file(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_secret_file_is_never_readable_by_others(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"secret", mode=0o600)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("former")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["file"]


OPENS = """
import os, resource, sys, threading
from asyncrl.util import files, processes
files.DESCRIPTORS_S, freed_s = 0.5, float(sys.argv[1])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
threading.Timer(freed_s, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard))).start()
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
{call}
"""


@pytest.mark.parametrize("call", ['files.open_file("/", os.O_RDONLY)', "processes.peak_memory_bytes()"])
@pytest.mark.parametrize(("freed_s", "error"), [(0.2, ""), (1.0, "Too many open files")])
def test_a_free_descriptor_is_waited_for(freed_s: float, error: str, call: str) -> None:
    """In a separate process: threads of ZeroMQ do not survive without descriptors."""
    command = [sys.executable, "-c", OPENS.format(call=call), str(freed_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (not error) and error in done.stderr
