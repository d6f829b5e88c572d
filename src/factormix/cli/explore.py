"""``factormix explore``: a local web page that shows a model."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import print_line, print_note
from factormix.cli.options import ImageShape, Reading, parse_shape, with_shared_options
from factormix.errors import InputError


@with_shared_options
def explore(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A model file of factormix train or factormix images train, or its folder of"
            " checkpoints.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="Rows to look at: a file or folder that factormix train reads.",
        ),
    ] = None,
    image_shape: ImageShape = None,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Draw rows as profiles, even if they may be images.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a MODEL that does not exist yet.")
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    host: Annotated[
        str,
        typer.Option(help="Address to listen at; all but the default admit other machines."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 0,
    *,
    reading: Reading,
) -> None:
    """Open MODEL as a web page on this machine.

    The page shows every component as a picture. You can move factors, look at rows of DATA, and
    try rows of your own. If DATA is a folder of activations, the page shows the texts of the
    components. A model of whole images shows its samples, the surprise of each pixel of an image
    that you drop, and fillings of what you erase. The page follows a training run: start
    `factormix train` with --checkpoint RUN --every 2s, and `factormix explore RUN --wait` beside
    it. Ctrl-C ends it. The page opens only at the complete address, which has a secret token.
    """
    from factormix.activations.store import HEADER_NAME, open_store
    from factormix.views.explorer import Server, Session, check_packages

    check_packages()
    shape = parse_shape(image_shape)
    if shape is not None and no_images:
        raise InputError("--image-shape and --no-images exclude each other: give one of them.")
    session = Session(model, shape, profiles=no_images)
    if session.exists() or not wait:
        session.load()
    if data is not None:
        store = open_store(data) if (data / HEADER_NAME).is_file() else None
        session.set_rows(reading.read(data, model=session.model), store)
    server = Server(session, host, port)
    session.watch()
    if host not in ("127.0.0.1", "localhost", "::1"):
        print_note("anyone who has the address can open the page from other machines.")
    with suppress(KeyboardInterrupt):
        print_line(f"{model} is shown at {server.address} until Ctrl-C")
        if browser:
            webbrowser.open(server.address)
        server.serve()
    print_line("closed")
