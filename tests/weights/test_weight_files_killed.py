"""A publisher that is killed at any point: readers end with the old or the new version, and nothing is left over."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from stored_parts import Model, make_publisher, make_reader, no_wait

from asyncrl.weights import version_store as folder_module
from asyncrl.weights.file_transport import Publisher
from asyncrl.weights.version_store import Folder
from asyncrl.wire.messages import Announced

KILLED = 9
OPERATIONS = {"open", "write", "fsync", "replace", "announce", "unlink", "rmtree", "mkdir"}


class Points:
    """Counts the points before and after each operation on the store, and ends the process at one of them."""

    def __init__(self, last: int | None, out: int) -> None:
        self._last, self._out = last, out
        self._count = 0

    def around(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pass(f"before {name}")
            result = operation(*args, **kwargs)
            self._pass(f"after {name}")
            return result

        return call

    def _pass(self, name: str) -> None:
        os.write(self._out, f"{name}\n".encode())
        if self._count == self._last:
            os._exit(KILLED)
        self._count += 1

    def install(self) -> None:
        os.fsync = self.around("fsync", os.fsync)
        os.replace = self.around("replace", os.replace)
        shutil.rmtree = self.around("rmtree", shutil.rmtree)
        Path.unlink = self.around("unlink", Path.unlink)  # type: ignore[method-assign]
        Path.mkdir = self.around("mkdir", Path.mkdir)  # type: ignore[method-assign]
        folder_module.open = self._open  # type: ignore[attr-defined]

    def _open(self, *args: Any) -> Any:
        file = self.around("open", builtins.open)(*args)
        return Written(file, self) if args[1] == "wb" else file


class Written:
    """A file whose writes are points. They are not buffered, so that a killed process leaves parts of the file."""

    def __init__(self, file: Any, points: Points) -> None:
        self._file = file
        self.write = points.around("write", self._write)

    def _write(self, chunk: Any) -> None:
        self._file.write(chunk)
        self._file.flush()

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def publish_until(publisher: Publisher, model: Model, version: int, last: int | None) -> tuple[int, list[str], bytes]:
    """Publishes, announces and collects in another process, which ends at the point with that number. Returns its exit
    code, the points that it passed, and what it announced."""
    read_points, write_points = os.pipe()
    read_announced, write_announced = os.pipe()
    pid = os.fork()
    if pid == 0:
        points = Points(last, write_points)
        points.install()
        announced = publisher.publish(version, model.weights, needed=version)
        points.around("announce", os.write)(write_announced, msgspec.json.encode(announced))
        publisher.collect()
        os._exit(0)
    os.close(write_points), os.close(write_announced)
    with os.fdopen(read_points, "rb") as passed, os.fdopen(read_announced, "rb") as said:
        names, announced = passed.read().decode().splitlines(), said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), names, announced


def check_readers(store: Path, models: dict[int, np.ndarray], before: Announced, told: bytes, version: int) -> None:
    """A reader of the version before, and one that has nothing."""
    target = msgspec.json.decode(told, type=Announced) if told else before
    assert target.version in (version, version - 1)
    for held in (None, before):
        reader = make_reader(store)
        if held is not None:
            reader.fetch(held, no_wait)
        reader.fetch(target, no_wait)
        assert np.array_equal(reader._weights, models[target.version])


@pytest.mark.parametrize("full_every", [32, 1], ids=["delta", "full"])
def test_killed_at_every_point_of_a_publish(full_every: int, tmp_path: Path) -> None:
    store, kept = tmp_path / "store", tmp_path / "kept"
    publisher, model, models = make_publisher(store, full_every=full_every, keep=2), Model(), {}
    for version in range(3):  # with full versions, the oldest two are to go
        model.step()
        models[version] = model.weights.copy()
        before = publisher.publish(version, model.weights, needed=version)
    model.step()
    models[3] = model.weights.copy()
    shutil.copytree(store, kept)
    code, names, _ = publish_until(publisher, model, 3, None)
    assert code == 0
    expected = OPERATIONS if full_every == 1 else OPERATIONS - {"unlink", "rmtree"}
    assert {name.split()[1] for name in names} == expected
    for point, name in enumerate(names):
        shutil.rmtree(store)
        shutil.copytree(kept, store)
        code, passed, told = publish_until(publisher, model, 3, point)
        assert (code, passed) == (KILLED, names[: point + 1])
        assert bool(told) == ("after announce" in passed), name
        check_readers(store, models, before, told, 3)
        restarted = make_publisher(store, full_every=full_every, keep=2)
        announced = restarted.publish(3, model.weights, needed=3)
        reader = make_reader(store)
        reader.fetch(announced, no_wait)
        assert np.array_equal(reader._weights, models[3])
        restarted.collect()
        assert [path.name for path in store.iterdir()] == [announced.folder], name
        assert not [path for path in store.rglob("*") if path.name.endswith(".new")]


class Killed(BaseException):
    """The sender's end, where no process can be killed."""


def test_an_object_store_whose_writer_ends_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for last in range(1000):
        store = f"memory://killed-{last}"
        publisher, model = make_publisher(store, full_every=1, keep=1), Model()
        publisher.publish(0, model.weights, needed=0)
        model.step()
        before = publisher.publish(1, model.weights, needed=1)
        old = model.weights.copy()
        model.step()
        calls, told = 0, None

        def count(operation: Callable[..., Any], last: int = last) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > last:
                    raise Killed
                return operation(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("open", "rm", "rm_file"):
                patch.setattr(publisher._folder._store, name, count(getattr(publisher._folder._store, name)))
            try:
                told = publisher.publish(2, model.weights, needed=2)
                publisher.collect()
            except Killed:
                pass
        reader = make_reader(store)
        reader.fetch(told or before, no_wait)
        assert np.array_equal(reader._weights, model.weights if told else old)
        restarted = make_publisher(store, full_every=1, keep=1)
        announced = restarted.publish(2, model.weights, needed=2)
        restarted.collect()
        assert Folder(store).names() == [announced.folder]
        if calls <= last:
            assert last > 4, "writes, and removes an old version"
            return
    raise AssertionError("it never ended")
