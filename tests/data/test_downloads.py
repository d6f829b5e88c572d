"""Downloads from a local server that misbehaves on request."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from factormix import datasets
from factormix.data.datasets.registry import REGISTRY
from factormix.errors import InputError
from image_sets import (
    idx_bytes,
    images_and_labels,
    md5,
    small_idx_entry,
    write,
)

pytest.importorskip("pooch")
pytest.importorskip("platformdirs")

pytestmark = pytest.mark.usefixtures("own_machine")


class Server(ThreadingHTTPServer):
    """Serve some files, and misbehave on request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.breaks: list[int] = []  # bytes to send before a connection is cut
        self.status: int | None = None
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        name = self.path[1:]
        server.requests.append(name)
        body = server.files.get(name)
        if server.status or body is None:
            self.send_error(server.status or 404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.breaks.pop(0)] if server.breaks else body)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def published(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Publish a small "mnist" on the local server."""
    entry, files = small_idx_entry("mnist", 0, server.address)
    monkeypatch.setitem(REGISTRY, "mnist", entry)
    server.files = dict(files)
    return files


IMAGES = "train-images-idx3-ubyte.gz"


def test_a_missing_set_is_downloaded_once_into_the_cache(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    first = datasets.load("mnist")
    assert first.source == f"downloaded from {server.address}/{IMAGES}"
    assert server.requests == [IMAGES, "train-labels-idx1-ubyte.gz"]
    again = datasets.load("mnist")
    assert again.source == "the user's cache"
    assert len(server.requests) == 2
    np.testing.assert_array_equal(first.data, again.data)
    np.testing.assert_allclose(first.images, images_and_labels(40, 5)[0] / 255, rtol=1e-6)
    cache = tmp_path / "cache/factormix/mnist"
    assert (cache / IMAGES).read_bytes() == published[IMAGES]
    assert len(list(cache.iterdir())) == 2


def test_a_broken_transfer_leaves_no_file(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    server.breaks = [5_000]
    with pytest.raises(InputError, match=r"no connection to the server, or it broke|checksum"):
        datasets.fetch("mnist", tmp_path / "here")
    assert not list((tmp_path / "here/mnist").iterdir())
    paths = datasets.fetch("mnist", tmp_path / "here")
    assert {path.name: path.read_bytes() for path in paths} == published
    assert {path.parent for path in paths} == {tmp_path / "here/mnist"}
    before = len(server.requests)
    assert datasets.fetch("mnist", tmp_path / "here") == paths
    assert len(server.requests) == before


def test_a_download_with_a_wrong_checksum_is_thrown_away(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    server.files[IMAGES] = gzip.compress(idx_bytes(images_and_labels(40, 77)[0]))
    expected = f"does not have the checksum md5:{md5(published[IMAGES])}"
    with pytest.raises(InputError, match=expected):
        datasets.load("mnist")
    assert not list((tmp_path / "cache/factormix/mnist").iterdir())


def test_the_next_address_is_tried_when_one_fails(
    server: Server, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = REGISTRY["mnist"]
    assert entry.form is not None
    files = {
        split: tuple(
            replace(file, addresses=(f"{server.address}/gone/{file.name}", *file.addresses))
            for file in files
        )
        for split, files in entry.form.files.items()
    }
    monkeypatch.setitem(REGISTRY, "mnist", replace(entry, form=replace(entry.form, files=files)))
    assert datasets.load("mnist").source == f"downloaded from {server.address}/{IMAGES}"


@pytest.mark.parametrize("status", [404, 503])
def test_a_refusing_server_is_named_with_what_to_do(
    status: int, server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    server.status = status
    with pytest.raises(InputError, match=f"the server answered {status}.*put its files") as caught:
        datasets.load("mnist")
    assert f"{IMAGES} (md5:{md5(published[IMAGES])})" in str(caught.value)
    assert len(server.requests) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_offline_the_error_says_so(
    published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens on the discard port.
    entry, _ = small_idx_entry("mnist", 0, "http://127.0.0.1:9")
    monkeypatch.setitem(REGISTRY, "mnist", entry)
    with pytest.raises(InputError, match=r"there is no connection to the server.*put its files"):
        datasets.fetch("mnist")


def test_fetch_replaces_a_spoilt_file_only_in_its_own_folder(
    server: Server, published: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = published | {IMAGES: published[IMAGES][:-9]}
    cache = write(tmp_path / "cache/factormix/mnist", spoilt)
    paths = datasets.fetch("mnist")
    assert (cache / IMAGES).read_bytes() == published[IMAGES]
    assert paths == [cache / name for name in published]
    own = write(tmp_path / "own/mnist", spoilt)
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path / "own"))
    with pytest.raises(InputError, match=r"own/mnist/train-images.* is truncated or altered"):
        datasets.fetch("mnist")
    assert (own / IMAGES).read_bytes() == spoilt[IMAGES]


def test_two_downloads_at_once_do_not_mix(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(lambda _: datasets.load("mnist"), range(2)))
    np.testing.assert_array_equal(loaded[0].data, loaded[1].data)
    cache = tmp_path / "cache/factormix/mnist"
    assert (cache / IMAGES).read_bytes() == published[IMAGES]


def test_an_unwritable_target_is_named(published: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file/mnist cannot be written to .*: name another"):
        datasets.fetch("mnist", tmp_path / "file")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(REGISTRY["mnist-5000"], embedded="no_such_package")
    monkeypatch.setitem(REGISTRY, "mnist-5000", entry)
    for call in (datasets.load, datasets.fetch):
        with pytest.raises(InputError, match=r'pip install "factormix\[demo\]"'):
            call("mnist-5000")
    row = next(row for row in datasets.available() if row.name == "mnist-5000")
    assert row.where is None
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match=r'needs pooch: run pip install "factormix\[data\]"'):
        datasets.load("mnist")
