"""Several real processes, started by torchrun, give the same model as one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import factormix
from factormix import MFA
from factormix.callbacks import EarlyStopping, checkpoints_in
from factormix.errors import InputError
from factormix.solvers import CovarianceGradient, NaturalGradient
from launching import fits, launch, torchrun

SMALL = {"n_components": 6, "n_factors": 2, "random_state": 0, "batch_size": 150, "max_epochs": 6}
EXTRAS = ("weighted", "gaps", "n_rows", "within", "natural", "messages")


def case(mesh: Any, solver: str = "natural", **more: Any) -> dict[str, Any]:
    extras = {name: more.pop(name) for name in EXTRAS if name in more}
    return {"options": SMALL | {"mesh": mesh, "solver": solver} | more, **extras}


def alone(one: dict[str, Any], table: np.ndarray, weights: np.ndarray) -> tuple[MFA, np.ndarray]:
    """Fit a case in this process alone."""
    rows = table[: one.get("n_rows", len(table))]
    if one.get("gaps"):
        rows = np.where(np.random.default_rng(0).random(rows.shape) < 0.1, np.nan, rows)
    model = MFA(**one["options"] | {"mesh": None})
    if "natural" in one:
        kind = CovarianceGradient if "scales" in one["natural"] else NaturalGradient
        model.set_params(solver=kind(**one["natural"]))
    return model.fit(rows, sample_weight=weights if one.get("weighted") else None), rows


def compare(n: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Fit by n processes and by one, and compare the models."""
    random = np.random.default_rng(0)
    centres = 3 * random.normal(size=(8, 10))
    table = centres[random.integers(8, size=900)] + random.normal(size=(900, 10))
    weights = random.integers(0, 4, size=len(table)).astype(float)
    np.save(folder / "rows.npy", table)
    np.save(folder / "weights.npy", weights)
    each = fits(n, cases, folder)
    for i, one in enumerate(cases):
        model, rows = alone(one, table, weights)
        score, within = model.score(rows), one.get("within", 1e-4)
        for found in each:
            record, last = found[i]["record"], model.history_[-1]
            assert found[i]["score"] == pytest.approx(score, rel=within), one
            likelihood = pytest.approx(last["log_likelihood"], rel=within)
            assert record["log_likelihood"] == likelihood, one
            for name in ("components_in_use", "step", "samples", "epoch", "revived"):
                assert record.get(name) == last.get(name), (name, one)


