"""The atlas against sorting all rows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from factormix import MFA, InputError
from factormix.activations import MixtureCoder, atlas, collect, steer
from networks import Network, Tokenizer, make_ids

QUIET = {"verbose": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    batches = make_ids(600).split(30)
    return collect(Network(), batches, layer="blocks.1", to=folder, rows_per_shard=900, **QUIET)


@pytest.fixture(scope="module")
def model(store):
    return MFA(6, 2, random_state=0, max_epochs=5).fit(store)


@pytest.fixture(scope="module")
def regions(model, store):
    return atlas(model, store, n_contexts=4, n_tokens=3, window=2, **QUIET)


def test_a_component_has_the_factors_of_its_own_rank(tmp_path):
    store = collect(Network(), make_ids(200).split(10), layer="blocks.1", to=tmp_path, **QUIET)
    model = MFA(4, "auto", max_factors=6, random_state=0, max_epochs=5).fit(store)
    coder = MixtureCoder(model)
    assert coder.ranks == model.ranks_.tolist()
    found = atlas(model, store, **QUIET)
    assert [len(region.factors) for region in found] == coder.ranks
    assert min(coder.ranks) < coder.n_factors
    k = int(np.argmin(coder.ranks))
    with pytest.raises(InputError, match=f"between 0 and {coder.ranks[k] - 1}, not"):
        steer(Network(), "blocks.1", coder, component=k, factor=coder.ranks[k])


def test_lists_are_those_of_sorting_all_rows(model, store, regions):
    rows = np.concatenate([np.asarray(block.rows) for block in store.blocks(100)])
    tokens, documents, _ = (np.concatenate(v) for v in zip(*store.labels(), strict=True))
    x = torch.from_numpy(rows).float()
    found = MixtureCoder(model, torch.float64).encode(x.double())
    log_p = model.mixture_.component_log_prob(x.double()).numpy()
    assert len(regions) == 6
    assert sum(region.n_rows for region in regions) == len(rows)
    for k, region in enumerate(regions):
        own = np.flatnonzero(found.components == k)
        assert (region.component, region.n_rows) == (k, len(own))
        assert math.isclose(region.share, len(own) / len(rows))
        highest = own[np.argsort(-log_p[own, k])][:4]
        assert [c.row for c in region.contexts] == highest.tolist()
        assert np.allclose([c.value for c in region.contexts], log_p[highest, k], atol=1e-5)
        for j, ends in enumerate(region.factors):
            z = found.codes[own, j].numpy()
            order = np.argsort(z, kind="stable")
            assert np.allclose([c.value for c in ends.low], z[order[:4]], atol=1e-5)
            assert np.allclose([c.value for c in ends.high], z[order[::-1][:4]], atol=1e-5)
            for context in (*ends.low, *ends.high):
                assert math.isclose(context.value, found.codes[context.row, j], abs_tol=1e-5)
        count = Counter(tokens[own].tolist())
        frequent = sorted(count.values(), reverse=True)
        assert [share for _, share in region.tokens] == [n / len(own) for n in frequent[:3]]
        assert all(count[token] / len(own) == share for token, share in region.tokens)
        assert region.purity == frequent[0] / len(own)
        fewest = next(n for n in range(50) if sum(frequent[:n]) >= 0.9 * len(own))
        assert region.n_tokens_90 == fewest
        for context in region.contexts:
            i = context.row
            near = [n for n in range(i - 2, i + 3) if 0 <= n < len(tokens)]
            near = [n for n in near if documents[n] == documents[i]]
            assert context.token == tokens[i]
            assert context.before == tuple(tokens[n] for n in near if n < i)
            assert context.after == tuple(tokens[n] for n in near if n > i)
            assert (context.document, context.position) == divmod(i, 10)


def test_tables_have_a_row_for_each_component_and_factor(model, store, regions):
    table = regions.table()
    assert list(table.component) == list(range(6))
    assert np.isclose(table.share.sum(), 1)
    assert f"[{regions[0].contexts[0].token}]" in table.context[0]
    assert len(regions.factor_table()) == 12
    words = atlas(model, store, tokenizer=Tokenizer(), **QUIET)
    first = words[0].contexts[0]
    assert f"[t{first.token}]" in words.table().context[0]
    assert words.table().tokens[0].startswith(f"t{words[0].tokens[0][0]}")
    assert (words.factor_table().low_value <= words.factor_table().high_value).all()


def test_a_component_without_rows_has_an_empty_region(model, store):
    mixture = model.mixture_
    mixture.means[2] = 1e3
    empty = atlas(mixture, store, **QUIET)[2]
    assert (empty.n_rows, empty.contexts, empty.n_tokens_90) == (0, (), 0)
    assert math.isnan(empty.purity)
    assert not len(atlas(mixture, store, **QUIET).factor_table().query("component == 2"))


def test_wrong_input_is_named(model, store, tmp_path):
    with pytest.raises(InputError, match="store is a ndarray"):
        atlas(model, np.zeros((3, 8)))
    for name, value in (("n_contexts", 0), ("n_tokens", "5"), ("window", 2.5)):
        with pytest.raises(InputError, match=f"{name} must be a whole number of at least"):
            atlas(model, store, **{name: value})
    other = collect(Network(6), [make_ids(4)], layer="embed", to=tmp_path, **QUIET)
    with pytest.raises(InputError, match="the model has 8 features and the store 6"):
        atlas(model, other)


def test_inputs_without_tokens_have_documents_and_positions(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(3, 5))
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    store = collect(network, x.split(10), layer="0", to=tmp_path, **QUIET)
    (region,) = found = atlas(MFA(1, 1, random_state=0).fit(store), store, **QUIET)
    assert (region.n_rows, region.tokens, region.n_tokens_90) == (40, (), 0)
    assert math.isnan(region.purity)
    first = region.contexts[0]
    assert found.table().context[0] == f"document {first.document}, position 0"


def test_missing_values_in_a_shard_are_named(model, tmp_path):
    store = collect(Network(), [make_ids()], layer="blocks.1", to=tmp_path, **QUIET)
    (path,) = store.paths
    shard = load_file(path)
    shard["activations"][17, 3] = torch.nan
    save_file(shard, path)
    with pytest.raises(InputError, match=f"row 17 of {tmp_path} has NaN: collect the"):
        atlas(model, store, **QUIET)
