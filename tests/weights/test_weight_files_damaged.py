"""Files of a store that are damaged, and weights that are not what they should be: found, named, and not believed."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from stored_parts import KEY, Model, assert_holds, files, make_publisher, make_reader, no_wait

from asyncrl.weights import deltas
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.version_store import BadFileError, Folder, Reader, Signed, manifest_key, read_manifest


def stored_versions(path: Path) -> tuple[list[Model], list]:
    """Four versions, the first and the last full, and their announcements."""
    model, publisher, announced, models = Model(), make_publisher(path, full_every=3), [], []
    for version in range(4):
        announced.append(publisher.publish(version, model.weights, needed=0))
        models.append(Model())
        models[-1].weights[:] = model.weights
        model.step()
    return models, announced


def error_of(reader: Reader, announced: Any) -> str:
    with pytest.raises(BadFileError) as raised:
        reader.fetch(announced, no_wait)
    return str(raised.value)


def test_a_flipped_byte_in_each_file_is_found_and_named(tmp_path: Path) -> None:
    models, announced = stored_versions(tmp_path)
    for file in files(tmp_path):
        data, name = file.read_bytes(), str(file.relative_to(tmp_path))
        for at in {0, len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            reader, problems = make_reader(tmp_path), []
            for version in (0, 1, 2, 3, None, 3):
                if version is None:
                    reader = make_reader(tmp_path)
                    continue
                try:
                    reader.fetch(announced[version], no_wait)
                    assert_holds(reader, models[version])
                except BadFileError as error:
                    problems.append(str(error))
            assert any(name in one for one in problems), (name, problems)
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"), [("gone", "cannot be read"), ("short", "ends too early"), ("long", "more bytes")]
)
def test_a_damaged_delta_is_named_and_leaves_the_version_that_was_there(
    damage: str, problem: str, tmp_path: Path
) -> None:
    models, announced = stored_versions(tmp_path)
    reader = make_reader(tmp_path)
    reader.fetch(announced[1], no_wait)
    file = tmp_path / announced[2].folder / "delta-0.bin"
    data = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(data[:-1] if damage == "short" else data + b"x")
    assert f"{file}: " in (error := error_of(reader, announced[2])) and problem in error
    assert_holds(reader, models[1])
    reader.fetch(announced[3], no_wait)
    assert_holds(reader, models[3])


def test_a_base_that_changed_in_memory_is_found_and_the_full_version_is_read(tmp_path: Path) -> None:
    models, announced = stored_versions(tmp_path)
    reader = make_reader(tmp_path)
    reader.fetch(announced[1], no_wait)
    reader._weights[100] ^= 1
    assert "makes other weights than version 2 has" in error_of(reader, announced[2])
    assert reader.held is None
    reader.fetch(announced[2], no_wait)
    assert_holds(reader, models[2])


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
    error = error_of(reader, announced)
    assert f"{announced.folder}/delta-0.bin: makes other weights than version 1 has" in error
    manifest = read_manifest(Folder(str(tmp_path)), announced.folder, KEY)
    assert f"that of the manifest {manifest.sums[0]}" in error and reader.held is None


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
    reader = make_reader(tmp_path, layout=WeightManifest.of([("a", torch.bfloat16, (4,))]))
    assert "has other names, shapes or dtypes than the model" in error_of(reader, announced)


# --- manifests of others


def test_a_manifest_that_this_run_did_not_write_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    reader, model, publisher = make_reader(tmp_path), Model(), make_publisher(tmp_path)
    honest = publisher.publish(0, model.weights, needed=0)
    other = make_publisher(tmp_path, key=manifest_key("run-10")).publish(1, Model(seed=1).weights, needed=1)
    foreign = "was not written by this run: its HMAC-SHA256 is not of the run's key"
    assert error_of(reader, other) == f"{tmp_path / other.folder / 'manifest.json'}: {foreign}"
    file = tmp_path / honest.folder / "manifest.json"
    signed = msgspec.json.decode(data := file.read_bytes(), type=Signed)
    later = Signed(signed.hmac, msgspec.Raw(bytes(signed.manifest).replace(b'"version":0', b'"version":7')))
    for changed in (later, Signed("0" * 64, signed.manifest)):
        file.write_bytes(msgspec.json.encode(changed))
        assert foreign in error_of(reader, honest)
    file.write_bytes(bytes(signed.manifest))  # without a signature
    assert "manifest.json: cannot be read" in error_of(reader, honest)
    assert reader.held is None and reader.num_bytes == 0
    file.write_bytes(data)
    reader.fetch(honest, no_wait)
    assert_holds(reader, model)


def test_a_manifest_of_another_folder_or_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    publisher, folder = make_publisher(tmp_path), Folder(str(tmp_path))
    first, second = (publisher.publish(version, Model().weights, needed=0) for version in (0, 1))
    old, new = (tmp_path / announced.folder / "manifest.json" for announced in (first, second))
    new.write_bytes(old.read_bytes())
    assert f"{new}: belongs to {first.folder}" in error_of(make_reader(tmp_path), second)
    manifest = read_manifest(folder, first.folder, KEY)
    two = structs.replace(manifest, sums=manifest.sums * 2, full=manifest.full * 2)
    raw = msgspec.json.encode(two).replace(b'"sums":["' + manifest.sums[0].encode() + b'",', b'"sums":[')
    old.write_bytes(msgspec.json.encode(Signed(hmac.new(KEY, raw, "sha256").hexdigest(), msgspec.Raw(raw))))
    assert "cannot be read: files of other ranks than 1" in error_of(make_reader(tmp_path), first)


def test_a_version_of_a_learner_that_was_replaced_is_refused(tmp_path: Path) -> None:
    model, reader = Model(), make_reader(tmp_path)
    replaced, successor = (make_publisher(tmp_path, epoch=epoch) for epoch in (0, 1))
    reader.fetch(replaced.publish(3, model.weights, needed=3), no_wait)
    reader.fetch(newest := successor.publish(2, model.weights, needed=2), no_wait)
    late = replaced.publish(4, Model(seed=1).weights, needed=4)
    problem = "was written by start 0 of the learner ranks, which start 1 has superseded"
    assert error_of(reader, late) == f"{tmp_path}/{late.folder}: {problem}"
    assert reader.held == newest.folder
    assert_holds(reader, model)
    make_reader(tmp_path).fetch(late, no_wait)  # of a queue that knows no other one
