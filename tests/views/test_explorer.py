"""The explorer's server: what it answers, whom it answers, and what it does with bad input."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax
from scipy.stats import multivariate_normal

import factormix
from explorers import ENVIRONMENT, Explorer, exploring, make_exhibits, unpacked
from factormix.cli import run
from factormix.data.readers import read_rows
from factormix.views.explorer import Exhibition, answers
from factormix.views.explorer.answers import message
from factormix.views.explorer.arrangement import arrange, grid_shape
from factormix.views.explorer.server import allowed_host


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explorer")
    make_exhibits(folder)
    (folder / "notes.txt").write_text("no model")
    whole = (folder / "wine.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "empty").mkdir()
    detector = factormix.MFAOutlierDetector(random_state=0)
    rows = np.random.default_rng(0).normal(size=(200, 3))
    detector.fit(rows).save(folder / "detector.safetensors")
    np.save(folder / "narrow.npy", np.zeros((5, 3)))
    return folder


@pytest.fixture(scope="module")
def digits(folder: Path):
    with exploring(
        folder / "digits.safetensors", "--data", folder / "digits.npy", "--image-shape", "8x8"
    ) as explorer:
        yield explorer


@pytest.fixture(scope="module")
def wine(folder: Path):
    with exploring(folder / "wine.safetensors", "--data", folder / "wine.csv") as explorer:
        yield explorer


# What is answered


def test_the_map_has_every_component_once(digits: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "digits.safetensors")
    facts, arrays = digits.ask("map")
    assert sorted(arrays["order"]) == list(range(12))
    assert facts["rows"] * facts["cols"] >= 12
    assert arrays["tiles"].shape == (12, 8, 8)
    np.testing.assert_allclose(arrays["weights"], model.weights_, rtol=1e-5)
    about, _ = digits.ask("model")
    values = about["low"] + arrays["tiles"].reshape(12, 64) / 255.0 * (about["high"] - about["low"])
    shown = np.clip(np.asarray(model.means_), about["low"], about["high"])
    assert np.abs(values - shown).max() <= 0.51 * (about["high"] - about["low"]) / 255


def test_a_component_is_that_of_the_model(digits: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "digits.safetensors")
    facts, arrays = digits.ask("component/5")
    Lambda, D = np.asarray(model.loadings_)[5], np.asarray(model.noise_variances_)[5]
    np.testing.assert_allclose(arrays["mean"], model.means_[5], atol=1e-4)
    np.testing.assert_allclose(arrays["loadings"], Lambda.T, atol=1e-4)
    np.testing.assert_allclose(arrays["precision"], 1 / D, rtol=1e-3)
    Sigma = np.diag(D) + Lambda @ Lambda.T
    np.testing.assert_allclose(arrays["deviation"], np.sqrt(np.diag(Sigma)), rtol=1e-3)
    shares = (Lambda**2).sum(axis=0) / np.trace(Sigma)
    np.testing.assert_allclose(facts["explained"], shares, rtol=1e-3)
    assert facts["noise"] == pytest.approx(1 - shares.sum(), rel=1e-3)


def test_samples_without_noise_lie_in_the_plane_of_the_factors(digits: Explorer) -> None:
    _, component = digits.ask("component/2")
    _, clean = digits.ask("component/2/samples?n=9&noise=0&seed=3")
    _, noisy = digits.ask("component/2/samples?n=9&noise=1&seed=3")
    assert clean["samples"].shape == noisy["samples"].shape == (9, 64)
    off = clean["samples"] - component["mean"]
    basis = component["loadings"].T
    code = np.linalg.lstsq(basis, off.T, rcond=None)[0]
    assert np.abs(off.T - basis @ code).max() < 1e-2
    assert np.abs(noisy["samples"] - clean["samples"]).max() > 0.1


def test_rows_are_scored_as_by_the_model(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    scores, best = model.score_and_predict(table)
    facts, _ = wine.ask("data/extremes?least=1&n=5")
    assert facts["numbers"] == np.argsort(scores)[:5].tolist()
    np.testing.assert_allclose(facts["scores"], np.sort(scores)[:5], rtol=1e-6)
    facts, _ = wine.ask("data/extremes?least=0&n=5")
    assert facts["numbers"] == np.argsort(-scores)[:5].tolist()
    facts, _ = wine.ask("component/1/nearest")
    mine = np.flatnonzero(best == 1)
    # Columns of a table count by their spread.
    _, units = wine.ask("model")
    off = (table.to_numpy()[mine] - model.means_[1]) / units["scale"]
    assert facts["numbers"] == mine[np.argsort((off**2).sum(axis=1))][:12].tolist()
    facts, _ = wine.ask("data?share=0.1")
    assert facts["threshold"] == pytest.approx(np.quantile(scores, 0.1))
    assert sum(facts["histogram"]["counts"]) + facts["histogram"]["below"] == len(table)


def test_outlier_shares_and_likelihoods_by_component(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    scores, best = model.score_and_predict(pd.read_csv(folder / "wine.csv"))
    wine.ask("data")
    _, arrays = wine.ask("map?share=0.2")
    below = scores < np.quantile(scores, 0.2)
    for k in range(3):
        assert arrays["rows"][k] == (best == k).sum()
        assert arrays["likelihood"][k] == pytest.approx(scores[best == k].mean(), rel=1e-5)
        assert arrays["outliers"][k] == pytest.approx(below[best == k].mean(), rel=1e-5)


def test_a_row_is_analysed_as_by_the_model(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    about, units = wine.ask("model")
    wine.ask("data")
    facts, arrays = wine.ask("row/17")
    one = table.iloc[[17]]
    scores = model.score_samples(table)
    assert facts["log_likelihood"] == pytest.approx(scores[17], rel=1e-6)
    # By rounding, the row may count as less likely than itself.
    assert facts["percentile"] == pytest.approx((scores < scores[17]).mean(), abs=1.01 / len(table))
    assert facts["component"] == model.predict(one)[0]
    np.testing.assert_allclose(facts["code"], model.transform(one)[0], rtol=1e-4, atol=1e-5)
    rebuilt = model.inverse_transform(model.transform(one), model.predict(one))[0]
    shown = units["centre"] + units["scale"] * arrays["rebuilt"]
    np.testing.assert_allclose(shown, rebuilt, rtol=1e-4)
    assert about["feature_names"] == list(table.columns)
    np.testing.assert_array_equal(arrays["values"], table.to_numpy(float)[17])
    centroid = units["centre"] + units["scale"] * arrays["centroid"]
    np.testing.assert_allclose(centroid, model.means_[facts["component"]], rtol=1e-4)
    status, raw = wine.analyse(table.to_numpy()[17])
    assert status == 200
    typed, _ = unpacked(raw)
    assert typed["log_likelihood"] == pytest.approx(facts["log_likelihood"])


def dense_expectation(model: factormix.MFA, row: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Compute what a mixture expects in the missing places by d x d matrices; (q,)."""
    there = ~missing
    joint, means = [], []
    parts = (model.weights_, model.means_, model.loadings_, model.noise_variances_)
    for pi, mu, Lambda, D in zip(*parts, strict=True):
        Sigma = np.diag(D) + Lambda @ Lambda.T
        inside = Sigma[np.ix_(there, there)]
        joint.append(np.log(pi) + multivariate_normal(mu[there], inside).logpdf(row[there]))
        pull = np.linalg.solve(inside, row[there] - mu[there])
        means.append(mu[missing] + Sigma[np.ix_(missing, there)] @ pull)
    return softmax(joint) @ np.array(means)


