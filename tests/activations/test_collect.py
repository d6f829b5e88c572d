"""Activations in shards: values, labels, resuming, and sources of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from factormix import MFA, InputError
from factormix.activations import collect, open_store
from factormix.cli import run
from factormix.data.readers import read_rows
from networks import Network, Tokenizer, make_ids

QUIET = {"verbose": False}


def all_rows(store):
    return np.concatenate([np.asarray(block.rows) for block in store.blocks(7)])


def all_labels(store):
    return [np.concatenate(values) for values in zip(*store.labels(), strict=True)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_the_outputs_of_the_layer(tmp_path, dtype):
    network, ids = Network().train(), make_ids()
    batches = ids.split(5)
    store = collect(
        network, batches, layer="blocks.1", to=tmp_path, dtype=dtype, rows_per_shard=60, **QUIET
    )
    expected = network.hidden(ids, 2).detach().to(getattr(torch, dtype)).float().view(-1, 8)
    assert np.array_equal(all_rows(store).astype(np.float32), expected.numpy())
    tokens, documents, positions = all_labels(store)
    assert np.array_equal(tokens, ids.view(-1).numpy())
    assert np.array_equal(documents, np.repeat(np.arange(24), 10))
    assert np.array_equal(positions, np.tile(np.arange(10), 24))
    assert len(store.paths) == 3
    found = store.labels_at(95, 105)
    assert np.array_equal(found.documents, documents[95:105])
    assert network.training
    assert network.blocks[0].dropout.training
    assert not network.blocks[1]._forward_hooks


def test_padding_and_excluded_tokens_give_no_rows(tmp_path):
    network = Network()
    ids = make_ids(4, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]])
    excluded = int(ids[0, 2])
    batch = {"input_ids": ids, "attention_mask": mask}
    store = collect(network, [batch], layer="blocks.0", to=tmp_path, exclude=[excluded], **QUIET)
    expected = [
        (int(ids[i, t]), i, int(mask[i, :t].sum()), i, t)
        for i in range(4)
        for t in range(6)
        if mask[i, t] and ids[i, t] != excluded
    ]
    assert [tuple(row) for row in zip(*all_labels(store), strict=True)] == [e[:3] for e in expected]
    hidden = network.hidden(ids, 1).detach().half()
    assert np.array_equal(all_rows(store), np.stack([hidden[i, t] for *_, i, t in expected]))


def test_texts_are_tokenized_in_batches(tmp_path):
    texts = ["hello", "a longer one", "me", "four"]
    store = collect(
        Network(), texts, layer="embed", to=tmp_path, tokenizer=Tokenizer(), batch_size=3, **QUIET
    )
    tokens, documents, positions = all_labels(store)
    assert np.array_equal(np.bincount(documents), [len(text) for text in texts])
    assert np.array_equal(positions[:7], [0, 1, 2, 3, 4, 0, 1])
    assert tokens[0] == ord("h") % 49 + 1


def test_a_layer_of_one_output_for_each_sequence(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    store = collect(network, [(x, "label")], layer="0", to=tmp_path, **QUIET)
    assert np.array_equal(all_rows(store), network[0](x).detach().half().numpy())
    assert set(all_labels(store)[0]) == {-1}


def test_empty_batches_and_hidden_files_are_passed_over(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(3, 5))
    (tmp_path / ".DS_Store").write_text("a folder of macOS")
    batches = [torch.zeros(0, 3), torch.ones(2, 3), torch.zeros(0, 3)]
    store = collect(network, batches, layer="0", to=tmp_path, **QUIET)
    assert (store.n_rows, store.n_documents) == (2, 2)
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="inputs has no tokens"):
        collect(network, batches[:1], layer="0", to=tmp_path / "b", **QUIET)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="has other files in it: collect into an empty folder"):
        collect(network, batches, layer="0", to=tmp_path / "c", **QUIET)


def test_the_folder_is_a_source_of_training_and_of_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = collect(Network(), make_ids(80).split(16), layer="blocks.2", to="acts", **QUIET)
    rows = all_rows(store).astype(np.float32)
    model = MFA(3, 2, random_state=0, max_epochs=3).fit(store)
    assert np.allclose(model.score_samples(store), model.score_samples(rows), atol=1e-4)
    other = MFA(3, 2, random_state=0).partial_fit(open_store("acts"))
    assert np.isfinite(other.score(rows))
    assert np.array_equal(all_rows(read_rows("acts")), all_rows(store))
    command = "train acts -o model.safetensors --n-components 3 --n-factors 2 --max-epochs 2"
    assert run(command.split()) == 0
    assert run(["score", "model.safetensors", "acts", "-o", "scores.csv"]) == 0
    assert len(Path("scores.csv").read_text().splitlines()) == 801


def test_shards_of_torch_save_are_read(tmp_path):
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    for i, part in enumerate(x.bfloat16().split(10)):
        torch.save(part if i else {"activations": part, "layer": "3"}, tmp_path / f"{i}.pt")
    rows = read_rows(tmp_path)
    assert np.array_equal(all_rows(rows), x.bfloat16().float().numpy())
    torch.save(x, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert np.array_equal(all_rows(read_rows(tmp_path / "old.pt")), x.numpy())
    torch.save(Network(), tmp_path / "network.pt")
    with pytest.raises(InputError, match="is not a readable file of tensors"):
        read_rows(tmp_path / "network.pt")
    torch.save(x.view(3, 10, 4), tmp_path / "sequences.pt")
    with pytest.raises(
        InputError, match=r"X.reshape\(-1, 4\) for activations \(sequences, tokens,"
    ):
        read_rows(tmp_path / "sequences.pt")
    torch.save({"a": x, "b": x}, tmp_path / "two.pt")
    with pytest.raises(InputError, match="has several tensors"):
        read_rows(tmp_path / "two.pt")
    assert read_rows(tmp_path / "two.pt", key="b").n_rows == 30
    torch.save(x.repeat(50, 1), tmp_path / "large.pt")
    for name, shares in (("1.pt", [0.5]), ("large.pt", [0.3, 0.99])):
        whole = (tmp_path / name).read_bytes()
        for share in shares:
            (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
            with pytest.raises(InputError, match=f"{name} is truncated or not a file"):
                read_rows(tmp_path / name)


SLOW_COLLECTION = """
import sys, time
sys.path.insert(0, sys.argv[1])
from networks import Network, make_ids
from factormix.activations import collect

