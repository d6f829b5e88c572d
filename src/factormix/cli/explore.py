"""``factormix explore``: a local web page on which a model can be looked at and tried."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import Columns, Header, Key, note, parse_columns, parse_shape, read, say
from factormix.errors import InputError

__all__ = ["explore"]


def explore(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A file of train, or its folder of checkpoints.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="Rows to look at: a .npy, .npz, .csv or .parquet file, or a folder of images.",
        ),
    ] = None,
    image_shape: Annotated[
        str | None,
        typer.Option(
            metavar="HEIGHTxWIDTH[x3]",
            help="Shape of the rows as images.",
            show_default="that of the training images",
        ),
    ] = None,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Draw rows as profiles, even if they may be images.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a MODEL that training has yet to write.")
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others can reach all but the default.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 0,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
) -> None:
    """Open MODEL as a web page on this machine.

    The page shows every component as a picture; factors can be moved, rows of DATA looked at, and
    rows of one's own tried. While a training saves MODEL, the page follows: `factormix train` with
    --checkpoint RUN --every 2s, and `factormix explore RUN --wait` beside it. Ctrl-C ends it.
    Only who has the whole address, with its token, can open the page.
    """
    from factormix.views.explorer import Server, Session, check_packages

    check_packages()
    shape = parse_shape(image_shape)
    if shape is not None and no_images:
        raise InputError("--image-shape and --no-images exclude each other: give one of them.")
    session = Session(model, shape, profiles=no_images)
    if session.exists() or not wait:
        session.load()
    if data is not None:
        size = session.image_size if data.is_dir() else None
        chosen = parse_columns(columns)
        session.set_rows(read(data, key=key, image_size=size, header=header, columns=chosen))
    server = Server(session, host, port)
    session.watch()
    if host not in ("127.0.0.1", "localhost", "::1"):
        note("whoever has the address can open the page from other machines.")
    with suppress(KeyboardInterrupt):
        say(f"{model} is shown at {server.address} until Ctrl-C")
        if browser:
            webbrowser.open(server.address)
        server.serve()
    say("closed")
