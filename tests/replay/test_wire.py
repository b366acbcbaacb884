"""Messages come back as they were sent; anything else is refused with its reason."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect, structs

from asyncrl.errors import ProtocolError
from asyncrl.replay import codec
from asyncrl.replay.codec import (
    GroupLimits,
    check_group,
    max_group_header_bytes,
    pack_group,
    unpack_group,
)
from asyncrl.types import NO_VERSION, Lease, Prompt
from asyncrl.wire.frames import BODIES, SCHEMA, decode, encode
from asyncrl.wire.messages import MAX_HEADER_BYTES, MAX_REQUEST_HEADER_BYTES, Leases, ShardHeader
from tests.helpers.examples import examples
from tests.helpers.replay import EndlessPrompts, make_group


def a_lease() -> Lease:
    return Lease(7, 1, next(EndlessPrompts()))


def frames_of_a_group(*, in_one: bool = False) -> list[bytes]:
    """With the arrays each in a frame of its own, or in one."""
    header, block = pack_group(make_group(a_lease(), 3))
    arrays = [block] if in_one else block
    return [bytes(frame) for frame in encode("run", header, seq=5, arrays=arrays)]


@pytest.mark.parametrize("in_one", [True, False])
def test_group_round_trip(in_one: bool) -> None:
    group = make_group(a_lease(), 3, completion_tokens=(1, 9))
    header, block = pack_group(group)
    frames = encode("run", header, seq=5, arrays=[block] if in_one else block)
    assert len(frames) == 1 + (1 if in_one else 4)
    message = decode("run", [bytes(frame) for frame in frames])
    assert (message.arrays.frame is not None) == in_one
    assert all(array.ctypes.data % array.itemsize == 0 for array in message.arrays)
    assert (message.kind, message.seq) == ("GroupHeader", 5)
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
    body = Leases(
        leases=[lease, lease],
        done=False,
        leave=False,
        reason="",
        evaluations_left=True,
        progress=3,
        batches=2,
        pause_s=0.0,
        weights="",
        stored=None,
    )
    message = decode("run", [bytes(f) for f in encode("run", body)])
    _, back = message.body.leases
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


def mask_of_twos() -> list[bytes]:
    frames = frames_of_a_group()
    frames[2] = bytes([2] * len(frames[2]))
    return frames


def frame_with(arrays: object, num_bytes: int) -> list[bytes]:
    """Returns a group's header, which declares these arrays, over one frame of `num_bytes` bytes."""
    return [*changed_header(arrays=[arrays])[:1], bytes(num_bytes)]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "does not have the id of this run"),
        ([b"\xc1"], "header is not msgpack"),
        ([b"\x01"], "does not have the id of this run"),
        (changed_header(v=9), f"schema version 9, this process speaks {SCHEMA}"),
        (changed_header(run="other"), "the message does not have the id of this run"),
        (changed_header(run="ru"), "the message does not have the id of this run"),
        (changed_header(run=["run"]), "the message does not have the id of this run"),
        (changed_header(kind="pickle"), "unknown kind 'pickle'"),
        (changed_header(seq="x"), "header: Expected `int`, got `str` - at `$.seq`"),
        (changed_header(body={}), "GroupHeader: Object missing required field `ticket`"),
        (changed_header(arrays=[]), "4 frames do not fit the header's list of arrays"),
        (changed_header(arrays=[[["i4", 1 << 40]]] * 4), "bytes does not hold"),
        (changed_header(arrays=[[["O", 12]]] * 4), "header: Invalid enum value 'O' - at `$.arrays[0][0][0]`"),
        (changed_header(arrays=[[["i4", -12]]] * 4), "header: Expected `int` >= 0 - at `$.arrays[0][0][1]`"),
        (changed_header(arrays=[[["i4", 3, 4]]] * 4), "header: Expected `array` of length 2"),
        (changed_header(seq=-1), "header: Expected `int` >= 0 - at `$.seq`"),
        (changed_header(seq=True), "header: Expected `int`, got `bool` - at `$.seq`"),
        (changed_body(generator=65536), "GroupHeader: Expected `int` <= 65535"),
        (changed_body(ticket=(1 << 62) + 1), "GroupHeader: Expected `int` <= 4611686018427387904"),
        (changed_body(attempt=1 << 31), "GroupHeader: Expected `int` <= 2147483647"),
        (changed_body(start_version=-2), "GroupHeader: Expected `int` >= -1"),
        (changed_body(started_s=float("nan")), "GroupHeader: Expected `float` >= "),
        (changed_body(greedy_reward=float("inf")), "GroupHeader: Expected `float` <= "),
        (changed_body(data_source="x" * 201), "GroupHeader: Expected `str` of length <= 200"),
        (changed_body(**{"k" * 5000: 1}), "GroupHeader: Object contains unknown field `kkk"),
        (changed_body(lengths=[1] * 65537), "header is not msgpack: 65537 exceeds max_array_len"),
        (changed_body(errors=msgpack.ExtType(1, b"x")), "header is not msgpack: . exceeds max_ext_len"),
        (changed_header(kind="ReadStatus", body={}), "ReadStatus: 4 frames of arrays, this kind has none"),
        (frame_with([["i4", 1]], 0), "a frame of 0 bytes does not hold"),
        (frame_with("i4", 4), "header: Expected `array`, got `str` - at `$.arrays[0]"),
        (frame_with(["i4", 1], 4), "header: Expected `array`, got `str` - at `$.arrays[0][0]"),
        (frame_with([["b1", 3], ["i4", 1]], 7), "a frame of 7 bytes does not hold"),
        (frame_with([["b1", 3], ["i4", 1]], 13), "a frame of 13 bytes does not hold"),
        (frame_with([["b1", 3], ["i4", 1], ["i4", 1]], 12), "a frame of 12 bytes does not hold"),
        (mask_of_twos(), "a truth value is neither 0 nor 1"),
    ],
)
def test_bad_message_is_refused_with_its_reason(frames: list[bytes], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason.replace("[", r"\[").replace("$", r"\$")):
        decode("run", frames)