def test_missing_values_are_filled_in(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    row = table.to_numpy()[60]
    missing = np.zeros(13, bool)
    missing[[0, 4, 12]] = True
    _, units = wine.ask("model")
    status, raw = wine.analyse(np.where(missing, np.nan, row))
    assert status == 200
    facts, arrays = unpacked(raw)
    filled = units["centre"] + units["scale"] * arrays["filled"]
    np.testing.assert_allclose(filled[~missing], row[~missing], rtol=1e-4)
    expected = dense_expectation(model, row, missing)
    np.testing.assert_allclose(filled[missing], expected, rtol=1e-3)
    assert facts["missing"] == 3
    assert (arrays["doubt"][missing] > 0).all()
    gaps = table.iloc[[60]].mask(missing[None])
    assert facts["log_likelihood"] == pytest.approx(model.score_samples(gaps)[0], rel=1e-5)
    assert 0 < facts["percentile"] <= 1
    # Each value that is there is judged by the others that are there.
    for j in range(13):
        without = missing | (np.arange(13) == j)
        told = dense_expectation(model, row, without)[np.flatnonzero(without) == j][0]
        shown = units["centre"][j] + units["scale"][j] * arrays["expected"][j]
        assert shown == pytest.approx(told, rel=1e-3, abs=1e-3)
    assert np.isnan(arrays["z_scores"]).tolist() == missing.tolist()


def test_rows_with_gaps_are_counted_and_shown(folder: Path, tmp_path: Path) -> None:
    table = pd.read_csv(folder / "wine.csv")
    table.iloc[[3, 5], 2] = np.nan
    table.to_csv(tmp_path / "gaps.csv", index=False)
    exhibition = Exhibition(folder / "wine.safetensors")
    exhibition.open()
    exhibition.show(read_rows(tmp_path / "gaps.csv"))
    exhibition.scores.wait()
    assert unpacked(answers.data(exhibition, 0.01))[0]["incomplete"] == 2
    facts, arrays = unpacked(answers.row(exhibition, 5))
    assert facts["missing"] == 1
    assert np.isnan(arrays["values"]).nonzero()[0].tolist() == [2]


def test_reasons_are_what_the_others_lead_one_to_expect(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    row = pd.read_csv(folder / "wine.csv").to_numpy()[60].copy()
    row[3] += 20
    _, units = wine.ask("model")
    _, arrays = unpacked(wine.analyse(row)[1])
    for j in range(13):
        expected = dense_expectation(model, row, np.arange(13) == j)[0]
        shown = units["centre"][j] + units["scale"][j] * arrays["expected"][j]
        assert shown == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert np.abs(arrays["z_scores"]).argmax() == 3
    assert arrays["z_scores"][3] > 3


def test_without_data_and_images(folder: Path) -> None:
    with exploring(folder / "digits.safetensors", "--no-images") as explorer:
        # Rows are drawn as profiles.
        facts, _ = explorer.ask("model")
        assert (facts["kind"], facts["shape"]) == ("line", [64])
        _, arrays = explorer.ask("map")
        assert arrays["tiles"].shape == (12, 64)
        # A row is compared with the model's own.
        row = np.load(folder / "digits.npy")[3].ravel()
        facts, _ = unpacked(explorer.analyse(row)[1])
        assert facts["among"] == "samples"
        assert 0.01 < facts["percentile"] <= 1
        far, _ = unpacked(explorer.analyse(row + 1e4)[1])
        assert far["percentile"] == 0
        status, raw = explorer.get("api/data")
        assert (status, "--data" in json.loads(raw)["error"]) == (400, True)
        # A page that keeps its connection open does not keep the server.
        connection = socket.create_connection((explorer.host, explorer.port))
    connection.close()


# Whom it answers


def test_only_the_whole_address_opens_the_page(digits: Explorer) -> None:
    for target in ("/", "/index.html", "/wrong-token/", "/api/model", f"/{digits.token}x/api/map"):
        status, raw = digits.request("GET", target, None)
        assert status == 403
        assert b"the address lacks its token" in raw
        assert b"Traceback" not in raw
    status, raw = digits.get("")
    assert status == 200
    assert raw.startswith(b"<!doctype html>")
    assert len(digits.token) >= 20


def test_requests_of_other_pages_are_turned_down(digits: Explorer) -> None:
    own = f"http://{digits.host}:{digits.port}"
    assert digits.get("api/state", Origin=own)[0] == 200
    for headers in (
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Origin": f"http://{digits.host}:{digits.port + 1}"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
    ):
        status, raw = digits.get("api/state", **headers)
        assert status == 403, headers
        assert b"came from another page" in raw
    # A link that is followed is no request of the page that has it.
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert digits.get("", **followed)[0] == 200


def test_foreign_names_of_the_server_are_turned_down(digits: Explorer) -> None:
    for host in ("example.org", f"example.org:{digits.port}", f"127.0.0.1:{digits.port + 1}", ""):
        status, raw = digits.get("api/state", Host=host)
        assert status == 403, host
        assert b"not known under that name" in raw
    assert digits.get("api/state", Host=f"localhost:{digits.port}")[0] == 200


def test_names_of_a_server_that_listens_everywhere() -> None:
    assert allowed_host("192.168.1.7:80", "0.0.0.0", 80)
    assert allowed_host("192.168.1.7", "0.0.0.0", 80)
    assert allowed_host("[fe80::1]:8000", "::", 8000)
    assert not allowed_host("evil.example:8000", "0.0.0.0", 8000)
    assert not allowed_host("192.168.1.7:8000", "127.0.0.1", 8000)


def test_no_file_but_those_of_the_page_is_served(digits: Explorer) -> None:
    for path in (
        "../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "%2fetc%2fpasswd",
        "app.py", "static/main.js", "index.html/../app.py",
    ):  # fmt: skip
        status, raw = digits.get(path)
        assert status in (403, 404), path
        assert b"root:" not in raw
        assert b"import" not in raw
    assert digits.get("main.js")[0] == 200


def test_answers_forbid_what_the_page_does_not_need(digits: Explorer) -> None:
    from urllib.request import urlopen

    with urlopen(digits.address) as response:
        headers = response.headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Server"] is None


# Bad input


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("component/12", "there is no component 12"),
        ("component/99999999999999999999", "there is no component"),
        ("component/x", "no such page"),
        ("row/600", "numbered from 0 to 599"),
        ("row/99999999999999999999", "numbered from 0 to 599"),
        ("map?share=7", "between 0 and 0.5"),
        ("map?share=nan", "between 0 and 0.5"),
        ("component/1/samples?n=many", "whole number"),
        ("training/77", "no snapshot 77"),
        ("nothing", "no such page"),
    ],
)
def test_a_wrong_question_gets_a_sentence(digits: Explorer, target: str, expected: str) -> None:
    digits.ask("data")
    status, raw = digits.get(f"api/{target}")
    assert status in (400, 404)
    assert expected in json.loads(raw)["error"]
    assert digits.get("api/state")[0] == 200


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (np.zeros(63), "has 64 values, not 63"),
        (np.zeros(0), "has 64 values, not 0"),
        (np.zeros(65), "more values"),
        (np.full(64, np.inf), "finite"),
        (np.full(64, np.nan), "at least one"),
        (np.full(64, 1e308), "too large"),
        (np.where(np.arange(64) == 3, np.nan, 1e308), "too large"),
    ],
)
def test_a_wrong_row_gets_a_sentence(digits: Explorer, row: np.ndarray, expected: str) -> None:
    status, raw = digits.analyse(row)
    assert status == 400
    assert expected in json.loads(raw)["error"]


