"""The methods of the quality benchmark, and one run of a method as a trial.

The methods are the solvers of factormix, public packages, and a mixture of factor analyzers as
people commonly write it in torch. Every peer starts from the same scikit-learn k-means, whose time
and passes count. A checkpoint is taken inside the peer's own loop, so it costs the peer nothing.
Each run is a process of its own: all methods start with the same clean memory, and a method that
does not return in time can be abandoned.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import resource
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from common import peak_memory, total_memory
from harness import Outcome, Settings
from numpy.typing import NDArray
from quality_problems import (
    EM_ITERATIONS,
    FLOOR,
    BudgetUsedError,
    FullMixture,
    LowRankMixture,
    Model,
    Problem,
    Recorder,
    Setting,
    compute_matched_share,
    count_components_in_use,
    load_problem,
    read_setting,
)
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

from factormix import MFA
from factormix.estimators import Progress
from factormix.solvers import SOLVERS

MEMORY_SHARE = 0.9
"""Share of the machine's memory that all concurrent runs may use before a MemoryError."""

Train = Callable[[Problem, Setting, int, Recorder], None]
"""Train a mixture on a problem, at the size of a setting, from a seed, with checkpoints."""
CHUNK_ELEMENTS = 1 << 26
"""Largest number of elements of tgmm's rows x K x d array."""
BATCH = 256
LEARNING_RATE = 0.02
"""The best of 0.001, 0.003, 0.01 and 0.02 in a trial on FashionMNIST."""
MAX_PASSES = 100
BROADCAST_ELEMENTS = 1 << 27
"""Largest number of elements of the B x K x d difference: large mixtures must fit in memory."""


