"""The reward model's process believes nothing that it is sent: bounds, errors as answers, peers that are cut off."""

from __future__ import annotations

import re
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import structlog
import zmq
from test_reward_model import endpoints_at, save_model

from asyncrl.errors import ProtocolError, RunError, StrangerError
from asyncrl.rewards.calling import Failed
from asyncrl.rewards.model_server import ModelServer, RewardModel
from asyncrl.rewards.reward_model import _Client, read_request
from asyncrl.wire.bad_peers import MAX_BAD_MESSAGES
from asyncrl.wire.sockets import bind_router, connect_dealer
from tests.helpers.serving import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    return RewardModel(str(save_model(tmp_path_factory.mktemp("reward_model"))), device="cpu")


@pytest.fixture
def server(model: RewardModel, tmp_path: Path) -> Iterator[ModelServer]:
    """A server in a thread, at `tmp_path/model`."""
    stop = threading.Event()
    server = ModelServer(model, endpoints_at(tmp_path / "model"))
    with serving(lambda: server.serve(stop.is_set), stop):
        yield server
    server.close()


@pytest.fixture
def client(server: ModelServer, tmp_path: Path) -> Iterator[_Client]:
    client = _Client(endpoints_at(tmp_path / "model"))
    yield client
    client.close()


RUN = memoryview(b"run")
SOUND = {"id": 1, "prompt": "1", "completions": ["2"], "timeout_s": 60.0}
BAD_REQUESTS = [
    (b"", "request is not msgpack"),
    (b"\xc1", "request is not msgpack"),
    (b"\x91" * 8_000_000, "request is not msgpack"),
    (b"\xdc\xff\xff" + b"\x94\x90\x90\x90\x90" * 65535, "request is not msgpack: more than 262144 values"),
    (b"\x90" * 2, "request is not msgpack"),
    (msgpack.packb([1]), "request: Input should be a valid dictionary"),
    (msgpack.packb({"id": 1}), "request: prompt: Field required"),
    (msgpack.packb(SOUND | {"id": "x"}), "request: id: Input should be a valid integer"),
    (msgpack.packb(SOUND | {"id": 0}), "request: id: Input should be greater than 0"),
    (msgpack.packb(SOUND | {"prompt": 5}), "request: prompt"),
    (msgpack.packb(SOUND | {"prompt": ["text"]}), "request: prompt"),
    (msgpack.packb(SOUND | {"completions": "2"}), "request: completions: Input should be a valid list"),
    (msgpack.packb(SOUND | {"completions": [2]}), "request: completions.0: Input should be a valid string"),
    (msgpack.packb(SOUND | {"completions": ["2"] * 65537}), "65537 exceeds max_array_len"),
    (msgpack.packb(SOUND | {"timeout_s": float("nan")}), "request: timeout_s: Input should be a finite number"),
    (msgpack.packb(SOUND | {"timeout_s": 1e9}), "request: timeout_s: Input should be less than or equal to 3600"),
    (msgpack.packb(SOUND | {"more": 1}), "request: more: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("message", "text"), BAD_REQUESTS)
def test_a_bad_request_is_refused_and_takes_little_memory(message: bytes, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=re.escape(text)):
            read_request([RUN, memoryview(message)], "run")
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


def test_a_request_has_two_frames_and_an_upper_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for frames in ([RUN], [RUN] * 3):
        with pytest.raises(ProtocolError, match=r"request of . frames, expected two"):
            read_request(frames, "run")
    monkeypatch.setattr("asyncrl.rewards.reward_model.MAX_REQUEST_BYTES", 100)
    with pytest.raises(ProtocolError, match="a request of 101 bytes, at most 100 are read"):
        read_request([RUN, memoryview(b"x" * 101)], "run")


def test_a_request_that_is_too_large_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.rewards.reward_model.MAX_REQUEST_BYTES", 100)
    with pytest.raises(RunError, match=r"are \d+ bytes, the reward model process reads at most 100: lower generator"):
        _Client(endpoints_at(tmp_path / "nobody")).score("p" * 100, ["c"], 60.0)


def test_bad_requests_are_answered_and_counted(client: _Client, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        for message, text in BAD_REQUESTS:
            peer = connect_dealer(f"ipc://{tmp_path}/model")
            peer.send_multipart([b"run", message])
            assert peer.poll(5000), "a bad request is answered"
            reply = msgpack.unpackb(peer.recv())
            peer.close()
            assert reply["id"] == 0 and text in reply["refusal"]
    assert [entry["event"] for entry in logs] == ["bad request to the reward model"] * len(BAD_REQUESTS)
    assert [entry["total"] for entry in logs] == list(range(1, len(BAD_REQUESTS) + 1))
    assert len(client.score("1", ["2"], 60.0)) == 1


def test_a_peer_of_bad_requests_is_cut_off_and_nobody_else(
    server: ModelServer, client: _Client, tmp_path: Path
) -> None:
    peer = connect_dealer(f"ipc://{tmp_path}/model")
    for _ in range(MAX_BAD_MESSAGES + 1):
        peer.send_multipart([b"run", b"rubbish"])
        assert peer.poll(5000), "a bad request is answered"
        peer.recv()
    for message in (b"rubbish", msgpack.packb(SOUND)):
        peer.send_multipart([b"run", message])
    assert not peer.poll(300), "whatever it sends now"
    peer.close()
    assert len(client.score("1", ["2"], 60.0)) == 1


@pytest.mark.parametrize("frames", [[], [b""], [b"ruN", b"x"], [b"x" * 1000, b"x"], [b"\xc1" * 3, b"x"]])
def test_a_request_without_the_run_id_is_a_strangers(frames: list[bytes]) -> None:
    with pytest.raises(StrangerError, match="does not have the id of this run"):
        read_request([memoryview(frame) for frame in frames], "run")


def test_a_stranger_gets_no_answer_of_the_reward_model(client: _Client, tmp_path: Path) -> None:
    stranger = connect_dealer(f"ipc://{tmp_path}/model")
    for frames in ([b"another-run", msgpack.packb(SOUND)], [msgpack.packb(SOUND)], [b"rubbish"]):
        stranger.send_multipart(frames)
    assert not stranger.poll(300)
    stranger.close()
    assert len(client.score("1", ["2"], 60.0)) == 1


def test_requests_are_tokenized_in_portions(
    model: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rewards.model_server.RECEIVE_BYTES_AT_ONCE", 1000)
    server = ModelServer(model, endpoints_at(tmp_path / "model"))
    server.close()
    # Within a process, what is sent has arrived.
    server._socket = zmq.Context.instance().socket(zmq.ROUTER)
    server._socket.bind("inproc://reward-model")
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.connect("inproc://reward-model")
    try:
        for number in range(1, 12):
            peer.send_multipart([b"run", msgpack.packb(SOUND | {"id": number, "prompt": "1" * 500})])
        portions = [[request.id for request in server._receive()] for _ in range(7)]
        assert portions == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11], []]
    finally:
        peer.close()
        server.close()


SOUND_REPLY = {"id": 1, "scores": [0.5], "errors": [""], "refusal": ""}


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ([b"\xc1"], "sent a malformed reply: reply is not msgpack"),
        ([msgpack.packb([1])], "sent a malformed reply: reply: Input should be a valid dictionary"),
        ([msgpack.packb({"id": 1})], "sent a malformed reply: reply: scores: Field required"),
        ([msgpack.packb(SOUND_REPLY | {"scores": [float("nan")]})], "sent a malformed reply: reply: scores.0"),
        ([msgpack.packb(SOUND_REPLY | {"errors": []})], "sent a malformed reply: reply: 1 scores and 0 errors"),
        ([msgpack.packb(SOUND_REPLY | {"scores": [1.0] * 2, "errors": [""] * 2})], "gave 2 scores for 1 completions"),
        ([msgpack.packb(SOUND_REPLY)] * 2, "sent a malformed reply: reply of 2 frames, expected one"),
    ],
)
def test_the_client_believes_no_reply_before_it_is_checked(tmp_path: Path, reply: list[bytes], text: str) -> None:
    router = bind_router(f"ipc://{tmp_path}/model", "reward model")
    client = _Client(endpoints_at(tmp_path / "model"))

    def answer() -> None:
        router.send_multipart([router.recv_multipart()[0], *reply])

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(RunError, match=re.escape(text)):
        client.score("1", ["2"], 20.0)
    thread.join(10)
    client.close()
    router.close()


def test_a_refused_request_fails_its_reward(client: _Client) -> None:
    with pytest.raises(RunError, match=r"refused a request: request: prompt"):
        client.score(5, ["2"], 60.0)
    assert len(client.score("1", ["2"], 60.0)) == 1


def test_an_exception_while_scoring_is_named_and_the_server_goes_on(
    server: ModelServer, client: _Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(texts: list[list[int]]) -> list[float]:
        raise IndexError("index out of range in self")

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
        patched.setattr(server.model, "score", fail)
        (failed,) = client.score("1", ["2"], 60.0)
    assert failed == Failed("the reward model failed: IndexError: index out of range in self")
    assert logs[-1]["event"] == "reward model failed" and logs[-1]["exc_info"], "with its traceback"
    assert isinstance(client.score("1", ["2"], 60.0)[0], float)


def test_a_token_outside_the_models_vocabulary_is_no_text_to_score(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", vocabulary=20)
    model = RewardModel(str(folder), device="cpu")
    assert model.tokenize("1", "2") == [4, 5]
    with pytest.raises(ValueError, match=r"token 38 of the reward model's tokenizer .* outside the model's vocabulary"):
        model.tokenize("1", "x")
