"""Model files: exact, atomic and free of code, with a clear error for every file that is no model.

Also which classes a file can hold: estimators of the package and subclasses of a user.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from factormix import MFA, InputError, load
from factormix.files import replacing
from factormix.solvers import ConstrainedSGD
from factormix.training import serialization

X = np.random.default_rng(0).normal(size=(120, 5))
X[60:] += 3


@pytest.fixture
def model() -> MFA:
    return MFA(3, 2, solver="sgd", max_epochs=5, batch_size=30, random_state=1).fit(X)


@pytest.fixture
def path(model: MFA, tmp_path: Path) -> Path:
    model.save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def tensors_and_header(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def save_altered(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a file with other contents, whose checksum is right."""
    save_file(tensors, path, metadata | {"checksum": serialization._checksum(metadata, tensors)})


def check_sentence(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
    assert text.endswith(".")
    for part in parts:
        assert part in text


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n_factors", [0, 2])
def test_loading_is_exact(dtype, n_factors, tmp_path):
    model = MFA(3, n_factors, max_epochs=5, dtype=dtype, random_state=1).fit(X * 1e3 + 1e5)
    model.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_", "loadings_"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(model, name))
        assert getattr(copy, name).dtype == getattr(model, name).dtype
    Y = X * 1e3 + 1e5
    for name in ("score_samples", "predict_proba", "transform"):
        np.testing.assert_array_equal(getattr(copy, name)(Y), getattr(model, name)(Y))
    np.testing.assert_array_equal(copy.sample(9)[0], model.sample(9)[0])
    assert copy.history_ == model.history_
    for name in ("n_iter_", "n_steps_", "n_samples_seen_", "converged_", "n_features_in_"):
        assert getattr(copy, name) == getattr(model, name)
    # Learning goes on as if nothing had happened.
    np.testing.assert_array_equal(copy.partial_fit(Y).means_, model.partial_fit(Y).means_)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "transposed", "strided", "expanded", "offset"]),
)
def test_tensors_of_any_layout_come_back(shape, dtype, layout, tmp_path_factory):
    plain = torch.arange(math.prod(shape) + 5).to(dtype)
    tensor = {
        "plain": lambda: plain[:-5].view(shape),
        "transposed": lambda: plain[:-5].view(shape[::-1]).permute(list(range(len(shape)))[::-1]),
        "strided": lambda: plain.repeat_interleave(2)[: 2 * math.prod(shape) : 2].view(shape),
        "expanded": lambda: plain[0].expand(shape),
        "offset": lambda: plain[5:].view(shape),
    }[layout]()
    path = tmp_path_factory.mktemp("tensors") / "file"
    serialization.write_file(path, {"a": tensor, "b": tensor[..., None]}, {})
    read, settings = serialization.read_file(path)
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["b"], tensor[..., None])
    assert settings == {}


@pytest.mark.parametrize("n_components", [1, 3])
@pytest.mark.parametrize(("n_features", "n_factors"), [(1, 0), (2, 0), (2, 1)])
def test_the_smallest_mixtures_are_saved(n_components, n_features, n_factors, tmp_path):
    model = MFA(n_components, n_factors, random_state=0).fit(X[:, :n_features])
    model.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    np.testing.assert_array_equal(
        copy.score_samples(X[:, :n_features]), model.score_samples(X[:, :n_features])
    )


def test_options_come_back(tmp_path):
    solver = ConstrainedSGD(phases=None, min_eigenvalue=0.01, parametrisation="linear")
    model = MFA(
        np.int64(2),
        1,
        solver=solver,
        max_precision=np.float32(7.5),
        batch_size=17,
        max_epochs=3,
        random_state=np.int32(4),
        dtype=torch.float64,
        scaling="feature",
        noise="isotropic",
        n_init=2,
        verbose=0,
        callbacks=[lambda progress: None],
        candidates=np.int64(40),
    ).fit(X)
    model.save(tmp_path / "m")
    options = load(tmp_path / "m").get_params(deep=False)
    assert options.pop("solver") == solver
    assert options == {
        "n_components": 2,
        "candidates": 40,
        "mesh": "auto",
        "n_factors": 1,
        "max_factors": None,
        "n_init": 2,
        "max_precision": 7.5,
        "batch_size": 17,
        "max_epochs": 3,
        "random_state": 4,
        "device": None,
        "dtype": "float64",
        "verbose": 0,
        "callbacks": (),
        "scaling": "feature",
        "noise": "isotropic",
        "means_init": None,
        "warm_start": False,
    }
    model = MFA(2, 1, max_epochs=1, random_state=np.random.RandomState(0)).fit(X)
    model.save(tmp_path / "m")
    assert load(tmp_path / "m").random_state is None


