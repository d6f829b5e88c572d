"""Selection of a size: by held-out rows and by criteria, stopped early, interrupted, invalid."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import sem

from factormix import MFA, InputError, select
from factormix.callbacks import EarlyStopping, Progress
from factormix.errors import TrainingWarning
from factormix.solvers import NaturalGradient

CENTRES = ((-6, 0), (0, 6), (6, -6))


def clusters(n: int, d: int = 6, l: int = 2, seed: int = 0) -> np.ndarray:
    """Draw rows of three clusters that have l factors each."""
    rng = np.random.default_rng(seed)
    loadings = np.random.default_rng(99).normal(size=(3, l, d))
    k = rng.integers(3, size=n)
    x = np.repeat(np.array(CENTRES, dtype=float), d // 2, axis=1)[k]
    x += np.einsum("nl,nld->nd", rng.normal(size=(n, l)), loadings[k])
    return x + 0.3 * rng.normal(size=(n, d))


X = clusters(900)
OURS = MFA(random_state=0)


@pytest.mark.parametrize("criterion", ["held_out", "bic", "aic", "icl"])
def test_the_size_of_the_data_is_found(criterion):
    found = select(X, [1, 2, 3, 6], [0, 1, 2, 4], criterion=criterion, estimator=OURS)
    assert found.complete
    assert found.criterion == criterion
    assert found.best_params_["n_components"] == 3
    assert found.best_params_["n_factors"] == 2 or criterion != "bic"
    assert len(found.sizes) == 16
    assert found.best.difference == 0
    assert all(one.difference <= 0 for one in found.sizes)
    model = found.best_estimator_
    assert (model.n_components, model.n_factors) == found.best_size


def test_values_equal_the_scores_of_the_models():
    plain = {"estimator": OURS, "refit": False, "stop_hopeless": False}
    found = select(X, [3], [2], held_out=X[:100], **plain)
    model = MFA(3, 2, random_state=0).fit(X)
    np.testing.assert_array_equal(found.best_estimator_.means_, model.means_)
    assert found.best_score_ == pytest.approx(model.score(X[:100]))
    for name in ("bic", "aic", "icl"):
        by = select(X, [3], [2], criterion=name, **plain)
        assert by.best_score_ == pytest.approx(getattr(model, name)(X))
        assert by.best.error is None


def test_differences_have_the_error_of_paired_rows():
    found = select(
        X, [1, 3], [2], held_out=X[:200], estimator=OURS, refit=False, stop_hopeless=False
    )
    one, three = (MFA(K, 2, random_state=0).fit(X).score_samples(X[:200]) for K in (1, 3))
    behind = found.sizes[0]
    assert behind.difference == pytest.approx((one - three).mean())
    assert behind.error == pytest.approx(sem(one - three))


def test_held_out_rows_are_not_trained_on():
    """A model that has seen a row far out scores it well; the search must not have."""
    far = np.concatenate([X, np.full((30, 6), 500.0) + clusters(30)])
    found = select(far, [4], [1], held_out=0.5, estimator=OURS, refit=False)
    model = found.best_estimator_
    assert model.n_samples_seen_ % 465 == 0
    whole = select(far, [4], [1], held_out=0.5, estimator=OURS).best_estimator_
    assert whole.n_samples_seen_ % 930 == 0
    np.testing.assert_array_equal(whole.means_, MFA(4, 1, random_state=0).fit(far).means_)


def test_stopping_hopeless_sizes_gives_the_same_result():
    rows = clusters(1500, d=20, l=3, seed=1)
    sizes = {"n_components": [1, 3, 8], "n_factors": [0, 3]}
    steps: list[dict[int, int]] = [{}, {}]
    race, full = (
        select(rows, **sizes, estimator=counting(taken), refit=False, stop_hopeless=stop)
        for stop, taken in zip((True, False), steps, strict=True)
    )
    assert race.best_params_ == full.best_params_
    # A run that continues after a pause ends as without it.
    assert race.best_score_ == full.best_score_
    assert {one.status for one in full.sizes} == {"done"}
    assert any(one.status == "stopped" for one in race.sizes)
    assert sum(steps[0].values()) < sum(steps[1].values())


def counting(steps: dict[int, int]) -> MFA:
    """Return an estimator that records the steps taken with each number of parameters."""

    def count(progress: Progress) -> None:
        steps[progress.model.n_parameters_] = progress.record["step"]

    return MFA(random_state=0, callbacks=[count])


def test_one_wild_row_does_not_decide():
    others = np.concatenate([X[:100], [[1e6] * 6]])
    found = select(X, [1, 3], [2], held_out=others, estimator=OURS)
    assert found.best_params_["n_components"] == 3
    assert [one.n_far for one in found.sizes] == [1, 1]
    assert found.best_score_ > -1000


def test_weights_count_as_rows_do():
    weights = np.ones(len(X))
    weights[X[:, 0] > 3] = 0
    found = select(X, [2, 3], [2], sample_weight=weights, estimator=OURS)
    assert found.best_estimator_.means_[:, 0].max() < 3
    twice = select(X, [3], [2], criterion="bic", sample_weight=np.full(len(X), 2.0), estimator=OURS)
    assert twice.best_score_ == pytest.approx(
        select(X, [3], [2], criterion="bic", estimator=OURS).best_score_
    )


@pytest.mark.parametrize("criterion", ["held_out", "icl"])
def test_rows_with_missing_values(criterion):
    rows = np.where(np.random.default_rng(0).random(X.shape) < 0.1, np.nan, X)
    found = select(rows, [1, 3], [2], criterion=criterion, estimator=OURS)
    assert found.best_params_["n_components"] == 3
    assert np.isfinite([one.value for one in found.sizes]).all()


def test_default_sizes_follow_the_rows():
    small = select(X[:50, :2], estimator=MFA(max_epochs=2, random_state=0))
    assert {(one.n_components, one.n_factors) for one in small.sizes} == {
        (K, l) for K in (1, 2) for l in (0, 1)
    }
    assert [s.n_factors for s in select(X[:60, :1], [1], estimator=OURS).sizes] == [0]


@pytest.mark.parametrize("kind", ["frame", "tensor", "map"])
def test_rows_of_every_kind(kind, tmp_path):
    np.save(tmp_path / "x.npy", X)
    rows = {
        "frame": pd.DataFrame(X, columns=list("abcdef")),
        "tensor": torch.from_numpy(X),
        "map": np.load(tmp_path / "x.npy", mmap_mode="r"),
    }[kind]
    plain = select(X, [1, 3], [2], estimator=OURS)
    found = select(rows, [1, 3], [2], estimator=OURS)
    assert found.best_params_ == plain.best_params_
    assert found.best_score_ == pytest.approx(plain.best_score_, rel=1e-3)
    model = found.best_estimator_
    assert isinstance(model.means_, torch.Tensor) == (kind == "tensor")
    assert hasattr(model, "feature_names_in_") == (kind == "frame")
    assert isinstance(found.best_score_, float)


def test_the_table_is_text_records_and_a_frame():
    found = select(X, [1, 3], 2, estimator=OURS)
    lines = str(found).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:3] == ["K", "l", "held_out"]
    assert lines[2].split()[0] == "*"
    frame = found.to_frame()
    assert frame["n_components"].tolist() == [1, 3]
    assert frame.loc[1, "held_out"] == found.best_score_
    assert frame.loc[1, "n_parameters"] == 3 * (12 + 12 - 1) + 2
    assert 1.5 < frame.loc[1, "effective_factors"] < 2


def test_effective_factors_show_when_there_are_too_many():
    model = MFA(3, 5, random_state=0).fit(clusters(3000))
    effective = model.effective_factors_
    assert effective.shape == (3,)
    assert (effective > 1.8).all()
    assert (effective < 2.6).all()
    assert MFA(3, 0, max_epochs=1).fit(X).effective_factors_.tolist() == [0, 0, 0]


def test_options_and_callbacks_of_the_estimator_hold():
    watcher = EarlyStopping(X[:50], epochs=5)
    random = np.random.RandomState(1)
    ours = MFA(max_precision=2.0, max_epochs=20, callbacks=[watcher], random_state=random)
    model = select(X, [2], [1], estimator=ours).best_estimator_
    assert model.noise_variances_.min() >= 0.5 - 1e-6
    assert model.random_state is ours.random_state
    assert model.callbacks is ours.callbacks
    assert watcher.best_score_ > -np.inf
    assert not hasattr(ours, "_run")


def test_a_size_that_cannot_be_trained_is_reported_as_failed():
    class Refusing:
        def __call__(self, progress):
            if progress.run.problem.n_components == 2:
                raise InputError("not two.")

    found = select(X, [1, 2], [1], estimator=MFA(callbacks=[Refusing()], random_state=0))
    assert [one.status for one in found.sizes] == ["done", "failed: not two."]
    assert found.best_params_["n_components"] == 1
    with pytest.raises(
        InputError, match=r"no size could be trained; with n_components=2: not two\."
    ):
        select(X, [2], [1], estimator=MFA(callbacks=[Refusing()]))


class Interrupting:
    """Press Ctrl-C at the first report of a size."""

    def __init__(self, n_components: int) -> None:
        self.n_components = n_components

    def __call__(self, progress):
        if progress.run.problem.n_components == self.n_components:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stop_hopeless", [True, False])
def test_an_interrupt_returns_the_sizes_done(stop_hopeless):
    ours = MFA(callbacks=[Interrupting(6)], random_state=0)
    with pytest.warns(TrainingWarning, match="interrupted with . sizes done and the others"):
        found = select(X, [1, 2, 3, 6], [2], estimator=ours, stop_hopeless=stop_hopeless)
    assert not found.complete
    assert [one.n_components for one in found.sizes] == [1, 2, 3]
    assert found.best_params_["n_components"] == 3
    assert found.best_estimator_.score(X) > -20
    with pytest.raises(KeyboardInterrupt):
        select(X, [6], [2], estimator=ours)


BAD = {
    "criterion": ({"criterion": "likelihood"}, "criterion must be one of held_out, bic, aic, icl"),
    "held out for bic": ({"criterion": "bic", "held_out": 0.5}, "for the criterion 'held_out'"),
    "no sizes": ({"n_components": []}, "n_components is empty"),
    "half a component": ({"n_components": [1.5]}, "whole number of at least 1, not 1.5"),
    "text": ({"n_components": "5,10"}, "whole number of at least 1, not '5,10'"),
    "many factors": ({"n_factors": [2, 6]}, "n_factors=6 must be smaller than n_features=6"),
    "many components": ({"n_components": [800]}, "fewer than the 800 that n_components=800"),
    "all held out": ({"held_out": 1.0}, "a share between 0 and 1"),
    "other columns": ({"held_out": X[:, :3]}, "held_out has 3 features"),
    "holes": ({"held_out": np.full((3, 6), np.inf)}, "held_out cannot be used"),
    "options": ({"estimator": MFA(scaling="x")}, "scaling must be"),
    "weights": ({"sample_weight": [1.0]}, "sample_weight must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_input_is_refused_in_one_sentence(name):
    options, expected = BAD[name]
    with pytest.raises(InputError, match=expected) as caught:
        select(X, **options)
    assert "\n" not in str(caught.value)


def test_few_rows():
    with pytest.raises(InputError, match="too few to hold some out"):
        select(X[:2])
    assert select(X[:5], estimator=OURS).best_params_["n_components"] == 1


def test_the_bar_shows_the_best_so_far(terminal, capsys):
    select(X, [1, 3], [2], estimator=OURS, verbose=1)
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert "best -" in shown
    assert "with K=3, l=2" in shown
    select(X, [1], [2], estimator=OURS)
    assert capsys.readouterr().err == ""


def test_rows_of_which_nothing_is_observed_judge_nothing():
    others = clusters(200, seed=1)
    empty = np.full((300, 6), np.nan)
    plain = {"estimator": OURS, "refit": False}
    found = select(X, [1, 3], [2], held_out=np.concatenate([others, empty]), **plain)
    alone = select(X, [1, 3], [2], held_out=others, **plain)
    assert found.best_score_ == alone.best_score_
    assert [one.error for one in found.sizes] == [one.error for one in alone.sizes]
    with pytest.raises(InputError, match="no entry of the rows held out is observed"):
        select(X, [1, 3], [2], held_out=empty, **plain)
    mixed = select(np.concatenate([X, empty]), [1, 3], [2], **plain)
    assert mixed.best_size == (3, 2)


@pytest.mark.parametrize("stop_hopeless", [True, False])
def test_the_number_of_jobs_does_not_change_the_result(stop_hopeless):
    options = {"estimator": OURS, "stop_hopeless": stop_hopeless}
    one, two, every = (
        select(X, [1, 2, 3], [0, 2], n_jobs=n_jobs, **options) for n_jobs in (None, 2, -1)
    )
    for other in (two, every):
        np.testing.assert_array_equal(other.best_estimator_.means_, one.best_estimator_.means_)
        assert other.best_params_ == one.best_params_
        columns = ["n_components", "n_factors", "held_out", "difference", "status"]
        pd.testing.assert_frame_equal(other.to_frame()[columns], one.to_frame()[columns])


def test_an_interrupt_ends_the_fits_of_all_threads():
    called = threading.Event()

    def interrupt(progress):
        # Signals reach the main thread, which waits for the others.
        if not called.is_set():
            called.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    solver = NaturalGradient(tol=0)
    slow = MFA(max_epochs=10**6, solver=solver, random_state=0, callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        select(X, [1, 2], [1], estimator=slow, stop_hopeless=False, n_jobs=2)


@pytest.mark.parametrize("n_jobs", [0, 1.5, "all", True])
def test_a_number_of_jobs_that_is_none_is_refused(n_jobs):
    with pytest.raises(InputError, match="n_jobs must be None, a whole number"):
        select(X, [1], [0], n_jobs=n_jobs)
