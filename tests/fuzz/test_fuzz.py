"""A short run of the fuzzer: nothing that is sent ends, holds up or swells a replay server or its clients."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from asyncrl.errors import ProtocolError
from asyncrl.replay.codec import check_group
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.wire.frames import BODIES, decode
from asyncrl.wire.service_messages import ReceiverMessage
from asyncrl.wire.sockets import connect_dealer
from tests.fuzz.drive import fuzz_clients, fuzz_server
from tests.fuzz.frames import GROUP_SIZE, RUN_ID, answers, requests
from tests.fuzz.mutate import Mutator
from tests.helpers.examples import examples
from tests.helpers.messages import raw_frames

SOUND = requests() | answers()
REASONS = [
    "schema version", "does not have the id of this run", "unknown kind", "is not msgpack", r"exceeds max_\w+_len",
    "frames do not fit the header's list", "frames of arrays, this kind has none",
    "bytes does not hold", "a truth value is neither",
    "no frame holds", "missing required field", "contains unknown field", r"Expected `[\w |]+`(, got| - at)",
    r"Expected `\w+` [<>]=?", "matching regex",
    "of length", "Invalid enum value", "a header of .* are read",
    r"\d+ \w+ for \d+ trajectories", "trajectories are of the members", "expected frames of tokens",
    "lengths do not add up",
    "not all in the vocabulary", "a token has a version if and only if", "older than the version",
    "behavior_logprobs of .* nats from", "the first token of a trajectory is an action",
    "reward .* is not finite", "is not between",
]  # fmt: skip
"""The errors of `decode` and `check_group`; `tests/replay/test_wire.py` has an empty message."""
MIN_MUTANTS, MAX_MUTANTS = 20_000, 1_000_000
"""The limit of a test that draws until it has found every reason."""


def test_every_kind_is_mutated() -> None:
    assert set(SOUND) == set(BODIES)
    for kind, frames in SOUND.items():
        message = decode(RUN_ID, frames)
        assert (message.kind, bool(message.arrays)) == (kind, message.body.has_arrays)


def test_every_reason_to_refuse_a_message_is_reached() -> None:
    """As many messages as it takes: how often a reason comes up changes with every field of a message."""
    mutator, reasons, unreached = Mutator(3), Counter[str](), set(REASONS)
    pool = [*SOUND.values(), *[SOUND["GroupHeader"]] * 16]
    for number in range(MAX_MUTANTS):
        if number >= MIN_MUTANTS and not unreached:
            break
        frames = mutator.mutant(pool)
        try:
            message = decode(RUN_ID, frames)
            if message.kind == "GroupHeader":
                check_group(message.body, message.arrays, group_size=GROUP_SIZE)
        except ProtocolError as error:
            found = [reason for reason in REASONS if re.search(reason, str(error))]
            assert found, f"a reason that the table lacks: {error}"
            reasons.update(found)
            unreached -= set(found)
    assert not unreached, f"messages refused for the other reasons: {reasons}"


@settings(max_examples=examples(500))
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_bytes_are_refused_with_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(RUN_ID, frames)


@pytest.mark.timeout(240)
def test_server_stands_mutated_messages() -> None:
    report = fuzz_server(17_000, 11, lambda _: None)
    assert report.outcomes["bad_messages"] > 10_000
    assert report.outcomes["step"] > 3, "the run went on all the while"


@pytest.mark.timeout(240)
def test_clients_stand_mutated_answers() -> None:
    report = fuzz_clients(3_000, 11, lambda _: None)
    for outcome in ("leases", "shard", "committed", "evaluation"):
        assert report.outcomes[outcome] > 5, "sound answers are found among the others"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_message_ends_or_holds_up_the_sender_of_weights(tmp_path: Path) -> None:
    address, names, tensor = (
        f"ipc://{tmp_path}/weights",
        [kind.__name__ for kind in ReceiverMessage.__subclasses__()],
        torch.arange(1000.0),
    )
    manifest = WeightManifest.of([("a", tensor.dtype, tensor.shape)])
    options = {"transport": "gloo", "timeout_s": 5.0, "run_id": RUN_ID}
    sender = WeightSender(address, manifest, expected_generators=1, **options)
    receiver = WeightReceiver(address, rank=1, max_bytes=manifest.num_bytes, **options)
    receiver.start()
    receiver.engine_is_up()
    mutator, pool = Mutator(7), [SOUND[name] for name in names if name != "Join"]
    try:
        with capture_logs() as logs:
            for version in range(5):
                for number in range(20):
                    peer = connect_dealer(address, linger_s=1.0)
                    join = raw_frames(RUN_ID, "Join", {"rank": 2 + number, "device": "cpu", "host": "host-1"})
                    for frames in (join, *(mutator.mutant(pool) for _ in range(20))):
                        peer.send_multipart(frames)
                    peer.close()
                sender._membership.await_members(1, 60.0)
                sender.send(version, [("a", tensor + version)])
                sender.wait()
                deadline_s = time.monotonic() + 60.0
                while (staged := receiver.staged()) is None:
                    assert time.monotonic() < deadline_s, "the generator gets no weights"
                    time.sleep(0.01)
                assert staged.version == version
                assert torch.equal(staged.tensors[0][1], tensor + version)
                receiver.loaded(staged)
        assert sender._channel.errors.total() > 1000
        assert not [entry for entry in logs if entry["log_level"] == "error"]
    finally:
        receiver.close()
        sender.close()
