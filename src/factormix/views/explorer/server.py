"""The optional packages that the explorer needs.

Who may ask: only a page of this server, by the address that holds its token.

The token in the address keeps out other users of the machine and other pages of the browser. The
Host header must name this server, so that no foreign name can be pointed at it, and a request that
another page has made is turned down whatever it knows.

The routes of the explorer: pages of the package, and answers about the model.

A server on this machine alone, at an address that nobody can guess.
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
from factormix.views.explorer import answers
from factormix.views.explorer.answers import plain
from factormix.views.explorer.exhibition import Exhibition, NotYet

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

__all__ = ["Guard", "Server", "allowed_host", "check_packages", "make_app"]


def check_packages() -> None:
    """Fail, before any long work, if no page could be served here."""
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise InputError(f'the explorer needs {module}: run pip install "factormix[explore]".')


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


KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
OUTLIERS = 0.01
"""Share of the least likely rows that are called outliers, unless the page says otherwise."""


def make_app(exhibition: Exhibition, token: str, host: str, port: int) -> ASGIApp:
    """Make the application that serves an exhibition below ``/token/``."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    files = _page_files()

    def page(request: Request) -> Response:
        # Only what was read from the package at the start is there to be asked for.
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return JSONResponse({"error": "there is no such page."}, status_code=404)
        kind, content = files[name]
        return Response(content, media_type=kind)

    def answered(ask: Callable[[Request], bytes]) -> Callable[[Request], Response]:
        # A function, not a coroutine: Starlette runs it in a thread, beside other requests.
        def answer(request: Request) -> Response:
            return Response(ask(request), media_type="application/octet-stream")

        return answer

    def state(request: Request) -> Response:
        return JSONResponse(plain(exhibition.state()))

    async def analyse(request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        raw = await _body(request, 8 * exhibition.subject.d)
        values = np.frombuffer(raw, "<f8")
        content = await run_in_threadpool(answers.analysis, exhibition, values)
        return Response(content, media_type="application/octet-stream")

    def wrong(request: Request, error: Exception) -> Response:
        # What is on its way is no error: the page asks again.
        if isinstance(error, NotYet):
            return JSONResponse({"later": str(error)}, status_code=202)
        return JSONResponse({"error": str(error)}, status_code=400)

    def broken(request: Request, error: Exception) -> Response:
        # Who has closed the window in the middle of a question wants no answer.
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        said = f"the explorer could not answer ({type(error).__name__}: {error})."
        print("factormix:", " ".join(said.split()), file=sys.stderr, flush=True)
        return JSONResponse({"error": said}, status_code=500)

    def missing(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "there is no such page."}, status_code=404)

    routes = [
        Route("/", page),
        Route("/api/state", state),
        Route("/api/analyse", analyse, methods=["POST"]),
        *(Route(path, answered(ask)) for path, ask in _questions(exhibition).items()),
        Route("/{name:path}", page),
    ]
    handlers: dict[Any, Any] = {
        InputError: wrong,
        404: missing,
        405: missing,
        Exception: broken,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(_Calm(app), token, host, port)


def _questions(exhibition: Exhibition) -> dict[str, Callable[[Request], bytes]]:
    """Name what can be asked, by path."""
    return {
        "/api/model": lambda r: answers.model(exhibition),
        "/api/map": lambda r: answers.component_map(exhibition, _share(r)),
        "/api/component/{k:int}": lambda r: answers.component(exhibition, r.path_params["k"]),
        "/api/component/{k:int}/nearest": lambda r: answers.nearest(exhibition, r.path_params["k"]),
        "/api/component/{k:int}/samples": lambda r: answers.samples(
            exhibition, r.path_params["k"], _count(r), _flag(r, "noise"), _number(r, "seed", 0)
        ),
        "/api/samples": lambda r: answers.samples(
            exhibition, None, _count(r), _flag(r, "noise"), _number(r, "seed", 0)
        ),
        "/api/data": lambda r: answers.data(exhibition, _share(r)),
        "/api/data/extremes": lambda r: answers.extremes(exhibition, _flag(r, "least"), _count(r)),
        "/api/row/{number:int}": lambda r: answers.row(exhibition, r.path_params["number"]),
        "/api/training": lambda r: answers.training(exhibition),
        "/api/training/{version:int}": lambda r: answers.snapshot(
            exhibition, r.path_params["version"]
        ),
    }


class _Calm:
    """Let no error through: Starlette raises them again after it has answered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with suppress(Exception):
            await self.app(scope, receive, send)


async def _body(request: Request, most: int) -> bytes:
    """Read the body of a request, and no more than it may have."""
    held = bytearray()
    async for part in request.stream():
        held += part
        if len(held) > most:
            raise InputError("the row has more values than the model has features.")
    if len(held) % 8:
        raise InputError("the row is not whole: send it again.")
    return bytes(held)


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
    """Read the share of rows that are called outliers."""
    try:
        share = float(request.query_params.get("share", OUTLIERS))
    except ValueError:
        share = -1.0
    if not 0 <= share <= 0.5:
        raise InputError("the share of outliers must lie between 0 and 0.5.")
    return share


def _page_files() -> dict[str, tuple[str, bytes]]:
    """Read all files of the page: name, kind and content."""
    folder = resources.files("factormix.views.explorer") / "static"
    found = {}
    for file in folder.iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in KINDS:
            found[file.name] = KINDS[suffix], file.read_bytes()
    return found


class Server:
    """Hold a port from the beginning on, so that its address can be told before it is served."""

    def __init__(self, exhibition: Exhibition, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen at ``host`` and ``port``; 0 takes a port that is free."""
        self.exhibition, self.host = exhibition, host
        self.token = secrets.token_urlsafe(16)
        self._socket = _listening(host, port)
        self.port = int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """The address to open, token included."""
        name = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer until the process is told to end."""
        import uvicorn

        app = make_app(self.exhibition, self.token, self.host, self.port)
        settings = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            # A page that is still open must not keep the process from ending.
            timeout_graceful_shutdown=1,
        )
        try:
            uvicorn.Server(settings).run(sockets=[self._socket])
        finally:
            self.exhibition.close()
            self._socket.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"the host {host!r} is not known ({error.strerror}): leave --host out."
        ) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen(64)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(
                f"the host {host!r} is not an address of this machine: leave --host out."
            ) from error
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}): name another --port, or"
            " leave it out for one that is free."
        ) from error
    return found