def test_a_row_of_half_a_number_gets_a_sentence(digits: Explorer) -> None:
    status, raw = digits.request("POST", f"/{digits.token}/api/analyse", b"123")
    assert status == 400
    assert "not whole" in json.loads(raw)["error"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none.safetensors"], "no such file"),
        (["notes.txt"], "not a complete factormix model"),
        (["cut.safetensors"], "not a complete factormix model"),
        (["empty"], "holds no checkpoints"),
        (["detector.safetensors"], "holds an MFAOutlierDetector"),
        (["wine.safetensors", "--data", "none.npy"], "does not exist"),
        (["wine.safetensors", "--data", "narrow.npy"], "3 features"),
        (["wine.safetensors", "--data", "notes.txt"], "unknown kind"),
        (["wine.safetensors", "--image-shape", "4x4"], "13 values"),
        (["wine.safetensors", "--image-shape", "big"], "no image shape"),
        (["wine.safetensors", "--image-shape", "1x13", "--no-images"], "exclude each other"),
        (["wine.safetensors", "--host", "no such host"], "is not known"),
        (["wine.safetensors", "--host", "203.0.113.7"], "not an address of this machine"),
        (["wine.safetensors", "--port", "99999"], "65535"),
    ],
)
def test_a_wrong_command_ends_with_one_sentence(
    folder: Path, arguments: list[str], expected: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(["explore", *arguments, "--no-browser"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("factormix:")
    assert expected in line


def test_a_port_in_use_is_said_and_the_other_server_stays_up(
    digits: Explorer, folder: Path, capsys
) -> None:
    arguments = [str(folder / "wine.safetensors"), "--port", str(digits.port), "--no-browser"]
    assert run(["explore", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {digits.port}" in line
    assert "--port" in line
    assert digits.get("api/state")[0] == 200


def test_windows_closed_in_the_middle_of_a_request(digits: Explorer) -> None:
    rest = f"HTTP/1.1\r\nHost: {digits.host}:{digits.port}\r\n"
    for beginning in (
        f"POST /{digits.token}/api/analyse {rest}Content-Length: 512\r\n\r\n12345678".encode(),
        f"GET /{digits.token}/api/map {rest}\r\n".encode(),
        f"GET /{digits.token}/api/m".encode(),
        b"\x16\x03\x01 this is no HTTP \x00\xff\r\n\r\n",
    ):
        for _ in range(5):
            with socket.create_connection((digits.host, digits.port)) as connection:
                connection.sendall(beginning)
    assert digits.get("api/state")[0] == 200


def test_ten_tabs_at_once(digits: Explorer) -> None:
    digits.ask("data")
    paths = ["", "main.js", "api/model", "api/map", "api/component/3", "api/row/5", "api/training"]
    failures: list[object] = []

    def tab() -> None:
        for path in paths:
            status, _ = digits.get(path)
            if status != 200:
                failures.append((path, status))

    tabs = [threading.Thread(target=tab) for _ in range(10)]
    for one in tabs:
        one.start()
    for one in tabs:
        one.join()
    assert not failures


# Training


def test_it_waits_for_a_model_and_follows_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    with exploring(path, "--wait", "--data", folder / "wine.csv") as explorer:
        status, raw = explorer.get("api/model")
        assert status == 202
        assert "not there yet" in json.loads(raw)["later"]
        facts, _ = explorer.ask("training")
        assert (facts["version"], facts["snapshots"]) == (0, [])
        shutil.copy(folder / "wine.safetensors", path)
        assert _reached(explorer, 1)["finished"] is True
        # Something that is no model does not take the place of the model that is there.
        path.write_bytes(b"no model")
        _until(explorer, lambda state: state["problem"] is not None)
        assert "not a complete factormix model" in _state(explorer)["problem"]
        assert explorer.ask("model")[0]["components"] == 3
        table = pd.read_csv(folder / "wine.csv")
        factormix.MFA(5, 1, random_state=0).fit(table).save(path)
        _reached(explorer, 2)
        assert explorer.ask("model")[0]["components"] == 5
        facts, _ = explorer.ask("training")
        assert [one["components"] for one in facts["snapshots"]] == [3, 5]
        _, arrays = explorer.ask("training/1")
        assert arrays["tiles"].shape == (3, 13)
        assert explorer.ask("data")[0]["rows"] == len(table)


def test_a_running_training_is_followed(folder: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    arguments = ["train", folder / "digits.npy", "-o", tmp_path / "m.safetensors", "--checkpoint"]
    arguments += [run_folder, "--every", "0.5s", "--solver", "sgd", "--batch-size", "5", "-q"]
    arguments += ["--n-components", "9", "--max-epochs", "100000"]
    command = [sys.executable, "-m", "factormix", *map(str, arguments)]
    training = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        with exploring(run_folder, "--wait") as explorer:
            state = _reached(explorer, 3)
            assert state["finished"] is False
            facts, _ = explorer.ask("training")
            steps = [one["step"] for one in facts["snapshots"]]
            assert steps == sorted(set(steps))
            assert len(steps) >= 3
            assert len(facts["curves"]["log_likelihood"]) > 1
    finally:
        training.terminate()
        training.wait(30)


def _state(explorer: Explorer) -> dict[str, object]:
    status, raw = explorer.get("api/state")
    assert status == 200
    state: dict[str, object] = json.loads(raw)
    return state


def _until(explorer: Explorer, condition, seconds: float = 60) -> dict[str, object]:
    end = time.monotonic() + seconds
    while not condition(state := _state(explorer)):
        assert time.monotonic() < end, state
        time.sleep(0.05)
    return state


def _reached(explorer: Explorer, version: int) -> dict[str, object]:
    return _until(explorer, lambda state: state["version"] >= version)


# Its parts


def neighbour_distance(points: np.ndarray, order: np.ndarray, rows: int, cols: int) -> float:
    """Average the distance between neighbouring cells of a grid."""
    grid = np.full((rows * cols, points.shape[1]), np.nan)
    grid[: len(order)] = points[order]
    grid = grid.reshape(rows, cols, -1)
    steps = (grid[1:] - grid[:-1], grid[:, 1:] - grid[:, :-1])
    return float(np.nanmean(np.concatenate([np.linalg.norm(s, axis=-1).ravel() for s in steps])))


def test_points_of_a_grid_find_their_places_again() -> None:
    random = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(16.0), np.arange(16.0)), -1).reshape(-1, 2)
    turned = places @ np.linalg.qr(random.normal(size=(5, 5))).Q[:2]
    shuffled = turned[random.permutation(256)]
    order = arrange(shuffled, 16, 16)
    assert sorted(order) == list(range(256))
    # In the best arrangement all neighbours are one step apart; in a random one, about eight.
    assert neighbour_distance(shuffled, order, 16, 16) < 1.2
    assert neighbour_distance(shuffled, np.arange(256), 16, 16) > 5


def test_no_swap_of_two_would_bring_neighbours_nearer() -> None:
    points = np.random.default_rng(3).normal(size=(23, 4))
    order = arrange(points, 4, 6)

    def apart(order: np.ndarray) -> float:
        grid = np.full((24, 4), np.nan)
        grid[:23] = points[order]
        grid = grid.reshape(4, 6, 4)
        return float(np.nansum((grid[1:] - grid[:-1]) ** 2) + np.nansum(np.diff(grid, axis=1) ** 2))

    least = apart(order)
    for i in range(23):
        for j in range(i):
            swapped = order.copy()
            swapped[[i, j]] = order[[j, i]]
            assert apart(swapped) >= least - 1e-9


def test_pictures_stay_in_their_places_as_they_form() -> None:
    """Components that training has moved a little, and has left in another order."""
    random = np.random.default_rng(0)
    points = random.normal(size=(49, 5))
    before = points[arrange(points, 7, 7)]
    moved = before + 0.05 * random.normal(size=before.shape)
    shuffled = random.permutation(49)
    after = moved[shuffled][arrange(moved[shuffled], 7, 7, before)]
    stayed = (np.abs(after - moved).max(axis=1) == 0).mean()
    assert stayed > 0.8
    anew = moved[shuffled][arrange(moved[shuffled], 7, 7)]
    assert (np.abs(anew - moved).max(axis=1) == 0).mean() < stayed


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 12, 13, 100, 211])
def test_every_number_of_components_has_a_map(n: int) -> None:
    rows, cols = grid_shape(n)
    assert (rows - 1) * cols < n <= rows * cols
    points = np.random.default_rng(n).normal(size=(n, 3))
    order = arrange(points, rows, cols)
    assert sorted(order) == list(range(n))
    np.testing.assert_array_equal(order, arrange(points, rows, cols))


def test_equal_components_have_a_map() -> None:
    assert sorted(arrange(np.ones((20, 6)), 4, 5)) == list(range(20))


def test_messages_keep_their_values() -> None:
    arrays = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32),
        "c": np.zeros((0, 4), np.float32),
        "d": np.array([1.5]),
    }
    facts = {"x": np.float64(2), "nothing": float("nan"), "list": [np.int64(3)], "text": "ü"}
    found, back = unpacked(message(facts, **arrays))
    assert found == {"x": 2.0, "nothing": None, "list": [3], "text": "ü"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_the_page_names_nothing_elsewhere() -> None:
    folder = Path(factormix.__file__).parent / "views" / "explorer" / "static"
    for file in folder.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text, file.name


def test_missing_packages_are_named(monkeypatch, folder: Path, capsys) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        "factormix.views.explorer.server.find_spec",
        lambda name: None if name == "uvicorn" else real(name),
    )
    assert run(["explore", str(folder / "wine.safetensors")]) == 2
    assert 'pip install "factormix[explore]"' in capsys.readouterr().err


def test_a_mixture_far_from_zero_keeps_its_digits(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = 1e7 + random.normal(size=(300, 4))
    factormix.MFA(2, 1, random_state=0, dtype="float64").fit(rows).save(tmp_path / "m.safetensors")
    model = factormix.load(tmp_path / "m.safetensors")
    exhibition = Exhibition(tmp_path / "m.safetensors")
    exhibition.open()
    facts, _ = unpacked(answers.analysis(exhibition, rows[0]))
    assert facts["log_likelihood"] == pytest.approx(model.score_samples(rows[:1])[0], abs=1e-4)