def test_names_notes_and_kind_come_back(tmp_path):
    frame = pd.DataFrame(X, columns=list("abcde"))
    model = MFA(2, 1, max_epochs=1).fit(frame)
    model.notes_ = {"image_shape": [1, 5], "remark": "naïve"}
    model.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    assert copy.feature_names_in_.tolist() == list("abcde")
    assert copy.notes_ == model.notes_
    np.testing.assert_array_equal(copy.score_samples(frame), model.score_samples(frame))
    MFA(2, 1, max_epochs=1).fit(torch.from_numpy(X)).save(tmp_path / "t")
    assert isinstance(load(tmp_path / "t").means_, torch.Tensor)


def test_without_training_state_a_model_scores_and_does_not_learn(model, path, tmp_path):
    small = tmp_path / "small.safetensors"
    model.save(small, training_state=False)
    assert small.stat().st_size < path.stat().st_size
    copy = load(small)
    np.testing.assert_array_equal(copy.score_samples(X), model.score_samples(X))
    np.testing.assert_array_equal(copy.sample(5)[0], model.sample(5)[0])
    for method in (copy.partial_fit, copy.resume):
        with pytest.raises(InputError) as error:
            method(X)
        check_sentence(error, "saved without its training state", "training_state=True")
    # Saved again, it is still a model that scores.
    copy.save(small)
    again = load(small)
    np.testing.assert_array_equal(again.score_samples(X), model.score_samples(X))
    with pytest.raises(InputError, match="training state"):
        again.partial_fit(X)
    np.testing.assert_array_equal(copy.fit(X).means_, model.means_)


def test_the_file_is_safetensors_with_version_and_settings(path):
    tensors, header = tensors_and_header(path)
    assert set(header) == {"format", "format_version", "settings", "checksum"}
    assert header["format"] == "factormix"
    assert header["format_version"] == str(serialization.FORMAT_VERSION) == "1"
    settings = json.loads(header["settings"])
    assert settings["options"]["n_components"] == 3
    assert tensors["parameters.means"].shape == (3, 5)
    assert tensors["parameters.precision_factors"].shape == (3, 5, 2)


