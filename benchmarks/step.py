"""Time a training step and scoring, divided by the bare matrix products that they need.

Everything runs in turn in one process, and medians are compared, so the ratios also hold on a busy
machine.

    python benchmarks/step.py [--solver sgd] [--repeats 60] [--threads 2]

"products" are the products of the batch with the parameters, forward and backward; "all products"
also include the products of a natural step that involve components but no rows.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributions

from factormix import PrecisionMixture
from factormix.core import density
from factormix.core.arrays import Workspace
from factormix.core.parameters import Parameters, factor_rows, loadings, noise_variances
from factormix.data.batches import Batch
from factormix.solvers import Problem, resolve
from factormix.training.solvers import step

SIZES = ((49, 784, 4, 100), (49, 784, 4, 1000), (100, 3072, 10, 500))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solver", default="sgd")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--size", type=int, nargs=4, action="append", metavar=("K", "d", "l", "B"))
    parser.add_argument("--no-peer", action="store_true", help="leave out torch.distributions")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(
        f"solver {options.solver}, torch {torch.__version__}, {options.threads} threads,"
        f" {platform.machine()}, medians of {options.repeats}"
    )
    print(
        "  K    d   l    B   step ms  products ms  step/products  step/all products"
        "  scoring/products  peer/step"
    )
    for size in options.size or SIZES:
        report(options.solver, tuple(size), options.repeats, not options.no_peer)


def report(name: str, size: tuple[int, int, int, int], repeats: int, peer: bool) -> None:
    K, d, l, B = size
    x, advance, parameters = training(name, K, d, l, B)
    with torch.no_grad():
        jobs: dict[str, Callable[[], object]] = {
            "products": all_products(parameters, x),
            "step": advance,
            "components": component_products(name, parameters),
            "forward": forward_products(parameters, x),
            "score": scoring(parameters, x),
        }
        times = medians(jobs, repeats)
    slower = ""
    if peer:
        pair = {"peer": peer_step(parameters, x), "step": no_grad(advance)}
        compared = medians(pair, max(3, repeats // 10))
        slower = f"{compared['peer'] / compared['step']:10.1f}"
    step, products = times["step"], times["products"]
    print(
        f"{K:4d} {d:4d} {l:3d} {B:4d} {step * 1e3:9.2f} {products * 1e3:12.2f}"
        f" {step / products:14.2f} {step / (products + times['components']):18.2f}"
        f" {times['score'] / times['forward']:17.2f} {slower}",
        flush=True,
    )


def training(
    name: str, K: int, d: int, l: int, B: int
) -> tuple[Tensor, Callable[[], None], Parameters]:
    """Return a batch, one step of training as a function, and the parameters after a few steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(B, d, generator=generator)
    solver = resolve(name)
    plan: Any = solver.plan(Problem(K, d, l, torch.tensor(20.0)))
    state = plan.init()

    def advance() -> None:
        nonlocal state
        state, _ = step(plan, state, Batch(x))

    for _ in range(5):
        no_grad(advance)()
    while not getattr(state, "seeded", True):
        no_grad(advance)()
    return x, advance, Parameters(*(t.clone() for t in state.parameters))


def forward_products(parameters: Parameters, x: Tensor) -> Callable[[], object]:
    """``X^2 E'``, ``X (E mu)'`` and ``X Gamma``, with ``X^2`` and ``E mu`` given."""
    E, Gamma = parameters.precision_diag, factor_rows(parameters.precision_factors)
    squares, E_mu = x.square(), E * parameters.means
    return lambda: (squares @ E.mT, x @ E_mu.mT, x @ Gamma.mT)


def all_products(parameters: Parameters, x: Tensor) -> Callable[[], object]:
    """The forward products, and ``R'X``, ``R'X^2`` and ``(R Y)' X``."""
    K, _, l = parameters.shape
    forward = forward_products(parameters, x)
    R, RY, squares = torch.rand(len(x), K), torch.rand(len(x), K * l), x.square()
    return lambda: (forward(), R.mT @ x, R.mT @ squares, RY.mT @ x)


def component_products(name: str, parameters: Parameters) -> Callable[[], object]:
    """The products of a natural step that involve no rows, one for each component.

    They are ``Gamma' mu``, ``sum R z z'``, ``A Theta``, ``A^-1 G``, ``Lambda' E Lambda``, the
    rotation of Theta, and the strengths in the new basis. Other solvers have none.
    """
    if name != "natural":
        return lambda: None
    K, d, l = parameters.shape
    mu, rows, Theta = torch.rand(K, 1, d), torch.rand(K, l, d), torch.rand(K, l + 1, d)
    Gamma, small = parameters.precision_factors, torch.rand(K, l + 1, l + 1)
    turned, share = torch.empty_like(Theta), torch.empty(K, l, l)

    def run() -> None:
        torch.bmm(mu, Gamma)
        # Into existing memory, as the step does.
        for _ in range(3):
            torch.bmm(rows, Gamma, out=share)
            torch.bmm(small, Theta, out=turned)

    return run


def scoring(parameters: Parameters, x: Tensor) -> Callable[[], object]:
    """Score a block of centred data as the estimator does, with the operands made once."""
    ops = density.operands(parameters, centre=False)
    work = Workspace()
    return lambda: density.log_prob(x, ops, work)


def peer_step(parameters: Parameters, x: Tensor) -> Callable[[], object]:
    """Return the gradient of the same mixture by ``torch.distributions`` and autograd."""
    mixture = PrecisionMixture.from_parameters(parameters)
    leaves = [
        t.detach().clone().contiguous().requires_grad_()
        for t in (
            parameters.logits,
            parameters.means,
            loadings(mixture.precision_form),
            noise_variances(parameters.precision_diag),
        )
    ]

    def step() -> None:
        logits, means, factors, noise = leaves
        model = distributions.MixtureSameFamily(
            distributions.Categorical(logits=logits, validate_args=False),
            distributions.LowRankMultivariateNormal(means, factors, noise, validate_args=False),
            validate_args=False,
        )
        torch.autograd.grad(model.log_prob(x).mean(), leaves)

    return step


def no_grad(job: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return job()

    return run


def medians(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run the jobs in turn and return the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
