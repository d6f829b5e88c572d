"""Who may ask: only a page of this server, by the address that holds its token.

The token in the address keeps out other users of the machine and other pages of the browser. The
Host header must name this server, so that no foreign name can be pointed at it, and a request that
another page has made is turned down whatever it knows.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "allowed_host"]

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """Let through what comes from the page itself, below ``/TOKEN/``, and answer the rest."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self.app, self.token, self.host, self.port = app, token, host, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from starlette.responses import PlainTextResponse

        async def send_with_headers(part: Message) -> None:
            if part["type"] == "http.response.start":
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                part["headers"] = [*part["headers"], *more]
            await send(part)

        refusal = self._refusal(scope)
        if refusal is not None:
            answer = PlainTextResponse(f"factormix: {refusal}\n", status_code=403)
            await answer(scope, receive, send_with_headers)
            return
        # What follows sees paths without the token.
        inner = dict(scope)
        inner["path"] = scope["path"][len(self.token) + 1 :] or "/"
        inner["root_path"] = ""
        await self.app(inner, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        """Say why a request is turned down; None if it is not."""
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        host = headers.get("host", "")
        if not allowed_host(host, self.host, self.port):
            return "this server is not known under that name: open the address that it printed."
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "the request came from another page: open the address that was printed."
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            return "the request came from another page: open the address that was printed."
        first = scope["path"].partition("/")[2].partition("/")[0]
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            return (
                "the address lacks its token: open the whole address that `factormix explore`"
                " printed."
            )
        return None


def allowed_host(header: str, host: str, port: int) -> bool:
    """Tell whether a Host header names this server.

    Numeric addresses do, where the server listens to more than itself: only a name can be made to
    point elsewhere.
    """
    name, _, number = header.rpartition(":")
    if not number.isdigit() or int(number) != port:
        # Without a port it is 80.
        if port != 80 or ":" in header.rpartition("]")[2]:
            return False
        name = header
    name = name.strip("[]").lower()
    if name in (host.lower(), "localhost", "127.0.0.1", "::1"):
        return True
    if not _everywhere(host):
        return False
    return _numeric(name) or name == socket.gethostname().lower()


def _everywhere(host: str) -> bool:
    return _numeric(host) and ipaddress.ip_address(host).is_unspecified


def _numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
