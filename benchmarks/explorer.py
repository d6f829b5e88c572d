"""Time the explorer's first picture and its sliders, for large models.

    python benchmarks/explorer.py
    python benchmarks/explorer.py --size 10000 784 4

A size is K, d and l. The model is trained on random smooth images and enlarged to K components: its
content does not affect the time. The explorer runs as a command, and a headless Chromium opens its
page. The first picture is timed from the start of the navigation until the map is drawn, a slider
move from its event until the picture is painted, and a row from its request to the answer with
likelihood, components and explanation.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from factormix import MFA
from factormix.training import serialization

SIZES = [(400, 3072, 10), (10_000, 784, 4)]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A frame requested after the event is the page's next one; a task after the frame runs once it is
# painted.
MOVE = """(slider) => {
  const start = performance.now();
  slider.value = String(6 * Math.random() - 3);
  slider.dispatchEvent(new Event('input', {bubbles: true}));
  return new Promise(done => requestAnimationFrame(() => setTimeout(() => done([
    performance.now() - start,
    Number(document.querySelector('.stage canvas').dataset.milliseconds)]))));
}"""
ROW = """async (d) => {
  const start = performance.now();
  const answer = await fetch('api/analyse', {method: 'POST', body: new Float64Array(d).fill(0.5)});
  await answer.arrayBuffer();
  return performance.now() - start;
}"""


def write_model(path: Path, K: int, d: int, l: int) -> None:
    """Write a model of K components: copies of a small mixture's, with their means shifted."""
    colours = 3 if math.isqrt(d // 3) ** 2 * 3 == d else 1
    side = math.isqrt(d // colours)
    assert side * side * colours == d, "d must be the size of square images"
    random = np.random.default_rng(0)
    rough = random.normal(size=(300, side // 4 + 2, side // 4 + 2, colours))
    smooth = np.kron(rough, np.ones((1, 4, 4, 1)))[:, :side, :side].reshape(300, d)
    MFA(4, l, random_state=0, max_epochs=1).fit(0.5 + 0.2 * smooth).save(path, training_state=False)
    tensors, settings = serialization.read_file(path)
    for name, tensor in tensors.items():
        if name.startswith("parameters."):
            copies = tensor.repeat(K // 4, *[1] * (tensor.ndim - 1))
            tensors[name] = copies + 0.3 * torch.randn_like(copies) * name.endswith("means")
    settings["options"]["n_components"] = settings["run"]["problem"]["n_components"] = K
    settings["image_shape"] = [side, side] + [3] * (colours == 3)
    serialization.write_file(path, tensors, settings)


def measure(path: Path, visits: int = 5, moves: int = 20) -> dict[str, float]:
    """Return seconds to the address, and medians of the first picture and of a slider move."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "factormix", "explore", str(path), "--no-browser"]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert server.stdout is not None
    try:
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        opened = time.perf_counter() - start
        with sync_playwright() as started:
            browser = next(filter(None, map(shutil.which, NAMES)))
            chromium = started.chromium.launch(executable_path=browser, args=FLAGS)
            pictures = [_first_picture(chromium, found[0]) for _ in range(visits)]
            sliders = _slider_moves(chromium, found[0], moves)
            rows = _rows(chromium, found[0], moves // 4)
            chromium.close()
    finally:
        server.terminate()
        server.wait(30)
    return {
        "seconds to the address": opened,
        "first picture, ms": statistics.median(pictures),
        "slider move, ms": statistics.median(painted for painted, _ in sliders),
        "slowest slider move, ms": max(painted for painted, _ in sliders),
        "of it computing, ms": statistics.median(computed for _, computed in sliders),
        "row judged, ms": statistics.median(rows),
    }


def _first_picture(browser: Any, address: str) -> float:
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("#view[data-view='map']", timeout=120_000)
    drawn: float = page.evaluate("performance.getEntriesByName('map drawn')[0].startTime")
    page.close()
    return drawn


def _rows(browser: Any, address: str, n: int) -> list[float]:
    page = browser.new_page()
    page.goto(f"{address}#/training")
    page.wait_for_selector("#view[data-view='training']")
    features = page.locator("#model-facts").inner_text().rpartition(", ")[2].split()[0]
    d = int(features.replace(",", ""))
    found: list[float] = [page.evaluate(ROW, d) for _ in range(n + 1)]
    page.close()
    # The first one prepares the operands.
    return found[1:]


def _slider_moves(browser: Any, address: str, moves: int) -> list[list[float]]:
    page = browser.new_page()
    page.goto(f"{address}#/component/1")
    page.wait_for_selector("#view[data-view='component']")
    slider = page.locator("#factor-0")
    found: list[list[float]] = [slider.evaluate(MOVE) for _ in range(moves)]
    page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs=3, type=int, action="append", metavar=("K", "d", "l"))
    for K, d, l in parser.parse_args().size or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            write_model(path, K, d, l)
            found = measure(path)
        print(f"K = {K:,}, d = {d:,}, l = {l}")
        for name, value in found.items():
            print(f"  {name:<24} {value:8.1f}")


if __name__ == "__main__":
    main()
