"""The demo: real digits, a comparison with scikit-learn, a class that stands out, a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from factormix.files import make_folder
from factormix.studies.demo.digits import load_digits
from factormix.studies.demo.fits import Fitted, Outliers, Plan, compare, leave_out, winner
from factormix.studies.demo.page import demo_report
from factormix.views.report import check_packages

__all__ = ["Plan", "run_demo"]

Say = Callable[[str], object]

HELD_OUT = (0, 9)
"""Classes to leave out of training, one at a time: an easy and a hard one."""


def run_demo(folder: Path, say: Say = print, plan: Plan | None = None) -> Path:
    """Train, compare, print, and write ``report.html`` and ``model.safetensors`` into a folder."""
    check_packages("demo")
    make_folder(folder)
    with _one_thread():
        return _run(folder, say, plan or Plan())


def _run(folder: Path, say: Say, plan: Plan) -> Path:
    begun = time.monotonic()
    digits = load_digits(plan.data, plan.train_rows, plan.test_rows, plan.seed)
    shape = digits.train.image_shape
    say(
        f"Data: {digits.train.name}, {len(digits.train):,} training and {len(digits.test):,}"
        f" held-out images of {shape[0]} x {shape[1]}, from {digits.train.source}."
    )
    fits = compare(digits, plan, say)
    say(_comparison_text(fits))
    outliers = [leave_out(digits, label, plan, say) for label in HELD_OUT]
    say(_outliers_text(outliers))
    model = fits[0].model
    model.image_shape_ = tuple(shape)
    model.save(folder / "model.safetensors")
    path = demo_report(digits, fits, outliers, plan, folder).write(folder / "report.html")
    say(f"Done in {time.monotonic() - begun:.0f} seconds.")
    say(f"Report: {path}\nModel:  {folder / 'model.safetensors'}")
    return path


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: on matrices this small, threads that wait for a busy core cost most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _comparison_text(fits: list[Fitted]) -> str:
    lines = ["", "Held-out mean log-likelihood, higher is better:"]
    lines += [f"  {fit.name:<58} {fit.score:>9.1f}   {fit.seconds:5.1f} s" for fit in fits]
    return "\n".join([*lines, f"  {winner(fits)}", ""])


def _outliers_text(outliers: list[Outliers]) -> str:
    lines = ["", "A class left out of training, told from the others by its log-likelihood (AUC):"]
    for found in outliers:
        mfa, gmm = found.auc
        lines.append(f"  class {found.label}: MFA {mfa:.3f}, scikit-learn {gmm:.3f}")
    return "\n".join([*lines, ""])
