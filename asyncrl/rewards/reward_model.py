"""The reward of a model with a score head: the reward worker's client of its process (model_server), and the messages.

Messages are msgpack, checked on receipt. A request is the run id and {"id", "prompt": text or messages,
"completions": [text, ...], "timeout_s"}; a reply is {"id", "scores": [number or None, ...], "errors": [text, ...],
"refusal": text}, with the id 0 and a refusal when the request is malformed.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgpack
import zmq
from pydantic import ConfigDict, FailFast, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.config import Config
from asyncrl.errors import ConfigError, PeerTimeoutError, ProtocolError, RunError, StrangerError
from asyncrl.rewards.calling import Failed, text_of
from asyncrl.rewards.table import reward_names
from asyncrl.util.files import read_json, read_tensor_descriptions
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.sockets import connect_dealer
from asyncrl.wire.unpack import check, unpack

MAX_REQUEST_BYTES = 1 << 26
MAX_REPLY_BYTES = 1 << 26
MAX_ITEMS = 1 << 16
"""Most completions of a request, and most messages of a chat."""
MAX_VALUES = 1 << 18
"""Most values in all lists and maps of a request."""
MAX_TIMEOUT_S = 3600.0
UNREAD = 0
"""Stands for the id in the reply to a refused request."""


Score = Annotated[float, Field(allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid", strict=True))
class RequestBody(TypedDict):
    """A request to score completions of one prompt."""

    id: Annotated[int, Field(gt=UNREAD, le=1 << 62)]
    """Unique among the requests of its sender."""
    prompt: str | list[dict[str, Any]]
    """Text or messages."""
    completions: Annotated[list[str], FailFast()]
    timeout_s: Annotated[float, Field(ge=0.0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid", strict=True))
class ReplyBody(TypedDict):
    """The scores of a request, or its refusal."""

    id: Annotated[int, Field(ge=UNREAD, le=1 << 62)]
    scores: Annotated[list[Score | None], FailFast()]
    """The score of each completion; None with an error."""
    errors: Annotated[list[str], FailFast()]
    """The error of each completion; "" with a score."""
    refusal: str
    """Why the request was not read; "" with an id."""


_REQUEST, _REPLY = TypeAdapter(RequestBody), TypeAdapter(ReplyBody)


def read_request(frames: Sequence[memoryview], run_id: str) -> RequestBody:
    """The request in a message, whose first frame is the run id. Raises ProtocolError that names the fault, and
    StrangerError, before anything is unpacked, when the run id is wrong."""
    expected = run_id.encode()
    if not frames or frames[0].nbytes != len(expected) or not hmac.compare_digest(bytes(frames[0]), expected):
        raise StrangerError("the request does not have the id of this run")
    if len(frames) != 2:
        raise ProtocolError(f"request of {len(frames)} frames, expected two")
    return check(_unpack(frames[1], "request", MAX_REQUEST_BYTES), _REQUEST, "request")


def read_reply(frames: Sequence[memoryview]) -> ReplyBody:
    """The reply in a message. Raises ProtocolError that names the fault."""
    if len(frames) != 1:
        raise ProtocolError(f"reply of {len(frames)} frames, expected one")
    reply: ReplyBody = check(_unpack(frames[0], "reply", MAX_REPLY_BYTES), _REPLY, "reply")
    if len(reply["scores"]) != len(reply["errors"]):
        raise ProtocolError(f"reply: {len(reply['scores'])} scores and {len(reply['errors'])} errors")
    return reply


def _unpack(frame: memoryview, what: str, max_bytes: int) -> Any:
    return unpack(
        frame, what, max_bytes=max_bytes, max_values=MAX_VALUES, max_items=MAX_ITEMS, max_characters=max_bytes
    )


NAME = "reward_model"
KEY = f"reward_options.{NAME}"
HEADS = ("score", "classifier", "classification_head", "sequence_summary")
"""Names that models use for the score layer."""
WAY_OUT = (
    "give a folder with an AutoModelForSequenceClassification that was trained with num_labels=1, or use a reward "
    "function instead"
)

_client: _Client | None = None

_PING_S = 0.5
"""Pause between two probes of the reward model."""


def reward_model(
    completions: list[Any],
    prompts: list[Any],
    time_left_s: float,
    *,
    path: str = "",
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokens_per_batch: int = 16384,
    device: str = "auto",
) -> list[float | Failed]:
    """The score of prompt and completion by a reward model (`AutoModelForSequenceClassification` with one label).

    The model in folder `path` runs in one process for all generators, in `dtype`, on `device` (auto: a GPU if there
    is one), in batches of at most `tokens_per_batch` tokens, including padding. A chat is rendered with the chat
    template of the reward model's tokenizer; a plain prompt and its completion are concatenated.
    """
    if _client is None:
        raise RunError("no reward model process: the reward workers have no address of it")
    return _client.score(prompts[0], [text_of(completion) for completion in completions], time_left_s)


def connect(endpoints: Endpoints | None) -> None:
    """Connects `reward_model` to the process at `endpoints.reward_model`; disconnects without such an address."""
    global _client
    if _client is not None:
        _client.close()
    _client = _Client(endpoints) if endpoints is not None and endpoints.reward_model else None


def await_reward_model(endpoints: Endpoints, *, timeout_s: float, should_stop: Callable[[], bool]) -> None:
    """Returns when the process at `endpoints.reward_model` has loaded its model, or on `should_stop()`: loading must
    not count towards the deadlines of rewards. Raises PeerTimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    client = _Client(endpoints)
    try:
        while not should_stop():
            try:
                client.score("", [], _PING_S)
                return
            except PeerTimeoutError:
                if time.monotonic() > deadline_s:
                    raise PeerTimeoutError(
                        f"the reward model process at {endpoints.reward_model} was not up within {timeout_s:g} s "
                        "(launch.start_timeout_s)"
                    ) from None
    finally:
        client.close()


