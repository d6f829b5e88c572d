"""Explorers on small models: in this process, or as the command that a user starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits, load_wine

from factormix import MFA, ConvMFA
from factormix.activations import collect, open_store
from factormix.data.readers import read_rows
from factormix.views.explorer import Server, Session
from networks import Network

SENTENCE = "my cat sat on the mat while your dog ate my hat and the cat saw it"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def write_models(folder: Path) -> None:
    """Write an image model, digits.safetensors, and a table model, wine.safetensors, with rows."""
    digits = load_digits().images.astype(np.uint8)
    np.save(folder / "digits.npy", digits[:600])
    model = MFA(12, 3, random_state=0, max_epochs=4)
    model.fit(digits.reshape(-1, 64).astype(np.float32)).save(folder / "digits.safetensors")
    wine: pd.DataFrame = load_wine(as_frame=True).data
    wine.to_csv(folder / "wine.csv", index=False)
    MFA(3, 2, random_state=0).fit(wine).save(folder / "wine.safetensors")


def write_image_models(folder: Path) -> None:
    """Write models of whole images, of depth 0 and 2 and of real colours, with images of digits."""
    digits = load_digits().images[:310].astype(np.uint8) * 15
    sizes = {"n_scales": 2, "n_features": 8, "n_neighbours": 6, "n_steps": 20, "batch_size": 200}
    for name, depth in (("flat", 0), ("deep", 2)):
        model = ConvMFA(3, depth=depth, random_state=0, **sizes).fit(digits[:300])
        model.save(folder / f"{name}.safetensors")
    colours = np.stack([digits[:300], digits[:300] // 2, 240 - digits[:300]], axis=-1)
    model = ConvMFA(2, random_state=0, **sizes).fit((colours / 60 - 2).astype(np.float32))
    model.save(folder / "colours.safetensors")
    np.save(folder / "whole.npy", digits[300:])


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file as training saves one: it appears under its name when it is complete."""
    shutil.copy(source, target.with_suffix(".part"))
    target.with_suffix(".part").replace(target)


def write_activations(folder: Path) -> None:
    """Write activations of ten texts, layer, and their model, words.safetensors."""
    words = SENTENCE.split()
    texts = [" ".join(words[i:] + words[: 2 * i]) for i in range(10)]
    options = {"layer": "blocks.1", "tokenizer": Words(sorted(set(words))), "verbose": False}
    store = collect(Network(), texts, to=folder / "layer", **options)
    MFA(4, 2, random_state=0, max_epochs=4).fit(store).save(folder / "words.safetensors")


class Words:
    """A token for each word, called as tokenizers of ``transformers`` are."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[self.words.index(word) for word in t.split()] for t in texts]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


class Explorer:
    """A running explorer: its address, and its answers to plain requests."""

    folder: Path
    """Where its files are, if a test needs them."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port, self.token = parts.hostname, parts.port, parts.path.strip("/")

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Request a path below the token."""
        return self.request("GET", f"/{self.token}/{path}", None, **headers)

    def request(
        self, method: str, target: str, body: bytes | None, **headers: str
    ) -> tuple[int, bytes]:
        connection = HTTPConnection(self.host, self.port, timeout=120)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, target, body, named)
            response = connection.getresponse()
            content = response.read()
            assert response.status != 500, content
            return response.status, content
        finally:
            connection.close()

    def ask(
        self, path: str, body: bytes | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Request a path of the API, or post to it, until the answer is ready, and unpack it."""
        method, target = "GET" if body is None else "POST", f"/{self.token}/api/{path}"
        status, raw = self.request(method, target, body)
        while status == 202:
            time.sleep(0.01)
            status, raw = self.request(method, target, body)
        assert status == 200, raw
        return unpack_message(raw)

    def analyse(self, row: np.ndarray) -> tuple[int, bytes]:
        """Send a row to be analysed."""
        raw = np.asarray(row, "<f8").tobytes()
        return self.request("POST", f"/{self.token}/api/analyse", raw)


def unpack_message(raw: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Unpack a message, independently of the code that packs it."""
    (length,) = struct.unpack("<I", raw[:4])
    header = json.loads(raw[4 : 4 + length])
    arrays = {}
    for one in header["arrays"]:
        count = int(np.prod(one["shape"]))
        flat = np.frombuffer(raw, one["dtype"], count, 4 + length + one["offset"])
        arrays[one["name"]] = flat.reshape(one["shape"])
    return header["facts"], arrays


@contextmanager
def serve_model(path: Path, data: Path | None = None, **options: Any) -> Iterator[Explorer]:
    """Serve a model, which may not exist yet, from a thread of this process."""
    session = Session(path, poll_seconds=0.02, **options)
    if session.exists():
        session.load()
    if data is not None:
        store = open_store(data) if data.is_dir() else None
        session.set_rows(read_rows(data), store)
    server = Server(session)
    session.watch()
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        explorer = Explorer(server.address)
        assert explorer.get("api/state")[0] == 200
        yield explorer
    finally:
        server.stop()
        thread.join()


@contextmanager
def run_explore_command(*arguments: str | Path) -> Iterator[Explorer]:
    """Run `factormix explore` as a process, and check at the end that it printed no complaint."""
    command = [sys.executable, "-m", "factormix", "explore", *map(str, arguments), "--no-browser"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert process.stdout is not None
        printed = process.stdout.readline()
        address = re.search(r"http://\S+", printed)
        if not address:
            raise AssertionError(printed + process.communicate()[1])
        yield Explorer(address[0])
        assert process.poll() is None, "the server ended early"
    finally:
        process.terminate()
        rest, complaints = process.communicate(timeout=120)
    assert complaints == ""
    assert rest == "closed\n"
    assert process.returncode == 0
