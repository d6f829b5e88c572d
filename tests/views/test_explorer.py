"""The explorer's server: its answers, whom it refuses, bad input, and training that it follows."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax
from scipy.stats import multivariate_normal

import factormix
from explorers import Explorer, copy_whole, run_explore_command, serve_model, unpack_message
from factormix.activations import atlas, collect, open_store
from factormix.callbacks import Checkpoints, checkpoints_in
from factormix.cli import run
from factormix.data.readers import read_rows
from factormix.views.explorer import Session, api, layout
from factormix.views.explorer.layout import arrange_on_grid, choose_grid
from factormix.views.explorer.server import is_host_allowed


@pytest.fixture(scope="module")
def digits(folder: Path) -> Iterator[Explorer]:
    """The command as a user starts it; the explorers of other tests are in this process."""
    with run_explore_command(
        folder / "digits.safetensors", "--data", folder / "digits.npy", "--image-shape", "8x8"
    ) as explorer:
        yield explorer


@pytest.fixture(scope="module")
def wrong_files(folder: Path) -> Path:
    """The folder of models, with files that the explorer cannot show."""
    (folder / "notes.txt").write_text("no model")
    whole = (folder / "wine.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "empty").mkdir()
    detector = factormix.MFAOutlierDetector(random_state=0)
    rows = np.random.default_rng(0).normal(size=(200, 3))
    detector.fit(rows).save(folder / "detector.safetensors")
    np.save(folder / "narrow.npy", np.zeros((5, 3)))
    return folder


# Answers


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


def test_a_component_matches_the_model(digits: Explorer, folder: Path) -> None:
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


def test_row_scores_match_the_model(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    # The model was trained on this table, so each row is scored as if left out.
    scores, best = model.leave_one_out_scores(table), model.predict(table)
    facts, _ = wine.ask("data/extremes?least=1&n=5")
    assert facts["numbers"] == np.argsort(scores)[:5].tolist()
    np.testing.assert_allclose(facts["scores"], np.sort(scores)[:5], rtol=1e-6)
    facts, _ = wine.ask("data/extremes?least=0&n=5")
    assert facts["numbers"] == np.argsort(-scores)[:5].tolist()
    facts, _ = wine.ask("component/1/nearest")
    members = np.flatnonzero(best == 1)
    # Distances are in standard deviations of the columns.
    _, units = wine.ask("model")
    off = (table.to_numpy()[members] - model.means_[1]) / units["scale"]
    assert facts["numbers"] == members[np.argsort((off**2).sum(axis=1))][:12].tolist()
    facts, _ = wine.ask("data?share=0.1")
    assert facts["left_out"]
    assert facts["threshold"] == pytest.approx(np.quantile(scores, 0.1))
    assert sum(facts["histogram"]["counts"]) + facts["histogram"]["below"] == len(table)


def test_rows_have_the_names_of_their_file(folder: Path, tmp_path: Path, wine: Explorer) -> None:
    table = pd.read_csv(folder / "wine.csv")
    bottles = [f"bottle {7 * i}" for i in range(len(table))]
    table.insert(0, "bottle", bottles)
    table.insert(5, "year", np.arange(len(table)) % 9 + 2000)
    table.to_csv(tmp_path / "named.csv", index=False)
    for ids, name in (
        (["bottle"], lambda i: bottles[i]),
        (["bottle", "year"], lambda i: f"{bottles[i]}, {2000 + i % 9}"),
    ):
        session = Session(folder / "wine.safetensors")
        session.load()
        session.set_rows(read_rows(tmp_path / "named.csv", ids=ids))
        session.scores.wait()
        facts, _ = unpack_message(api.send_extremes(session, least=True, n=5))
        assert len(facts["numbers"]) == 5
        assert facts["names"] == [name(i) for i in facts["numbers"]]
        facts, _ = unpack_message(api.send_nearest(session, 1))
        assert facts["names"] == [name(i) for i in facts["numbers"]]
        assert unpack_message(api.send_row(session, 30))[0]["name"] == name(30)
    # Without a column that identifies rows, they have numbers only.
    assert wine.ask("data/extremes?least=1&n=5")[0]["names"] is None
    assert wine.ask("row/3")[0]["name"] is None


def test_images_have_the_names_of_their_files(folder: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    digits = np.load(folder / "digits.npy")[:6]
    for i, pixels in enumerate(digits):
        image.fromarray(pixels * 15).save(tmp_path / f"{'fcadbe'[i]}.png")
    session = Session(folder / "digits.safetensors", (8, 8))
    session.load()
    session.set_rows(read_rows(tmp_path))
    session.scores.wait()
    facts, _ = unpack_message(api.send_extremes(session, least=False, n=6))
    # Images are read in the order of their names.
    assert facts["names"] == [f"{'abcdef'[i]}.png" for i in facts["numbers"]]


def test_rows_keep_their_numbers_when_the_file_of_their_names_is_gone(
    folder: Path, tmp_path: Path
) -> None:
    table = pd.read_csv(folder / "wine.csv").assign(bottle=lambda t: "b" + t.index.astype(str))
    table.to_csv(tmp_path / "named.csv", index=False)
    session = Session(folder / "wine.safetensors")
    session.load()
    session.set_rows(read_rows(tmp_path / "named.csv", ids=["bottle"]))
    session.scores.wait()
    (tmp_path / "named.csv").unlink()
    facts, _ = unpack_message(api.send_row(session, 3))
    assert facts["name"] is None


def test_outlier_shares_and_likelihoods_by_component(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    scores, best = model.leave_one_out_scores(table), model.predict(table)
    wine.ask("data")
    _, arrays = wine.ask("map?share=0.2")
    below = scores < np.quantile(scores, 0.2)
    for k in range(3):
        assert arrays["rows"][k] == (best == k).sum()
        assert arrays["likelihood"][k] == pytest.approx(scores[best == k].mean(), rel=1e-5)
        assert arrays["outliers"][k] == pytest.approx(below[best == k].mean(), rel=1e-5)


def test_the_analysis_of_a_row_matches_the_model(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    about, units = wine.ask("model")
    wine.ask("data")
    facts, arrays = wine.ask("row/17")
    row = table.iloc[[17]]
    scores = model.leave_one_out_scores(table)
    assert facts["log_likelihood"] == pytest.approx(scores[17], rel=1e-6)
    # By rounding, the row may count as less likely than itself.
    assert facts["percentile"] == pytest.approx((scores < scores[17]).mean(), abs=1.01 / len(table))
    assert facts["component"] == model.predict(row)[0]
    np.testing.assert_allclose(facts["code"], model.transform(row)[0], rtol=1e-4, atol=1e-5)
    reconstruction = model.inverse_transform(model.transform(row), model.predict(row))[0]
    shown = units["centre"] + units["scale"] * arrays["reconstruction"]
    np.testing.assert_allclose(shown, reconstruction, rtol=1e-4)
    assert about["feature_names"] == list(table.columns)
    np.testing.assert_array_equal(arrays["values"], table.to_numpy(float)[17])
    centroid = units["centre"] + units["scale"] * arrays["centroid"]
    np.testing.assert_allclose(centroid, model.means_[facts["component"]], rtol=1e-4)
    status, raw = wine.analyse(table.to_numpy()[17])
    assert status == 200
    # A row from the page is a new one.
    typed, _ = unpack_message(raw)
    assert typed["log_likelihood"] == pytest.approx(model.score_samples(row)[0])


def test_a_misprint_with_a_component_of_its_own_is_least_likely(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"area": rng.normal(100, 20, 300), "built": rng.normal(1980, 20, 300)})
    table.loc[7, "built"] = 20190
    table.to_csv(tmp_path / "houses.csv", index=False)
    factormix.MFA(4, 1, random_state=0).fit(table).save(tmp_path / "houses.safetensors")
    with serve_model(tmp_path / "houses.safetensors", tmp_path / "houses.csv") as explorer:
        facts, _ = explorer.ask("data/extremes?least=1&n=3")
        assert facts["numbers"][0] == 7
        _, units = explorer.ask("model")
        _, arrays = explorer.ask("row/7")
    assert np.abs(arrays["z_scores"]).argmax() == 1
    assert arrays["z_scores"][1] > 100
    assert units["centre"][1] + units["scale"][1] * arrays["expected"][1] < 2100


def dense_expectation(model: factormix.MFA, row: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Compute the expected missing values (q,) by d x d matrices."""
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
    facts, arrays = unpack_message(raw)
    filled = units["centre"] + units["scale"] * arrays["imputed"]
    np.testing.assert_allclose(filled[~missing], row[~missing], rtol=1e-4)
    expected = dense_expectation(model, row, missing)
    np.testing.assert_allclose(filled[missing], expected, rtol=1e-3)
    assert facts["missing"] == 3
    assert (arrays["imputed_deviation"][missing] > 0).all()
    gaps = table.iloc[[60]].mask(missing[None])
    assert facts["log_likelihood"] == pytest.approx(model.score_samples(gaps)[0], rel=1e-5)
    assert 0 < facts["percentile"] <= 1
    # Each observed value is compared with what the other observed values predict.
    for j in range(13):
        without = missing | (np.arange(13) == j)
        expected = dense_expectation(model, row, without)[np.flatnonzero(without) == j][0]
        shown = units["centre"][j] + units["scale"][j] * arrays["expected"][j]
        assert shown == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert np.isnan(arrays["z_scores"]).tolist() == missing.tolist()