def run_method(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Train by one method until it ends or its time is up, and return its checkpoints."""
    limit_memory(MEMORY_SHARE / settings["jobs"])
    setting = read_setting(settings)
    problem = load_problem(setting, quick=settings["quick"])
    train = METHODS[settings["method"]].train
    warm_up_threads()
    recorder = Recorder(torch.from_numpy(problem.held_out), settings["limit"])
    # Lightning leaves files where it runs.
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            status, message = train_within_limit(
                lambda: train(problem, setting, settings["seed"], recorder), recorder
            )
        finally:
            os.chdir("/")
    return Outcome(collect_values(problem, recorder, status, message))


def train_within_limit(train: Callable[[], None], recorder: Recorder) -> tuple[str, str]:
    """Train in a thread, and abandon it if it reaches no checkpoint in time.

    Returns the status and a message.
    """
    ended: list[tuple[str, str]] = []
    training = threading.Thread(
        target=lambda: ended.append(train_to_end(train, recorder)), daemon=True
    )
    training.start()
    # A tenth more, for a method that is about to finish an iteration.
    while training.is_alive() and recorder.clock.seconds < 1.1 * recorder.limit:
        training.join(0.1)
    if ended:
        return ended[0]
    if recorder.points:
        return "stopped", f"stopped after {recorder.limit:.0f} s, within an iteration"
    return "unfinished", f"did not finish in {recorder.limit:.0f} s"


def train_to_end(train: Callable[[], None], recorder: Recorder) -> tuple[str, str]:
    """Train, and return how it ended: a status and a message."""
    try:
        train()
    except BudgetUsedError:
        return "stopped", f"stopped after {recorder.limit:.0f} s"
    except MemoryError:
        return "failed", "ran out of memory"
    except Exception as error:
        if "memory" in str(error).lower():
            return "failed", "ran out of memory"
        text = " ".join(str(error).split())
        return "failed", f"{type(error).__name__}: {text[:200]}"
    return "finished", ""


def collect_values(
    problem: Problem, recorder: Recorder, status: str, message: str
) -> dict[str, Any]:
    """Collect the values of a run's result file."""
    model, truth = recorder.model, problem.truth
    return {
        "status": status,
        "message": message,
        "points": [list(point) for point in recorder.points],
        "seconds": recorder.clock.seconds,
        "components_in_use": None if model is None else count_components_in_use(model),
        "matched": None if model is None or truth is None else compute_matched_share(model, truth),
        "true_log_likelihood": None if truth is None else truth.score(recorder.held_out),
        "rows": len(problem.train),
        "features": problem.train.shape[1],
        "held_out_rows": len(problem.held_out),
        "peak_memory": peak_memory(),
    }


def warm_up_threads() -> None:
    """Start the threads of the matrix products, so that no method pays for it."""
    x = torch.rand(500, 500)
    for _ in range(3):
        x = (x @ x).softmax(dim=1)


def limit_memory(share: float) -> None:
    """Make a method that asks for too much memory fail, before the machine does."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(share * total_memory()),) * 2)


def train_natural(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train by natural-gradient steps from random values, with the defaults of the library."""
    _train(problem, setting, seed, recorder, solver="natural", max_epochs=setting.passes)


def train_one_pass(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train as ``train_natural`` does, with a schedule for a single pass."""
    _train(problem, setting, seed, recorder, solver="natural", max_epochs=1)


def train_em(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train by batch EM from k-means, for all iterations that the targets name."""
    solver = SOLVERS["em"](iterations=EM_ITERATIONS, tol=0)
    _train(problem, setting, seed, recorder, whole=True, solver=solver)


def train_sgd(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train as the paper does, on data that is not rescaled."""
    options: dict[str, Any] = {"scaling": None, "max_epochs": setting.sgd_passes}
    # Its steps are short: a report after each of them would slow it down.
    _train(problem, setting, seed, recorder, tick=0.05, solver="sgd", **options)


def _train(
    problem: Problem,
    setting: Setting,
    seed: int,
    recorder: Recorder,
    *,
    tick: float = 0.0,
    whole: bool = False,
    **options: Any,
) -> None:
    """Train with a report after every step, or every ``tick`` seconds.

    The library's own two reports a second would miss checkpoints that are due. ``whole`` is for a
    solver that changes its parameters only at the end of a pass: it has a checkpoint after each.
    """
    n = len(problem.train)

    def watch(progress: Progress) -> None:
        # Counted in rows read, so that the passes of a k-means start count too.
        passes = progress.record["samples"] / n
        step = (progress.record["samples"] / max(1.0, progress.record["step"])) / n
        if not whole or passes == round(passes):
            recorder.checkpoint(passes, lambda: copy_mfa(progress.model), step=step, now=whole)

    watch.report_seconds = tick
    model = MFA(
        setting.components,
        setting.factors,
        max_precision=1 / FLOOR,
        random_state=seed,
        callbacks=[watch],
        **options,
    )
    recorder.clock.start()
    model.fit(problem.train)
    recorder.checkpoint(model.n_samples_seen_ / n, lambda: copy_mfa(model), last=True)


def copy_mfa(model: MFA) -> LowRankMixture:
    """Copy the model in its present state."""
    with torch.no_grad():
        return LowRankMixture.from_generative(
            *(
                torch.as_tensor(t)
                for t in (model.weights_, model.means_, model.loadings_, model.noise_variances_)
            )
        )


FLOORS = {
    "natural": "noise variances are bounded below by 1/400 (`max_precision=400`)",
    "sgd": "noise variances are bounded below by 1/400 (`max_precision=400`)",
    "em": "noise variances are bounded below by 1/400 (`max_precision=400`)",
    "adam": "noise variances are 1/400 plus a softplus",
    "sklearn": "`reg_covar=1/400`, which is added to every variance",
    "tgmm": (
        "diagonal: `covariance_bounds=(1/400, inf)`, which bounds variances as we do;"
        " full: `reg_covar=1/400`, which is added to every variance"
    ),
    "torchgmm": "`covariance_regularization=1/400`, which is added to every variance",
}
"""How each method keeps the common variance floor."""


class Start(NamedTuple):
    """A k-means clustering."""

    means: NDArray[np.float32]
    labels: NDArray[np.integer]
    passes: int
    """Lloyd iterations, plus one for the seeding."""


def run_kmeans(x: NDArray[np.float32], n_clusters: int, seed: int) -> Start:
    """Cluster as scikit-learn's GaussianMixture does before its first iteration."""
    model = KMeans(n_clusters, n_init=1, random_state=seed).fit(x)
    return Start(model.cluster_centers_, model.labels_, model.n_iter_ + 1)


def train_sklearn(kind: str) -> Train:
    """Train scikit-learn's GaussianMixture with covariances of a kind, "diag" or "full"."""

    def train(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
        class Watched(GaussianMixture):  # type: ignore[misc]
            passes = 0

            def _initialize_parameters(self, X: Any, random_state: Any, xp: Any = None) -> None:
                start = run_kmeans(X, self.n_components, seed)
                shares = np.zeros((len(X), self.n_components), dtype=X.dtype)
                shares[np.arange(len(X)), start.labels] = 1
                self._initialize(X, shares)
                self.passes = start.passes + 1
                recorder.checkpoint(self.passes, self.copy_model)

            def _m_step(self, *args: Any, **kwargs: Any) -> None:
                super()._m_step(*args, **kwargs)
                self.passes += 1
                recorder.checkpoint(self.passes, self.copy_model)

            def copy_model(self) -> Model:
                return wrap_mixture(kind, self.weights_, self.means_, self.covariances_)

        model = Watched(setting.components, covariance_type=kind, reg_covar=FLOOR)
        recorder.clock.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(problem.train)
        recorder.checkpoint(model.passes, model.copy_model, last=True)

    return train


def train_tgmm(kind: str) -> Train:
    """Train tgmm's GaussianMixture with covariances of a kind, "diag" or "full"."""

    def train(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import tgmm

        class Watched(tgmm.GaussianMixture):  # type: ignore[misc]
            passes = 0

            def _m_step_from_stats(self, stats: Any) -> None:
                super()._m_step_from_stats(stats)
                self.passes += 1
                recorder.checkpoint(self.passes, self.copy_model)

            def copy_model(self) -> Model:
                return wrap_mixture(kind, self.weights_, self.means_, self.covariances_)

        x = torch.from_numpy(problem.train)
        K, d = setting.components, x.shape[1]
        floor: dict[str, Any] = {"reg_covar": FLOOR}
        if kind == "diag":
            floor = {"covariance_bounds": (FLOOR, float("inf"))}
        recorder.clock.start()
        start = run_kmeans(problem.train, K, seed)
        # Chunks of rows change its memory, not its result.
        chunk = max(1, CHUNK_ELEMENTS // (K * d))
        model = Watched(
            K,
            d,
            kind,
            init_means=torch.from_numpy(start.means),
            batch_size=chunk,
            random_state=seed,
            device="cpu",
            **floor,
        )
        model.passes = start.passes + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x)
        recorder.checkpoint(model.passes, model.copy_model, last=True)

    return train


def train_torchgmm(kind: str) -> Train:
    """Train torchgmm's GaussianMixture with covariances of a kind, "diag" or "full".

    Its own k-means is left out in its favour: it reads the data 300 times to estimate the features'
    variance.
    """

    def train(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pytorch_lightning as lightning
            import torchgmm.bayes
        for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        passes = 0.0

        class Watch(lightning.Callback):  # type: ignore[misc]
            def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
                # Its mini-batches are the whole data, and an iteration takes two epochs.
                nonlocal passes
                fits = type(module).__name__ == "GaussianMixtureLightningModule"
                if fits and trainer.current_epoch % 2 == 0:
                    recorder.checkpoint(passes, lambda: wrap_torchgmm(kind, module.model))
                passes += 1

        torch.manual_seed(seed)
        recorder.clock.start()
        start = run_kmeans(problem.train, setting.components, seed)
        passes += start.passes
        model = torchgmm.bayes.GaussianMixture(
            setting.components,
            covariance_type=kind,
            init_means=torch.from_numpy(start.means),
            covariance_regularization=FLOOR,
            trainer_params={
                "accelerator": "cpu",
                "callbacks": Watch(),
                "enable_progress_bar": False,
            },
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(torch.from_numpy(problem.train))
        recorder.checkpoint(passes, lambda: wrap_torchgmm(kind, model.model_), last=True)

    return train


def wrap_mixture(kind: str, weights: Any, means: Any, covariances: Any) -> Model:
    """Wrap the parameters of a mixture."""
    make = LowRankMixture.from_diagonal if kind == "diag" else FullMixture
    return make(weights, means, covariances)


def wrap_torchgmm(kind: str, model: Any) -> Model:
    """Wrap a model of torchgmm, which stores Cholesky factors of the precisions."""
    covariances = (
        model.precisions_cholesky.double().square().reciprocal()
        if kind == "diag"
        else model.covariances
    )
    return wrap_mixture(kind, model.component_probs, model.means, covariances)


class CovarianceMFA(nn.Module):
    """Covariances ``Lambda Lambda' + D``, with ``D = floor + softplus(free parameters)``."""

    def __init__(
        self,
        means: Tensor,
        variances: Tensor,
        weights: Tensor,
        n_factors: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        K, d = means.shape
        above = (variances - FLOOR).clamp_min(1e-4)
        # Loadings start at a tenth of the spread: zero would be a saddle point.
        noise = torch.randn(K, d, n_factors, generator=generator)
        self.logits = nn.Parameter(weights.clamp_min(1e-6).log())
        self.means = nn.Parameter(means.clone())
        self.loadings = nn.Parameter(0.1 * variances.sqrt().unsqueeze(-1) * noise)
        self.free_noise = nn.Parameter(above + torch.log(-torch.expm1(-above)))

    @property
    def noise_variances(self) -> Tensor:
        """D, (K, d)."""
        return FLOOR + nn.functional.softplus(self.free_noise)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``log p(x)``, (B,), for x (B, d), by the Woodbury identity and the determinant
        lemma.
        """
        Lambda, D = self.loadings, self.noise_variances
        l, d = Lambda.shape[2], x.shape[1]
        inner = torch.eye(l) + torch.einsum("kdi,kd,kdj->kij", Lambda, 1 / D, Lambda)
        factor = torch.linalg.cholesky(inner)
        xt = x.unsqueeze(1) - self.means
        projected = torch.einsum("bkd,kdl->bkl", xt / D, Lambda)
        solved = torch.linalg.solve_triangular(factor, projected.unsqueeze(-1), upper=False)
        distance = torch.einsum("bkd,bkd->bk", xt, xt / D) - solved.square().sum(dim=(-1, -2))
        log_det = D.log().sum(dim=1) + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        log_p = -0.5 * (d * math.log(2 * math.pi) + log_det + distance)
        return torch.logsumexp(self.logits.log_softmax(dim=0) + log_p, dim=1)

    def copy_model(self) -> LowRankMixture:
        """Copy the model in its present state."""
        return LowRankMixture.from_generative(
            self.logits.detach().softmax(dim=0),
            self.means.detach().clone(),
            self.loadings.detach().clone(),
            self.noise_variances.detach(),
        )


def train_adam(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train until the time is up."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    K = setting.components
    import_optimiser()
    recorder.clock.start()
    clusters = run_kmeans(problem.train, K, seed)
    means, variances, weights = compute_cluster_moments(problem.train, clusters.labels, K)
    model = CovarianceMFA(means, variances, weights, setting.factors, generator)
    start, seen = clusters.passes + 1, 0
    recorder.checkpoint(start, model.copy_model)

    x = torch.from_numpy(problem.train)
    batch = max(1, min(BATCH, BROADCAST_ELEMENTS // (K * x.shape[1])))
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(MAX_PASSES):
        for rows in torch.split(torch.randperm(len(x), generator=generator), batch):
            optimiser.zero_grad()
            (-model(x[rows]).mean()).backward()
            optimiser.step()
            seen += len(rows)
            recorder.checkpoint(start + seen / len(x), model.copy_model, step=batch / len(x))
    recorder.checkpoint(start + seen / len(x), model.copy_model, last=True)


def import_optimiser() -> None:
    """Take an empty step: torch imports much of itself on the first one."""
    nothing = nn.Parameter(torch.zeros(1))
    nothing.grad = torch.zeros(1)
    torch.optim.Adam([nothing]).step()


def compute_cluster_moments(
    x: NDArray[np.float32], labels: NDArray[np.integer], n_clusters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and variances (K, d) and weights (K,) of the clusters."""
    parts = [x[labels == k] for k in range(n_clusters)]
    means = np.stack([part.mean(axis=0) for part in parts])
    variances = np.stack([part.var(axis=0) for part in parts])
    weights = np.array([len(part) / len(x) for part in parts])
    return torch.from_numpy(means), torch.from_numpy(variances), torch.from_numpy(weights).float()


@dataclass(frozen=True)
class Method:
    """A way to train a mixture, and how it is shown."""

    label: str
    train: Train
    colour: str
    solver: str | None = None
    """The solver of factormix that it needs."""
    package: str | None = None
    """The optional package that it needs."""
    why_ahead: str = ""
    """Why it may end above ours: the note beside a target that is not met."""


_FULL = (
    "it is a richer model: a full covariance has d(d+1)/2 free numbers for a component,"
    " a factor analyzer about d(l+1)"
)

METHODS: dict[str, Method] = {
    "natural": Method("factormix natural", train_natural, "#c23b4b", solver="natural"),
    "natural-1": Method("factormix natural, one pass", train_one_pass, "#f0562d", solver="natural"),
    "em": Method("factormix EM", train_em, "#2f6db3", solver="em"),
    "sgd": Method("factormix SGD", train_sgd, "#7fb0e0", solver="sgd"),
    "adam": Method("Adam, covariance form", train_adam, "#9659b0"),
    "sklearn-diag": Method("scikit-learn GMM diagonal", train_sklearn("diag"), "#3a9d6e"),
    "sklearn-full": Method(
        "scikit-learn GMM full", train_sklearn("full"), "#1d5c3f", why_ahead=_FULL
    ),
    "tgmm": Method("tgmm diagonal", train_tgmm("diag"), "#d9a521", package="tgmm"),
    "tgmm-full": Method(
        "tgmm full", train_tgmm("full"), "#8a6508", package="tgmm", why_ahead=_FULL
    ),
    "torchgmm": Method("torchgmm diagonal", train_torchgmm("diag"), "#7a7a7a", package="torchgmm"),
    "torchgmm-full": Method(
        "torchgmm full",
        train_torchgmm("full"),
        "#3c3c3c",
        package="torchgmm",
        why_ahead=_FULL,
    ),
}

# Full covariances are the same model in every package: by default scikit-learn stands for them.
DEFAULT_METHODS = tuple(name for name in METHODS if name not in ("tgmm-full", "torchgmm-full"))


def explain_missing_method(name: str) -> str | None:
    """Return why a method cannot run here, or None."""
    method = METHODS[name]
    if method.solver is not None and method.solver not in SOLVERS:
        return f"factormix has no solver {method.solver!r} here"
    if method.package is not None and importlib.util.find_spec(method.package) is None:
        return f"{method.package} is not installed: pip install -r benchmarks/requirements.txt"
    return None
