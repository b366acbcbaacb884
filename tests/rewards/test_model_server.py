"""The reward model's process checks everything that it receives: bounds, errors as answers, peers that are cut off."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import zmq
from test_reward_model import endpoints_at, save_model

from asyncrl.errors import RunError
from asyncrl.rewards.calling import Failed
from asyncrl.rewards.model_server import REPORT_S, ModelServer, RewardModel
from asyncrl.rewards.reward_model import ModelClient
from asyncrl.wire.frames import decode
from asyncrl.wire.messages import Memory
from asyncrl.wire.service_messages import Score
from asyncrl.wire.sockets import bind_router, connect_dealer
from tests.helpers.messages import raw_frames
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
def client(server: ModelServer, tmp_path: Path) -> Iterator[ModelClient]:
    client = ModelClient(endpoints_at(tmp_path / "model"))
    yield client
    client.close()


SOUND = {"prompt": "1", "completions": ["2"], "timeout_s": 60.0, "template_options": {}}


def request(**changes: Any) -> list[bytes]:
    return raw_frames("run", "Score", SOUND | changes)


def request_of(body: bytes) -> list[bytes]:
    """A request with any bytes as its body."""
    header, _, after = raw_frames("run", "Score", "the body")[0].partition(msgspec.msgpack.encode("the body"))
    return [header + body + after]


BAD_REQUESTS = [
    (request_of(msgspec.msgpack.encode({"prompt": "1"})), "Score: Object missing required field `completions`"),
    (request(prompt=5), "Score: Expected `str | array`, got `int` - at `$.prompt`"),
    (request(timeout_s=float("nan")), "Score: Expected `float` >= 0.0 - at `$.timeout_s`"),
    (raw_frames("run", "ReadStatus", {}), "'ReadStatus' is not a request to the reward model"),
]


def test_a_request_that_is_too_large_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Score, "max_header_bytes", 100)
    client = ModelClient(endpoints_at(tmp_path / "nobody"))
    with pytest.raises(RunError, match=r"Score: a header of \d+ bytes, at most 100 can be sent; lower generator"):
        client.score("p" * 100, ["c"], 60.0)
    client.close()


def test_bad_requests_are_answered_and_counted(client: ModelClient, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        for message, text in BAD_REQUESTS:
            peer = connect_dealer(f"ipc://{tmp_path}/model")
            peer.send_multipart(message)
            assert peer.poll(5000), "a bad request is answered"
            header = msgspec.msgpack.decode(peer.recv())
            peer.close()
            assert header["kind"] == "Error" and text in header["body"]["text"]
    assert {entry["event"] for entry in logs} == {"bad message to the reward model"}
    assert [entry["total"] for entry in logs] == [1, 2, 4], "one line for each doubling"
    assert len(client.score("1", ["2"], 60.0)) == 1


def test_requests_are_tokenized_in_portions(
    model: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rewards.model_server.RECEIVE_BYTES_AT_ONCE", 1000)
    server = ModelServer(model, endpoints_at(tmp_path / "model"))
    server.close()
    # Within a process, sent messages have arrived.
    server._server._socket = zmq.Context.instance().socket(zmq.ROUTER)
    server._server._socket.bind("inproc://reward-model")
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.connect("inproc://reward-model")
    try:
        for number in range(1, 12):
            peer.send_multipart(raw_frames("run", "Score", SOUND | {"prompt": "1" * 500}, seq=number))
        portions = [[request.message.seq for request in server._receive()] for _ in range(7)]
        assert portions == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11], []]
    finally:
        peer.close()
        server.close()


def test_the_peak_of_its_memory_is_reported_to_the_replay_queue(model: RewardModel, tmp_path: Path) -> None:
    queue = bind_router(f"ipc://{tmp_path}/queue", "replay queue")
    server = ModelServer(model, replace(endpoints_at(tmp_path / "model"), replay=f"ipc://{tmp_path}/queue"))
    try:
        for now_s in (10.0, 11.0, 10.0 + REPORT_S):
            server._report(now_s)
        for _ in range(2):
            assert queue.poll(5000)
            _, *frames = queue.recv_multipart()
            report = decode("run", frames).body
            assert isinstance(report, Memory) and report.role == "reward_model"
            assert report.peak_memory_bytes > 10e6
        assert not queue.poll(100), "once for each pause"
    finally:
        server.close()
        queue.close()


SOUND_ANSWER = {"scores": [0.5], "errors": [""]}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (raw_frames("run", "Scores", SOUND_ANSWER | {"errors": []}), "gave 1 scores and 0 errors for 1 completions"),
        (raw_frames("run", "Scores", {"scores": [1.0] * 2, "errors": [""] * 2}), "gave 2 scores and 2 errors for 1"),
        (raw_frames("run", "Ok", {"result": {}}), "sent a bad answer: 'Ok' as the answer to 'Score'"),
    ],
)
def test_the_client_believes_no_reply_before_it_is_checked(tmp_path: Path, answer: list[bytes], text: str) -> None:
    router = bind_router(f"ipc://{tmp_path}/model", "reward model")
    client = ModelClient(endpoints_at(tmp_path / "model"))

    def serve() -> None:
        router.send_multipart([router.recv_multipart()[0], *answer])

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(RunError, match=re.escape(text)):
        client.score("1", ["2"], 20.0)
    thread.join(10)
    client.close()
    router.close()


def test_a_refused_request_fails_its_reward(client: ModelClient) -> None:
    with pytest.raises(RunError, match=r"refused a message: Score: Expected"):
        client.score(5, ["2"], 60.0)
    assert len(client.score("1", ["2"], 60.0)) == 1


def test_an_exception_while_scoring_is_named_and_the_server_goes_on(
    server: ModelServer, client: ModelClient, monkeypatch: pytest.MonkeyPatch
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
