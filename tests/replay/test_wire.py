"""Messages come back as they were sent; anything else is refused with its reason."""

from __future__ import annotations

import resource
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.replay.codec import check_group, pack_group, pack_leases, unpack_group, unpack_leases
from asyncrl.types import Lease, Prompt
from asyncrl.wire.frames import MAX_HEADER_BYTES, MAX_REQUEST_HEADER_BYTES, decode, encode
from tests.helpers.examples import examples
from tests.helpers.replay import EndlessPrompts, make_group


def a_lease() -> Lease:
    return Lease(7, 1, next(EndlessPrompts()))


def frames_of_a_group(*, in_one: bool = False) -> list[bytes]:
    """With the arrays each in a frame of its own, or in one."""
    meta, block = pack_group(make_group(a_lease(), 3))
    arrays = [block] if in_one else block
    return [bytes(frame) for frame in encode("run", "finish", meta, seq=5, arrays=arrays)]


@pytest.mark.parametrize("in_one", [True, False])
def test_group_round_trip(in_one: bool) -> None:
    group = make_group(a_lease(), 3, completion_tokens=(1, 9))
    meta, block = pack_group(group)
    frames = encode("run", "finish", meta, seq=5, arrays=[block] if in_one else block)
    assert len(frames) == 1 + (1 if in_one else 4)
    message = decode("run", [bytes(frame) for frame in frames])
    assert (message.arrays.frame is not None) == in_one
    assert all(array.ctypes.data % array.itemsize == 0 for array in message.arrays)
    assert (message.kind, message.seq) == ("finish", 5)
    check_group(message.body, message.arrays, group_size=2)
    back = unpack_group(message.body, message.arrays)
    assert (back.ticket, back.attempt, back.start_version, back.started_s) == (7, 1, 3, 1.0)
    for ours, theirs in zip(group.trajectories, back.trajectories, strict=True):
        for name in ("tokens", "action_mask", "behavior_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert (ours.reward, ours.reward_parts, ours.status) == (theirs.reward, theirs.reward_parts, theirs.status)
        theirs.check()


def test_lease_round_trip() -> None:
    tokens = np.array([5, 6], dtype=np.int32)
    chat = [{"role": "user", "content": "5+6="}]
    lease = Lease(1, 0, Prompt(4, tokens, "11", "sums", {"level": 2, "tags": ["a"]}, chat, {"ability": "math"}), True)
    metas, block = pack_leases([lease, lease])
    body = {
        "leases": metas,
        "done": False,
        "leave": False,
        "reason": "",
        "evaluations_left": True,
        "progress": 3,
        "pause_s": 0.0,
    }
    message = decode("run", [bytes(f) for f in encode("run", "leases", body, arrays=[block])])
    _, back = unpack_leases(message.body["leases"], message.arrays)
    assert (back.ticket, back.prompt.ground_truth, back.prompt.extra_info) == (1, "11", {"level": 2, "tags": ["a"]})
    assert back.evaluation
    assert (back.prompt.chat, back.prompt.columns) == (chat, {"ability": "math"})
    np.testing.assert_array_equal(back.prompt.tokens, [5, 6])


def changed_header(**changes: object) -> list[bytes]:
    header, *arrays = frames_of_a_group()
    values = msgpack.unpackb(header)
    values.update(changes)
    return [msgpack.packb(values), *arrays]


def changed_body(**changes: object) -> list[bytes]:
    return changed_header(body=msgpack.unpackb(frames_of_a_group()[0])["body"] | changes)


def empty_array(shape: list[int]) -> list[bytes]:
    return [*changed_header(arrays=[[["i4", shape]]])[:1], b""]


def mask_of_twos() -> list[bytes]:
    frames = frames_of_a_group()
    frames[2] = bytes([2] * len(frames[2]))
    return frames


def frame_with(arrays: object, num_bytes: int) -> list[bytes]:
    """A group's header over one frame of so many bytes that is said to hold the arrays."""
    return [*changed_header(arrays=[arrays])[:1], bytes(num_bytes)]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "empty message"),
        ([b"\xc1"], "header is not msgpack"),
        ([b"\x01"], "header is int, expected a map"),
        (changed_header(v=9), "schema version 9, this process speaks 2"),
        (changed_header(run="other"), "the message does not have the id of this run"),
        (changed_header(run="ru"), "the message does not have the id of this run"),
        (changed_header(run=["run"]), "the message does not have the id of this run"),
        (changed_header(kind="pickle"), "unknown kind 'pickle'"),
        (changed_header(seq="x"), "sequence number 'x' is not an integer"),
        (changed_header(body={}), "finish: ticket: Field required"),
        (changed_header(arrays=[]), "4 frames do not fit the header's list of arrays"),
        (changed_header(arrays=[[["i4", [1 << 40]]]] * 4), "bytes does not hold"),
        (changed_header(arrays=[[["O", [12]]]] * 4), "does not name a known dtype"),
        (changed_header(arrays=[[["i4", [-12]]]] * 4), "does not name a known dtype and a shape"),
        (changed_header(arrays=[[["i4", [1] * 9]]] * 4), "does not name a known dtype and a shape"),
        (changed_header(seq=-1), "sequence number -1 is not an integer from 0"),
        (changed_header(seq=True), "sequence number True is not an integer"),
        (changed_body(generator=65536), "generator: Input should be less than or equal to 65535"),
        (changed_body(ticket=(1 << 62) + 1), "ticket: Input should be less than or equal to"),
        (changed_body(attempt=1 << 31), "attempt: Input should be less than or equal to 2147483647"),
        (changed_body(start_version=-2), "start_version: Input should be greater than or equal to -1"),
        (changed_body(started_s=float("nan")), "started_s: Input should be"),
        (changed_body(greedy_reward=float("inf")), "greedy_reward: Input should be"),
        (changed_body(data_source="x" * 201), "data_source: String should have at most 200 characters"),
        (changed_body(**{"k" * 5000: 1}), "finish: k{500}$"),
        (changed_body(lengths=[1] * 65537), "header is not msgpack: 65537 exceeds max_array_len"),
        (changed_body(errors=[[0] * 65000] * 17), "header is not msgpack: more than 1048576 values"),
        (changed_body(errors=msgpack.ExtType(1, b"x")), "exceeds max_ext_len"),
        (
            [
                msgpack.packb(
                    {"v": 2, "run": "run", "kind": "status", "seq": 1, "body": {}, "arrays": [[["i4", [1]]]]}
                ),
                b"1234",
            ],
            "status: 1 frames of arrays, this kind has none",
        ),
        (empty_array([0, 1 << 31, 1 << 31, 1 << 31]), r"no frame holds i4"),
        (empty_array([1]), "a frame of 0 bytes does not hold"),
        (frame_with("i4", 4), "a frame of 4 bytes with 'i4' is not a list of arrays"),
        (frame_with(["i4", [1]], 4), "array description 'i4' does not name"),
        (frame_with([["b1", [3]], ["i4", [1]]], 7), "a frame of 7 bytes does not hold"),
        (frame_with([["b1", [3]], ["i4", [1]]], 13), "a frame of 13 bytes does not hold"),
        (frame_with([["b1", [3]], ["i4", [1]], ["i4", [1]]], 12), "a frame of 12 bytes does not hold"),
        (mask_of_twos(), "a truth value is neither 0 nor 1"),
    ],
)
def test_bad_message_is_refused_with_its_reason(frames: list[bytes], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason.replace("[", r"\[")):
        decode("run", frames)