def test_a_request_has_a_smaller_header_than_an_answer() -> None:
    group = make_group(a_lease(), 3)
    for trajectory in group.trajectories:
        trajectory.reward_parts = {f"{number:0200d}": 0.5 for number in range(256)}
        trajectory.error = "x" * (1 << 16)
    packed, arrays = pack_group(group)
    lists = {name: value * 32 for name, value in structs.asdict(packed).items() if isinstance(value, list)}
    header = structs.replace(packed, **lists)
    with pytest.raises(
        ProtocolError, match=rf"GroupHeader: a header of 7\d+ bytes, at most {MAX_REQUEST_HEADER_BYTES} can"
    ):
        encode("run", header, arrays=arrays)
    body = ShardHeader(1, "shard", [header])
    frames = [bytes(frame) for frame in encode("run", body, arrays=arrays)]
    with pytest.raises(ProtocolError, match=rf"a header of 7\d+ bytes, at most {MAX_REQUEST_HEADER_BYTES} are read"):
        decode("run", frames)
    assert decode("run", frames, max_bytes=MAX_HEADER_BYTES).body == body


def parts_of(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The type and all types in it."""
    yield kind
    match kind:
        case inspect.StructType():
            inner = [field.type for field in kind.fields]
        case inspect.ListType():
            inner = [kind.item_type]
        case inspect.DictType():
            inner = [kind.key_type, kind.value_type]
        case inspect.TupleType():
            inner = list(kind.item_types)
        case inspect.UnionType():
            inner = list(kind.types)
        case _:
            inner = []
    for one in inner:
        yield from parts_of(one)


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_a_body_has_no_optional_fields_and_refuses_unknown_ones(kind: str) -> None:
    for part in parts_of(inspect.type_info(BODIES[kind])):
        if isinstance(part, inspect.StructType):
            assert part.forbid_unknown_fields
            if part.cls.__module__ != "asyncrl.types":  # whose structs are also made by hand
                assert kind in ("HostReply", "HostRequest") or all(field.required for field in part.fields)


@pytest.mark.parametrize(
    "kind", [kind for kind, body in BODIES.items() if body.max_header_bytes == MAX_REQUEST_HEADER_BYTES]
)
def test_numbers_texts_and_lists_of_a_request_have_bounds(kind: str) -> None:
    for part in parts_of(inspect.type_info(BODIES[kind])):
        match part:
            case inspect.IntType():
                assert part.ge is not None and part.le is not None
            case inspect.StrType() | inspect.ListType() | inspect.DictType():
                assert part.max_length is not None
            case _:
                assert not isinstance(part, inspect.AnyType)


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
        if message.kind == "GroupHeader":  # the body of another kind has other fields
            check_group(message.body, message.arrays, group_size=2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header, arrays: header.rewards.pop(), "1 rewards for 2 trajectories"),
        (lambda header, arrays: setattr(header, "lengths", [1, 1]), "lengths do not add up"),
        (lambda header, arrays: setattr(header, "start_version", 4), "older than the version the group started at"),
        (lambda header, arrays: setattr(header, "rewards", [0.0, float("nan")]), "reward nan is not finite"),
        (
            lambda header, arrays: setattr(header, "rewards", [0.0, 1e31]),
            r"reward 1e\+31 is not between -1e\+30 and 1e\+30",
        ),
        (lambda header, arrays: header.parts[0].update(exact=-1e300), "is not between"),
        (lambda header, arrays: arrays[0].fill(-5), "the tokens -5 to -5 are not all in the vocabulary"),
        (lambda header, arrays: arrays.pop(), "expected frames of tokens"),
        (lambda header, arrays: arrays[1].fill(True), "the first token of a trajectory is an action"),
        (lambda header, arrays: arrays[3].fill(NO_VERSION), "a token has a version if and only if"),
        (lambda header, arrays: arrays[2].fill(np.inf), "behavior_logprobs of .*inf; they are nats from -10000 to 0"),
    ],
)
def test_inconsistent_group_is_refused(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    header, arrays = pack_group(make_group(a_lease(), 3))
    change(header, arrays)
    with pytest.raises(ProtocolError, match=reason):
        check_group(header, arrays, group_size=2)


@pytest.mark.parametrize("groups_per_step", [1, 5, 300])
def test_the_largest_headers_that_are_accepted_can_be_sent_for_a_complete_step(
    monkeypatch: pytest.MonkeyPatch, groups_per_step: int
) -> None:
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 1 << 19)
    monkeypatch.setattr(ShardHeader, "max_header_bytes", 1 << 19)
    group = make_group(a_lease(), 0)
    limits = GroupLimits(header_bytes=max_group_header_bytes(groups_per_step))
    accepted, refused = 0, 1 << 19
    while refused - accepted > 1:
        length = (accepted + refused) // 2
        group.trajectories[0].error = "e" * length
        header, block = pack_group(group)
        try:
            check_group(header, block, group_size=2, limits=limits)
            accepted = length
        except ProtocolError as error:
            refused = length
            assert "of each group can be sent for one step; lower generator.group_size" in str(error)
    group.trajectories[0].error = "e" * accepted
    header, block = pack_group(group)
    shard = ShardHeader(groups_per_step, "shard", [header] * groups_per_step)
    message, *_ = encode("r" * 40, shard, seq=1 << 40, arrays=[block] * groups_per_step)
    assert len(message) > (1 << 18), "the bound is not far below what can be sent"
