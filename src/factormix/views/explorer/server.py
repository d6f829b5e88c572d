"""Serve the page and its API on this machine, at an address that nobody can guess.

Only a page of this server may ask. The token in the address keeps out other users of the machine
and other pages of the browser. The Host header must name this server, so that no foreign name can
be pointed at it. Requests made by other pages are refused even if they have the token.
"""

from __future__ import annotations

import errno
import inspect
import ipaddress
import math
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from factormix.errors import InputError, input_error, require_package
from factormix.views.explorer import api
from factormix.views.explorer.session import NotReady, Session

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
EVERYWHERE = ("0.0.0.0", "::")
"""Hosts by which a server listens to other machines."""


def check_packages() -> None:
    """Raise an error if the packages of the explorer are not installed."""
    for module in ("starlette", "uvicorn"):
        require_package(module, "explore")


class Server:
    """A server that holds its port from the start, so its address is known before it runs."""

    def __init__(self, session: Session, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen at ``host`` and ``port``; port 0 takes a free one."""
        self.session, self.host = session, host
        self.token = secrets.token_urlsafe(16)
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._uvicorn: uvicorn.Server | None = None

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        name = "127.0.0.1" if self.host in EVERYWHERE else self.host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until the process gets a signal to end, or ``stop`` is called."""
        import uvicorn

        settings = uvicorn.Config(
            make_app(self.session, self.token, self.host, self.port),
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            # A page that is still open must not keep the process from ending.
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(settings)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self.session.close()
            self._socket.close()

    def stop(self) -> None:
        """End ``serve`` from another thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    fault = f"the host {host!r} is not known ({{reason}}): leave --host out."
    with input_error(fault, socket.gaierror):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(
                f"the host {host!r} is not an address of this machine: leave --host out."
            ) from error
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}): name another --port, or"
            " leave it out for a free one."
        ) from error


def make_app(session: Session, token: str, host: str, port: int) -> ASGIApp:
    """Make the application that serves a session below ``/token/``."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    def make_route(path: str, answer: Callable[..., bytes]) -> Route:
        posted = "body" in inspect.signature(answer).parameters

        async def respond(request: Request) -> Response:
            try:
                given = read_query(answer, request.query_params) | request.path_params
                if posted:
                    given["body"] = await _read_body(request, session)
                found = await run_in_threadpool(answer, session, **given)
            except NotReady as error:
                # The page asks again for what is not ready.
                return JSONResponse({"later": str(error)}, status_code=202)
            except InputError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            except ClientDisconnect:
                # A window that was closed in the middle of a request needs no answer.
                return Response(status_code=499)
            except Exception as error:
                text = f"the explorer could not answer ({type(error).__name__}: {error})."
                print("factormix:", " ".join(text.split()), file=sys.stderr, flush=True)
                return JSONResponse({"error": text}, status_code=500)
            return Response(found, media_type="application/octet-stream")

        return Route(path, respond, methods=["POST" if posted else "GET"])

    def send_state(request: Request) -> Response:
        return JSONResponse(api.to_json(session.state()))

    def refuse_path(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "there is no such page."}, status_code=404)

    page = StaticFiles(packages=[("factormix.views.explorer", "static")], html=True)
    routes = [make_route(path, answer) for path, answer in api.ANSWERS.items()]
    routes.append(Route("/api/state", send_state))
    app = Starlette(
        routes=[*routes, Mount("/", page)],
        exception_handlers={404: refuse_path, 405: refuse_path},
    )
    return Guard(app, token, host, port)


def read_query(answer: Callable[..., bytes], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of an answer that a query gives, in the types of their defaults."""
    given = dict[str, Any]()
    for name, parameter in inspect.signature(answer).parameters.items():
        if name not in query or parameter.default is parameter.empty:
            continue
        text, given[name] = query[name], query[name]
        if isinstance(parameter.default, float):
            given[name] = math.nan
            # What is no number lies outside of every range.
            with suppress(ValueError):
                given[name] = float(text)
        elif not isinstance(parameter.default, str):
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise InputError(f"{name} must be a whole number, not {text[:20]!r}.")
            given[name] = int(text)
    return given


async def _read_body(request: Request, session: Session) -> bytes:
    """Read the body of a request, as long as the model allows."""
    body = bytearray()
    async for part in request.stream():
        body += part
        session.newest.check_length(len(body))
    return bytes(body)


class Guard:
    """Pass on requests of the page itself, below ``/TOKEN/``, and refuse all others."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self.app, self.token, self.host, self.port = app, token, host, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse one request, or pass it on."""
        from starlette.responses import PlainTextResponse

        async def send_with_headers(part: Message) -> None:
            if part["type"] == "http.response.start":
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                part["headers"] = [*part["headers"], *more]
            await send(part)

        refusal = self._find_refusal(scope)
        if refusal is not None:
            response = PlainTextResponse(f"factormix: {refusal}\n", status_code=403)
            await response(scope, receive, send_with_headers)
            return
        # The application sees paths without the token.
        path = scope["path"][len(self.token) + 1 :] or "/"
        inner = {**scope, "path": path, "root_path": ""}
        await self.app(inner, receive, send_with_headers)

    def _find_refusal(self, scope: Scope) -> str | None:
        """Return why a request is refused; None if it is not."""
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        host = headers.get("host", "")
        if not is_host_allowed(host, self.host, self.port):
            return "this server is not known under that name: open the address that it printed."
        origin = headers.get("origin")
        foreign_site = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        foreign_request = foreign_site and headers.get("sec-fetch-mode") != "navigate"
        if foreign_request or origin not in (None, f"http://{host}"):
            return "the request came from another page: open the address that was printed."
        first = scope["path"].partition("/")[2].partition("/")[0]
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            return (
                "the address lacks its token: open the whole address that `factormix explore`"
                " printed."
            )
        return None


def is_host_allowed(header: str, host: str, port: int) -> bool:
    """Return whether a Host header names this server.

    If the server listens to other machines, any numeric address is allowed: only a name can be
    made to point elsewhere.
    """
    try:
        parts = urlsplit(f"//{header}")
        # A header without a port means port 80.
        name, number = parts.hostname or "", parts.port or 80
    except ValueError:
        return False
    if number != port:
        return False
    if name in (host.lower(), "localhost", "127.0.0.1", "::1"):
        return True
    if host not in EVERYWHERE:
        return False
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return name == socket.gethostname().lower()