def test_rows_with_gaps_are_counted_and_shown(folder: Path, tmp_path: Path) -> None:
    table = pd.read_csv(folder / "wine.csv")
    table.iloc[[3, 5], 2] = np.nan
    table.to_csv(tmp_path / "gaps.csv", index=False)
    session = Session(folder / "wine.safetensors")
    session.load()
    session.set_rows(read_rows(tmp_path / "gaps.csv"))
    session.scores.wait()
    assert unpack_message(api.describe_data(session, 0.01))[0]["incomplete"] == 2
    facts, arrays = unpack_message(api.send_row(session, 5))
    assert facts["missing"] == 1
    assert np.isnan(arrays["values"]).nonzero()[0].tolist() == [2]


def test_expected_values_are_conditional_means(wine: Explorer, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    row = pd.read_csv(folder / "wine.csv").to_numpy()[60].copy()
    row[3] += 20
    _, units = wine.ask("model")
    _, arrays = unpack_message(wine.analyse(row)[1])
    for j in range(13):
        expected = dense_expectation(model, row, np.arange(13) == j)[0]
        shown = units["centre"][j] + units["scale"][j] * arrays["expected"][j]
        assert shown == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert np.abs(arrays["z_scores"]).argmax() == 3
    assert arrays["z_scores"][3] > 3


def test_without_data_and_images(folder: Path) -> None:
    with serve_model(folder / "digits.safetensors", profiles=True) as explorer:
        # Rows are drawn as profiles.
        facts, _ = explorer.ask("model")
        assert (facts["kind"], facts["shape"]) == ("line", [64])
        _, arrays = explorer.ask("map")
        assert arrays["tiles"].shape == (12, 64)
        # Without data, a row is compared with samples of the model.
        row = np.load(folder / "digits.npy")[3].ravel()
        facts, _ = unpack_message(explorer.analyse(row)[1])
        assert facts["among"] == "samples"
        assert 0.01 < facts["percentile"] <= 1
        far, _ = unpack_message(explorer.analyse(row + 1e4)[1])
        assert far["percentile"] == 0
        status, raw = explorer.get("api/data")
        assert (status, "--data" in json.loads(raw)["error"]) == (400, True)
        # An open connection does not keep the server from ending.
        connection = socket.create_connection((explorer.host, explorer.port))
    connection.close()


# Access


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


def test_requests_of_other_pages_are_refused(digits: Explorer) -> None:
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
    # A click on a link of another page is allowed.
    click = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert digits.get("", **click)[0] == 200


def test_foreign_names_of_the_server_are_refused(digits: Explorer) -> None:
    for host in ("example.org", f"example.org:{digits.port}", f"127.0.0.1:{digits.port + 1}", ""):
        status, raw = digits.get("api/state", Host=host)
        assert status == 403, host
        assert b"not known under that name" in raw
    assert digits.get("api/state", Host=f"localhost:{digits.port}")[0] == 200


def test_names_of_a_server_that_listens_everywhere() -> None:
    assert is_host_allowed("192.168.1.7:80", "0.0.0.0", 80)
    assert is_host_allowed("192.168.1.7", "0.0.0.0", 80)
    assert is_host_allowed("[fe80::1]:8000", "::", 8000)
    assert not is_host_allowed("evil.example:8000", "0.0.0.0", 8000)
    assert not is_host_allowed("192.168.1.7:8000", "127.0.0.1", 8000)


def test_only_files_of_the_page_are_served(digits: Explorer) -> None:
    for path in (
        "../server.py", "..%2fserver.py", "%2e%2e/server.py", "/etc/passwd", "%2fetc%2fpasswd",
        "server.py", "static/main.js", "index.html/../server.py",
    ):  # fmt: skip
        status, raw = digits.get(path)
        assert status in (403, 404), path
        assert b"root:" not in raw
        assert b"import" not in raw
    assert digits.get("main.js")[0] == 200


def test_headers_forbid_everything_the_page_does_not_need(digits: Explorer) -> None:
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
def test_a_bad_request_gets_a_sentence(digits: Explorer, target: str, expected: str) -> None:
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
def test_a_bad_row_gets_a_sentence(digits: Explorer, row: np.ndarray, expected: str) -> None:
    status, raw = digits.analyse(row)
    assert status == 400
    assert expected in json.loads(raw)["error"]


def test_a_row_cut_off_gets_a_sentence(digits: Explorer) -> None:
    status, raw = digits.request("POST", f"/{digits.token}/api/analyse", b"123")
    assert status == 400
    assert "cut off" in json.loads(raw)["error"]


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
        (["wine.safetensors", "--image-shape", "big"], "not an image shape"),
        (["wine.safetensors", "--image-shape", "1x13", "--no-images"], "exclude each other"),
        (["wine.safetensors", "--host", "no such host"], "is not known"),
        (["wine.safetensors", "--host", "203.0.113.7"], "not an address of this machine"),
        (["wine.safetensors", "--port", "99999"], "65535"),
    ],
)
def test_a_bad_command_ends_with_one_sentence(
    wrong_files: Path, arguments: list[str], expected: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(wrong_files)
    assert run(["explore", *arguments, "--no-browser"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("factormix:")
    assert expected in line


def test_a_port_in_use_is_reported_and_the_other_server_stays_up(
    digits: Explorer, folder: Path, capsys
) -> None:
    arguments = [str(folder / "wine.safetensors"), "--port", str(digits.port), "--no-browser"]
    assert run(["explore", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {digits.port}" in line
    assert "--port" in line
    assert digits.get("api/state")[0] == 200


def test_the_server_survives_requests_that_are_cut_off(digits: Explorer) -> None:
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
    with serve_model(path, folder / "wine.csv") as explorer:
        status, raw = explorer.get("api/model")
        assert status == 202
        assert "not there yet" in json.loads(raw)["later"]
        facts, _ = explorer.ask("training")
        assert (facts["version"], facts["snapshots"]) == (0, [])
        copy_whole(folder / "wine.safetensors", path)
        assert wait_for_version(explorer, 1)["finished"] is True
        # A damaged file does not replace the model.
        path.write_bytes(b"no model")
        state = wait_until(explorer, lambda state: state["problem"] is not None)
        assert "not a complete factormix model" in state["problem"]
        assert explorer.ask("model")[0]["components"] == 3
        table = pd.read_csv(folder / "wine.csv")
        factormix.MFA(5, 1, random_state=0, max_epochs=2).fit(table).save(path)
        wait_for_version(explorer, 2)
        assert explorer.ask("model")[0]["components"] == 5
        facts, _ = explorer.ask("training")
        assert [one["components"] for one in facts["snapshots"]] == [3, 5]
        _, arrays = explorer.ask("training/1")
        assert arrays["tiles"].shape == (3, 13)
        assert explorer.ask("data")[0]["rows"] == len(table)


def test_the_command_waits_for_a_model(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    with run_explore_command(path, "--wait", "--data", folder / "wine.csv") as explorer:
        assert explorer.get("api/model")[0] == 202
        copy_whole(folder / "wine.safetensors", path)
        wait_for_version(explorer, 1)
        assert explorer.ask("data")[0]["rows"] == 178


def test_a_folder_of_checkpoints_is_followed(folder: Path, tmp_path: Path) -> None:
    done, growing = tmp_path / "done", tmp_path / "growing"
    rows = np.load(folder / "digits.npy").reshape(-1, 64).astype(np.float32)
    saving = Checkpoints(done, seconds=0, keep=100)
    factormix.MFA(9, 1, random_state=0, max_epochs=4, callbacks=[saving]).fit(rows)
    growing.mkdir()
    with serve_model(growing) as explorer:
        *running, last = checkpoints_in(done)
        for version, checkpoint in enumerate(running[-3:], start=1):
            copy_whole(checkpoint, growing / checkpoint.name)
            assert wait_for_version(explorer, version)["finished"] is False
        facts, _ = explorer.ask("training")
        steps = [one["step"] for one in facts["snapshots"]]
        assert len(steps) == 3
        assert steps == sorted(set(steps))
        assert len(facts["curves"]["log_likelihood"]) > 1
        last.rename(growing / last.name)
        assert wait_for_version(explorer, 4)["finished"] is True


def wait_until(explorer: Explorer, condition: Callable[[Any], bool]) -> dict[str, Any]:
    """Wait until the state fulfils a condition, at most ten minutes, and return it."""
    end = time.monotonic() + 600
    while True:
        status, raw = explorer.get("api/state")
        assert status == 200
        state: dict[str, Any] = json.loads(raw)
        if condition(state):
            return state
        assert time.monotonic() < end, state
        time.sleep(0.02)


def wait_for_version(explorer: Explorer, version: int) -> dict[str, Any]:
    return wait_until(explorer, lambda state: state["version"] >= version)


# Parts


def neighbour_distance(points: np.ndarray, order: np.ndarray, rows: int, cols: int) -> float:
    """Average the distance between neighbouring cells of a grid."""
    grid = np.full((rows * cols, points.shape[1]), np.nan)
    grid[: len(order)] = points[order]
    grid = grid.reshape(rows, cols, -1)
    steps = (grid[1:] - grid[:-1], grid[:, 1:] - grid[:, :-1])
    return float(np.nanmean(np.concatenate([np.linalg.norm(s, axis=-1).ravel() for s in steps])))


def test_shuffled_grid_points_are_put_next_to_their_neighbours() -> None:
    """The long side of the grid is its first principal direction, on every machine."""
    random = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(20.0), np.arange(12.0)), -1).reshape(-1, 2)
    turned = places @ np.linalg.qr(random.normal(size=(5, 5))).Q[:2]
    shuffled = turned[random.permutation(240)]
    order = arrange_on_grid(shuffled, 12, 20)
    assert sorted(order) == list(range(240))
    # In the best arrangement all neighbours are one step apart; in a random one, about eight.
    assert neighbour_distance(shuffled, order, 12, 20) < 1.05
    assert neighbour_distance(shuffled, np.arange(240), 12, 20) > 5


@pytest.mark.parametrize("degrees", [0, 15, 30, 45, 60, 75])
def test_a_square_grid_is_in_order_however_it_is_turned(degrees: float) -> None:
    """Its two principal directions are equally strong, so rounding turns them by any angle."""
    random, angle = np.random.default_rng(0), np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    places = np.stack(np.meshgrid(np.arange(16.0), np.arange(16.0)), -1).reshape(-1, 2)
    turned = ((places - 7.5) @ turn)[random.permutation(256)]
    order = layout._sort_coarse_to_fine(turned, 16, 16)
    assert sorted(order) == list(range(256))
    # Upright, the best arrangement is found; a square on its corner takes up to 1.3 steps.
    assert neighbour_distance(turned, order, 16, 16) < (1.05 if degrees == 0 else 1.35)


def test_components_keep_their_cells_between_snapshots() -> None:
    """Components have moved a little and come in another order."""
    random = np.random.default_rng(0)
    points = random.normal(size=(49, 5))
    before = points[arrange_on_grid(points, 7, 7)]
    moved = before + 0.05 * random.normal(size=before.shape)
    shuffled = random.permutation(49)
    after = moved[shuffled][arrange_on_grid(moved[shuffled], 7, 7, before)]
    stayed = (np.abs(after - moved).max(axis=1) == 0).mean()
    assert stayed > 0.8
    without = moved[shuffled][arrange_on_grid(moved[shuffled], 7, 7)]
    assert (np.abs(without - moved).max(axis=1) == 0).mean() < stayed


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 12, 13, 100, 211])
def test_every_number_of_components_has_a_map(n: int) -> None:
    rows, cols = choose_grid(n)
    assert (rows - 1) * cols < n <= rows * cols
    points = np.random.default_rng(n).normal(size=(n, 3))
    order = arrange_on_grid(points, rows, cols)
    assert sorted(order) == list(range(n))
    np.testing.assert_array_equal(order, arrange_on_grid(points, rows, cols))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 49, 97])
