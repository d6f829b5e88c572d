"""The routes of the explorer: pages of the package, and answers about the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from factormix.errors import InputError
from factormix.views.explorer import answers
from factormix.views.explorer.exhibition import Exhibition, NotYet
from factormix.views.explorer.guard import Guard
from factormix.views.explorer.wire import plain

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

__all__ = ["make_app"]

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
