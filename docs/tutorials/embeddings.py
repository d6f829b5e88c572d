# %% [markdown]
# # Embeddings and activations
#
# Inside a network, every input is a vector of activations. Interpretability methods look for meaningful directions in that space,
# mostly with one dictionary for the whole space. A mixture of factor analyzers gives regions (components) and a few directions of
# its own for each region (loadings). You can interpret both, and steer along the directions.
#
# ## A network to look into
#
# A small network that classifies digits. We model the 64 activations of its hidden layer, not the images.

# %%
import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from factormix import MFA, MFAOutlierDetector, inspection

images, digits = load_digits(return_X_y=True)
network = MLPClassifier(
    (64,), activation="tanh", alpha=0.1, max_iter=800, random_state=0
)
network.fit(images / 16, digits)


def activations(rows):
    return np.tanh(rows / 16 @ network.coefs_[0] + network.intercepts_[0])


def read_out(hidden):
    """What the rest of the network makes of activations: probabilities of the ten digits."""
    values = hidden @ network.coefs_[1] + network.intercepts_[1]
    values = np.exp(values - values.max(axis=-1, keepdims=True))
    return values / values.sum(axis=-1, keepdims=True)


hidden = activations(images)
model = MFA(n_components=20, n_factors=3, random_state=0).fit(hidden)
print(
    f"{hidden.shape[0]:,} activations of {hidden.shape[1]} units; {len(model.weights_)} components"
)

# %% [markdown]
# ## Top rows of each component
#
# The inputs whose activations are nearest to a component show what it represents. The mixture has no labels.

# %%
nearest = inspection.nearest_rows(model, hidden, n_rows=8).rows  # (20, 8)
figure = Figure(figsize=(8, 4.7), layout="constrained")
axes = figure.subplots(10, 17)
for k in range(20):
    column = 9 * (k // 10)
    for place, row in enumerate(nearest[k]):
        if row >= 0:
            axes[k % 10, column + place].imshow(
                images[row].reshape(8, 8), cmap="gray_r"
            )
for place in axes.flat:
    place.axis("off")
figure

# %%
components = model.predict(hidden)
counts = np.zeros((20, 10), dtype=int)
np.add.at(counts, (components, digits), 1)
print(
    f"{counts.max(1).sum() / len(digits):.1%} of the rows are of the commonest digit of their component"
)

# %% [markdown]
# ## Steering along a loading
#
# Start at the mean of a component and move the activations along one loading column, in standard deviations of the latent code.
# The rest of the network classifies each point. Below is the component whose classification changes most.

# %%
steps = np.linspace(-4, 4, 9)
change = np.zeros((20, 3))
for k in range(20):
    for j in range(3):
        path = model.means_[k] + steps[:, None] * model.loadings_[k, :, j]
        seen = read_out(path)
        change[k, j] = np.abs(seen[-1] - seen[0]).sum()
k, j = np.unravel_index(change.argmax(), change.shape)
path = model.means_[k] + steps[:, None] * model.loadings_[k, :, j]
for step, seen in zip(steps, read_out(path), strict=True):
    first, second = np.argsort(seen)[::-1][:2]
    print(
        f"{step:+.0f} deviations: {first} ({seen[first]:.0%}), {second} ({seen[second]:.0%})"
    )

# %% [markdown]
# The images of that component, sorted by their position along this direction. The direction has a meaning.

# %%
members = np.flatnonzero(components == k)
codes = model.transform(hidden[members])[:, j]
order = members[np.argsort(codes)]
shown = order[np.linspace(0, len(order) - 1, 12).astype(int)]
figure = Figure(figsize=(8, 0.9), layout="constrained")
for place, row in enumerate(shown):
    axes = figure.add_subplot(1, 12, place + 1)
    axes.imshow(images[row].reshape(8, 8), cmap="gray_r")
    axes.axis("off")
figure

# %% [markdown]
# ## Is this input like the training data?
#
# The density of activations detects inputs unlike the training data. Here are digits, digits upside down and noise, and the
# network's own confidence in each.

# %%
train, new = hidden[::2], images[1::2]
density = MFA(n_components=20, n_factors=3, random_state=0).fit(train)
noise = np.random.default_rng(0).uniform(0, 16, new.shape)
for name, rows in {
    "new digits": new,
    "upside down": new[:, ::-1],
    "noise": noise,
}.items():
    inside = activations(rows)
    sure = read_out(inside).max(1).mean()
    print(
        f"{name:12s} log-likelihood {density.score(inside):7.1f}; the network is {sure:.0%} sure"
    )

# %% [markdown]
# ## Features of large networks
#
# ADBench has features of BERT, ViT and ResNet as tables, with a held-out class as outliers. With the files in
# `$FACTORMIX_DATA/adbench`, this cell trains on half of the inliers and scores all other rows.

# %%
folder = Path(os.environ.get("FACTORMIX_DATA", "")) / "adbench"
patterns = ("bert_*.npz", "vit_*.npz", "ViT_*.npz", "resnet18_*.npz")
files = sorted(file for pattern in patterns for file in folder.glob(pattern))
for file in files:
    with np.load(file) as table:
        rows, odd = table["X"].astype("float32"), table["y"] == 1
    order = np.random.default_rng(0).permutation(len(rows))
    rows, odd = rows[order], odd[order]
    usual = np.flatnonzero(~odd)[:2000]
    train, test = rows[usual[::2]], np.concatenate([rows[usual[1::2]], rows[odd]])
    wanted = np.arange(len(test)) >= len(usual[1::2])
    mixture = MFA(n_components=4, n_factors=8, random_state=0).fit(train)
    detector = MFAOutlierDetector(novelty=True, random_state=0).fit(train)
    print(
        f"{file.stem}: {len(train):,} rows of {rows.shape[1]} features, {wanted.sum()} outliers"
    )
    print(
        f"  variance in 8 factors: {inspection.variance_explained(mixture).factors:.0%},",
        end=" ",
    )
    print(f"between 4 components: {inspection.variance_explained(mixture).between:.0%}")
    for name, judge in {"MFA": mixture, "MFAOutlierDetector": detector}.items():
        scores = judge.score_samples(test)
        ranks = scores[wanted][:, None] < scores[~wanted]
        print(f"  area under the ROC curve, {name}: {ranks.mean():.3f}")
if not files:
    print("no such files here: set FACTORMIX_DATA to the folder that has adbench")

# %% [markdown]
# These files contain features only, without their inputs, so nearest rows cannot be shown. Keep the inputs beside your own
# activations, as above.
#
# Activations of language models come by the billion: [streams](drift.md) and [sources](../streams.md) learn from a generator or
# from shards on disk, and [very many components](../benchmarks-many.md) has the cost of ten thousand components.
