"""A store of versions: the bits that were published come out, by the shortest way, and nothing else is believed."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stored_parts import FLOAT32, LAYOUT, Model, make_publisher, make_reader, no_wait
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError
from asyncrl.weights import deltas
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.files.folder import BadFileError, Folder
from asyncrl.weights.files.manifest import Earlier, Edge, Stamp, Step, shortest_way
from asyncrl.weights.files.reader import Reader, newest, read_manifest
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
    return [name for name in Folder(url).names() if name != "NEWEST"]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def assert_holds(reader: Reader, model: Model) -> None:
    assert np.array_equal(reader._weights, model.weights)


def test_two_readers_one_a_version_behind(url: str) -> None:
    model, publisher = Model(), make_publisher(url)
    first, second = make_reader(url), make_reader(url)
    for version in range(8):
        announced = publisher.publish(version, model.weights, needed=version)
        publisher.collect()
        assert newest(Folder(url)) == announced
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


def test_a_reader_far_behind_takes_the_larger_stride(tmp_path: Path) -> None:
    model, publisher = Model(), make_publisher(tmp_path)
    reader = make_reader(tmp_path)
    reader.fetch(publisher.publish(16, model.weights, needed=16), no_wait)
    before = reader.num_bytes
    for version in range(17, 33):
        model.step()
        announced = publisher.publish(version, model.weights, needed=16)
    names = [path.name for path in files(tmp_path / announced.folder)]
    assert names == ["from-000016.delta", "from-000028.delta", "from-000031.delta", "manifest.json"]
    reader.fetch(announced, no_wait)
    assert_holds(reader, model)
    assert reader.num_bytes - before == (tmp_path / announced.folder / "from-000016.delta").stat().st_size


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


# --- damage


def stored_versions(path: Path) -> tuple[list[Model], list]:
    """Four versions, the first and the last full, and their announcements."""
    model, publisher, announced, models = Model(), make_publisher(path, full_every=3), [], []
    for version in range(4):
        announced.append(publisher.publish(version, model.weights, needed=0))
        models.append(Model())
        models[-1].weights[:] = model.weights
        model.step()
    return models, announced


def test_a_flipped_byte_in_each_file_is_found_and_named(tmp_path: Path) -> None:
    models, announced = stored_versions(tmp_path)
    for file in files(tmp_path):
        data = file.read_bytes()
        name = str(file.relative_to(tmp_path))
        for at in {0, len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            named = []
            for start, target in [(None, 0), (0, 1), (1, 2), (None, 3), (2, 3)]:
                reader = make_reader(tmp_path)
                with capture_logs() as logs:
                    try:
                        if start is not None:
                            reader._weights[:] = models[start].weights
                            reader.held = stamp(models[start], start)
                        reader.fetch(announced[target], no_wait)
                        assert_holds(reader, models[target])
                    except BadFileError as error:
                        named.append(str(error))
                named += [entry["reason"] for entry in logs]
            if name == "NEWEST":
                assert not named
                with pytest.raises(BadFileError):
                    if (found := newest(Folder(str(tmp_path)))) != announced[3]:
                        make_reader(tmp_path).fetch(found, no_wait)
            else:
                assert any(name in one and ("sha256" in one or "cannot be read" in one) for one in named), (name, named)
        file.write_bytes(data)


def stamp(model: Model, version: int) -> Stamp:
    from asyncrl.weights.files.manifest import digest_of, sums_of

    return Stamp(version, digest_of(sums_of(model.weights, no_wait)))


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_a_delta_that_is_damaged_is_tried_twice_and_then_the_full_version_is_read(damage: str, tmp_path: Path) -> None:
    models, announced = stored_versions(tmp_path)
    reader = make_reader(tmp_path)
    reader.fetch(announced[2], no_wait)
    file = tmp_path / announced[3].folder / "from-000002.delta"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "short" else file.read_bytes() + b"x")
    with capture_logs() as logs:
        reader.fetch(announced[3], no_wait)
    assert_holds(reader, models[3])
    problem = {"gone": "cannot be read", "short": "ends too early", "long": "more bytes"}[damage]
    assert len(logs) == 2 and all(str(file) in entry["reason"] and problem in entry["reason"] for entry in logs)


def test_without_a_way_the_error_names_all_files_that_failed(tmp_path: Path) -> None:
    _, announced = stored_versions(tmp_path)
    reader = make_reader(tmp_path)
    reader.fetch(announced[2], no_wait)
    bad = [tmp_path / announced[3].folder / name for name in ("from-000002.delta", "full-00001.safetensors")]
    for file in bad:
        file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(BadFileError) as raised:
        reader.fetch(announced[3], no_wait)
    assert all(str(file) in str(raised.value) for file in bad)
    assert "its sha256 is" in str(raised.value)
    assert reader.held is None, "the buffer has parts of several versions"


def test_a_base_that_changed_in_memory_is_not_used(tmp_path: Path) -> None:
    models, announced = stored_versions(tmp_path)
    reader = make_reader(tmp_path)
    for version in (0, 1):
        reader.fetch(announced[version], no_wait)
    reader._weights[100] ^= 1
    with capture_logs() as logs:
        reader.fetch(announced[2], no_wait)
    assert_holds(reader, models[2])
    assert [entry["event"] for entry in logs] == ["the weights in memory have changed"]


def test_a_delta_that_makes_other_weights_is_named_with_both_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is as it was written: the sender has made a mistake."""
    model, publisher, reader, real = Model(), make_publisher(tmp_path), make_reader(tmp_path), deltas.encode
    reader.fetch(publisher.publish(0, model.weights, needed=0), no_wait)
    model.step()

    def wrong(old: np.ndarray, new: np.ndarray, **options: Any) -> list[bytes] | None:
        return real(old, new + np.uint16(1), max_bytes=1 << 30)

    monkeypatch.setattr(deltas, "encode", wrong)
    announced = publisher.publish(1, model.weights, needed=0)
    with pytest.raises(BadFileError) as raised:
        reader.fetch(announced, no_wait)
    assert f"{announced.folder}: the weights that from-000000.delta make differ from version 1 in part 0" in str(
        raised.value
    )
    manifest = read_manifest(Folder(str(tmp_path)), f"{announced.folder}/manifest.json", announced.sha256)
    assert f"that of the manifest {manifest.sums[0]}" in str(raised.value)
    assert reader.held is None


def test_an_attempt_at_the_same_version_with_other_bits_is_another_version(tmp_path: Path) -> None:
    reader, model, other = make_reader(tmp_path), Model(), Model(seed=1)
    reader.fetch(make_publisher(tmp_path).publish(5, model.weights, needed=5), no_wait)
    publisher = make_publisher(tmp_path)  # the learner was restarted
    announced = publisher.publish(5, other.weights, needed=5)
    publisher.collect()
    reader.fetch(announced, no_wait)
    assert_holds(reader, other)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    announced = make_publisher(tmp_path).publish(0, Model().weights, needed=0)
    with pytest.raises(BadFileError, match=r"manifest\.json: has weights of other names, shapes or dtypes"):
        make_reader(tmp_path, layout=WeightManifest.of([("a", torch.bfloat16, (4,))])).fetch(announced, no_wait)


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
    assert newest(Folder(url)) == announced[-1]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["NEWEST", "notes", announced.folder])


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
    found = shortest_way(versions, held)
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
    assert shortest_way(versions, STAMPS[1]) == [delta]
    assert shortest_way(versions, STAMPS[1], {delta}) == [full]
    assert shortest_way(versions, STAMPS[1], {delta, full}) is None


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
