"""Serves the OpenAI API on loopback, with a base URL and a key for each episode.

GET  /e/EPISODE/v1/models
POST /e/EPISODE/v1/chat/completions     also with "stream"
POST /e/EPISODE/v1/reward               {"reward": 1.0, "parts": {...}}, for programs that do not return one
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog
from aiohttp import web

from asyncrl.environments.gateway.openai_api import (
    MODEL,
    Access,
    GatewayError,
    TurnAnswer,
    chat_chunks,
    chat_completion,
    chat_request,
    models,
    read_body,
    sampling_of,
)
from asyncrl.environments.gateway.session import Session
from asyncrl.wire.endpoints import LOOPBACK

log = structlog.get_logger()

MAX_BODY_BYTES = 64 << 20
CLOSE_S = 1.0
"""Time for responses in progress when the gateway closes."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """The HTTP server of an environment host; `start` opens its port."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[Session, str]] = {}
        """The session and the key of each episode in progress."""
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._noted: set[str] = set()
        """Sampling parameters that were ignored, and named in the log."""

    async def start(self) -> None:
        """Listens at a free port of the loopback interface, to which clients in this process and its children go
        without a proxy. Raises OSError."""
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK)))
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        routes = {"chat/completions": self._chat, "reward": self._reward}
        app.router.add_get("/e/{episode}/v1/models", self._models)
        for path, handler in routes.items():
            app.router.add_post(f"/e/{{episode}}/v1/{path}", handler)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self._url = f"http://{LOOPBACK}:{port}"

    async def close(self) -> None:
        """Closes the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: Session) -> Access:
        """Serves an episode, until `end`."""
        key = secrets.token_urlsafe(16)
        self._sessions[session.episode] = session, key
        return Access(f"{self._url}/e/{session.episode}/v1", key)

    def end(self, session: Session) -> None:
        """Requests for the episode are refused from now on."""
        self._sessions.pop(session.episode, None)

    def _session(self, request: web.Request) -> Session:
        episode = request.match_info["episode"]
        if episode not in self._sessions:
            raise GatewayError(f"episode {episode} is over, or never began", status=410, code="episode_over")
        session, key = self._sessions[episode]
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), key.encode()):
            raise GatewayError(f"episode {episode} has another key", status=401, code="invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return _json(models())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, content = self._session(request), await request.read()
        body = read_body(content)
        self._note(sampling_of(body))
        answer = await session.complete(chat_request(body, content, request.headers, session.template_options))
        model = str(body.get("model") or MODEL)
        if body.get("stream"):
            options = body.get("stream_options") or {}
            events = chat_chunks(session.episode, answer, model=model, with_usage=bool(options.get("include_usage")))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                await response.write(event)
        else:
            with_tokens = bool(body.get("return_token_ids"))
            response = _json(chat_completion(session.episode, answer, model=model, with_tokens=with_tokens))
        return await _delivered(session, answer, response, request)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = read_body(await request.read())
        session.posted = {"score": body.get("reward"), **(body.get("parts") or {})}
        return _json({"object": "reward"})

    def _note(self, names: Sequence[str]) -> None:
        """Says once of each sampling parameter that it is ignored."""
        if new := sorted(set(names) - self._noted):
            self._noted |= set(new)
            log.warning("sampling parameters of an agent are ignored, those of the run hold", parameters=new)


async def _delivered(
    session: Session, answer: TurnAnswer, response: web.StreamResponse, request: web.Request
) -> web.StreamResponse:
    """Completes the response, and notes that the client has it. Raises ConnectionResetError if it has disconnected."""
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    session.delivered(answer)
    return response


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answers with an error in the form of the API."""
    try:
        return await handler(request)
    except GatewayError as error:
        return _json(error.body(), error.status)
    except web.HTTPException as error:
        refused = GatewayError(f"{request.method} {request.path}: {error.reason}")
        return _json(refused.body(), error.status)
