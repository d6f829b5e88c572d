"""Serve the page and its API on this machine, at an address that nobody can guess.

Only a page of this server may ask. The token in the address keeps out other users of the machine
and other pages of the browser. The Host header must name this server, so that no foreign name can
be pointed at it. Requests made by other pages are refused even if they have the token.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from factormix.errors import InputError
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
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
OUTLIER_SHARE = 0.01
"""Share of the least likely rows that count as outliers, unless the page asks for another."""


def check_packages() -> None:
    """Raise an error if the packages of the explorer are not installed."""
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise InputError(f'the explorer needs {module}: run pip install "factormix[explore]".')


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
        name = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
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
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"the host {host!r} is not known ({error.strerror}): leave --host out."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(
                f"the host {host!r} is not an address of this machine: leave --host out."
            ) from error
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}): name another --port, or"
            " leave it out for a free one."
        ) from error
    return listener


def make_app(session: Session, token: str, host: str, port: int) -> ASGIApp:
    """Make the application that serves a session below ``/token/``."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    files = _read_page_files()

    def send_page(request: Request) -> Response:
        # Only the files that were read from the package at the start can be asked for.
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return refuse_path(request, None)
        media_type, content = files[name]
        return Response(content, media_type=media_type)

    def send_state(request: Request) -> Response:
        return JSONResponse(api.to_json(session.state()))

    def make_endpoint(answer: Callable[[Request], bytes]) -> Callable[[Request], Response]:
        # A function, not a coroutine: Starlette runs it in a thread, beside other requests.
        def endpoint(request: Request) -> Response:
            return Response(answer(request), media_type="application/octet-stream")

        return endpoint

    async def analyse(request: Request) -> Response:
        values = np.frombuffer(await _read_body(request, 8 * session.view.d), "<f8")
        content = await run_in_threadpool(api.send_analysis, session, values)
        return Response(content, media_type="application/octet-stream")

    def report_input_error(request: Request, error: Exception) -> Response:
        # The page asks again for what is not ready.
        if isinstance(error, NotReady):
            return JSONResponse({"later": str(error)}, status_code=202)
        return JSONResponse({"error": str(error)}, status_code=400)

    def report_failure(request: Request, error: Exception) -> Response:
        # A window that was closed in the middle of a request needs no answer.
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        text = f"the explorer could not answer ({type(error).__name__}: {error})."
        print("factormix:", " ".join(text.split()), file=sys.stderr, flush=True)
        return JSONResponse({"error": text}, status_code=500)

    def refuse_path(request: Request, error: Exception | None) -> Response:
        return JSONResponse({"error": "there is no such page."}, status_code=404)

    routes = [
        Route("/", send_page),
        Route("/api/state", send_state),
        Route("/api/analyse", analyse, methods=["POST"]),
        *(Route(path, make_endpoint(answer)) for path, answer in _api_routes(session).items()),
        Route("/{name:path}", send_page),
    ]
    handlers: dict[Any, Any] = {
        InputError: report_input_error,
        404: refuse_path,
        405: refuse_path,
        Exception: report_failure,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)

    async def run_quietly(scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette raises errors again after it has answered them.
        with suppress(Exception):
            await app(scope, receive, send)

    return Guard(run_quietly, token, host, port)


def _api_routes(session: Session) -> dict[str, Callable[[Request], bytes]]:
    """Return the function that answers each path."""
    return {
        "/api/model": lambda r: api.describe_model(session),
        "/api/map": lambda r: api.send_map(session, _share(r)),
        "/api/component/{k:int}": lambda r: api.describe_component(session, r.path_params["k"]),
        "/api/component/{k:int}/nearest": lambda r: api.send_nearest(session, r.path_params["k"]),
        "/api/component/{k:int}/samples": lambda r: api.send_samples(
            session, r.path_params["k"], _count(r), _flag(r, "noise"), _number(r, "seed", 0)
        ),
        "/api/samples": lambda r: api.send_samples(
            session, None, _count(r), _flag(r, "noise"), _number(r, "seed", 0)
        ),
        "/api/data": lambda r: api.describe_data(session, _share(r)),
        "/api/data/extremes": lambda r: api.send_extremes(session, _flag(r, "least"), _count(r)),
        "/api/row/{number:int}": lambda r: api.send_row(session, r.path_params["number"]),
        "/api/training": lambda r: api.describe_training(session),
        "/api/training/{version:int}": lambda r: api.send_snapshot(
            session, r.path_params["version"]
        ),
    }


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InputError(f"{name} must be a whole number, not {text[:20]!r}.")
    return int(text)


def _count(request: Request) -> int:
    return _number(request, "n", 12)


def _flag(request: Request, name: str) -> bool:
    return _number(request, name, 0) > 0


def _share(request: Request) -> float:
    """Read the share of rows that count as outliers."""
    try:
        share = float(request.query_params.get("share", OUTLIER_SHARE))
    except ValueError:
        share = -1.0
    if not 0 <= share <= 0.5:
        raise InputError("the share of outliers must lie between 0 and 0.5.")
    return share


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request, a row of float64 values."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise InputError("the row has more values than the model has features.")
    if len(body) % 8:
        raise InputError("the row is cut off in the middle of a value: send it again.")
    return bytes(body)


def _read_page_files() -> dict[str, tuple[str, bytes]]:
    """Return the media type and content of every file of the page."""
    files = {}
    for file in (resources.files("factormix.views.explorer") / "static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            files[file.name] = MEDIA_TYPES[suffix], file.read_bytes()
    return files


class Guard:
    """Pass on requests of the page itself, below ``/TOKEN/``, and refuse all others."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self.app, self.token, self.host, self.port = app, token, host, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse one request, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
    name, _, number = header.rpartition(":")
    if not number.isdigit() or int(number) != port:
        # A header without a port means port 80.
        if port != 80 or ":" in header.rpartition("]")[2]:
            return False
        name = header
    name = name.strip("[]").lower()
    if name in (host.lower(), "localhost", "127.0.0.1", "::1"):
        return True
    if not (_is_numeric(host) and ipaddress.ip_address(host).is_unspecified):
        return False
    return _is_numeric(name) or name == socket.gethostname().lower()


def _is_numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
