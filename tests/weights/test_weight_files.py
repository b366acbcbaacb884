"""A store of versions: the bits that were published come out, and nothing else is believed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_parts import FLOAT32, LAYOUT, Model, assert_holds, files, make_publisher, make_reader, no_wait
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError
from asyncrl.weights import version_store
from asyncrl.weights.version_store import Folder, StoredVersion, steps_to
from tests.helpers.examples import examples


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "store")
        return
    yield (url := f"memory://{uuid.uuid4().hex}")
    store, path = fsspec.core.url_to_fs(url)
    if store.exists(path):
        store.rm(path, recursive=True)


def folders(url: str) -> list[str]:
    return Folder(url).names()


def test_two_readers_one_a_version_behind(url: str) -> None:
    model, publisher = Model(), make_publisher(url)
    first, second = make_reader(url), make_reader(url)
    for version in range(8):
        announced = publisher.publish(version, model.weights, needed=version)
        publisher.collect()
        first.fetch(announced, no_wait)
        assert_holds(first, model)
        if version % 2 == 0:
            second.fetch(announced, no_wait)
            assert_holds(second, model)
        model.step()
    full = LAYOUT.num_bytes
    assert full < first.num_bytes < 1.3 * full, "one full version and seven deltas"
    assert full < second.num_bytes < 1.3 * full
    assert first.num_bytes > 7 * 200 + full


def test_float32_weights_are_always_full(url: str) -> None:
    model, publisher, reader = Model(FLOAT32), make_publisher(url, layout=FLOAT32), make_reader(url, layout=FLOAT32)
    for version in range(4):
        reader.fetch(publisher.publish(version, model.weights, needed=version), no_wait)
        assert_holds(reader, model)
        model.step()
    assert reader.num_bytes > 4 * 300 * 64 * 4


def test_a_delta_of_more_than_half_of_the_bytes_is_a_full_version(tmp_path: Path) -> None:
    model, publisher, reader = Model(), make_publisher(tmp_path), make_reader(tmp_path)
    reader.fetch(publisher.publish(0, model.weights, needed=0), no_wait)
    model.weights[: LAYOUT.entries[0].num_bytes] = np.random.default_rng(1).integers(
        0, 256, LAYOUT.entries[0].num_bytes, np.uint8
    )
    announced = publisher.publish(1, model.weights, needed=0)
    assert {path.name for path in files(tmp_path / announced.folder)} == {"manifest.json", "full-0.bin"}
    reader.fetch(announced, no_wait)
    assert_holds(reader, model)


def test_every_so_often_a_version_is_full_too(tmp_path: Path) -> None:
    model, publisher = Model(), make_publisher(tmp_path, full_every=3)
    full = []
    for version in range(7):
        announced = publisher.publish(version, model.weights, needed=version)
        full.append((tmp_path / announced.folder / "full-0.bin").exists())
        assert version == 0 or (tmp_path / announced.folder / "delta-0.bin").exists()
        model.step()
    assert full == [True, False, False, True, False, False, True]


def test_a_store_that_cannot_be_used_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"weights\.url = 'nosuch://bucket': cannot be used: Protocol not known"):
        Folder("nosuch://bucket")


# --- what stays


def test_old_versions_go_when_nobody_needs_them(url: str) -> None:
    model, publisher = Model(), make_publisher(url, full_every=4, keep=2)
    announced = []
    for version in range(10):
        announced.append(publisher.publish(version, model.weights, needed=5 if version < 9 else 8))
        publisher.collect()
        model.step()
    assert folders(url) == sorted(one.folder for one in announced[8:]), "8 is full, and the newest before 9"


def test_a_reader_on_its_way_keeps_what_it_needs(url: str) -> None:
    model, publisher = Model(), make_publisher(url, full_every=4, keep=1)
    announced = []
    for version in range(12):
        announced.append(publisher.publish(version, model.weights, needed=min(version, 6)))
        publisher.collect()
        if version == 6:
            expected = model.weights.copy()
        model.step()
    assert folders(url) == sorted(one.folder for one in announced[4:])
    reader = make_reader(url)
    with capture_logs() as logs:
        reader.fetch(announced[6], no_wait)
    assert np.array_equal(reader._weights, expected) and not logs


def test_what_other_attempts_left_goes_and_other_files_stay(tmp_path: Path) -> None:
    left = make_publisher(tmp_path).publish(0, Model().weights, needed=0)
    (tmp_path / left.folder / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    publisher = make_publisher(tmp_path)
    announced = publisher.publish(1, Model().weights, needed=1)
    publisher.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["notes", announced.folder])


def test_a_reader_that_closes_does_not_read_a_file_to_its_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_store, "CHUNK_BYTES", 1000)
    checks: list[int] = []
    folder = Folder(url, check=lambda: checks.append(1))
    file = folder.write("v000000-00000000/delta-0.bin", [bytes(10_000)])
    checks.clear()
    folder.read_into("v000000-00000000/delta-0.bin", file, [memoryview(bytearray(10_000))])
    assert len(checks) == 10


def test_a_version_that_is_written_again_for_another_reader_is_not_read_again(url: str) -> None:
    model, publisher, reader = Model(), make_publisher(url), make_reader(url)
    reader.fetch(publisher.publish(0, model.weights, needed=0), no_wait)
    publisher.restart()
    again, num_bytes = publisher.publish(0, model.weights, needed=0), reader.num_bytes
    reader.fetch(again, no_wait)
    assert (reader.held, reader.num_bytes) == (again.folder, num_bytes)
    model.step()
    reader.fetch(publisher.publish(1, model.weights, needed=0), no_wait)
    assert_holds(reader, model)
    assert reader.num_bytes < 1.3 * num_bytes, "a delta"


# --- steps of a reader


def test_a_reader_takes_deltas_in_a_row_or_the_last_full_version() -> None:
    names = [f"v{version:06d}-00000000" for version in range(7)]
    bases = [None, 0, 1, 2, None, 4, 5]
    versions = [
        StoredVersion(version, names[version], None if base is None else names[base], version in (0, 3, 4))
        for version, base in enumerate(bases)
    ]

    def steps(target: int, held: int | None) -> list[int]:
        return [step.version for step in steps_to(versions[: target + 1], None if held is None else names[held])]

    assert steps(2, None) == [0, 1, 2] and steps(2, 0) == [1, 2] and steps(3, 2) == [3], "3 also is a delta"
    assert steps(3, 1) == [3] and steps(6, 3) == [4, 5, 6] and steps(6, 4) == [5, 6]
    assert steps_to(versions[5:], names[1]) == [], "the full version is gone"


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["step", "leap", "restart", "skip"]), st.booleans()), max_size=20))
def test_any_course_of_training_and_reading(course: list[tuple[str, bool]]) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    model, publisher, readers = Model(), make_publisher(url, full_every=4, keep=1), [make_reader(url), make_reader(url)]
    version = 0
    for what, both in [("step", True), *course]:
        model.step(0.5 if what == "leap" else 0.01)
        if what == "restart":
            publisher = make_publisher(url, full_every=4, keep=1)
            version = max(version - 2, 0)
        announced = publisher.publish(version, model.weights, needed=version)
        publisher.collect()
        version += 1
        for reader in readers if both else readers[:1]:
            if what != "skip":
                reader.fetch(announced, no_wait)
                assert_holds(reader, model)
    fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)
