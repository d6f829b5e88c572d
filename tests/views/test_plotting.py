"""Figures of components, samples, curves and sizes, and the files they are saved to."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factormix import MFA, select
from factormix.core.annealing import grid_shape
from factormix.errors import InputError
from factormix.estimators import Selection

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from factormix.plotting import (
    figure_png,
    plot_history,
    plot_loadings,
    plot_means,
    plot_precisions,
    plot_roc,
    plot_samples,
    plot_scores,
    plot_selection,
    plot_weights,
    save_figure,
    save_image_grid,
)
from factormix.views.plotting.components import draw_sample_rows
from factormix.views.plotting.drawing import MARK
from factormix.views.plotting.tiles import make_mosaic


@dataclass
class FittedModel:
    """The fitted attributes of an estimator."""

    weights_: Any
    means_: Any
    precision_diag_: Any
    precision_factors_: Any
    loadings_: Any
    noise_variances_: Any
    history_: list[dict[str, float]] = field(default_factory=list)


def make_model(K: int = 6, d: int = 64, l: int = 2, seed: int = 0) -> FittedModel:
    rng = np.random.default_rng(seed)
    E = rng.uniform(5, 20, (K, d))
    Gamma = rng.normal(size=(K, d, l)) * np.linspace(0.3, 0.1, l)
    return FittedModel(
        weights_=rng.dirichlet(np.full(K, 20.0)),
        means_=rng.uniform(0, 1, (K, d)),
        precision_diag_=E,
        precision_factors_=Gamma,
        loadings_=Gamma / E[:, :, None] * 4,
        noise_variances_=1 / E,
        history_=[
            {"epoch": t, "step": 10 * t, "log_likelihood": -100 / t, "sigma": 2.0 / t,
             "learning_rate": 0.01, "components_in_use": K}
            for t in range(1, 8)
        ],
    )  # fmt: skip


def as_torch(model: FittedModel) -> FittedModel:
    arrays = {
        name: torch.tensor(value, dtype=torch.float32, requires_grad=True)
        for name, value in vars(model).items()
        if isinstance(value, np.ndarray)
    }
    return FittedModel(**arrays, history_=model.history_)


def get_image(fig: Any) -> Any:
    images = [image for axes in fig.axes for image in axes.get_images()]
    assert len(images) == 1
    return images[0]


def get_tile(mosaic: np.ndarray, k: int, shape: tuple[int, int], cols: int, pad: int) -> np.ndarray:
    top, left = (k // cols) * (shape[0] + pad), (k % cols) * (shape[1] + pad)
    return mosaic[top : top + shape[0], left : left + shape[1]]


def get_text(fig: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(artist.get_text() for artist in fig.findobj(Text))


@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 4),
    pad=st.integers(0, 3),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    missing=st.integers(0, 3),
    colour=st.booleans(),
)
def test_tiles_of_a_mosaic_lie_on_the_grid(rows, cols, pad, shape, missing, colour):
    n = max(1, rows * cols - missing)
    full = (n, *shape, 3) if colour else (n, *shape)
    images = 1.0 + np.arange(math.prod(full)).reshape(full)
    mosaic = make_mosaic(images, rows, cols, pad)
    assert mosaic.shape[:2] == (rows * (shape[0] + pad) - pad, cols * (shape[1] + pad) - pad)
    for k in range(n):
        np.testing.assert_array_equal(get_tile(mosaic, k, shape, cols, pad), images[k])
    assert np.isfinite(mosaic).sum() == images.size


@pytest.mark.parametrize("K", [1, 6, 7, 25])
def test_means_are_one_mosaic_in_the_layout_of_the_component_grid(K):
    model = make_model(K)
    fitted = as_torch(model) if K == 6 else model
    mosaic = np.ma.filled(get_image(plot_means(fitted)).get_array(), np.nan)
    rows, cols = grid_shape(K)
    pad = (mosaic.shape[1] - 8 * cols) // max(1, cols - 1)
    assert mosaic.shape[0] == 8 * rows + pad * (rows - 1)
    for k in range(K):
        tile = get_tile(mosaic, k, (8, 8), cols, pad)
        np.testing.assert_allclose(tile.ravel(), model.means_[k], rtol=1e-6)


def test_images_that_are_not_square_need_their_shape():
    model = make_model(4, 60)
    mosaic = get_image(plot_means(model, (5, 12))).get_array()
    np.testing.assert_array_equal(mosaic[:5, :12].ravel(), model.means_[0])
    with pytest.raises(InputError, match="a row has 60 values"):
        plot_means(model, (5, 11))
    with pytest.raises(InputError, match="image_shape"):
        plot_means(model, (5, 6, 2))


def test_means_within_zero_and_one_use_that_range_and_others_their_own():
    model = make_model()
    assert get_image(plot_means(model)).get_clim() == (0, 1)
    model.means_ = 100 * model.means_ - 500
    low, high = get_image(plot_means(model)).get_clim()
    assert -500 <= low < -490
    assert -410 < high <= -400


def test_colour_images_are_clipped_and_keep_their_channels():
    model = make_model(4, 3 * 64)
    model.means_ = 2 * model.means_ - 0.5
    model.means_[:, ::50] = 9.0
    fig = plot_means(model, (8, 8, 3))
    mosaic = np.asarray(get_image(fig).get_array())
    assert mosaic.shape[2] == 3
    assert mosaic.min() >= 0
    assert mosaic.max() <= 1
    model = make_model(4, 3 * 64)
    mosaic = np.asarray(get_image(plot_means(model)).get_array())
    np.testing.assert_allclose(mosaic[:8, :8].ravel(), model.means_[0])


def test_signed_colours_are_symmetric_about_zero_with_a_bar():
    model = make_model()
    model.precision_factors_ += 0.2
    factors, loadings = plot_loadings(model, 1), plot_loadings(model, 0, kind="loadings")
    for fig in (factors, loadings):
        image = get_image(fig)
        low, high = image.get_clim()
        assert low == -high < 0
        middle = np.array(image.get_cmap()(0.5))
        assert middle[:3].min() > 0.9, "zero is nearly white"
        assert len(fig.axes) == 2, "the grid and its colour bar"
    seen = np.ma.filled(get_image(factors).get_array(), np.nan)
    np.testing.assert_array_equal(seen[:8, :8].ravel(), model.precision_factors_[0, :, 1])


def test_all_columns_share_one_scale():
    model = make_model(l=3)
    fig = plot_loadings(model)
    images = [image for axes in fig.axes for image in axes.get_images()]
    assert len(images) == 3
    assert len({image.get_clim() for image in images}) == 1
    for j, image in enumerate(images):
        tile = image.get_array()[:8, :8]
        np.testing.assert_array_equal(tile.ravel(), model.precision_factors_[0, :, j])


def test_precisions_take_limits():
    model = make_model()
    assert get_image(plot_precisions(model, vmin=0, vmax=20)).get_clim() == (0, 20)
    assert get_image(plot_precisions(model)).get_clim() == (
        model.precision_diag_.min(),
        model.precision_diag_.max(),
    )
    model.precision_diag_[:] = 20
    low, high = get_image(plot_precisions(model)).get_clim()
    assert low < 20 < high


def test_precisions_of_colour_images_are_averaged_over_the_channels():
    model = make_model(4, 3 * 64)
    mosaic = get_image(plot_precisions(model)).get_array()
    expected = model.precision_diag_[0].reshape(8, 8, 3).mean(2)
    np.testing.assert_allclose(mosaic[:8, :8], expected)


def count_crosses(fig: Any) -> int:
    strokes = [
        len(lines.get_segments())
        for lines in fig.axes[0].findobj(LineCollection)
        if len(lines.get_colors()) and tuple(lines.get_colors()[0]) == to_rgba(MARK)
    ]
    return sum(strokes) // 2


@pytest.mark.parametrize("shape", [None, (64,)])
def test_unused_components_are_crossed_out_and_do_not_affect_colours(shape):
    model = make_model()
    assert count_crosses(plot_precisions(model, shape)) == 0
    before = model.precision_diag_.max()
    model.precision_diag_[[0, 4]] = 1e6
    model.weights_[[0, 4]] = [0.09 / 6, 0.0]
    model.weights_[1] = 0.11 / 6
    fig = plot_precisions(model, shape)
    assert count_crosses(fig) == 2
    assert "2 of 6 components unused" in get_text(fig)
    if shape is None:
        assert get_image(fig).get_clim()[1] <= before
    else:
        curves = fig.axes[0].findobj(LineCollection)[0].get_segments()
        assert np.ptp(np.asarray(curves[1])[:, 1]) > 0.5, "the others still fill their tiles"


@pytest.mark.parametrize("d", [1, 16, 27])
def test_rows_that_are_not_images_are_lines(d):
    model = make_model(6, d)
    means = plot_means(model)
    for fig in (means, plot_precisions(model), plot_loadings(model), plot_samples(model, n=2)):
        assert not any(axes.get_images() for axes in fig.axes)
        assert figure_png(fig, dpi=40).startswith(b"\x89PNG")
    curves = means.axes[0].findobj(LineCollection)[-1].get_segments()
    if d > 1:
        assert len(curves) == 6
        # Component 4 of a 2 x 3 grid lies in the second row and column; higher values lie higher.
        inside = np.asarray(curves[4])
        assert ((inside > (1, -2)) & (inside < (2, -1))).all()
        order = np.argsort(model.means_[4])
        assert (np.diff(inside[order, 1]) >= 0).all()


def test_any_number_of_components_can_be_drawn():
    for K in (1, 23, 200):
        assert figure_png(plot_means(make_model(K)), dpi=40).startswith(b"\x89PNG")
    for K in (1, 23, 121):
        assert figure_png(plot_weights(make_model(K)), dpi=40).startswith(b"\x89PNG")


def test_samples_without_noise_lie_in_the_span_of_the_loadings():
    model = make_model(l=2)
    rows = draw_sample_rows(model, [3, 1], 5, False, 0)
    assert rows.shape == (2, 6, 64)
    for block, k in zip(rows, [3, 1], strict=True):
        np.testing.assert_array_equal(block[0], model.means_[k])
        deviations = block[1:] - model.means_[k]
        _, residual, *_ = np.linalg.lstsq(model.loadings_[k], deviations.T, rcond=None)
        np.testing.assert_allclose(residual, 0, atol=1e-20)
    mosaic = get_image(plot_samples(model, [3, 1], n=5, noise=False, random_state=0)).get_array()
    np.testing.assert_array_equal(mosaic[:8, :8].ravel(), model.means_[3])
    np.testing.assert_array_equal(mosaic[-8:, :8].ravel(), model.means_[1])
    np.testing.assert_array_equal(mosaic[:8, -8:].ravel(), rows[0, 5])


def test_samples_have_the_moments_of_their_component():
    model = make_model(2, 5, 2)
    rows = draw_sample_rows(model, [1], 40_000, True, 1)[0, 1:]
    covariance = np.diag(model.noise_variances_[1]) + model.loadings_[1] @ model.loadings_[1].T
    np.testing.assert_allclose(rows.mean(0), model.means_[1], atol=0.02)
    np.testing.assert_allclose(np.cov(rows.T), covariance, atol=0.01)


def test_samples_depend_on_the_seed_and_show_the_heaviest_components():
    model = make_model(16)
    first, again, other = (plot_samples(model, n=3, random_state=seed) for seed in (1, 1, 2))
    pixels = get_image(first).get_array()
    assert np.ma.allequal(pixels, get_image(again).get_array())
    assert not np.ma.allequal(pixels, get_image(other).get_array())
    labels = [t.get_text() for t in first.axes[0].get_yticklabels()]
    heaviest = sorted(np.argsort(-model.weights_)[:10])
    assert [int(label.split()[0]) for label in labels] == heaviest
    with pytest.raises(InputError, match="from 0 to 15"):
        plot_samples(model, [16])
    with pytest.raises(InputError, match="n is 0"):
        plot_samples(model, n=0)


def test_history_draws_all_recorded_quantities():
    model = make_model()
    fig = plot_history(model)
    assert [axes.get_ylabel() for axes in fig.axes] == [
        "mean log-likelihood", "components\nin use", "sigma", "learning\nrate",
    ]  # fmt: skip
    line = fig.axes[0].get_lines()[0]
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 8))
    np.testing.assert_allclose(line.get_ydata(), [-100 / t for t in range(1, 8)])
    assert fig.axes[-1].get_xlabel() == "epoch"


def test_history_draws_the_scores_of_held_out_rows():
    records = [{"epoch": t, "log_likelihood": -10.0 - 1 / t} for t in range(1, 31)]
    for record in records[9::5]:
        record["held_out"] = -12.0
    (axes,) = plot_history(records).axes
    _, others = axes.get_lines()
    assert others.get_xdata().tolist() == [10, 15, 20, 25, 30]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["held-out rows"]
    assert axes.get_ylim()[0] < -12


def test_history_copes_with_gaps_repeated_epochs_and_a_very_low_start():
    records = [{"epoch": 1, "step": t, "log_likelihood": -10.0 - 1 / t} for t in range(1, 31)]
    records[0]["log_likelihood"] = -1e9
    records[5]["log_likelihood"] = math.nan
    del records[7]["log_likelihood"]
    fig = plot_history(records)
    assert len(fig.axes) == 1
    assert fig.axes[0].get_xlabel() == "step"
    assert len(fig.axes[0].get_lines()[0].get_xdata()) == 28
    assert fig.axes[0].get_ylim()[0] > -20
    for empty in ([], [{"epoch": 1}]):
        with pytest.raises(InputError, match="no log-likelihood"):
            plot_history(empty)


def pairwise_auc(high: np.ndarray, low: np.ndarray) -> float:
    return float(((high[:, None] > low) + 0.5 * (high[:, None] == low)).mean())


def test_scores_show_every_row_and_the_auc_of_two_groups():
    rng = np.random.default_rng(0)
    high, low = rng.normal(0, 1, 300).round(1), rng.normal(-1, 2, 200).round(1)
    low[0] = -1e6
    fig = plot_scores({"inliers": high, "class 9": torch.tensor(low)})
    assert f"AUC {pairwise_auc(high, low):.3f}" in fig.axes[0].get_title(loc="left")
    for patch in fig.axes[0].patches:
        np.testing.assert_allclose(patch.get_data().values.sum(), 100)
    assert "AUC" not in plot_scores({"a": high}).axes[0].get_title(loc="left")
    with pytest.raises(InputError, match="the scores of 'a'"):
        plot_scores({"a": [1.0, math.nan]})
    with pytest.raises(InputError, match="no scores"):
        plot_scores({})


def test_roc_names_each_curve_with_its_auc():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    scores = labels + rng.normal(size=200)
    fig = plot_roc({"MFA": (labels, scores), "GMM": (labels.astype(bool), -scores)})
    names = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    auc = pairwise_auc(scores[labels == 1], scores[labels == 0])
    assert names == [f"MFA (AUC {auc:.3f})", f"GMM (AUC {1 - auc:.3f})"]
    with pytest.raises(InputError, match="both inliers"):
        plot_roc({"MFA": (np.ones(200), scores)})
    with pytest.raises(InputError, match="200 labels and 3 scores"):
        plot_roc({"MFA": (labels, scores[:3])})


@pytest.fixture(scope="module", params=["held_out", "bic"])
def selection(request) -> Selection:
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(size=(100, 3)), 9 + rng.normal(size=(100, 3))])
    estimator = MFA(random_state=0, max_epochs=20)
    return select(X, [1, 2, 4], [0, 1], estimator=estimator, refit=False, criterion=request.param)


def test_selection_has_a_cell_for_each_size_and_frames_the_best(selection):
    axes = plot_selection(selection).axes[0]
    values = axes.images[0].get_array()
    assert values.shape == (2, 3)
    for size in selection.sizes:
        cell = values[[0, 1].index(size.n_factors), [1, 2, 4].index(size.n_components)]
        assert cell == pytest.approx(size.difference)
    (frame,) = axes.patches
    best = selection.best
    assert frame.get_xy() == (
        [1, 2, 4].index(best.n_components) - 0.5,
        [0, 1].index(best.n_factors) - 0.5,
    )
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "4"]
    assert len(axes.texts) == 6


def test_selection_shows_stopped_sizes_in_brackets(selection):
    stopped = dataclasses.replace(selection.sizes[0], status="stopped")
    changed = dataclasses.replace(selection, sizes=[stopped, *selection.sizes[1:]])
    texts = [t.get_text() for t in plot_selection(changed).axes[0].texts]
    assert texts[0].startswith("(−")
    with pytest.raises(InputError, match="no size to draw"):
        plot_selection(dataclasses.replace(selection, sizes=[]))


def test_weights_as_bars_and_as_grid():
    model = make_model()
    model.weights_[2] = 0.0
    fig = plot_weights(model)
    bars = fig.axes[0].patches
    heights = [bar.get_height() for bar in bars]
    np.testing.assert_allclose(heights, 100 * np.sort(model.weights_)[::-1])
    assert bars[-1].get_facecolor() == to_rgba(MARK)
    assert "5 of 6 components in use" in get_text(fig)
    mosaic = get_image(plot_weights(model, "grid")).get_array()
    np.testing.assert_allclose(mosaic[0, 0], 100 * model.weights_[0])
    np.testing.assert_allclose(mosaic[-1, -1], 100 * model.weights_[5])
    with pytest.raises(InputError, match="bars"):
        plot_weights(model, "pie")  # type: ignore[arg-type]


def test_bad_models_get_one_sentence():
    model = make_model(l=0)
    for draw in (plot_loadings, lambda m: plot_loadings(m, 0)):
        with pytest.raises(InputError, match="n_factors=0"):
            draw(model)
    with pytest.raises(InputError, match="from 0 to 1"):
        plot_loadings(make_model(), 2)
    with pytest.raises(InputError, match="kind is 'covariance'"):
        plot_loadings(make_model(), 0, kind="covariance")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="fit it first"):
        plot_means(object())  # type: ignore[arg-type]


def test_a_diagonal_model_still_gives_samples():
    assert figure_png(plot_samples(make_model(l=0), n=2), dpi=40).startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_equal_figures_give_equal_files_whatever_the_users_style(tmp_path, kind):
    files = [tmp_path / f"{name}.{kind}" for name in "abc"]
    fig = plot_means(make_model())
    save_figure(fig, files[0], dpi=60)
    save_figure(fig, files[1], dpi=60)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "svg.hashsalt": "x"}):
        save_figure(plot_means(make_model()), files[2], dpi=60)
    first, again, styled = (file.read_bytes() for file in files)
    assert first == again == styled
    assert b"date" not in first.lower()
    assert sorted(tmp_path.iterdir()) == sorted(files), "no temporary file is left"


def test_a_failure_leaves_the_old_file(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "means.png"
    fig = plot_means(make_model())
    save_figure(fig, path, dpi=40)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(InputError, match="cannot write"):
            save_figure(fig, path, dpi=50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_cannot_be_written_get_one_sentence(tmp_path):
    fig = plot_weights(make_model())
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        save_figure(fig, tmp_path / "means.tiff")
    with pytest.raises(InputError, match="does not exist"):
        save_figure(fig, tmp_path / "absent" / "means.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="does not exist"):
        save_figure(fig, tmp_path / "file" / "means.png")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_image_grid_keeps_every_pixel_in_its_place(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (7, 64)) / 255
    path = tmp_path / "grid.png"
    save_image_grid(torch.tensor(images), path)
    pixels = imread(path)[:, :, :3]
    unit = pixels.shape[1] // (3 * 8 + 2)
    assert pixels.shape == (unit * 26, unit * 26, 3), "three rows and columns, one pixel between"
    small = pixels[unit // 2 :: unit, unit // 2 :: unit]
    for k in range(7):
        tile = get_tile(small, k, (8, 8), 3, 1)
        np.testing.assert_allclose(tile, np.repeat(images[k].reshape(8, 8, 1), 3, 2), atol=1e-6)
    assert (small[18:, 18:] == 1).all(), "the rest is white"
    before = path.read_bytes()
    save_image_grid(images, path)
    assert path.read_bytes() == before


def test_image_grid_takes_colours_noise_and_other_scales(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "grid.png"
    noisy = rng.uniform(0, 1, (4, 8 * 9 * 3)) + 0.2 * rng.normal(size=(4, 216))
    save_image_grid(noisy, path, (8, 9, 3))
    pixels = imread(path)
    assert np.allclose(pixels[0, 0, :3], np.clip(noisy[0, :3], 0, 1), atol=1 / 255)
    save_image_grid(rng.uniform(0, 255, (4, 64)), path)
    assert 0.2 < imread(path)[:100, :100, 0].mean() < 0.8
    save_image_grid(np.full((1, 64), 3.0), path, vmin=2, vmax=4)
    assert abs(imread(path)[5, 5, 0] - 0.5) < 0.01


def test_image_grid_refuses_what_it_cannot_draw(tmp_path):
    path = tmp_path / "grid.png"
    for images, message in (
        (np.zeros((3, 17)), "not images"),
        (np.zeros((0, 64)), "one or more rows"),
        (np.zeros(64), "one or more rows"),
        (np.full((1, 64), np.nan), "NaN"),
    ):
        with pytest.raises(InputError, match=message):
            save_image_grid(images, path)
    with pytest.raises(InputError, match=r"name it \.png"):
        save_image_grid(np.zeros((1, 64)), tmp_path / "grid.npy")
    assert not list(tmp_path.iterdir())


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"factormix\[plots\]"):
        plot_means(make_model())


def test_pyplot_and_the_backend_are_never_touched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    # Read without the look-up that would choose a backend.
    before = dict.__getitem__(matplotlib.rcParams, "backend")
    save_figure(plot_scores({"a": np.arange(9.0)}), tmp_path / "a.png", dpi=40)
    assert dict.__getitem__(matplotlib.rcParams, "backend") is before
