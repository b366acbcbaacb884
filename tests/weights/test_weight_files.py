"""A store of versions: the bits that were published come out, by the shortest way, and nothing else is believed."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stored_parts import FLOAT32, LAYOUT, Model, assert_holds, files, make_publisher, make_reader, no_wait
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError
from asyncrl.weights.version_store import Earlier, Edge, Folder, Stamp, Step, cheapest_path
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


def test_a_full_version_is_a_checkpoint_of_safetensors(tmp_path: Path) -> None:
    model = Model()
    announced = make_publisher(tmp_path).publish(3, model.weights, needed=3)
    stored = {}
    for file in sorted((tmp_path / announced.folder).glob("*.safetensors")):
        stored |= load_file(file)
    assert len(list((tmp_path / announced.folder).glob("*.safetensors"))) == 3
    expected = dict(LAYOUT.views(torch.from_numpy(model.weights)))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor)


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
    assert {path.suffix for path in files(tmp_path / announced.folder)} == {".json", ".safetensors"}
    reader.fetch(announced, no_wait)
    assert_holds(reader, model)


def test_every_so_often_a_version_is_full_too(tmp_path: Path) -> None:
    model, publisher = Model(), make_publisher(tmp_path, full_every=3)
    full = []
    for version in range(7):
        announced = publisher.publish(version, model.weights, needed=version)
        full.append(any(path.suffix == ".safetensors" for path in files(tmp_path / announced.folder)))
        assert version == 0 or (tmp_path / announced.folder / f"from-{version - 1:06d}.delta").exists()
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


# --- ways


STAMPS = [Stamp(version, f"{version:064d}") for version in range(6)]


@settings(max_examples=examples(150))
@given(st.data())
def test_the_way_is_the_shortest_in_bytes(data: st.DataObject) -> None:
    versions = []
    for index, one in enumerate(STAMPS):
        bases = data.draw(st.sets(st.sampled_from([None, *STAMPS[:index]])))
        edges = [Edge(base, data.draw(st.integers(1, 20))) for base in bases]
        versions.append(Earlier(f"v{index:06d}-00000000", "0" * 64, one, edges))
    held = data.draw(st.sampled_from([None, *STAMPS[:-1]]))
    found = cheapest_path(versions, held)
    best = None
    for middle in itertools.chain.from_iterable(itertools.combinations(range(5), k) for k in range(6)):
        path = [*(STAMPS[index] for index in middle), STAMPS[5]]
        for start in {None, held}:
            cost, base = 0, start
            for one in path:
                edge = next((e for e in versions[one.version].edges if e.base == base), None)
                cost, base = (None if edge is None or cost is None else cost + edge.bytes), one
            best = cost if best is None or (cost is not None and cost < best) else best
    assert (found is None) == (best is None)
    if found is not None:
        assert best == sum(
            next(e.bytes for e in versions[int(step.folder[1:7])].edges if e.base == step.base) for step in found
        )
        assert found[0].base in (None, held) and found[-1].folder == versions[5].folder


def test_a_way_without_a_step() -> None:
    versions = [
        Earlier("v000000-00000000", "0" * 64, STAMPS[0], [Edge(None, 100)]),
        Earlier("v000001-00000000", "1" * 64, STAMPS[1], [Edge(STAMPS[0], 1)]),
        Earlier("v000002-00000000", "2" * 64, STAMPS[2], [Edge(STAMPS[1], 1), Edge(None, 100)]),
    ]
    delta, full = (Step("v000002-00000000", "2" * 64, base) for base in (STAMPS[1], None))
    assert cheapest_path(versions, STAMPS[1]) == [delta]
    assert cheapest_path(versions, STAMPS[1], {delta}) == [full]
    assert cheapest_path(versions, STAMPS[1], {delta, full}) is None


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