def test_two_processes_give_the_model_of_one(tmp_path: Path):
    cases = [case("auto"), case("data", "em", max_epochs=13), case("data", "sgd")]
    cases += [case("data", natural={"scales": 2}, max_epochs=12)]
    cases += [case("components"), case("components", "em", max_epochs=13)]
    # Factors for more than half of the features: steps by sums of products, of some components.
    many = {"n_components": 120, "n_factors": 7, "dtype": "float64", "max_epochs": 4}
    cases += [case("data", natural={"first_components": 120, "seed_rows": 400, "tol": 0.0}, **many)]
    # Shares of 50 rows: most of 300 components are touched by none, and not all by both.
    natural = {"first_components": 300, "seed_rows": 600, "tol": 0.0}
    large = {"n_components": 300, "batch_size": 100, "max_epochs": 4, "dtype": "float64"}
    cases += [case(mesh, natural=natural, **large) for mesh in ("data", "components")]
    compare(2, cases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("thumbnails", [None, "2,2"])
def test_two_processes_train_the_images_of_one(tmp_path: Path, thumbnails: str | None):
    """The shares of a batch are odd, the first process writes, and a checkpoint is the model."""
    walk = np.random.default_rng(0).normal(size=(200, 7, 6, 3)).cumsum(1).cumsum(2)
    images = (128 + 12 * walk).clip(0, 255).astype(np.uint8)
    np.save(tmp_path / "images.npy", images)
    sizes = {"n_kinds": 3, "n_scales": 2, "n_features": 8, "n_neighbours": 6}
    sizes |= {"depth": 1, "n_steps": 20, "batch_size": 151, "random_state": 0}
    options = [
        text for name, n in sizes.items() for text in (f"--{name.replace('_', '-')}", str(n))
    ]
    command = ["-m", "factormix", "images", "train", "images.npy", "-o", "m.safetensors"]
    if thumbnails:
        options, sizes = [*options, "--thumbnails", thumbnails], sizes | {"thumbnails": (2, 2)}
    done = torchrun(2, *command, *options, "--checkpoint", "run", folder=tmp_path)
    assert done.stdout.count("bits per dimension") == 1
    alone = factormix.ConvMFA(**sizes).fit(images)
    model = factormix.load(tmp_path / "m.safetensors")
    np.testing.assert_allclose(model.score_samples(images), alone.score_samples(images), rtol=1e-3)
    for one, other in zip(model.history_, alone.history_, strict=True):
        assert one["bits_per_dim"] == pytest.approx(other["bits_per_dim"], rel=1e-4)
    saved = factormix.load(tmp_path / "run")
    assert saved.finished_
    np.testing.assert_array_equal(saved.score_samples(images), model.score_samples(images))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data", "components", (2, 2)])
def test_four_processes_give_the_model_of_one(tmp_path: Path, mesh: Any):
    cases = [case(mesh, solver, gaps=gaps, max_epochs=14) for solver in ("natural", "em")
             for gaps in (False, True)]  # fmt: skip
    cases += [case(mesh, weighted=True), case(mesh, "em", weighted=True, max_epochs=14)]
    # Batches with fewer rows than there are processes, and a batch that is all of the data.
    cases += [case(mesh, batch_size=151, n_rows=455), case(mesh, batch_size=900, max_epochs=60)]
    # Several starts, no factors, other numbers.
    cases += [case(mesh, n_init=3), case(mesh, n_factors=0), case(mesh, "em", n_init=3)]
    cases += [case(mesh, dtype="float64", scaling="feature")]
    # Which components a row is evaluated against depends on the rows and components around it.
    cases += [case(mesh, candidates=20, n_components=40, max_epochs=4, within=5e-3)]
    cases += [case("data", "sgd", gaps=gaps) for gaps in (False, True) if mesh == "data"]
    compare(4, cases, tmp_path)


@pytest.mark.slow
def test_components_are_revived_and_grow_as_in_one_process(tmp_path: Path):
    large = {"n_components": 60, "max_epochs": 10, "dtype": "float64"}
    natural = [{"first_components": 60, "seed_rows": 120, "unused_weight": 0.6, "tol": 0.0}]
    natural += [{"first_components": 10, "tol": 0.0}]
    meshes = "data", "components"
    compare(2, [case(mesh, natural=n, **large) for n in natural for mesh in meshes], tmp_path)


@pytest.mark.slow
def test_a_mesh_of_two_axes_grows_by_odd_numbers(tmp_path: Path):
    """A rank with one component more than others must not communicate on its own."""
    natural = {"first_components": 4, "seed_rows": 200, "tol": 0}
    compare(4, [case((2, 2), n_components=9, natural=natural)], tmp_path)


def test_a_mesh_of_the_wrong_size_is_refused():
    rows = np.random.default_rng(0).normal(size=(50, 3))
    with pytest.raises(InputError, match=r"the mesh 2 x 2 needs 4 processes, and there is 1"):
        MFA(2, mesh=(2, 2)).fit(rows)
    with pytest.raises(InputError, match="mesh must be 'auto', 'data', 'components', two numbers"):
        MFA(2, mesh="rows").fit(rows)


DIFFERENT = """
import os, sys
import numpy as np
from factormix import MFA
rows = np.random.default_rng(int(os.environ["RANK"])).normal(size=(50, 3))
try:
    MFA(2).fit(rows)
except ValueError as error:
    sys.exit(f"rank {os.environ['RANK']}: {error}")
"""


@pytest.mark.slow
def test_all_processes_refuse_different_rows(tmp_path: Path):
    (tmp_path / "script.py").write_text(DIFFERENT)
    done = torchrun(2, "script.py", folder=tmp_path, check=False)
    assert done.returncode != 0
    assert done.stderr.count("were given different rows: give each of them all rows") == 2


@pytest.mark.slow
def test_the_command_reports_an_error_once(tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(50, 3)))
    train = ["-m", "factormix", "train", "rows.npy", "-o", "model.safetensors"]
    done = torchrun(2, *train, "--mesh=3x1", folder=tmp_path, check=False)
    assert done.stderr.count("factormix: the mesh 3 x 1 needs 3 processes, and there are 2") == 1
    done = torchrun(2, *train, "--n-components=60", folder=tmp_path, check=False)
    assert done.stderr.count("factormix: X has n_samples=50, fewer than the 60 rows") == 1
    assert not (tmp_path / "model.safetensors").exists()


def workers(process: subprocess.Popen[Any]) -> list[int]:
    """Wait until torchrun has started two processes, and return their ids."""
    while process.poll() is None:
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        # It starts them by a thread of its own in some versions.
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            found += (thread / "children").read_text().split()
        ranked = [pid for pid in sorted(set(found)) if b"\0RANK=" in environment(pid)]
        if len(ranked) == 2:
            return [int(pid) for pid in ranked]
        time.sleep(0.2)
    raise AssertionError("torchrun has ended")


def environment(pid: str) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_the_command_reports_divided_components(tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(300, 5)))
    train = ["-m", "factormix", "train", "rows.npy", "-o", "model.safetensors"]
    options = ["--n-components=6", "--max-epochs=5", "--random-state=0", "--mesh=components"]
    said = torchrun(2, *train, *options, folder=tmp_path).stdout
    score = factormix.load(tmp_path / "model.safetensors").score(np.load(tmp_path / "rows.npy"))
    (reported,) = re.findall(r"mean log-likelihood +(\S+)", said)
    assert float(reported) == pytest.approx(score, rel=1e-4)
    assert re.search(r"components in use +\d of 6", said)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("mesh", ["data", "components"])
