"""A network of ``transformers``, with random weights: collect, fit, atlas, steer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factormix import MFA, InputError
from factormix.activations import atlas, collect, steer
from networks import N_TOKENS, Tokenizer, make_ids

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=N_TOKENS,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return transformers.BertModel(config).eval()


def test_a_language_model_goes_from_batches_to_steering(network, tmp_path):
    ids = make_ids(80, 12)
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0
    batches = [
        {"input_ids": some, "attention_mask": own}
        for some, own in zip(ids.split(16), mask.split(16), strict=True)
    ]
    layer = "encoder.layer.1"
    store = collect(network, batches, layer=layer, to=tmp_path, verbose=False)
    rows = np.concatenate([np.asarray(block.rows) for block in store.blocks(64)])
    with torch.no_grad():
        hidden = network(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    expected = hidden.hidden_states[2][mask.bool()]
    assert np.allclose(rows, expected.numpy(), atol=2e-3)
    model = MFA(3, 2, random_state=0, max_epochs=3).fit(store)
    assert sum(region.n_rows for region in atlas(model, store, verbose=False)) == len(rows)
    # The hidden states of transformers are recorded before the move: look at the next layer.
    seen = []
    hook = network.encoder.layer[2].register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    with torch.no_grad(), steer(network, layer, model, component=1, amount=2.0):
        moved = network(input_ids=ids, attention_mask=mask)
    hook.remove()
    expected = hidden.hidden_states[2] + 2 * model.mixture_.loadings[1, :, 0].float()
    torch.testing.assert_close(seen[0], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(moved.last_hidden_state, hidden.last_hidden_state)


def test_the_configuration_limits_the_length(network, tmp_path):
    with pytest.raises(InputError, match="document 0 has 40 tokens, and the model allows 32"):
        collect(network, [make_ids(2, 40)], layer="embeddings", to=tmp_path, verbose=False)
    options = {"tokenizer": Tokenizer(), "max_length": 5, "long": "cut", "verbose": False}
    store = collect(network, ["a longer text"], layer="embeddings", to=tmp_path, **options)
    assert store.n_rows == 5


def make_tokenizer(words, **special):
    """A fast tokenizer of whole words, without a token for padding."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    base = Words(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    base.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=base, **special)


def test_a_fast_tokenizer_without_padding_splits_texts(network, tmp_path):
    tokenizer = make_tokenizer(["?", "my", "cat", "sat", "##s"], model_max_length=6)
    texts = ["my cat sat", " ".join(["cat", "sat"] * 10), "", "my ##s"]
    options = {"tokenizer": tokenizer, "long": "split", "batch_size": 2, "verbose": False}
    store = collect(network, texts, layer="encoder.layer.0", to=tmp_path, **options)
    (labels,) = store.labels()
    assert np.array_equal(np.bincount(labels.documents), [3, 20, 0, 2])
    assert labels.positions[3:23].tolist() == list(range(20))
    assert "".join(store.pieces[token] for token in labels.tokens[-5:].tolist()).endswith(
        " cat sat mys"
    )
    ids = torch.tensor(labels.tokens[3:9])
    with torch.no_grad():
        hidden = network(input_ids=ids[None], output_hidden_states=True).hidden_states[1]
    rows = np.concatenate([np.asarray(block.rows) for block in store.blocks(64)])
    assert np.allclose(rows[3:9], hidden[0].numpy(), atol=2e-3)


@pytest.mark.parametrize(
    ("words", "sign"),
    [
        (["?", "my", "##my", "cat", "##s"], "##"),
        # A heading is no sign of words here.
        (["?", "\u0120my", "my", "\u0120cat", "##"], "\u0120"),
        (["?", "\u2581my", "my", "\u2581cat"], "\u2581"),
        (["?", "my", "cat"], ""),
    ],
)
def test_words_and_ends_of_words_have_different_names(network, tmp_path, words, sign):
    from tokenizers import decoders

    texts = [" ".join(words[1:4])] * 3
    tokenizer = make_tokenizer(words)
    if sign == "\u0120":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    elif sign == "\u2581":
        tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    options = {"tokenizer": tokenizer, "verbose": False}
    store = collect(network, texts, layer="encoder.layer.0", to=tmp_path, **options)
    assert store.header.word_sign == sign
    assert list(store.names.values()) == words[1:4]
    model = MFA(1, 0, random_state=0, max_epochs=1).fit(store)
    regions = atlas(model, store, n_contexts=9, verbose=False)
    assert set(regions.table().tokens[0].split(", ")) == set(words[1:4])
    # A token in its context is glued to the word that it continues.
    if sign == "##":
        (end,) = (c for c in regions[0].contexts if c.token == 2 and c.document == 0)
        assert regions._describe((end,)) == "my[my] cat"


def test_windows_without_room_for_special_tokens_are_refused(network, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(["?", "my", "cat"])
    special = [("?", 0)]
    template = TemplateProcessing(single="? $A ?", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    options = {"tokenizer": tokenizer, "long": "split", "max_length": 2, "verbose": False}
    with pytest.raises(InputError, match="windows of 2 tokens have no room for the tokenizer's"):
        collect(network, ["my cat my cat"], layer="embeddings", to=tmp_path, **options)