def test_loading_executes_nothing(path, monkeypatch):
    """Loading works when unpickling is impossible."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert load(path).n_features_in_ == 5


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError) as error:
        load("model.safetensors")
    check_sentence(error, "not a complete factormix model")
    assert not Path("exploded").exists()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError) as error:
        load(path)
    check_sentence(error, str(path), "truncated, damaged or of another kind")


@pytest.mark.parametrize("content", [b"hello, world", b"\x93NUMPY" + bytes(200), bytes(1000)])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError) as error:
        load(tmp_path / "x.safetensors")
    check_sentence(error, "x.safetensors", "of another kind")


@pytest.mark.parametrize("header", [None, {"format": "pt"}, {"format": "factormix"}])
def test_other_safetensors_are_refused(tmp_path, header):
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors", metadata=header)
    with pytest.raises(InputError) as error:
        load(tmp_path / "x.safetensors")
    check_sentence(error, "x.safetensors", "not a factormix model")


def test_a_newer_version_asks_for_an_upgrade(path):
    tensors, header = tensors_and_header(path)
    save_file(tensors, path, metadata=header | {"format_version": "2"})
    with pytest.raises(InputError) as error:
        load(path)
    check_sentence(error, "format version 2", "upgrade factormix")


@pytest.mark.parametrize(
    "settings",
    [
        "{",
        "",
        "[]",
        "{}",
        "null",
        '"text"',
        '{"estimator": "MFA"}',
        '{"estimator": "Other"}',
        '{"estimator": "MFA", "options": [], "run": {}}',
    ],
)
def test_damaged_settings_are_refused(path, settings):
    tensors, header = tensors_and_header(path)
    save_altered(tensors, path, metadata=header | {"settings": settings})
    with pytest.raises(InputError) as error:
        load(path)
    check_sentence(error, str(path))


@pytest.mark.parametrize(
    "keys",
    [
        ("options",),
        ("run",),
        ("run", "solver"),
        ("run", "problem", "seed"),
        ("run", "state"),
        ("run", "state", "window"),
        ("run", "solver", "name"),
        ("notes",),
        ("returns",),
        ("feature_names",),
    ],
)
def test_a_missing_part_is_named(path, keys):
    tensors, header = tensors_and_header(path)
    settings = json.loads(header["settings"])
    part = settings
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    save_altered(tensors, path, metadata=header | {"settings": json.dumps(settings)})
    with pytest.raises(InputError) as error:
        load(path)
    check_sentence(error, keys[-1], "damaged or of another kind")


@pytest.mark.parametrize("value", [None, 3, "sgd", []])
@pytest.mark.parametrize("keys", [("options",), ("run",), ("run", "solver"), ("run", "state")])
def test_a_part_of_the_wrong_kind_is_refused(path, keys, value):
    tensors, header = tensors_and_header(path)
    settings = json.loads(header["settings"])
    part = settings
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    save_altered(tensors, path, metadata=header | {"settings": json.dumps(settings)})
    with pytest.raises(InputError) as error:
        load(path)
    check_sentence(error, str(path))


def test_missing_and_unfitting_tensors_are_refused(path):
    tensors, header = tensors_and_header(path)
    for name in tensors:
        save_altered({k: t for k, t in tensors.items() if k != name}, path, metadata=header)
        with pytest.raises(InputError) as error:
            load(path)
        check_sentence(error, name)
    for name in ("parameters.means", "parameters.logits", "units.offset", "units.scale"):
        save_altered(tensors | {name: tensors[name][:-1].clone()}, path, metadata=header)
        with pytest.raises(InputError) as error:
            load(path)
        check_sentence(error, "do not fit together")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_flip_of_one_bit_is_noticed(dtype, tmp_path):
    """The file is the same again only where JSON has several ways to write the same."""
    path = tmp_path / "m.safetensors"
    MFA(3, 2, max_epochs=2, dtype=dtype, random_state=1).fit(X).save(path)
    whole, (tensors, header) = path.read_bytes(), tensors_and_header(path)
    random, noticed = np.random.default_rng(0), 0
    for bit in random.integers(8 * len(whole), size=300):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        message = complaint(path)
        if message is None:
            same, text = tensors_and_header(path)
            assert text == header
            assert all(torch.equal(same[name], t) for name, t in tensors.items())
        else:
            noticed += 1
            assert str(path) in message
            assert "\n" not in message
    assert noticed >= 299


def complaint(path: Path) -> str | None:
    try:
        load(path)
    except InputError as error:
        return str(error)
    return None


def test_a_damaged_tensor_is_reported_in_one_sentence(path):
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 4
    path.write_bytes(whole)
    with pytest.raises(InputError) as error:
        load(path)
    check_sentence(error, str(path), "is damaged: its checksum does not match", "earlier copy")


def test_a_damaged_header_does_not_switch_the_check_off(path):
    tensors, header = tensors_and_header(path)
    header["settings"] = header["settings"].replace('"n_components": 3', '"n_components": 4')
    save_file(tensors, path, metadata=header)
    with pytest.raises(InputError, match="checksum"):
        load(path)
    del header["checksum"]
    save_file(tensors, path, metadata=header)
    with pytest.raises(InputError, match="checksum"):
        load(path)


def test_paths_that_are_no_files_are_refused(tmp_path):
    for where, words in ((tmp_path / "missing", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(InputError) as error:
            load(where)
        check_sentence(error, str(where), words)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta"])
def test_an_unknown_device_is_refused(path, device):
    with pytest.raises(InputError) as error:
        load(path, device=device)
    check_sentence(error, "device", device)


def test_saving_where_nothing_can_be_written(model, tmp_path):
    (tmp_path / "file").write_text("here before")
    cases = [
        (tmp_path / "no" / "folder" / "m", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "m", "does not exist"),
    ]
    if Path("/dev/null").exists():
        cases.append((Path("/dev/null"), "is a device"))
    if Path("/proc/self").is_dir():
        cases.append((Path("/proc/self/m"), "cannot write"))
    for where, words in cases:
        with pytest.raises(InputError) as error:
            model.save(where)
        check_sentence(error, words)
    assert (tmp_path / "file").read_text() == "here before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_without_permission(model, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError) as error:
            model.save(tmp_path / "m")
        check_sentence(error, "cannot write")
    finally:
        tmp_path.chmod(0o700)


def test_notes_that_cannot_be_saved_leave_the_old_file(model, path):
    before = path.read_bytes()
    model.notes_ = {"function": print}
    with pytest.raises(InputError) as error:
        model.save(path)
    check_sentence(error, "cannot be saved as JSON")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_full_disk_leaves_the_old_file(model, path):
    """A limit on the size of files stands in for a full disk."""
    resource = pytest.importorskip("resource")
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a write beyond the limit is an OSError.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(InputError) as error:
            model.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(error.value).startswith(f"cannot write {path}")
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_killed_process_leaves_the_old_file(path):
    """Whenever the process is killed, the file at the path is a complete model."""
    script = (
        "import sys, factormix\n"
        "model = factormix.load(sys.argv[1])\n"
        "print('saving', flush=True)\n"
        "while True: model.save(sys.argv[1])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    process.wait()
    process.stdout.close()
    assert np.isfinite(load(path).score(X))


def test_saving_replaces_atomically(model, path):
    inode = path.stat().st_ino
    with path.open("rb") as reader:
        model.partial_fit(X).save(path)
        # A reader of the old file can go on reading it.
        assert len(reader.read()) > 0
    assert path.stat().st_ino != inode
    assert load(path).n_steps_ == model.n_steps_
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")
def test_permissions_and_links_are_kept(model, tmp_path):
    before = os.umask(0o027)
    try:
        model.save(tmp_path / "m.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o640
    (tmp_path / "link").symlink_to(tmp_path / "m.safetensors")
    model.partial_fit(X).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "m.safetensors").n_steps_ == model.n_steps_


def test_relative_and_home_paths(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save("m")
    assert load("m").n_steps_ == model.n_steps_


def test_replacing_keeps_the_ending_and_cleans_up(tmp_path):
    target = tmp_path / "table.csv"
    with replacing(target) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".csv"
        temporary.write_text("new")
    assert target.read_text() == "new"
    with pytest.raises(ZeroDivisionError), replacing(target) as temporary:
        temporary.write_text(f"newer {1 / 0}")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_write_and_read_are_inverse(tmp_path):
    tensors = {
        "a": torch.randn(3, 4, dtype=torch.float64).mT,
        "b": torch.tensor(3),
        "c": torch.zeros(2, 0),
    }
    settings = {"x": [1, 2.5, None, True], "y": {"z": "ü"}}
    serialization.write_file(tmp_path / "f", tensors, settings)
    back, same = serialization.read_file(tmp_path / "f")
    assert same == settings
    for name, tensor in tensors.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


class Careful(MFA):
    """A subclass of a user, with an option of its own."""

    def __init__(
        self,
        n_components: int = 2,
        n_factors: int = 1,
        *,
        care: float = 0.5,
        solver: Any = "natural",
        max_epochs: int | None = 2,
        random_state: int | None = 0,
        dtype: Any = "float32",
        device: Any = None,
    ) -> None:
        super().__init__(
            n_components,
            n_factors,
            solver=solver,
            max_epochs=max_epochs,
            random_state=random_state,
            dtype=dtype,
            device=device,
        )
        self.care = care


def test_a_subclass_is_loaded_as_a_subclass(tmp_path):
    model = Careful(care=0.25, solver="em").fit(X)
    model.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    assert type(copy) is Careful
    assert copy.get_params() == model.get_params()
    np.testing.assert_array_equal(copy.score_samples(X), model.score_samples(X))


def test_a_class_of_the_same_name_does_not_replace_ours(tmp_path):
    ours = MFA
    made = type("MFA", (ours,), {"__init__": ours.__init__, "__module__": "elsewhere"})
    ours(2, 1, max_epochs=1).fit(X).save(tmp_path / "ours")
    made(2, 1, max_epochs=1).fit(X).save(tmp_path / "theirs")
    assert type(load(tmp_path / "ours")) is ours
    assert type(load(tmp_path / "theirs")) is made


OVERWRITTEN = """
import sys
import numpy as np
from factormix import load

