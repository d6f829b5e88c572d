"""Model files of earlier format versions: they score as they did, and go on learning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from factormix import InputError, load

FOLDER = Path(__file__).parent / "old_models"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
X = np.random.default_rng(0).normal(size=(120, 5))
X[60:] += 3


def test_there_are_files_of_both_versions():
    assert {name.partition("-")[0] for name in FILES} == {"v1", "v2"}
    assert len(FILES) == 10


def running_before_version_2(name: str) -> bool:
    return name in ("v1-natural", "v1-em")


@pytest.mark.parametrize("name", FILES)
def test_a_model_of_an_earlier_version_scores_as_it_did(name):
    if running_before_version_2(name):
        with pytest.raises(InputError, match=r"format version 1.*train the model again"):
            load(FOLDER / f"{name}.safetensors")
        return
    model = load(FOLDER / f"{name}.safetensors")
    version = name.partition("-")[0]
    expected = np.load(FOLDER / f"{version}-scores.npz")[name]
    # The command kept names of columns among the notes; they have moved to where all look now.
    named = hasattr(model, "feature_names_in_")
    assert named == (name in ("v1-sgd", "v2-em", "v2-natural", "v2-sgd"))
    assert model.notes_ == {}
    rows = pd.DataFrame(X, columns=list("abcde"))[list("ecabd")] if named else X
    np.testing.assert_allclose(model.score_samples(rows), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("-early")])
def test_a_run_of_an_earlier_version_goes_on_to_its_end(name):
    model = load(FOLDER / f"{name}.safetensors")
    before, steps = model.score(X), model.n_steps_
    if "natural" in name:
        state = model._run.state
        assert state.concentration * state.samples == pytest.approx(1)
    model.set_params(callbacks=())
    model.resume(X)
    assert model.n_steps_ > steps
    assert model.weights_.shape == (3,)
    # The excess of components that was left goes on the way.
    assert model.score(X) > before - 0.2


def test_a_stream_of_an_earlier_version_goes_on():
    model = load(FOLDER / "v2-stream.safetensors")
    steps = model.n_steps_
    # Its rows were kept for seeding, and nothing is learned from them as yet.
    assert model._run.state.concentration == 0
    assert np.isfinite(model.partial_fit(X).score(X))
    assert model.n_steps_ == steps + 4
