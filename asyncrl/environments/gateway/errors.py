"""What the gateway answers to a request that it does not serve."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import AsyncrlError


class GatewayError(AsyncrlError):
    """A request that is not served: an HTTP status, and an error in the form of the OpenAI API."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


class BadRequestError(GatewayError):
    """The request is wrong, or asks for what cannot be trained."""

    status, kind = 400, "invalid_request_error"


class WrongKeyError(GatewayError):
    """The request has not the key of its episode."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class EpisodeOverError(GatewayError):
    """The episode has ended, or never began."""

    status, kind, code = 410, "invalid_request_error", "episode_over"


class WindowFullError(GatewayError):
    """The conversation does not fit the engine's window. Clients know the code and the words."""

    status, kind, code = 400, "invalid_request_error", "context_length_exceeded"


class TurnsUsedError(GatewayError):
    """The episode has had all its turns."""

    status, kind, code = 400, "invalid_request_error", "max_turns"
