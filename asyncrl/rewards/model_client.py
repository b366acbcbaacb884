"""The client of the reward model's process."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import PeerTimeoutError, ProtocolError, RunError
from asyncrl.rewards.calling import Failed
from asyncrl.wire.bounds import MAX_DURATION_S
from asyncrl.wire.directory import located
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.rpc import Connection
from asyncrl.wire.service_messages import Score, Scores

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
