"""Sets of images, and their blocks as means and differences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from factormix.data.pictures import (
    as_image,
    as_pictures,
    bound_differences,
    join_blocks,
    join_rows,
    size_blocks,
    split_all,
    split_blocks,
)
from factormix.errors import InputError


@pytest.mark.parametrize("size", [(4, 6), (5, 4), (3, 3), (1, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("whole", [True, False])
def test_blocks_join_to_the_image_they_were_split_from(size, whole):
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (*size, 2)) if whole else random.normal(size=(*size, 2))
    image = image.astype(np.uint8 if whole else np.float64)
    blocks = split_blocks(image, whole)
    for plane, shape in zip(blocks, size_blocks(*size), strict=True):
        assert plane.shape == (*shape, 2)
    np.testing.assert_allclose(join_blocks(blocks), image, atol=1e-12)
    for found, expected in zip(join_rows(blocks[0], blocks[1]), blocks[2:4], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_bounds_have_room_for_exactly_the_pairs_of_each_mean():
    levels = 7
    pairs = [((a + b) // 2, a - b) for a, b in product(range(levels), repeat=2)]
    assert len(set(pairs)) == levels**2
    for mean in range(levels):
        low, high = bound_differences(np.array(mean), levels)
        assert sorted(d for m, d in pairs if m == mean) == list(range(int(low), int(high) + 1))


def test_real_blocks_keep_the_volume():
    def split(x: torch.Tensor) -> torch.Tensor:
        (a, b), (c, d) = x
        up, down = (a + b) / 2, (c + d) / 2
        return torch.stack([(up + down) / 2, up - down, a - b, c - d])

    x = torch.randn(2, 2).double()
    blocks = split_blocks(x.numpy()[..., None], whole=False)
    ours = np.array([float(blocks[i][0, 0, 0]) for i in (0, 1, 4, 5)])
    np.testing.assert_allclose(ours, split(x))
    jacobian = torch.autograd.functional.jacobian(split, x).reshape(4, 4)
    assert float(jacobian.det().abs()) == pytest.approx(1)


def test_arrays_tensors_lists_and_folders_are_the_same_images(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (3, 4, 5, 3)).astype(np.uint8)
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    for given in (images, torch.from_numpy(images), list(images), tmp_path):
        pictures = as_pictures(given)
        assert pictures.levels == 256
        np.testing.assert_array_equal([pictures.image(i) for i in range(3)], images)


def test_images_of_different_sizes_are_found_by_their_pixels():
    images = [np.full((2, 3), 1.0), np.full((4, 1), 2.0)]
    pictures = as_pictures(images)
    image, row, column = pictures.locate(np.array([0, 4, 5, 6, 9]))
    assert list(zip(image, row, column, strict=True)) == [
        *((0, 0, 0), (0, 1, 1), (0, 1, 2)),
        *((1, 0, 0), (1, 3, 0)),
    ]
    planes = split_all(pictures)
    assert [(plane.heights.tolist(), plane.widths.tolist()) for plane in planes] == [
        *(([1, 2], [2, 1]),) * 4,
        *(([1, 2], [1, 0]),) * 2,
    ]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((3, 4, 5), np.int32), "int32: give uint8"),
        (np.zeros((4, 5), np.uint8), "shape"),
        (np.zeros((0, 4, 5), np.uint8), "no image"),
        ([], "no image"),
        ([np.zeros((0, 4), np.uint8)], "no image"),
        (np.full((2, 3, 3), np.nan), "image 0 .* row 0 and column 0"),
        (np.full((2, 3, 3), np.float16(np.inf)), "image 0 .* not finite"),
        (np.full((2, 3, 3), 1e300), "image 0 .* beyond 1e.36, .* row 0 .*: divide all images"),
        ([np.zeros((2, 2), np.uint8), np.zeros((2, 2, 3), np.uint8)], "channels"),
        ([[[1, 2], [3]]], "not an array of numbers .*: give an array, or lists of equal lengths"),
        (torch.zeros(2, 3, 3, dtype=torch.bfloat16), "not an array of numbers"),
        (7, "not int"),
        ("/no/such/folder", "no such file"),
    ],
)
def test_bad_images_get_one_sentence(images, message):
    with pytest.raises(InputError, match=message):
        as_pictures(images)


def test_a_folder_is_not_one_image(tmp_path):
    Image.fromarray(np.zeros((3, 4), np.uint8)).save(tmp_path / "a.png")
    assert as_image(tmp_path / "a.png").shape == (3, 4, 1)
    with pytest.raises(InputError, match="is a folder: give the path of one image"):
        as_image(tmp_path)


def test_an_empty_folder_and_a_broken_file_get_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"no images in it; give a folder with .*\.webp files\.$"):
        as_pictures(tmp_path)
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="not a readable image"):
        as_pictures(tmp_path)