@pytest.mark.parametrize("ratio", [0.4, 0.66, 1.0, 1.4, 3.0])
def test_no_other_grid_has_larger_cells(n: int, ratio: float) -> None:
    rows, cols = choose_grid(n, ratio)
    # Every grid of n cells in a space of height 1 and this width.
    sizes = {(r, c): min(ratio / c, 1 / r) for r in range(1, n + 1) for c in range(1, n + 1)}
    enough = {grid: size for grid, size in sizes.items() if grid[0] * grid[1] >= n}
    assert min(ratio / cols, 1 / rows) == max(enough.values())


def test_a_map_fits_the_space_of_the_page(wine: Explorer, digits: Explorer) -> None:
    for ratio, shape in (("0.66", (4, 3)), ("1.4", (3, 4)), ("50", (1, 12)), ("1e-3", (12, 1))):
        facts, arrays = digits.ask(f"map?ratio={ratio}")
        assert (facts["rows"], facts["cols"]) == shape
        assert sorted(arrays["order"]) == list(range(12))
    for ratio in ("0", "-1", "nan", "inf", "wide"):
        status, raw = wine.get(f"api/map?ratio={ratio}")
        assert status == 400
        assert b"positive number" in raw


def test_equal_components_have_a_map() -> None:
    assert sorted(arrange_on_grid(np.ones((20, 6)), 4, 5)) == list(range(20))


