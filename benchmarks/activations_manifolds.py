"""Ranks and dead components on toy manifolds whose local dimensions are known.

Eight kinds of manifolds, two of each with random centres and places, in 128 features:

============  =========  ===================================================================
kind          dimension  points, with s and t uniform
============  =========  ===================================================================
segment       1          a straight line
circle        1          a circle
helix         1          two turns around a cylinder, twice as high as wide
sphere        2          the surface of a ball
torus         2          a flat torus: the product of two circles, in four dimensions
Swiss roll    2          a sheet that is rolled up by one and a half turns
Moebius       2          a strip with half a twist, half as wide as the radius of its circle
box           5          a flat cube
============  =========  ===================================================================

Each is scaled to a root mean square distance of one from its centre, mapped into the features by a
random orthogonal map, and moved by a random vector of length three. Noise is Gaussian, with the
same deviation in all features: a tenth of that distance at a noise ratio of 10. Without noise the
likelihood has no bound, and ranks mean nothing.

A component covers a piece of a manifold, and a curved piece bends away from its tangent space.
Where the bend exceeds the noise, it is one more direction in which the rows of the component vary,
and a factor for it is right. So "exact" has two meanings here:

- local dimension: the rank is the dimension of the manifold that most rows of the component are
  from. On a manifold cut into few pieces, no likelihood can find it.
- of the piece: the rank is the number of directions in which the rows of the component vary by more
  than the noise, by their points before noise was added.

The two agree on flat pieces, which bend by less than the noise. Only there does the noise make the
local dimension meaningful, so it is also given for flat pieces alone.

    python benchmarks/activations_manifolds.py            # about three minutes of CPU time
    python benchmarks/activations_manifolds.py --quick
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from common import make_parser
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from factormix import MFA
from factormix.core.arrays import Workspace
from factormix.core.averages import (
    Averages,
    StepOptions,
    natural_step,
    prediction_widths,
    rotate_averages,
)
from factormix.core.density import operands, project, project_packed
from factormix.core.expectation import expected_statistics
from factormix.core.inspection import components_in_use
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters
from factormix.core.ranks import NATS_PER_NUMBER, factor_gains
from factormix.errors import TrainingWarning

Array = NDArray[np.float64]

FEATURES, COMPONENTS, MOST, NOISE_RATIO, DISTANCE = 128, 100, 32, 10.0, 3.0
TRAIN, HELD_OUT, SEEDS, PASSES = 150_000, 20_000, 3, 3


def _draw_helix(s: Array, t: Array, *rest: Array) -> list[Array]:
    a = 4 * np.pi * s
    return [np.cos(a), np.sin(a), 4 * s - 2]


def _draw_sphere(s: Array, t: Array, *rest: Array) -> list[Array]:
    a, z = 2 * np.pi * s, 2 * t - 1
    r = np.sqrt(1 - z**2)
    return [r * np.cos(a), r * np.sin(a), z]


def _draw_torus(s: Array, t: Array, *rest: Array) -> list[Array]:
    a, b = 2 * np.pi * s, 2 * np.pi * t
    return [np.cos(a), np.sin(a), np.cos(b), np.sin(b)]


def _draw_roll(s: Array, t: Array, *rest: Array) -> list[Array]:
    a = 1.5 * np.pi * (1 + 2 * s)
    return [a * np.cos(a), a * np.sin(a), 20 * t - 10]


def _draw_moebius(s: Array, t: Array, *rest: Array) -> list[Array]:
    a, w = 2 * np.pi * s, t - 0.5
    r = 1 + w * np.cos(a / 2)
    return [r * np.cos(a), r * np.sin(a), w * np.sin(a / 2)]


KINDS: dict[str, tuple[int, Callable[..., list[Array]]]] = {
    "segment": (1, lambda s, *rest: [s]),
    "circle": (1, lambda s, *rest: [np.cos(2 * np.pi * s), np.sin(2 * np.pi * s)]),
    "helix": (1, _draw_helix),
    "sphere": (2, _draw_sphere),
    "torus": (2, _draw_torus),
    "Swiss roll": (2, _draw_roll),
    "Moebius": (2, _draw_moebius),
    "box": (5, lambda *sides: list(sides)),
}
"""The dimension of each kind, and coordinates of its points by five uniform numbers of each."""


TEXTS = (
    "Sixteen manifolds of eight kinds in 128 features, 150,000 rows, K = 100, at most 32 factors,"
    " noise ratio 10, three passes; means of three seeds. A component covers a piece of a manifold,"
    " and a curved piece bends away from its tangent space. Where the bend exceeds the noise, a"
    " factor for it is right. So ranks are compared twice: with the dimension of the manifold, and"
    " with the number of directions in which the rows of the component vary by more than the noise,"
    " by their points before noise was added. A dead component counts as wrong. The two numbers are"
    " equal for flat pieces, which bend by less than the noise; only there does the noise make the"
    " dimension of the manifold meaningful for a component. The column on flat pieces has the share"
    " of them whose rank is the dimension, and how many there are. It was added after the"
    " share of all components was known.",
    "By kind of manifold. Spheres, tori and rolls are cut into six or seven pieces, which bend by"
    " more than the noise: one more direction, or two.",
    "Held-out log-likelihood of tables, a quarter of the rows held out, means of three splits. Most"
    " is 32, or one less than the number of features.",
    "CPU time of a batch, and size of its projections, where components have several ranks.",
)
"""What each table shows."""


class Manifolds(NamedTuple):
    """Rows from sixteen manifolds."""

    rows: NDArray[np.float32]
    """(n, d), with noise."""
    points: Array
    """(n, d), without noise."""
    kinds: NDArray[np.int64]
    """(n,), numbers in ``KINDS``."""


def draw_manifolds(n: int, seed: int, ratio: float = NOISE_RATIO) -> Manifolds:
    """Draw n rows of two manifolds of each kind."""
    rng = np.random.default_rng(seed)
    which = rng.integers(2 * len(KINDS), size=n)
    points = np.empty((n, FEATURES))
    for i in range(2 * len(KINDS)):
        here = which == i
        draw = list(KINDS.values())[i // 2][1]
        local = np.stack(draw(*rng.random((5, here.sum()))), axis=1)
        local -= local.mean(axis=0)
        local /= np.sqrt((local**2).sum(axis=1).mean())
        basis = np.linalg.qr(rng.normal(size=(FEATURES, local.shape[1])))[0]
        centre = rng.normal(size=FEATURES)
        points[here] = local @ basis.T + DISTANCE * centre / np.linalg.norm(centre)
    rows = points + rng.normal(size=points.shape) / ratio
    return Manifolds(rows.astype(np.float32), points, which // 2)


class Fitted(NamedTuple):
    """What a method found."""

    ranks: NDArray[np.int64]
    """(K,)."""
    labels: NDArray[np.int64]
    """(n,), the component of each training row."""
    weights: Array
    """(K,)."""
    score: float
    """Mean log-likelihood of held-out rows; NaN where there is no density."""
    seconds: float
    """CPU time of the training."""


def fit_mixture(train: Manifolds, new: Manifolds, seed: int, n_factors: int | str) -> Fitted:
    """Train a mixture with a rank for each component, or with one for all."""
    most = {"max_factors": MOST} if n_factors == "auto" else {}
    start = time.process_time()
    model = MFA(COMPONENTS, n_factors, max_epochs=PASSES, random_state=seed, **most)
    model.fit(train.rows)
    seconds = time.process_time() - start
    labels = np.asarray(model.predict(train.rows))
    return Fitted(np.asarray(model.ranks_), labels, model.weights_, model.score(new.rows), seconds)


def fit_clusters(train: Manifolds, seed: int) -> Fitted:
    """Find clusters by k-means and the rank of each by its principal components.

    The factors of a cluster are its first principal components, as long as each is supported above
    the mean variance of all later ones, by the same rule.
    """
    start = time.process_time()
    kmeans = MiniBatchKMeans(COMPONENTS, random_state=seed, batch_size=4096, n_init=3)
    labels = kmeans.fit_predict(train.rows)
    counts = np.bincount(labels, minlength=COMPONENTS)
    ranks = np.zeros(COMPONENTS, dtype=int)
    for k in np.flatnonzero(counts > 1):
        rows = train.rows[labels == k].astype(np.float64)
        ranks[k] = find_rank(np.linalg.eigvalsh(np.cov(rows.T, bias=True))[::-1], counts[k])
    seconds = time.process_time() - start
    return Fitted(ranks, labels, counts / counts.sum(), np.nan, seconds)


def find_rank(variances: Array, n_rows: int) -> int:
    """Return how many principal components have support, by the falling variances (d,) of all."""
    d, j = len(variances), np.arange(MOST)
    noise = np.array([variances[i + 1 :].mean() for i in j])
    # Each principal component in turn is the one factor of a mixture's component.
    Theta, V = torch.zeros(MOST, 2, d, dtype=torch.float64), torch.from_numpy(noise)
    Theta[:, 1, 0] = torch.from_numpy(np.sqrt(np.maximum(variances[:MOST] - noise, 0)))
    weights, p = torch.ones(MOST, dtype=torch.float64), 1 + torch.from_numpy(j)
    widths = prediction_widths(weights, 1 - p.unsqueeze(1), float(n_rows))
    averages = Averages(Theta, V.unsqueeze(1).repeat(1, d), weights)
    bound = torch.full((d,), 1e12, dtype=torch.float64)
    gains = factor_gains(averages, bound, Noise("isotropic"), widths)[:, 0].numpy()
    supported = n_rows * gains > NATS_PER_NUMBER * (d - j)
    return int(np.cumprod(supported).sum())


class Judged(NamedTuple):
    """The components of a method against the manifolds that their rows are from."""

    used: NDArray[np.bool_]
    """(K,), components in use."""
    kinds: NDArray[np.int64]
    """(K,), the kind that most rows are from."""
    pieces: NDArray[np.int64]
    """(K,), directions in which the points vary by more than the noise."""


def judge(fitted: Fitted, train: Manifolds) -> Judged:
    """Compare components with the points of their rows before noise was added."""
    K = len(fitted.ranks)
    kinds, pieces = np.zeros(K, dtype=int), np.zeros(K, dtype=int)
    used = np.bincount(fitted.labels, minlength=K) > 1
    used &= fitted.weights >= 0.1 / K
    for k in np.flatnonzero(used):
        here = fitted.labels == k
        kinds[k] = np.bincount(train.kinds[here]).argmax()
        variances = np.linalg.eigvalsh(np.cov(train.points[here].T))
        pieces[k] = (variances > NOISE_RATIO**-2).sum()
    return Judged(used, kinds, pieces)


def run(quick: bool = False) -> list[str]:
    """Run all methods, and return the lines of four Markdown tables."""
    n, seeds = (20_000, 1) if quick else (TRAIN, SEEDS)
    dimensions = np.array([dimension for dimension, _ in KINDS.values()])
    names: dict[str, int | str] = {"factormix, rank of each component": "auto"}
    names |= {f"factormix, {l} factors each": l for l in (2, 8, MOST)}
    clusters = "k-means, local PCA by the same rule"
    results: dict[str, list[list[float]]] = {name: [] for name in (*names, clusters)}
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in results}
    for seed in range(seeds):
        both = draw_manifolds(n + HELD_OUT, seed)
        train, new = (Manifolds(*(t[part] for t in both)) for part in (slice(n), slice(n, None)))
        for name in results:
            fitted = (
                fit_clusters(train, seed)
                if name == clusters
                else fit_mixture(train, new, seed, names[name])
            )
            used, kinds, pieces = judge(fitted, train)
            ranks, dead = (
                fitted.ranks[used],
                COMPONENTS
                - components_in_use(torch.from_numpy(np.asarray(fitted.weights, dtype=np.float64))),
            )
            # A dead component counts as wrong.
            local, flat = dimensions[kinds][used], (dimensions[kinds] == pieces)[used]
            exact = [100 * (ranks == t).sum() / COMPONENTS for t in (local, pieces[used])]
            exact += [100 * (ranks == local)[flat].mean(), flat.sum()]
            results[name].append([dead, *exact, ranks.mean(), fitted.score, fitted.seconds])
            found[name] += zip(kinds[used], ranks, pieces[used], strict=True)
            print(name, seed, [round(float(v), 2) for v in results[name][-1]], flush=True)
    kinds = _list_kinds(found, (next(iter(names)), clusters))
    tables = [_summarise(results, names), kinds, compare_tables(quick), time_steps(quick)]
    parts = zip(TEXTS, tables, strict=True)
    return [line for text, table in parts for line in (text, "", *table, "")]


def _summarise(results: dict[str, list[list[float]]], names: dict[str, int | str]) -> list[str]:
    lines = [
        "| | dead of 100 | local dimension exact | of flat pieces | rank of the piece exact"
        " | mean rank | held out | CPU seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in results.items():
        dead, local, piece, flat, n_flat, rank, score, seconds = np.mean(values, axis=0)
        free = names.get(name, "auto") == "auto"
        exact = (
            f"{local:.0f}% | {flat:.0f}% of {n_flat:.0f} | {piece:.0f}%" if free else "- | - | -"
        )
        text = "-" if np.isnan(score) else f"{score:.2f}"
        lines.append(f"| {name} | {dead:.1f} | {exact} | {rank:.1f} | {text} | {seconds:.0f} |")
    return lines


def _list_kinds(found: dict[str, list[tuple[int, int, int]]], names: tuple[str, str]) -> list[str]:
    """List, for each kind, its dimension and how often the ranks of each method are exact."""
    lines = [
        "| | dimension | of the pieces, mean | ranks, mean | local dimension exact"
        " | rank of the piece exact | the last two of k-means |",
        "|---|---|---|---|---|---|---|",
    ]
    for i, (kind, (dimension, _)) in enumerate(KINDS.items()):
        texts = []
        for name in names:
            some = np.array([(rank, piece) for which, rank, piece in found[name] if which == i])
            rank, piece = some.T if len(some) else np.full((2, 1), np.nan)
            exact = (100 * np.mean(rank == other) for other in (dimension, piece))
            texts.append((piece.mean(), rank.mean(), *(f"{value:.0f}%" for value in exact)))
        (piece, rank, local, own), other = texts
        lines.append(
            f"| {kind} | {dimension} | {piece:.1f} | {rank:.1f} | {local} | {own}"
            f" | {other[2]}, {other[3]} |"
        )
    return lines


def time_steps(quick: bool = False) -> list[str]:
    """Time a batch of 1,000 rows by mixtures of several ranks, and return a Markdown table."""
    K, d, repeats = 300, 256, 2 if quick else 8
    few, spread = torch.full((K,), 4), torch.arange(K) % (MOST + 1)
    few[:3] = MOST
    cases = {
        f"all {MOST}": torch.full((K,), MOST),
        f"3 of {MOST}, the others 4": few,
        f"evenly from 0 to {MOST}": spread,
        "all 4": torch.full((K,), 4),
    }
    states = {name: _make_state(ranks, d) for name, ranks in cases.items()}
    seconds = {name: np.zeros((repeats, 2)) for name in cases}
    bound = torch.full((d,), 1e4)
    for i in range(repeats + 1):
        for name, (averages, parameters, rows, work) in states.items():
            with torch.inference_mode():
                start = time.process_time()
                statistics = expected_statistics(parameters, rows, work=work)
                middle = time.process_time()
                options = StepOptions(0.01, bound, 1e-6, n_rows=1e5)
                averages, parameters = natural_step(averages, parameters, statistics, options)
                end = time.process_time()
            states[name] = averages, parameters, rows, work
            # The first step makes the workspace.
            seconds[name][i - 1] = middle - start, end - middle
    lines = [
        f"| ranks of {K} components, {d} features | statistics of 1,000 rows | step"
        " | projections of 1,000 rows |",
        "|---|---|---|---|",
    ]
    for name, values in seconds.items():
        statistics_ms, step_ms = 1000 * np.median(values, axis=0)
        projections = count_bytes(*states[name][1:3]) / 2**20
        lines.append(
            f"| {name} | {statistics_ms:.0f} ms | {step_ms:.0f} ms | {projections:.1f} MiB |"
        )
    return lines


def count_bytes(parameters: Parameters, rows: Tensor) -> int:
    """Count the bytes of the projections of rows."""
    ops = operands(parameters)
    Y = project(rows, ops)[1]
    if ops.packed is not None:
        Y = project_packed(rows, ops, ops.packed)[1].values
    return Y.nbytes


def compare_tables(quick: bool = False) -> list[str]:
    """Compare ranks of components with one for all on tables, and return a Markdown table."""
    digits = datasets.load_digits().data
    tables = {
        "digits": (digits, 10),
        "digits, many components": (digits, 25),
        "breast cancer": (datasets.load_breast_cancer().data, 4),
        "wine": (datasets.load_wine().data, 3),
        "diabetes": (datasets.load_diabetes().data, 4),
        "made, ranks 0 to 12": (draw_ranks(4000), 7),
        "made, weak factors": (draw_ranks(2000, strength=0.3), 7),
    }
    lines = [
        "| | K | 2 factors | 8 | most | a rank each | mean rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (rows, K) in tables.items():
        most, scores, ranks = min(MOST, rows.shape[1] - 1), np.zeros((1 if quick else 3, 4)), []
        for seed, found in enumerate(scores):
            order = np.random.default_rng(seed).permutation(len(rows))
            train, new = np.split(rows[order], [3 * len(rows) // 4])
            for i, l in enumerate((2, 8, most, "auto")):
                extra = {"max_factors": most} if l == "auto" else {}
                model = MFA(K, l, scaling="feature", random_state=seed, **extra)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", TrainingWarning)
                    found[i] = model.fit(train).score(new)
            ranks.append(model.ranks_.mean())
        texts = " | ".join(f"{score:.2f}" for score in scores.mean(axis=0))
        lines.append(f"| {name} | {K} | {texts} | {np.mean(ranks):.1f} |")
        print(lines[-1], flush=True)
    return lines


def draw_ranks(n: int, strength: float = 1.0, d: int = 30) -> Array:
    """Draw n rows of a mixture of factor analyzers of seven ranks."""
    rng, ranks = np.random.default_rng(0), (0, 1, 2, 3, 5, 8, 12)
    which, rows = rng.integers(len(ranks), size=n), np.empty((n, d))
    for k, rank in enumerate(ranks):
        m = int((which == k).sum())
        codes, loadings = rng.normal(size=(m, rank)), strength * rng.normal(size=(rank, d))
        noise = rng.normal(size=(m, d)) * np.sqrt(rng.uniform(0.5, 1.5, d))
        rows[which == k] = 3 * rng.normal(size=d) + codes @ loadings + noise
    return rows


def _make_state(ranks: Tensor, d: int) -> tuple[Averages, Parameters, Tensor, Workspace]:
    """Make a mixture of these ranks (K,), and rows around its means."""
    K, most = len(ranks), int(ranks.max())
    generator = torch.Generator().manual_seed(0)
    Theta = torch.randn(K, most + 1, d, generator=generator)
    Theta[:, 0] *= 3
    Theta[:, 1:] *= (torch.arange(most) < ranks.unsqueeze(1)).unsqueeze(2)
    averages = Averages(Theta, torch.ones(K, d), torch.full((K,), 1 / K))
    averages, parameters = rotate_averages(averages, torch.full((d,), 1e4), 1e-6)
    rows = parameters.means[torch.arange(1000) % K] + torch.randn(1000, d, generator=generator)
    return averages, parameters, rows, Workspace()


def main() -> None:
    """Print the tables."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    print("\n".join(run(options.quick)))


if __name__ == "__main__":
    main()
