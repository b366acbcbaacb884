from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from asyncrl.util import files
from asyncrl.util.files import open_file, replace_file


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


@pytest.mark.parametrize("freed_s", [0.2, 1.0])
def test_a_free_descriptor_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed_s: float) -> None:
    monkeypatch.setattr(files, "DESCRIPTORS_S", 0.5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    frees = threading.Timer(freed_s, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    frees.start()
    try:
        if freed_s > files.DESCRIPTORS_S:
            with pytest.raises(OSError, match="Too many open files"):
                open_file(tmp_path, os.O_RDONLY)
        else:
            os.close(open_file(tmp_path, os.O_RDONLY))
    finally:
        frees.join()