def slowly():
    for batch in make_ids(400).split(4):
        time.sleep(0.02)
        yield batch

collect(Network(), slowly(), layer="blocks.1", to=sys.argv[2], rows_per_shard=100, verbose=False)
"""


def test_a_killed_collection_resumes_to_identical_shards(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = ["-c", SLOW_COLLECTION, str(Path(__file__).parents[1]), str(killed)]
    process = subprocess.Popen([sys.executable, *arguments], env=dict(os.environ))
    deadline = time.monotonic() + 120
    while len(list(killed.glob("activations-*.safetensors"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    partial = open_store(killed)
    assert not partial.header.complete
    assert 300 <= partial.n_rows < 4000
    # A kill while a file is written leaves such a file.
    (killed / ".activations-00003.abcd1234.safetensors").write_bytes(b"unfinished")
    options = {"layer": "blocks.1", "rows_per_shard": 100, "verbose": False}
    for folder in (killed, whole):
        network = Network()
        store = collect(network, make_ids(400).split(4), to=folder, **options)
        assert network.calls == (100 if folder == whole else 100 - partial.n_rows // 40)
        assert store.header.complete
    assert contents(killed) == contents(whole)
    again = Network()
    collect(again, make_ids(400).split(4), to=whole, **options)
    assert again.calls == 0


def test_a_folder_of_something_else_is_refused(tmp_path):
    ids = make_ids()
    options = {"layer": "blocks.1", "to": tmp_path, **QUIET}
    collect(Network(), ids[:20].split(5), rows_per_shard=50, **options)
    options["rows_per_shard"] = 50
    before = contents(tmp_path)
    for change, sentence in (
        ({"layer": "blocks.0"}, "another layer, blocks.1 and not blocks.0"),
        ({"dtype": "bfloat16"}, "another dtype of the shards, float16 and not bfloat16"),
        ({"rows_per_shard": 60}, "another rows_per_shard"),
    ):
        with pytest.raises(InputError, match=sentence):
            collect(Network(), ids[:20].split(5), **{**options, **change})
    with pytest.raises(InputError, match="another dtype of the network, float32 and not bfloat16"):
        collect(Network().bfloat16(), ids[:20].split(5), **options)
    with pytest.raises(InputError, match="with other weights of the network"):
        collect(Network(seed=1), ids[:20].split(5), **options)
    with pytest.raises(InputError, match="long='stop' and at most None tokens, not long='cut' and"):
        collect(Network(), ids[:20].split(5), **options, long="cut", max_length=4)
    for inputs, sentence in (
        (ids[:15], "inputs are fewer than"),
        (ids, "inputs are more than"),
        (ids.flip(1)[:20], "inputs differ from"),
    ):
        with pytest.raises(InputError, match=sentence):
            collect(Network(), inputs.split(5), **options)
    assert contents(tmp_path) == before
    (tmp_path / "activations-00001.safetensors").unlink()
    with pytest.raises(InputError, match="lacks one of its shards"):
        open_store(tmp_path)


def test_a_random_head_behind_the_layer_is_no_other_network(tmp_path):
    options = {"layer": "blocks.1", "to": tmp_path, **QUIET}
    collect(Network(), [make_ids()], **options)
    network = Network()
    for behind in (network.blocks[2], network.head):
        for weight in behind.parameters():
            weight.data.normal_()
    collect(network, [make_ids()], **options)
    network.blocks[1].mix.weight.data[0] += 1
    with pytest.raises(InputError, match="with other weights of the network"):
        collect(network, [make_ids()], **options)


def test_a_collection_that_stopped_at_a_long_text_goes_on(tmp_path):
    texts = ["one", "two", "three", "much too long a text", "four"]
    options = {"layer": "blocks.1", "tokenizer": Tokenizer(), "batch_size": 1, **QUIET}
    options["rows_per_shard"] = 5
    with pytest.raises(InputError, match="document 3 has 20 tokens"):
        collect(Network(), texts, to=tmp_path / "stopped", **options)
    assert open_store(tmp_path / "stopped").n_rows == 11
    for name in ("stopped", "whole"):
        collect(Network(), texts, to=tmp_path / name, long="split", **options)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    with pytest.raises(InputError, match="begun with long='split' and at most 12 tokens, not"):
        collect(Network(), texts, to=tmp_path / "stopped", long="cut", **options)


def test_another_tokenizer_is_refused(tmp_path):
    class Other(Tokenizer):
        def get_vocab(self):
            return {"a": 0, "b": 1}

    class Third(Other):
        def get_vocab(self):
            return {"a": 1, "b": 0}

    texts = ["one", "two", "three"]
    options = {"layer": "blocks.1", "to": tmp_path, "batch_size": 1, "rows_per_shard": 5, **QUIET}

    def breaking():
        yield from texts
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(Network(), breaking(), tokenizer=Other(), **options)
    for another in (Tokenizer(), Third()):
        with pytest.raises(InputError, match="was begun with another tokenizer: give the same"):
            collect(Network(), texts, tokenizer=another, **options)
    store = collect(Network(), texts, tokenizer=Other(), **options)
    assert store.n_rows == 11
    # A folder of an older version does not say which it was.
    path = tmp_path / "activations.json"
    path.write_text(path.read_text().replace(store.header.tokenizer, ""))
    collect(Network(), texts, tokenizer=Third(), **options)


@pytest.mark.parametrize("long", ["stop", "split"])
def test_lengths_of_a_list_of_batches_are_checked_before_any_work(tmp_path, long):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 7:] = 0
    last = {"input_ids": make_ids(2, 9), "attention_mask": mask} if long == "split" else make_ids(2)
    batches = [*make_ids(6, 8).split(3), last]
    network, folder = Network(), tmp_path / "new"
    options = {"layer": "blocks.1", "to": folder, "max_length": 8, "long": long, **QUIET}
    which, n = (7, 9) if long == "split" else (6, 10)
    with pytest.raises(
        InputError, match=f"document {which} has {n} tokens, and the model allows 8"
    ):
        collect(network, batches, **options)
    assert network.calls == 0
    assert not folder.exists()
    # Batches that come one by one are checked when they come.
    with pytest.raises(
        InputError, match=f"document {which} has {n} tokens, and the model allows 8"
    ):
        collect(network, iter(batches), **options)
    assert network.calls == 2


def test_labels_must_be_as_many_as_rows(tmp_path):
    store = collect(Network(), [make_ids()], layer="blocks.1", to=tmp_path, **QUIET)
    (path,) = store.paths
    whole = load_file(path)
    save_file({**whole, "positions": whole["positions"][:-3]}, path)
    sentence = r"activations-00000.safetensors has 240 rows and positions of shape \(237,\)"
    with pytest.raises(InputError, match=sentence):
        open_store(tmp_path)
    del whole["positions"]
    save_file(whole, path)
    with pytest.raises(InputError, match="is truncated or has no labels of its rows"):
        open_store(tmp_path)


def test_a_folder_of_an_older_version_may_go_on(tmp_path):
    options = {"layer": "blocks.1", "to": tmp_path, **QUIET}
    collect(Network(), [make_ids()], **options)
    path = tmp_path / "activations.json"
    added = ("weights", "long", "max_length", "tokenizer")
    older = {k: v for k, v in json.loads(path.read_text()).items() if k not in added}
    path.write_text(json.dumps(older))
    assert collect(Network(), [make_ids()], **options).header.complete


def test_a_truncated_shard_is_named(tmp_path):
    options = {"layer": "blocks.1", "to": tmp_path, "rows_per_shard": 50, **QUIET}
    collect(Network(), make_ids().split(5), **options)
    path = tmp_path / "activations-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for attempt in (
        lambda: open_store(tmp_path),
        lambda: read_rows(tmp_path),
        lambda: collect(Network(), make_ids().split(5), **options),
    ):
        with pytest.raises(InputError, match=r"activations-00001.safetensors is truncated"):
            attempt()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer": "blocks.l"}, "no layer 'blocks.l': choose .* such as 'blocks.0', 'blocks.1'"),
        (
            {"layer": "blocks"},
            "'blocks' is a ModuleList, which is not called: choose a module within",
        ),
        ({"layer": "unused"}, "does not call the layer 'unused'"),
        ({"layer": "blocks.1", "dtype": "float32"}, "dtype must be 'float16' or 'bfloat16'"),
        (
            {"layer": "blocks.1", "max_length": 9},
            "document 0 has 10 tokens, and the model allows 9",
        ),
        ({"max_length": "9"}, "max_length must be a whole number of at least 1, not '9'"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, not 2.5"),
        ({"rows_per_shard": 0}, "rows_per_shard must be a whole number of at least 1, not 0"),
        ({"exclude": ["the"]}, "exclude must be ids of tokens"),
        ({"exclude": 5}, "exclude must be ids of tokens"),
        ({"to": None}, "to is a NoneType: give the path of a folder"),
        (
            {"model": torch.nn.Linear(3, 5)},
            "the network is a Linear without modules within it: put it into a torch.nn.Sequential",
        ),
        ({"model": "bert"}, "the network is a str: give a torch.nn.Module"),
        ({"inputs": None}, "inputs is a NoneType: give a list of texts or batches"),
        ({"layer": "blocks.1", "inputs": "text"}, "inputs is a single str"),
        ({"layer": "blocks.1", "inputs": []}, "inputs has no tokens"),
        ({"layer": "blocks.1", "inputs": ["text"]}, "give a tokenizer for texts"),
        (
            {"inputs": ["abc", "much too long a text"], "tokenizer": Tokenizer()},
            "document 1 has 20 tokens, and the model allows 12: give texts or tensors with long=",
        ),
        ({"inputs": [3], "tokenizer": Tokenizer()}, "inputs has a int among its texts"),
        ({"inputs": ["abc"], "tokenizer": "bert"}, "tokenizer is a str: give a tokenizer of"),
        ({"layer": ["blocks.0"]}, r"the network has no layer \['blocks.0'\]"),
        (
            {"inputs": [{"input_ids": [[1, 2]]}]},
            "input_ids is a list: call the tokenizer with return_tensors='pt'",
        ),
        (
            {"inputs": [{"input_ids": make_ids(2, 3), "attention_mask": [[1, 1, 1]] * 2}]},
            "attention_mask is a list",
        ),
        (
            {"inputs": [{"input_ids": make_ids(2, 3), "attention_mask": torch.ones(2, 4)}]},
            r"attention_mask has the shape \(2, 4\) and input_ids \(2, 3\)",
        ),
        (
            {
                "inputs": [{"input_ids": make_ids(2), "attention_mask": torch.eye(2, 10)}],
                "max_length": 9,
            },
            "a batch has 10 tokens with its padding, and the model allows 9: pad to fewer",
        ),
    ],
)
def test_errors_are_one_sentence(tmp_path, change, sentence):
    options = {"inputs": make_ids().split(5), "layer": "blocks.0", "to": tmp_path, **QUIET}
    with pytest.raises(InputError, match=sentence) as caught:
        collect(**{"model": Network(), **options, **change})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.safetensors"))


LINEAR = torch.nn.Sequential(torch.nn.Linear(3, 5))


@pytest.mark.parametrize(
    ("network", "inputs", "reason"),
    [
        (LINEAR, torch.zeros(2, 3).double(), "must have the same dtype"),
        (LINEAR, torch.zeros(2, 4), "shapes cannot be multiplied"),
        (Network(), torch.full((2, 3), 50), "index out of range"),
        (Network(), torch.zeros(2, 3), "Expected tensor for argument #1"),
        (Network(), {"ids": torch.zeros(2, 3)}, "unexpected keyword argument 'ids'"),
    ],
)
def test_inputs_that_the_network_refuses_are_named(tmp_path, network, inputs, reason):
    layer = "0" if network is LINEAR else "blocks.0"
    good = torch.zeros(2, 3) if network is LINEAR else torch.ones(2, 3).long()
    sentence = rf"cannot be run on batch 1 of the inputs \(.*{reason}.*\): give what its forward"
    with pytest.raises(InputError, match=sentence) as caught:
        collect(network, [good, inputs], layer=layer, to=tmp_path, **QUIET)
    assert "\n" not in str(caught.value)


def test_a_device_without_memory_is_named(tmp_path):
    def fail(module, arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    network = Network()
    network.embed.register_forward_pre_hook(fail)
    with pytest.raises(InputError, match="too little memory for a batch: give smaller"):
        collect(network, [make_ids()], layer="blocks.0", to=tmp_path, **QUIET)


def test_long_texts_are_cut_on_request(tmp_path):
    texts = ["abc", "much too long a text"]
    options = {"layer": "embed", "tokenizer": Tokenizer(), "long": "cut", **QUIET}
    store = collect(Network(), texts, to=tmp_path, **options)
    assert np.array_equal(np.bincount(all_labels(store)[1]), [3, 12])


def test_long_texts_are_split_into_windows_of_one_document(tmp_path):
    texts = ["abc", "", "much too long a text, of more than two windows", "de"]
    options = {"tokenizer": Tokenizer(), "long": "split", **QUIET}
    network = Network()
    store = collect(network, texts, layer="blocks.1", to=tmp_path / "a", **options)
    tokens, documents, positions = all_labels(store)
    assert np.array_equal(np.bincount(documents), [len(text) for text in texts])
    assert positions.tolist() == [t for text in texts for t in range(len(text))]
    # Each window is seen alone, and their number does not change what a window gives.
    ids = torch.tensor(tokens[documents == 2][12:24])
    expected = network.hidden(ids[None], 2)[0].detach().half()
    assert np.array_equal(all_rows(store)[documents == 2][12:24], expected.numpy())
    few = collect(network, texts, layer="blocks.1", to=tmp_path / "b", batch_size=2, **options)
    assert np.array_equal(np.stack(all_labels(few)), np.stack([tokens, documents, positions]))
    assert np.allclose(all_rows(few), all_rows(store), atol=2e-3)
    # The pieces of a document are its text.
    assert store.pieces[int(tokens[0])] == f" t{tokens[0]}"


def test_a_broken_collection_of_long_texts_resumes_to_identical_files(tmp_path):
    texts = ["one, and much too long for a window" * (1 + i % 3) for i in range(12)] + ["", "end"]
    options = {"layer": "blocks.1", "tokenizer": Tokenizer(), "long": "split", **QUIET}
    options |= {"batch_size": 2, "rows_per_shard": 150}

    def breaking():
        yield from texts[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(Network(), breaking(), to=tmp_path / "broken", **options)
    assert len(open_store(tmp_path / "broken").paths) > 1
    assert open_store(tmp_path / "broken").pieces == {}
    for name in ("broken", "whole"):
        store = collect(Network(), texts, to=tmp_path / name, **options)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert store.n_documents == len(texts)
    assert [len(store.rows_of(i)) for i in range(len(texts))] == [len(text) for text in texts]
    last = store.rows_of(len(texts) - 1)
    assert last.tolist() == list(range(store.n_rows - 3, store.n_rows))
    assert not len(store.rows_of(99))


def test_long_tensors_are_split_too(tmp_path):
    ids = make_ids(3, 10)
    options = {"layer": "blocks.1", "max_length": 4, **QUIET}
    network = Network()
    store = collect(network, [ids], to=tmp_path, long="split", **options)
    tokens, documents, positions = all_labels(store)
    order = np.lexsort([positions, documents])
    assert np.array_equal(tokens[order], ids.view(-1).numpy())
    assert np.array_equal(positions[order], np.tile(np.arange(10), 3))
    expected = [network.hidden(some, 2) for some in ids.split(4, dim=1)]
    expected = torch.cat(expected, dim=1).detach().half().reshape(-1, 8).numpy()
    assert np.allclose(all_rows(store)[order], expected, atol=2e-3)
    assert store.pieces == {}


def test_a_network_without_weights_is_refused(tmp_path):
    with pytest.raises(InputError, match="on the device meta, without weights"):
        collect(Network().to("meta"), [make_ids()], layer="embed", to=tmp_path, **QUIET)


def test_a_tokenizer_that_cannot_split_is_named(tmp_path):
    def tokenizer(texts, **options):
        return {"input_ids": [[1, 2]] * len(texts)}

    options = {"tokenizer": tokenizer, "long": "split", "max_length": 2, **QUIET}
    with pytest.raises(InputError, match="the tokenizer cannot split texts"):
        collect(Network(), ["a"], layer="embed", to=tmp_path, **options)


def test_values_beyond_float16_need_bfloat16(tmp_path):
    network = Network()
    network.embed.weight.data[3] = 1e5
    ids = [torch.full((2, 3), 3)]
    with pytest.raises(InputError, match=r"values up to 1e\+05, more than float16 holds"):
        collect(network, ids, layer="embed", to=tmp_path / "b", **QUIET)
    # The folder has no shards yet, so the same one may be taken.
    store = collect(network, ids, layer="embed", to=tmp_path / "b", dtype="bfloat16", **QUIET)
    assert np.allclose(all_rows(store), 1e5, rtol=0.01)
    kept = collect(network.bfloat16(), ids, layer="embed", to=tmp_path / "c", **QUIET)
    assert kept.header.dtype == "bfloat16"
