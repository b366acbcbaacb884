"""The reward of a model with a score head, which runs in a separate process (model_server)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config.config import Config
from asyncrl.config.sections import Options
from asyncrl.errors import ConfigError, PeerTimeoutError, ProtocolError, RunError
from asyncrl.rewards.calling import Failed
from asyncrl.rewards.table import evaluation_config, reward_names
from asyncrl.util.files import read_json, read_tensor_descriptions
from asyncrl.util.text import after_reasoning
from asyncrl.wire.endpoints import Endpoints

if TYPE_CHECKING:
    from asyncrl.wire.rpc import Connection
    from asyncrl.wire.service_messages import Scores

NAME = "reward_model"
KEY = f"reward_options.{NAME}"
HEADS = ("score", "classifier", "classification_head", "sequence_summary")
"""Names that models use for the score layer."""
WAY_OUT = (
    "give a folder with an AutoModelForSequenceClassification that was trained with num_labels=1, or use a reward "
    "function instead"
)

_client: ModelClient | None = None

_PING_S = 0.5
"""Pause between two probes of the reward model."""


def reward_model(
    completions: list[Any],
    completion_texts: list[str],
    prompts: list[Any],
    time_left_s: float,
    chat_template_kwargs: list[dict[str, Any] | None] | None = None,
    *,
    path: str = "",
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokens_per_batch: int = 16384,
    device: str = "auto",
) -> list[float | Failed]:
    """The score of prompt and completion by a reward model (`AutoModelForSequenceClassification` with one label).

    The model in folder `path` runs in one process for all generators, in `dtype`, on `device` (auto: a GPU if there
    is one), in batches of at most `tokens_per_batch` tokens, including padding. A chat is rendered with the chat
    template of the reward model's tokenizer, with `data.template_options` and the row's; a plain prompt and its
    completion are concatenated. Of an episode it reads the policy's text, as one message. Reasoning (up to the last
    `</think>`, or an open `<think>`) is left out.
    """
    if _client is None:
        raise RunError("no reward model process: the reward workers have no address of it")
    row_options = chat_template_kwargs[0] if chat_template_kwargs else None
    texts = [after_reasoning(text) for text in completion_texts]
    return _client.score(prompts[0], texts, time_left_s, row_options)


def connect(endpoints: Endpoints | None) -> None:
    """Connects `reward_model` to the process at `endpoints.reward_model`; disconnects without such an address."""
    global _client
    if _client is not None:
        _client.close()
    _client = None
    if endpoints is not None and endpoints.reward_model:
        _client = ModelClient(endpoints)


def await_reward_model(endpoints: Endpoints, *, timeout_s: float, should_stop: Callable[[], bool]) -> None:
    """Returns when the process at `endpoints.reward_model` has loaded its model, or on `should_stop()`: loading must
    not count towards the deadlines of rewards. Raises PeerTimeoutError after `timeout_s`."""

    deadline_s = time.monotonic() + timeout_s
    client = ModelClient(endpoints)
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
    return any(NAME in reward_names(one.rewards) for one in (config, evaluation_config(config)))


def model_options(config: Config) -> Options:
    """The options of the reward model, which training and evaluations share."""
    return config.reward_options.get(NAME, {})


def check_reward_model(config: Config) -> None:
    """Checks the model's folder without loading weights. Raises ConfigError when the model cannot score."""
    options = config.reward_options.get(NAME, {})
    check_model_folder(str(options.get("path") or ""))
    tokens = options.get("tokens_per_batch", 1)
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"{KEY}.tokens_per_batch = {tokens!r}: must be at least 1")


def check_failed(config: Config) -> None:
    """Raises ConfigError if completions that the reward model cannot score would have the reward 0."""
    if config.replay.failed == "zero" and NAME in reward_names(config.rewards):
        raise ConfigError(
            "replay.failed = 'zero': most scores of a reward model are below 0, so that a completion without a score "
            "would be the best of its group; use exclude or refund"
        )


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


def _weight_names(folder: Path) -> Iterable[str] | None:
    """Names of the tensors in a folder's safetensors files; None when it has none."""
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return read_json(index, f"{KEY}.path").get("weight_map", {})
    if not file.is_file():
        return None
    return read_tensor_descriptions(file)


MAX_ANSWER_BYTES = 1 << 26


class ModelClient:
    """A connection to the reward model. Create it in the process that uses it: ZeroMQ does not survive a fork."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._peer = f"the reward model process at {endpoints.reward_model}"
        self._endpoints = endpoints
        self._connection: Connection | None = None

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def score(
        self, prompt: Any, completions: list[str], timeout_s: float, template_options: dict[str, Any] | None = None
    ) -> list[float | Failed]:
        """The scores of the completions. Raises PeerTimeoutError when no answer arrives in time, and RunError when the
        request is too large or refused, or the answer cannot be read."""
        from asyncrl.wire.messages import MAX_DURATION_S
        from asyncrl.wire.service_messages import Score  # imports numpy, which most reward workers do not need

        timeout_s = min(max(timeout_s, 0.0), MAX_DURATION_S)
        try:
            connection = self._connected(timeout_s)
            answer = connection.request(
                Score(prompt, completions, timeout_s, template_options or {}), timeout_s=timeout_s
            )
        except PeerTimeoutError as error:
            self.close()  # the process may be on another host when it is asked again
            raise PeerTimeoutError(f"{error} (generator.reward_timeout_s)") from None
        except ProtocolError as error:
            raise RunError(f"{self._peer} cannot be asked: {error}") from None
        scores: Scores = answer.body
        if not len(scores.scores) == len(scores.errors) == len(completions):
            raise RunError(
                f"{self._peer} gave {len(scores.scores)} scores and {len(scores.errors)} errors for "
                f"{len(completions)} completions"
            )
        pairs = zip(scores.scores, scores.errors, strict=True)
        return [Failed(error) if score is None else score for score, error in pairs]

    def _connected(self, timeout_s: float) -> Connection:
        from asyncrl.wire.rpc import Connection, located

        if self._connection is None:
            # Requests without an answer are not worth a delay at the end, and are not sent again: their time is over.
            self._connection = Connection(
                self._endpoints,
                located(self._endpoints, self._endpoints.reward_model, timeout_s=timeout_s),
                "the reward model process",
                strict=True,
                linger_s=0.0,
                max_frame_bytes=MAX_ANSWER_BYTES,
            )
        return self._connection