def test_messages_keep_their_values() -> None:
    arrays = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32),
        "c": np.zeros((0, 4), np.float32),
        "d": np.array([1.5]),
    }
    facts = {"x": np.float64(2), "nothing": float("nan"), "list": [np.int64(3)], "text": "ü"}
    found, back = unpack_message(api.pack_message(facts, **arrays))
    assert found == {"x": 2.0, "nothing": None, "list": [3], "text": "ü"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    folder = Path(factormix.__file__).parent / "views" / "explorer" / "static"
    for file in folder.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text, file.name


def test_missing_packages_are_named(monkeypatch, folder: Path, capsys) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["explore", str(folder / "wine.safetensors")]) == 2
    assert 'pip install "factormix[explore]"' in capsys.readouterr().err


def test_a_mixture_far_from_zero_keeps_its_digits(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = 1e7 + random.normal(size=(300, 4))
    factormix.MFA(2, 1, random_state=0, dtype="float64").fit(rows).save(tmp_path / "m.safetensors")
    model = factormix.load(tmp_path / "m.safetensors")
    session = Session(tmp_path / "m.safetensors")
    session.load()
    facts, _ = unpack_message(api.send_analysis(session, rows[0].astype("<f8").tobytes()))
    assert facts["log_likelihood"] == pytest.approx(model.score_samples(rows[:1])[0], abs=1e-4)


# Texts


def test_texts_are_those_of_the_atlas(words: Explorer) -> None:
    facts, _ = words.ask("text")
    store = open_store(words.folder / "layer")
    model = factormix.load(words.folder / "words.safetensors")
    regions = atlas(model, store, verbose=False)
    assert {one["component"]: one["rows"] for one in facts["regions"]} == {
        region.component: region.n_rows for region in regions
    }
    assert facts["documents"] == 10
    k = facts["regions"][0]["component"]
    one, _ = words.ask(f"text/component/{k}")
    assert [context["position"] for context in one["contexts"][:3]] == [
        context.position for context in regions[k].contexts[:3]
    ]
    low = regions[k].factors[1].low[0]
    assert one["factors"][1]["low"][0]["document"] == low.document
    assert one["factors"][1]["low"][0]["value"] == pytest.approx(low.value, abs=1e-3)


def test_a_token_is_found_in_its_components(words: Explorer) -> None:
    store = open_store(words.folder / "layer")
    model = factormix.load(words.folder / "words.safetensors")
    (labels,) = store.labels()
    names = np.array([store.pieces[token].strip() for token in labels.tokens.tolist()])
    components = model.predict(store)
    facts, _ = words.ask("text/token?q=MY")
    found = {one["component"]: one["found"] for one in facts["components"]}
    mine = np.bincount(components[names == "my"], minlength=4)
    assert found == {k: n for k, n in enumerate(mine.tolist()) if n}
    assert facts["exact"]
    begins, _ = words.ask("text/token?q=m")
    assert begins["tokens"] == ["mat", "my"]
    assert not begins["exact"]
    assert words.ask("text/token?q=zebra")[0]["components"] == []


def test_ends_of_words_have_the_sign_of_their_vocabulary(words: Explorer, tmp_path: Path) -> None:
    folder = tmp_path / "layer"
    shutil.copytree(words.folder / "layer", folder)
    header = json.loads((folder / "activations.json").read_text())
    (folder / "activations.json").write_text(json.dumps({**header, "word_sign": "##"}))
    pieces = (folder / "tokens.json").read_text()
    (folder / "tokens.json").write_text(pieces.replace('" mat"', '"my"'))
    with serve_model(words.folder / "words.safetensors", folder) as explorer:
        regions = explorer.ask("text")[0]["regions"]
        assert {"my", "##my"} <= {token for one in regions for token in one["tokens"]}
        assert explorer.ask("text/token?q=my")[0]["tokens"] == ["##my", "my"]
        assert explorer.ask("text/token?q=%23%23my")[0]["tokens"] == ["##my"]
        facts, _ = explorer.ask("text/document/0")
        assert facts["names"][:6] == ["my", "cat", "sat", "on", "the", "##my"]
        ends = [one for k in range(4) for one in explorer.ask(f"text/component/{k}")[0]["contexts"]]
        assert {"my", " my"} & {one["token"] for one in ends}


def test_rows_without_tokens_are_shown_as_dots(tmp_path: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    network = torch.nn.Sequential(torch.nn.Linear(3, 5))
    store = collect(network, x.split(10), layer="0", to=tmp_path / "layer", verbose=False)
    factormix.MFA(1, 1, random_state=0).fit(store).save(tmp_path / "m.safetensors")
    with serve_model(tmp_path / "m.safetensors", tmp_path / "layer") as explorer:
        (region,) = explorer.ask("text")[0]["regions"]
        assert (region["rows"], region["tokens"], region["purity"]) == (40, [], None)
        assert explorer.ask("text/component/0")[0]["contexts"][0]["token"] == " \u2022"
        assert explorer.ask("text/document/7")[0]["names"] == ["\u2022"]


def test_a_document_has_the_codes_of_its_tokens(words: Explorer) -> None:
    store = open_store(words.folder / "layer")
    model = factormix.load(words.folder / "words.safetensors")
    (labels,) = store.labels()
    own = np.flatnonzero(labels.documents == 4)
    x = np.concatenate([np.asarray(block.rows) for block in store.blocks(64)])[own]
    facts, arrays = words.ask("text/document/4")
    assert "".join(facts["pieces"]).startswith(" the mat while your dog")
    assert facts["rows"] == own.tolist()
    shares = model.predict_proba(x)
    assert np.array_equal(arrays["components"][:, 0], shares.argmax(axis=1))
    assert np.allclose(arrays["shares"][:, 0], shares.max(axis=1), atol=1e-3)
    assert np.allclose(arrays["codes"], model.transform(x), atol=1e-2)
    _, inside = words.ask("text/document/4?component=2")
    assert np.allclose(inside["own"], shares[:, 2], atol=1e-3)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("text/document/99", "document 99 has no tokens"),
        ("text/document/1?component=9", "there is no component 9"),
        ("text/document/1?component=x", "component must be a whole number"),
        ("text/component/4", "there is no component 4"),
        ("text/token?q=", "give a token"),
    ],
)
def test_wrong_questions_about_texts_are_answered(words: Explorer, path: str, sentence: str):
    words.ask("text")
    status, raw = words.get(f"api/{path}")
    assert status == 400
    assert sentence in json.loads(raw)["error"]


@pytest.mark.slow
def test_the_command_shows_texts_of_a_folder_of_activations(words: Explorer) -> None:
    folder = words.folder
    with run_explore_command(folder / "words.safetensors", "--data", folder / "layer") as explorer:
        assert explorer.ask("model")[0]["text"]
        assert explorer.ask("text")[0]["rows"] == open_store(folder / "layer").n_rows


def test_other_data_has_no_texts(digits: Explorer) -> None:
    assert not digits.ask("model")[0]["text"]
    assert b"has no texts" in digits.get("api/text")[1]
