"""Memory that processes share: what one has written the others read, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factormix.training import boards
from factormix.training.boards import Board, board_of
from factormix.training.processes import ALONE, Group


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(boards, "FOLDER", tmp_path)
    return tmp_path


def test_what_one_process_has_written_the_other_reads(folder: Path):
    size = 2 * 2 * 1024
    path = boards._made(size)
    assert path is not None
    # Each has mapped the file by itself, as processes do.
    memories = [boards._mapped(path, size) for _ in range(2)]
    one, other = (Board(memory, Group(2, i)) for i, memory in enumerate(memories))
    assert one.room == 1024
    for i in range(3):
        first = [torch.full((3, 5), float(i)), torch.arange(7, dtype=torch.float64) + i]
        second = [-t for t in first]
        one.write(first)
        other.write(second)
        before = one.read(1, second)
        for found, t in zip([*before, *other.read(0, first)], [*second, *first], strict=True):
            assert torch.equal(found, t)
        # The next page is another one, so that what was read stays for one more exchange.
        other.write([t + 100 for t in second])
        for found, t in zip(before, second, strict=True):
            assert torch.equal(found, t)
        one.write(first)
        assert torch.equal(one.read(1, second)[0], second[0] + 100)


def test_where_there_is_no_memory_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert boards._made(1 << 60) is None
    assert list(folder.iterdir()) == []
    assert boards._mapped(str(folder / "gone"), 64) is None
    monkeypatch.setattr(boards, "FOLDER", folder / "nowhere")
    assert boards._made(64) is None
    assert board_of(ALONE, 10, torch.empty(1, device="meta")) is None