def test_a_killed_process_continues_from_the_checkpoint(tmp_path: Path, mesh: str):
    random = np.random.default_rng(0)
    rows = 3 * random.normal(size=(8, 10))[random.integers(8, size=900)]
    np.save(tmp_path / "rows.npy", rows + random.normal(size=rows.shape))
    options = ["--n-components=6", "--random-state=0", "--max-epochs=400", "--batch-size=150"]
    train = ["-m", "factormix", "train", "rows.npy", "-o", "model.safetensors", *options]
    train += [f"--mesh={mesh}", "--checkpoint=run", "--every=0.2s", "--resume", "--quiet"]
    begin = launch(2, *train, options=("--max-restarts=2",))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(begin, cwd=tmp_path, stderr=log, env=environ) as process,
    ):
        while not checkpoints_in(tmp_path / "run"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        os.kill(workers(process)[1], signal.SIGKILL)
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert said.count("run has no checkpoints yet: the run starts from the beginning") == 1
    model, rows = factormix.load(tmp_path / "model.safetensors"), np.load(tmp_path / "rows.npy")
    same = {"n_components": 6, "random_state": 0, "max_epochs": 400, "batch_size": 150}
    assert model.finished_
    assert model.score(rows) == pytest.approx(MFA(**same).fit(rows).score(rows), rel=1e-4)


SAVED = """
import os, resource, sys
import numpy as np
from factormix import MFA, load

rows = np.load("rows.npy")
model = MFA(6, 2, random_state=0, max_epochs=3, batch_size=150, mesh="components").fit(rows)
scores, best = model.score_and_predict(rows)
model.save("model.safetensors")
whole = load("model.safetensors")
assert whole.means_.shape == (6, 10)
assert np.allclose(whole.score_samples(rows), scores, rtol=1e-5)
assert (whole.predict(rows) == best).all()
try:
    model.means_
except ValueError as error:
    assert "only some of the components" in str(error), error
else:
    sys.exit("a part was taken for the whole")
try:
    model.save("no/such/folder/model.safetensors")
except ValueError as error:
    assert "the folder" in str(error), error
else:
    sys.exit("saved where nothing is")
try:
    MFA(1, 2, max_epochs=1, mesh="components").fit(rows)
except ValueError as error:
    assert "1 components cannot be divided among 2 processes" in str(error), error
else:
    sys.exit("one component was divided")
try:
    MFA(6, 2, solver="sgd", max_epochs=1, mesh="components").fit(rows)
except ValueError as error:
    assert "the solver 'sgd' cannot have its components divided" in str(error), error
else:
    sys.exit("a grid was divided")
"""


@pytest.mark.slow
def test_a_divided_model_is_one_file(tmp_path: Path):
    random = np.random.default_rng(0)
    centres = 3 * random.normal(size=(8, 10))
    np.save(
        tmp_path / "rows.npy",
        centres[random.integers(8, size=600)] + random.normal(size=(600, 10)),
    )
    (tmp_path / "script.py").write_text(SAVED)
    torchrun(2, "script.py", folder=tmp_path)


HELD_OUT = """
import json, os
import numpy as np
from factormix import MFA
from factormix.callbacks import EarlyStopping

rows, held_out = np.load("rows.npy"), np.load("held_out.npy")
found = []
for mesh in ("data", "components"):
    stopping = EarlyStopping(held_out, patience=2)
    options = {"random_state": 0, "max_epochs": 60, "batch_size": 150}
    model = MFA(6, 2, mesh=mesh, callbacks=[stopping], **options).fit(rows)
    found.append([stopping.best_score_, stopping.best_epoch_, model.n_steps_])


def scoring(progress):
    progress.model.score(held_out)


try:
    MFA(6, 2, max_epochs=1, mesh="components", callbacks=[scoring]).fit(rows)
except ValueError as error:
    assert "callbacks are called in the first one alone" in str(error), error
else:
    raise AssertionError("a callback in one process has scored by all")
with open(f"found-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_held_out_rows_end_the_training_in_all_processes(tmp_path: Path):
    random = np.random.default_rng(0)
    centres = 3 * random.normal(size=(8, 10))
    rows, held_out = (
        centres[random.integers(8, size=n)] + random.normal(size=(n, 10)) for n in (900, 300)
    )
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "held_out.npy", held_out)
    stopping = EarlyStopping(held_out, patience=2)
    options = {"random_state": 0, "max_epochs": 60, "batch_size": 150}
    model = MFA(6, 2, callbacks=[stopping], **options).fit(rows)
    (tmp_path / "script.py").write_text(HELD_OUT)
    torchrun(2, "script.py", folder=tmp_path)
    for rank in range(2):
        for score, epoch, steps in json.loads((tmp_path / f"found-{rank}.json").read_text()):
            assert score == pytest.approx(stopping.best_score_, rel=1e-4)
            assert (epoch, steps) == (stopping.best_epoch_, model.n_steps_)
