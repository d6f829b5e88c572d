"""How mixtures look in a notebook."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import sklearn
from PIL import Image
from sklearn.datasets import load_digits

from factormix import MFA
from factormix.notebook import mixture_html, png
from oracles import random_case


@pytest.fixture(scope="module")
def digits() -> MFA:
    rows = load_digits().data.astype(np.float32)
    model = MFA(30, 1, random_state=0, max_epochs=1).fit(rows)
    model.image_shape_ = (8, 8)
    return model


def checked(text: str) -> str:
    """Return HTML whose elements are all closed."""

    class Balance(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attributes):
            if tag != "img":
                self.open.append(tag)

        def handle_startendtag(self, tag, attributes):
            pass

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Balance()
    parser.open = []
    parser.feed(text)
    assert parser.open == []
    return text


def test_an_image_model_shows_its_heaviest_means(digits: MFA) -> None:
    text = digits._repr_mimebundle_()["text/html"]
    assert digits._repr_html_().count("<img") == text.count("<img") == 24
    assert "30 components" in text
    assert "and 6 lighter components" in text
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", text)
    assert len(pictures) == 24
    first = np.asarray(Image.open(io.BytesIO(base64.b64decode(pictures[0]))), float)
    heaviest = digits.means_[np.argmax(digits.weights_)].reshape(8, 8)
    assert np.corrcoef(first.ravel(), heaviest.ravel())[0, 1] > 0.99


def test_scikit_learns_own_view_stays(digits: MFA) -> None:
    assert "sk-" in digits._repr_mimebundle_()["text/html"]
    with sklearn.config_context(display="text"):
        assert "text/html" not in digits._repr_mimebundle_()
    assert "<figure" not in MFA()._repr_mimebundle_()["text/html"]


def test_a_mixture_is_shown_as_profiles() -> None:
    text = checked(random_case(3, 5, 2).mixture._repr_html_())
    assert "<b>PrecisionMixture</b>: 3 components, 2 factors each, 5 features" in text
    assert text.count("<svg") == 3
    assert text.count("<rect") == 15


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 5, 3)])
def test_pictures_are_png_files_that_others_read(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_names_cannot_become_markup_and_large_images_stay_small() -> None:
    means = np.random.default_rng(0).normal(size=(2, 300 * 200))
    text = checked(mixture_html("<script>", {"<b>": "<i>"}, np.ones(2) / 2, means, (300, 200)))
    assert "<script>" not in text
    assert len(text) < 20_000


def test_equal_components_are_shown() -> None:
    text = checked(mixture_html("x", {}, np.ones(2) / 2, np.ones((2, 4))))
    assert "nan" not in text
    assert "nan" not in checked(mixture_html("x", {}, np.ones(1), np.ones((1, 4)), (2, 2)))
