"""Trials of the benchmark of activations: likelihood, reading and steering, one process each."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from activations_data import LAYERS, load_network, make_small_network
from common import peak_memory
from harness import Outcome, Settings
from numpy.typing import NDArray
from torch import Tensor

from factormix import MFA
from factormix.activations import MixtureCoder, atlas, open_store, steer
from factormix.activations.store import Store as Activations

FACTORS = 10
KMEANS_PASSES = 4
"""Passes of k-means from random rows; the mean distance falls by less than 2% in a fifth."""
PRIOR_ROWS = 10
"""Rows of the pooled noise that are added to each cluster, so that small ones have a density."""
ADAM_BATCH, ADAM_RATE = 512, 3e-3
"""Rows of a batch and learning rate. Of the rates 0.001, 0.003, 0.01 and 0.03, this one is best on
layer 3 with K = 200 after 12 CPU seconds: -177, -161, -164 and -174 nats."""
POINTS = 4
"""Points of a curve."""


def run_likelihood(settings: Settings, data_folder: str | None) -> Outcome:
    """Train by one method; return held-out log-likelihoods at CPU seconds, memory and dead."""
    train, test = load_rows(settings, data_folder)
    run = {"factormix": _run_mfa, "em": _run_mfa, "k-means": _run_kmeans, "Adam": _run_adam}
    curve, n_rows_of_components = run[settings["method"]](train, test, settings)
    return Outcome(
        {
            "curve": curve,
            "dead": int((np.asarray(n_rows_of_components) < 1).sum()),
            "memory": peak_memory(),
        }
    )


def open_layer(settings: Settings, data_folder: str | None) -> Activations:
    """Open the activations of a layer."""
    assert data_folder is not None
    return open_store(Path(data_folder) / f"layer-{settings['layer']}")


def load_rows(settings: Settings, data_folder: str | None) -> tuple[Tensor, Tensor]:
    """Return training rows (n, d), and the last ones of the store, (m, d), which are held out."""
    store = open_layer(settings, data_folder)
    n, m = min(settings["rows"], store.n_rows - settings["test"]), settings["test"]
    train, test = torch.empty(n, store.n_features), torch.empty(m, store.n_features)
    first = 0
    for block in store.blocks(8192):
        rows = torch.as_tensor(np.asarray(block.rows)).float()
        for part, start in ((train, 0), (test, store.n_rows - m)):
            low, high = max(first, start), min(first + len(rows), start + len(part))
            if low < high:
                part[low - start : high - start] = rows[low - first : high - first]
        first += len(rows)
    return train, test


class _Clock:
    """CPU seconds of training: the time of evaluations is taken off."""

    def __init__(self) -> None:
        self._began, self._lost = time.process_time(), 0.0

    @property
    def seconds(self) -> float:
        return time.process_time() - self._began - self._lost

    def evaluate(self, score: Callable[[], float]) -> list[float]:
        """Return the seconds up to now and a score."""
        seconds, before = self.seconds, time.process_time()
        point = [seconds, score()]
        self._lost += time.process_time() - before
        return point


def _run_mfa(train: Tensor, test: Tensor, settings: Settings) -> Any:
    curve, clock, n = list[list[float]](), _Clock(), len(train)

    def watch(progress: Any) -> bool:
        due = len(curve) + 1
        part = max(progress.record["step"] / progress.steps, clock.seconds / settings["budget"])
        if due < POINTS and part * POINTS >= due:
            curve.append(clock.evaluate(lambda: float(progress.model.score(test.numpy()))))
        return bool(clock.seconds > settings["budget"])

    name = "natural" if settings["method"] == "factormix" else "em"
    model = MFA(
        settings["K"],
        FACTORS,
        solver=name,
        max_epochs=settings["passes"],
        random_state=settings["seed"],
        callbacks=[watch],
    ).fit(train.numpy())
    curve.append(clock.evaluate(lambda: float(model.score(test.numpy()))))
    return curve, n * np.asarray(model.weights_)


def _run_kmeans(train: Tensor, test: Tensor, settings: Settings) -> Any:
    clock = _Clock()
    centres, labels = run_kmeans(train, settings["K"], settings["seed"])
    mixture = fit_clusters(train, labels, len(centres))
    points = [clock.evaluate(lambda: covariance_log_prob(test, *mixture).mean().item())]
    counts = torch.bincount(labels, minlength=len(centres))
    return points, counts.numpy()


def run_kmeans(x: Tensor, K: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return centres (K, d) and the nearest one of each row, (n,), by Lloyd's algorithm."""
    generator = torch.Generator().manual_seed(seed)
    centres = x[torch.randperm(len(x), generator=generator)[:K]].clone()
    labels = torch.empty(len(x), dtype=torch.long)
    for _ in range(KMEANS_PASSES):
        half = 0.5 * centres.square().sum(dim=1)
        for first in range(0, len(x), 4096):
            some = slice(first, first + 4096)
            labels[some] = torch.addmm(-half, x[some], centres.mT).argmax(dim=1)
        counts = torch.bincount(labels, minlength=K).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add_(0, labels, x)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres, labels


