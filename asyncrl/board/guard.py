"""The guard of the board: answers only its own address, with the token in it, and only requests to read."""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")
"""Names under which a browser may ask. Another one is that of a site whose name leads here (DNS rebinding)."""
METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes a request on, without the token in its path, if it is one to read and has the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = TrustedHostMiddleware(self._check_token, allowed_hosts=HOSTS, www_redirect=False)
        self._inner = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, _with_headers(send))

    async def _check_token(self, scope: Scope, receive: Receive, send: Send) -> None:
        token, slash, rest = scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(errors="replace"), self._token):
            answer = JSONResponse({"error": "not found; use the address that `asyncrl board` has printed"}, 404)
        elif scope["method"] not in METHODS:
            answer = JSONResponse({"error": f"{scope['method']}: the board is read only"}, 405)
        elif not slash:
            answer = RedirectResponse(f"/{token}/")
        else:
            await self._inner({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)
            return
        await answer(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return send_with_headers