model = load(sys.argv[1])
open(sys.argv[1], "wb").write(b"another file")
print(model.score(np.zeros((1, model.n_features_in_))))
"""


def test_a_loaded_model_does_not_need_its_file(model, tmp_path):
    """A file that is overwritten in place must not end the process that has loaded it."""
    model.save(tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", OVERWRITTEN, str(tmp_path / "model.safetensors")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = model.score(np.zeros((1, model.n_features_in_)))
    assert float(done.stdout) == pytest.approx(expected)


def test_a_class_that_is_not_imported_is_named(tmp_path):
    """A process that has not imported the class names the module, and loads the model after it."""
    (tmp_path / "mine.py").write_text(
        "from factormix import MFA\nclass Careful(MFA):\n    __init__ = MFA.__init__\n"
    )
    made = type("Careful", (MFA,), {"__init__": MFA.__init__, "__module__": "mine"})
    made(2, 1, max_epochs=1).fit(X).save(tmp_path / "m")
    code = (
        "import factormix\n"
        "try: factormix.load('m')\n"
        "except factormix.InputError as error: print(error)\n"
        "import mine\n"
        "print(type(factormix.load('m')) is mine.Careful)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    message, loaded = done.stdout.splitlines()
    assert "mine.Careful" in message
    assert "import mine before" in message
    assert loaded == "True"