def test_a_request_has_a_smaller_header_than_an_answer() -> None:
    group = make_group(a_lease(), 3)
    for trajectory in group.trajectories:
        trajectory.reward_parts = {f"{number:0200d}": 0.5 for number in range(256)}
        trajectory.error = "x" * (1 << 16)
    packed, arrays = pack_group(group)
    meta = {name: value * 32 if isinstance(value, list) else value for name, value in packed.items()}
    with pytest.raises(ProtocolError, match=rf"finish: a header of 7\d+ bytes, at most {MAX_REQUEST_HEADER_BYTES} can"):
        encode("run", "finish", meta, arrays=arrays)
    body = {"step": 1, "outcome": "shard", "groups": [meta]}
    frames = [bytes(frame) for frame in encode("run", "shard", body, arrays=arrays)]
    with pytest.raises(ProtocolError, match=rf"a header of 7\d+ bytes, at most {MAX_REQUEST_HEADER_BYTES} are read"):
        decode("run", frames)
    assert decode("run", frames, max_header_bytes=MAX_HEADER_BYTES).body == body


def test_nested_lists_that_never_end_take_little_memory() -> None:
    list_of = b"\xdd" + (1 << 16).to_bytes(4, "big")
    level = list_of + b"\xe0" * ((1 << 16) - 1)
    decode("run", frames_of_a_group())
    before = peak_bytes()
    for header in (level * (MAX_REQUEST_HEADER_BYTES // len(level)), list_of * 500, level * 150):
        with pytest.raises(ProtocolError, match="header"):
            decode("run", [header])
    assert peak_bytes() - before < 128 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@settings(max_examples=examples(300))
@given(
    in_one=st.booleans(), frame=st.integers(0, 4), position=st.integers(0, 10_000), value=st.integers(0, 255),
    cut=st.booleans(),
)  # fmt: skip
def test_damaged_frames_never_do_worse_than_a_protocol_error(
    in_one: bool, frame: int, position: int, value: int, cut: bool
) -> None:
    frames = frames_of_a_group(in_one=in_one)
    frame %= len(frames)
    damaged = bytearray(frames[frame])
    position %= len(damaged)
    if cut:
        del damaged[position:]
    else:
        damaged[position] = value
    frames[frame] = bytes(damaged)
    with suppress(ProtocolError):
        message = decode("run", frames)
        if message.kind == "finish":  # the body of another kind has other fields
            check_group(message.body, message.arrays, group_size=2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda meta, arrays: meta["rewards"].pop(), "1 rewards, a group has 2"),
        (lambda meta, arrays: meta.update(lengths=[1, 1]), "lengths do not add up"),
        (lambda meta, arrays: meta.update(start_version=4), "older than the version the group started at"),
        (lambda meta, arrays: meta.update(rewards=[0.0, float("nan")]), "reward nan is not finite"),
        (lambda meta, arrays: meta.update(rewards=[0.0, 1e31]), r"reward 1e\+31 is not between -1e\+30 and 1e\+30"),
        (lambda meta, arrays: meta["parts"][0].update(exact=-1e300), "is not between"),
        (lambda meta, arrays: arrays[0].fill(-5), "token -5 is negative"),
        (lambda meta, arrays: arrays.pop(), "expected frames of tokens"),
        (lambda meta, arrays: arrays[1].fill(True), "a token has a version if and only if"),
        (lambda meta, arrays: arrays[2].fill(np.inf), "behavior_logprobs are not finite"),
    ],
)
def test_inconsistent_group_is_refused(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    meta, arrays = pack_group(make_group(a_lease(), 3))
    change(meta, arrays)
    with pytest.raises(ProtocolError, match=reason):
        check_group(meta, arrays, group_size=2)