def fit_clusters(x: Tensor, labels: Tensor, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fit a factor analyzer to each cluster: log-weights, means, loadings and noise variances.

    Three rounds of the usual iteration of maximum likelihood: principal directions of rows scaled
    by the noise, then the noise from what they leave.
    """
    n, d = x.shape
    order = labels.argsort()
    counts = torch.bincount(labels, minlength=K)
    means, loadings = torch.zeros(K, d), torch.zeros(K, d, FACTORS)
    noise = torch.empty(K, d)
    rows = torch.split(x[order], counts.tolist())
    filled = [k for k in range(K) if len(rows[k])]
    within = sum(((rows[k] - rows[k].mean(dim=0)) ** 2).sum(dim=0) for k in filled) / n
    noise[:] = within
    for k in filled:
        n_k = len(rows[k])
        means[k] = rows[k].mean(dim=0)
        centred = rows[k] - means[k]
        variances = (centred.square().sum(dim=0) + PRIOR_ROWS * within) / (n_k + PRIOR_ROWS)
        psi = variances
        if n_k > 1:
            for _ in range(3):
                scaled = centred / (psi.sqrt() * math.sqrt(n_k))
                torch.manual_seed(0)
                _, s, V = torch.svd_lowrank(scaled, min(FACTORS + 4, n_k, d), niter=2)
                s, V = s[:FACTORS], V[:, :FACTORS]
                L = psi.sqrt().unsqueeze(1) * V * (s.square() - 1).clamp(min=0).sqrt()
                psi = torch.maximum(variances - L.square().sum(dim=1), 0.05 * within)
            loadings[k, :, : L.shape[1]] = L
        noise[k] = psi
    log_weights = (counts.float().clamp(min=1e-3) / n).log()
    return log_weights, means, loadings, noise


def covariance_log_prob(
    x: Tensor, log_weights: Tensor, means: Tensor, loadings: Tensor, noise: Tensor
) -> Tensor:
    """Compute ``log p(x)``, (B,), of ``sum_k pi_k N(mu_k, Lambda_k Lambda_k' + diag(noise_k))``."""
    K, d, l = loadings.shape
    weighted = loadings / noise.unsqueeze(-1)
    inner = torch.eye(l) + loadings.mT @ weighted
    chol = torch.linalg.cholesky(inner)
    # Whitened projections: |chol^-1 Lambda' Psi^-1 (x - mu)|^2 is what the factors explain.
    A = torch.linalg.solve_triangular(chol, weighted.mT, upper=False).reshape(K * l, d)
    offset = torch.einsum("kld,kd->kl", A.view(K, l, d), means).reshape(-1)
    logdet = noise.log().sum(dim=1) + 2 * chol.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    constant = log_weights - 0.5 * (
        d * math.log(2 * math.pi) + logdet + (means.square() / noise).sum(dim=1)
    )
    parts = []
    for some in torch.split(x, max(1, (1 << 24) // (K * (l + 1)))):
        quadratic = some.square() @ (1 / noise).mT - 2 * some @ (means / noise).mT
        explained = (some @ A.mT - offset).view(len(some), K, l).square().sum(dim=-1)
        parts.append((constant - 0.5 * (quadratic - explained)).logsumexp(dim=1))
    return torch.cat(parts)


def _run_adam(train: Tensor, test: Tensor, settings: Settings) -> Any:
    """Adam on means, loadings, weights and one noise for all components, from k-means."""
    clock, K, d = _Clock(), settings["K"], train.shape[1]
    centre = train[:4096].mean(dim=0)
    train, test = train - centre, test - centre
    centres, labels = run_kmeans(train, K, settings["seed"])
    counts = torch.bincount(labels, minlength=K)
    within = (train - centres[labels]).square().mean(dim=0)
    generator = torch.Generator().manual_seed(settings["seed"])
    scale = 0.1 * within.sqrt().unsqueeze(-1)
    logits = (counts + 1.0).log().requires_grad_()
    means = centres.clone().requires_grad_()
    loadings = (scale * torch.randn(K, d, FACTORS, generator=generator)).requires_grad_()
    log_noise = within.log().requires_grad_()
    optimizer = torch.optim.Adam([logits, means, loadings, log_noise], lr=ADAM_RATE)

    def log_prob(x: Tensor) -> Tensor:
        noise = log_noise.exp().expand(K, d)
        return covariance_log_prob(x, logits.log_softmax(dim=0), means, loadings, noise)

    def score() -> float:
        with torch.no_grad():
            return log_prob(test).mean().item()

    curve = [clock.evaluate(score)]
    while clock.seconds < settings["budget"]:
        some = torch.randint(len(train), (ADAM_BATCH,), generator=generator)
        optimizer.zero_grad()
        (-log_prob(train[some]).mean()).backward()
        optimizer.step()
        if clock.seconds > len(curve) / POINTS * settings["budget"]:
            curve.append(clock.evaluate(score))
    curve.append(clock.evaluate(score))
    return curve, len(train) * logits.detach().softmax(dim=0).numpy()


def run_manifolds(settings: Settings, data_folder: str | None) -> Outcome:
    """Measure ranks on toy manifolds, which has a script of its own."""
    import activations_manifolds

    return Outcome({"lines": activations_manifolds.run(settings["quick"])})


def run_reading(settings: Settings, data_folder: str | None) -> Outcome:
    """Assign rows to regions by three methods of equal CPU time; measure tokens and contexts."""
    train, _ = load_rows(settings, data_folder)
    store = open_layer(settings, data_folder)
    labels = store.labels_at(0, len(train))
    K, seed, clock = settings["K"], settings["seed"], _Clock()
    model = MFA(K, FACTORS, max_epochs=settings["passes"], random_state=seed).fit(train.numpy())
    budget = clock.seconds
    shown = train[: settings["shown"]]
    found = {"factormix": (budget, MixtureCoder(model).encode_best(shown).components.numpy())}
    clock = _Clock()
    _, nearest = run_kmeans(train, K, seed)
    found["k-means"] = (clock.seconds, nearest[: len(shown)].numpy())
    found["dictionary"] = _run_dictionary(train, shown, K, budget, seed)
    contexts = average_contexts(train, labels.documents)[: len(shown)]
    values = {
        name: {"seconds": seconds, **judge(assigned, labels.tokens[: len(shown)], contexts, seed)}
        for name, (seconds, assigned) in found.items()
    }
    return Outcome({"methods": values, "components": _show_components(model, store)})


def _run_dictionary(x: Tensor, shown: Tensor, K: int, budget: float, seed: int) -> Any:
    """Train a sparse dictionary for the same CPU time; a row belongs to its strongest atom."""
    from sklearn.decomposition import MiniBatchDictionaryLearning

    clock = _Clock()
    mean, generator = x.mean(dim=0), torch.Generator().manual_seed(seed)
    scale = (x[:4096] - mean).square().sum(dim=1).mean().sqrt()
    learner = MiniBatchDictionaryLearning(
        K,
        alpha=0.1,
        fit_algorithm="cd",
        batch_size=256,
        random_state=seed,
        transform_algorithm="omp",
        transform_n_nonzero_coefs=FACTORS,
    )
    with warnings.catch_warnings():
        # Of its inner iterations, which it takes up again with the next batch.
        warnings.simplefilter("ignore")
        while clock.seconds < budget:
            some = torch.randint(len(x), (256,), generator=generator)
            learner.partial_fit(((x[some] - mean) / scale).numpy())
        seconds = clock.seconds
        codes = learner.transform(((shown - mean) / scale).numpy())
    strongest = np.abs(codes).argmax(axis=1)
    # Both signs of an atom are regions of their own.
    sign = codes[np.arange(len(codes)), strongest] < 0
    return seconds, strongest + K * sign


def average_contexts(x: Tensor, documents: NDArray[np.int64], reach: int = 4) -> Tensor:
    """Return the mean of the neighbouring rows of each row, without itself, (n, d)."""
    total, count = torch.zeros_like(x), torch.zeros(len(x), 1)
    own = torch.as_tensor(documents)
    for step in range(1, reach + 1):
        same = (own[step:] == own[:-step]).unsqueeze(1)
        total[step:] += x[:-step] * same
        total[:-step] += x[step:] * same
        count[step:] += same
        count[:-step] += same
    return total / count.clamp(min=1)


def judge(
    assigned: NDArray[np.int64], tokens: NDArray[np.int64], contexts: Tensor, seed: int
) -> dict[str, float]:
    """Measure how few tokens a region has, and how alike the contexts of its rows are."""
    from sklearn.metrics import silhouette_score

    sizes, three, purity = [], [], []
    for k in np.unique(assigned):
        counts = np.sort(np.unique(tokens[assigned == k], return_counts=True)[1])[::-1]
        n = counts.sum()
        if n >= 10:
            sizes.append(n)
            three.append(counts[:3].sum() >= 0.9 * n)
            purity.append(counts[0] / n)
    some = np.random.default_rng(seed).permutation(len(assigned))[:4000]
    # A region with one row of the sample has no silhouette.
    kept = some[np.bincount(assigned[some])[assigned[some]] > 1]
    silhouette = silhouette_score(contexts[kept].numpy(), assigned[kept])
    return {
        "regions": len(sizes),
        "three": float(np.mean(three)),
        "three_rows": float(np.average(three, weights=sizes)),
        "purity": float(np.mean(purity)),
        "silhouette": float(silhouette),
    }


def _show_components(model: MFA, store: Activations) -> list[dict[str, Any]]:
    """Describe ten components, evenly spaced among those in use by purity."""
    regions = atlas(model, _Head(store.folder, 40_000), n_contexts=2, n_tokens=5, verbose=False)
    used = sorted((r for r in regions if r.n_rows >= 20), key=lambda r: -r.purity)

    def name(token: int) -> str:
        return store.pieces.get(token, str(token)).strip()

    def text(context: Any) -> str:
        pieces = [store.pieces.get(t, f" {t}") for t in context.before]
        after = [store.pieces.get(t, f" {t}") for t in context.after]
        return "".join([*pieces, f" **{name(context.token)}**", *after]).strip()

    return [
        {
            "component": r.component,
            "rows": r.n_rows,
            "purity": r.purity,
            "tokens": ", ".join(name(token) for token, _ in r.tokens),
            "low": text(r.factors[0].low[0]),
            "high": text(r.factors[0].high[0]),
        }
        for r in used[:: max(1, len(used) // 10)][:10]
    ]


class _Head(Activations):
    """The first rows of a folder, up to the end of a block."""

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__(folder)
        self._n = n

    def blocks(self, size: int) -> Any:
        seen = 0
        for block in super().blocks(size):
            if seen >= self._n:
                return
            seen += len(block)
            yield block


def run_steering(settings: Settings, data_folder: str | None) -> Outcome:
    """Steer along first factors; return the cosine of the output's change with the high end."""
    train, _ = load_rows(settings, data_folder)
    store = open_layer(settings, data_folder)
    small = settings["small"]
    network = make_small_network() if small else load_network()[0]
    layer = "blocks.1" if small else LAYERS[settings["layer"]]
    K, seed = settings["K"], settings["seed"]
    model = MFA(K, FACTORS, max_epochs=settings["passes"], random_state=seed).fit(train.numpy())
    coder = MixtureCoder(model)
    head = store.labels_at(0, settings["shown"])
    found = coder.encode_best(train[: settings["shown"]])
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.bincount(found.components, minlength=K)
    n = settings["texts"]
    large = (sizes >= 6 * n).nonzero()[:, 0]
    chosen = large[torch.randperm(len(large), generator=generator)][: settings["components"]]
    records = []
    for k in chosen.tolist():
        own = (found.components == k).nonzero()[:, 0]
        order = own[found.codes[own, 0].argsort()]
        middle = order[len(order) // 2 - n // 2 :][:n]
        ends = [Windows(some, head) for some in (order[:n], order[-n:])]
        low, high = (window.run(network) for window in ends)
        texts = Windows(middle, head)
        before = texts.run(network)
        target = high.mean(dim=0) - low.mean(dim=0)
        factor = coder.loadings[k, :, 0]
        length = factor.norm()
        other = coder.loadings[(k + 1 + int(torch.randint(K - 1, (), generator=generator))) % K]
        directions = {
            "factor": factor,
            "random": torch.randn(len(factor), generator=generator),
            "other": other[:, 0],
        }
        for name, direction in directions.items():
            # Replaced in a copy of the coder, so that all three take the same path.
            moved = MixtureCoder(model)
            moved.loadings[k, :, 0] = direction * (length / direction.norm())
            with steer(network, layer, moved, component=k, amount=settings["amount"]):
                after = texts.run(network)
            change = (after - before).mean(dim=0)
            cosine = torch.cosine_similarity(change, target, dim=0).item()
            share = (change @ target / target.square().sum()).item()
            records.append({"component": k, "direction": name, "cosine": cosine, "share": share})
    return Outcome({"records": records})


class Windows:
    """The tokens around some rows, as a batch of a network."""

    def __init__(self, rows: Tensor, labels: Any, reach: int = 16) -> None:
        sequences, self._at = [], []
        for row in rows.tolist():
            near = np.arange(max(0, row - reach), min(len(labels.tokens), row + reach + 1))
            same = near[labels.documents[near] == labels.documents[row]]
            sequences.append(labels.tokens[same])
            self._at.append(int(np.flatnonzero(same == row)[0]))
        width = max(map(len, sequences))
        self.ids = torch.zeros(len(sequences), width, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for i, tokens in enumerate(sequences):
            self.ids[i, : len(tokens)] = torch.as_tensor(tokens)
            self.mask[i, : len(tokens)] = 1

    @torch.no_grad()
    def run(self, network: Any) -> Tensor:
        """Return the last layer's output at each row's token, (n, d)."""
        hidden = network(input_ids=self.ids, attention_mask=self.mask).last_hidden_state
        return hidden[torch.arange(len(hidden)), torch.tensor(self._at)]