def uses_reward_model(config: Config) -> bool:
    """True if the run needs the process of `model_server.run_reward_model`."""
    return NAME in reward_names(config.rewards)


def check_reward_model(config: Config) -> None:
    """Checks the model's folder without loading weights. Raises ConfigError when the model cannot score."""
    options = config.reward_options.get(NAME, {})
    check_model_folder(str(options.get("path") or ""))
    tokens = options.get("tokens_per_batch", 1)
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"{KEY}.tokens_per_batch = {tokens!r}: must be at least 1")


def check_model_folder(path: str) -> None:
    """Raises ConfigError, naming reward_options.reward_model.path, unless the folder holds a model with one score."""
    folder = Path(path)
    if not path:
        raise ConfigError(f"{KEY}.path: required when rewards uses {NAME}; {WAY_OUT}")
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{KEY}.path = {path!r}: there is no {name}; {WAY_OUT}")
    settings = read_json(folder / "config.json", f"{KEY}.path")
    labels = len(settings["id2label"]) if "id2label" in settings else settings.get("num_labels", 2)
    kinds = settings.get("architectures") or []
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ConfigError(f"{KEY}.path = {path!r}: a {', '.join(kinds) or 'model of unknown kind'}; {WAY_OUT}")
    if labels != 1:
        raise ConfigError(f"{KEY}.path = {path!r}: its head has {labels} labels, a reward is 1 number; {WAY_OUT}")
    names = _weight_names(folder)
    if names is None:
        raise ConfigError(f"{KEY}.path = {path!r}: there is no model.safetensors; save it in that format; {WAY_OUT}")
    if not any(part in HEADS for name in names for part in name.split(".")):
        raise ConfigError(
            f"{KEY}.path = {path!r}: its weights have no score head (such as score.weight), so scores would be "
            f"random; {WAY_OUT}"
        )


class _Client:
    """A connection to the reward model. Create it in the process that uses it: ZeroMQ does not survive a fork."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._address = endpoints.reward_model
        self._run_id = endpoints.run_id.encode()
        self._socket = connect_dealer(self._address, keys=endpoints.keys, linger_s=0.0, max_frame_bytes=MAX_REPLY_BYTES)
        self._last = 0

    def close(self) -> None:
        self._socket.close()

    def score(self, prompt: Any, completions: list[str], timeout_s: float) -> list[float | Failed]:
        """The scores of the completions. Raises PeerTimeoutError when no reply arrives in time, and RunError when the
        request is too large or refused, or the reply cannot be read."""
        self._last += 1
        timeout_s = min(max(timeout_s, 0.0), MAX_TIMEOUT_S)
        deadline_s = time.monotonic() + timeout_s
        request = {"id": self._last, "prompt": prompt, "completions": completions, "timeout_s": timeout_s}
        packed = cast(bytes, msgpack.packb(request))
        if len(packed) > MAX_REQUEST_BYTES:
            raise RunError(
                f"prompt and completions are {len(packed)} bytes, the reward model process reads at most "
                f"{MAX_REQUEST_BYTES}: lower generator.group_size or generator.max_new_tokens"
            )
        try:
            self._socket.send_multipart([self._run_id, packed], zmq.DONTWAIT)
        except zmq.Again:
            raise PeerTimeoutError(
                f"the reward model process at {self._address} takes no more requests, or refused the keys of this one"
            ) from None
        while self._socket.poll(max(0, round((deadline_s - time.monotonic()) * 1000))):
            reply = self._receive()
            if reply["id"] == UNREAD:
                raise RunError(f"the reward model process at {self._address} refused a request: {reply['refusal']}")
            if reply["id"] != self._last:
                continue  # a late reply to a request that timed out
            if len(reply["scores"]) != len(completions):
                raise RunError(
                    f"the reward model process at {self._address} gave {len(reply['scores'])} scores for "
                    f"{len(completions)} completions"
                )
            pairs = zip(reply["scores"], reply["errors"], strict=True)
            return [Failed(error) if score is None else score for score, error in pairs]
        raise PeerTimeoutError(
            f"the reward model process at {self._address} did not answer within {timeout_s:.1f} s "
            "(generator.reward_timeout_s)"
        )

    def _receive(self) -> ReplyBody:
        frames = self._socket.recv_multipart(copy=False)
        try:
            return read_reply([frame.buffer for frame in frames])
        except ProtocolError as error:
            raise RunError(f"the reward model process at {self._address} sent a malformed reply: {error}") from None


def _weight_names(folder: Path) -> Iterable[str] | None:
    """Names of the tensors in a folder's safetensors files; None when it has none."""
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return read_json(index, f"{KEY}.path").get("weight_map", {})
    if not file.is_file():
        return None
    return read_tensor_descriptions(file)
