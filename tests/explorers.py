"""Explorers as a user starts them: real processes on small models, and what they answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits, load_wine

from factormix import MFA

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def make_exhibits(folder: Path) -> None:
    """Write an image model, digits.safetensors, and a tabular one, wine.safetensors, with rows."""
    digits = load_digits().images.astype(np.uint8)
    np.save(folder / "digits.npy", digits[:600])
    model = MFA(12, 3, random_state=0, max_epochs=4)
    model.fit(digits.reshape(-1, 64).astype(np.float32)).save(folder / "digits.safetensors")
    wine: pd.DataFrame = load_wine(as_frame=True).data
    wine.to_csv(folder / "wine.csv", index=False)
    MFA(3, 2, random_state=0).fit(wine).save(folder / "wine.safetensors")


class Explorer:
    """A running explorer: its address, and what it answers to plain requests."""

    def __init__(self, process: subprocess.Popen[str], said: str) -> None:
        self.process, self.said = process, said
        found = re.search(r"http://\S+", said)
        assert found, said
        self.address = found[0]
        parts = urlsplit(self.address)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port, self.token = parts.hostname, parts.port, parts.path.strip("/")

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Ask for a path below the token."""
        return self.request("GET", f"/{self.token}/{path}", None, **headers)

    def request(
        self, method: str, target: str, body: bytes | None, **headers: str
    ) -> tuple[int, bytes]:
        connection = HTTPConnection(self.host, self.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, target, body, named)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Ask until the answer is there, and take it apart."""
        status, raw = self.get(f"api/{path}")
        while status == 202:
            status, raw = self.get(f"api/{path}")
        assert status == 200, raw
        return unpacked(raw)

    def analyse(self, row: np.ndarray) -> tuple[int, bytes]:
        """Send a row of one's own."""
        raw = np.asarray(row, "<f8").tobytes()
        return self.request("POST", f"/{self.token}/api/analyse", raw)


def unpacked(raw: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Take a message apart, independently of what wrote it."""
    (length,) = struct.unpack("<I", raw[:4])
    header = json.loads(raw[4 : 4 + length])
    arrays = {}
    for one in header["arrays"]:
        count = int(np.prod(one["shape"]))
        flat = np.frombuffer(raw, one["dtype"], count, 4 + length + one["at"])
        arrays[one["name"]] = flat.reshape(one["shape"])
    return header["facts"], arrays


@contextmanager
def exploring(*arguments: str | Path) -> Iterator[Explorer]:
    """Run `factormix explore`, and check at the end that it has had nothing to complain about."""
    command = [sys.executable, "-m", "factormix", "explore", *map(str, arguments), "--no-browser"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise AssertionError(process.communicate()[1])
        yield Explorer(process, said)
        assert process.poll() is None, "the server has ended by itself"
    finally:
        process.terminate()
        rest, complaints = process.communicate(timeout=30)
    assert complaints == ""
    assert rest == "closed\n"
    assert process.returncode == 0
