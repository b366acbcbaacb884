"""Files of a store that are damaged, and weights that are not what they should be: found, named, and not believed."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from stored_parts import KEY, LAYOUT, Model, assert_holds, files, make_publisher, make_reader, no_wait
from structlog.testing import capture_logs

from asyncrl.weights import deltas
from asyncrl.weights.layout import WeightManifest, slices_of
from asyncrl.weights.version_store import (
    BadFileError,
    Folder,
    Signed,
    Stamp,
    digest_of,
    manifest_key,
    read_manifest,
    sums_of,
)
from asyncrl.wire.messages import Announced


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
                            reader._slices = [slices_of(LAYOUT, 0, 1)]
                            reader.held = stamp(models[start], start)
                        reader.fetch(announced[target], no_wait)
                        assert_holds(reader, models[target])
                    except BadFileError as error:
                        named.append(str(error))
                named += [entry["reason"] for entry in logs]
            assert any(name in one and ("sha256" in one or "cannot be read" in one) for one in named), (name, named)
        file.write_bytes(data)


def stamp(model: Model, version: int) -> Stamp:
    return Stamp(version, digest_of(sums_of(model.weights, slices_of(LAYOUT, 0, 1).spans, no_wait)))


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
        changed = new.copy()
        changed[:100] += 1
        return real(old, changed, max_bytes=1 << 30)

    monkeypatch.setattr(deltas, "encode", wrong)
    announced = publisher.publish(1, model.weights, needed=0)
    with pytest.raises(BadFileError) as raised:
        reader.fetch(announced, no_wait)
    assert f"{announced.folder}: the weights that from-000000.delta make differ from version 1 in part 0" in str(
        raised.value
    )
    manifest = read_manifest(Folder(str(tmp_path)), f"{announced.folder}/manifest.json", announced.sha256, KEY)
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


# --- manifests of others


def announce(path: Path, folder: str) -> Announced:
    """The announcement of somebody who can write to the store, and knows its contents."""
    return Announced(
        int(folder[1:7]), folder, hashlib.sha256((path / folder / "manifest.json").read_bytes()).hexdigest()
    )


def test_a_manifest_of_another_run_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    reader, model = make_reader(tmp_path), Model()
    reader.fetch(make_publisher(tmp_path).publish(0, model.weights, needed=0), no_wait)
    other = make_publisher(tmp_path, key=manifest_key("run-10")).publish(1, Model(seed=1).weights, needed=1)
    with pytest.raises(BadFileError) as raised:
        reader.fetch(other, no_wait)
    manifest = tmp_path / other.folder / "manifest.json"
    assert str(raised.value) == f"{manifest}: was not written by this run: its HMAC-SHA256 is not of the run's key"
    assert_holds(reader, model)


def test_a_manifest_that_was_changed_is_refused_whatever_is_announced(tmp_path: Path) -> None:
    reader, model = make_reader(tmp_path), Model()
    honest = make_publisher(tmp_path).publish(0, model.weights, needed=0)
    file = tmp_path / honest.folder / "manifest.json"
    signed = msgspec.json.decode(file.read_bytes(), type=Signed)
    changes = [
        Signed(1, signed.hmac, msgspec.Raw(bytes(signed.manifest).replace(b'"version":0', b'"version":7'))),
        Signed(1, "0" * 64, signed.manifest),
    ]
    for changed in changes:
        file.write_bytes(msgspec.json.encode(changed))
        with pytest.raises(BadFileError, match=rf"{honest.folder}/manifest\.json: was not written by this run"):
            reader.fetch(announce(tmp_path, honest.folder), no_wait)
    file.write_bytes(msgspec.json.encode(Signed(2, signed.hmac, signed.manifest)))
    with pytest.raises(BadFileError, match=r"manifest\.json: has format 2, this process reads 1; .* same version"):
        reader.fetch(announce(tmp_path, honest.folder), no_wait)
    file.write_bytes(bytes(signed.manifest))  # without a signature
    with pytest.raises(BadFileError, match=r"manifest\.json: cannot be read"):
        reader.fetch(announce(tmp_path, honest.folder), no_wait)
    assert reader.held is None and reader.num_bytes == 0
    file.write_bytes(msgspec.json.encode(signed))
    reader.fetch(announce(tmp_path, honest.folder), no_wait)
    assert_holds(reader, model)


def test_a_file_of_a_rank_that_there_is_not_is_refused(tmp_path: Path) -> None:
    honest = make_publisher(tmp_path).publish(0, Model().weights, needed=0)
    file = tmp_path / honest.folder / "manifest.json"
    manifest = read_manifest(Folder(str(tmp_path)), f"{honest.folder}/manifest.json", honest.sha256, KEY)
    (way,) = manifest.paths
    wrong = structs.replace(way, files=[structs.replace(way.files[0], rank=1)])
    file.write_bytes(structs.replace(manifest, ranks=2, paths=[wrong]).signed(KEY))
    text = file.read_bytes().replace(b'"ranks":2', b'"ranks":1')
    raw = msgspec.json.decode(text, type=Signed).manifest
    file.write_bytes(msgspec.json.encode(Signed(1, hmac.new(KEY, bytes(raw), "sha256").hexdigest(), raw)))
    with pytest.raises(BadFileError, match=r"manifest\.json: cannot be read: a file of a rank that is not one of 1"):
        make_reader(tmp_path).fetch(announce(tmp_path, honest.folder), no_wait)


def test_the_key_is_that_of_rfc_5869() -> None:
    """As another implementation of HKDF-SHA256 derives it, with this label and no salt."""
    assert KEY.hex() == "16ffb741a99b2890947056bee01ae14508a135401ebbea5383b7f6f62ef2b8b4"
    assert manifest_key("run-10") != KEY


def test_a_version_of_a_learner_that_was_replaced_is_refused(tmp_path: Path) -> None:
    model, reader = Model(), make_reader(tmp_path)
    replaced, successor = (make_publisher(tmp_path, epoch=epoch) for epoch in (0, 1))
    reader.fetch(replaced.publish(3, model.weights, needed=3), no_wait)
    reader.fetch(successor.publish(2, model.weights, needed=2), no_wait)
    late = replaced.publish(4, Model(seed=1).weights, needed=4)
    with pytest.raises(BadFileError) as raised:
        reader.fetch(late, no_wait)
    problem = "was written by start 0 of the learner ranks, which start 1 has superseded"
    assert str(raised.value) == f"{tmp_path}/{late.folder}: {problem}"
    assert reader.held == stamp(model, 2)
    assert_holds(reader, model)
    make_reader(tmp_path).fetch(late, no_wait)  # of a queue that knows no other one
