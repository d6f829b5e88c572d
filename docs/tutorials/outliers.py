# %% [markdown]
# # A table: which rows are wrong, and why
#
# Ten measurements of 569 tumours. Eight of the 5,690 values were mistyped: each was replaced by the value of another row, so that
# no check of ranges would find it. Which ones?

# %%
import numpy as np
from sklearn.datasets import load_breast_cancer

from factormix import MFA, MFAOutlierDetector, plotting

tumours = load_breast_cancer(as_frame=True)
clean = tumours.data.iloc[:, :10].rename(
    columns=lambda name: name.removeprefix("mean ")
)
table, errors = clean.copy(), {}
random = np.random.default_rng(0)
while len(errors) < 8:
    row, other = random.integers(len(table), size=2)
    column = random.choice(table.columns)
    value = clean.loc[other, column]
    change = abs(value - clean.loc[row, column]) / clean[column].std()
    if row not in errors and change > 2:
        table.loc[row, column] = value
        errors[int(row)] = str(column)
print(*(f"{row}: {column}" for row, column in errors.items()), sep="\n")

# %% [markdown]
# ## Which
#
# A mistyped value is one that contradicts the others of its row. A density of whole rows sees that: the mistyped rows, with a
# star, come first.

# %%
model = MFA(n_components=2, n_factors=4, random_state=0).fit(table)
scores = model.score_samples(table)
oddest = np.argsort(scores)[:10]
print(*(f"{'*' if row in errors else ''}{row}" for row in oddest))

# %% [markdown]
# ## Why
#
# `explain` says for every value what the model would expect *knowing all other values of the row*.

# %%
told = model.explain(table.iloc[oddest])
for row, sentence in zip(oddest, told.sentences(top=1), strict=True):
    print(f"{'*' if row in errors else ' '} {row:3d}: {sentence}")

# %% [markdown]
# The rows without a star are real tumours that are unusual. As a picture: the bars are contributions to the score, the
# longest the strongest reason.

# %%
plotting.plot_reasons(told[:3])

# %% [markdown]
# ## What should it have been?
#
# For the eight mistyped values the truth is known. The largest z-score of the row points at each of them.

# %%
found = model.explain(table.loc[list(errors)])
print(
    "row  column             typed    expected        true   largest z-score of the row"
)
for i, (row, column) in enumerate(errors.items()):
    j = table.columns.get_loc(column)
    numbers = (table.loc[row, column], found.expected[i, j], clean.loc[row, column])
    worst = table.columns[np.abs(found.z_score[i]).argmax()]
    print(
        f"{row:3d}  {column:14s}" + "".join(f"{x:12.4g}" for x in numbers), f"  {worst}"
    )

# %% [markdown]
# All reasons of all rows as a data frame go into whatever comes next.

# %%
told.to_frame(top=1).round(3).head(4)

# %% [markdown]
# ## A guard for new rows
#
# `MFAOutlierDetector` is an ensemble of mixtures with a threshold that means something. With `novelty=True` the training rows
# are trusted, and `contamination=0.01` says that one in a hundred clean new rows may be called an outlier. Here it has seen half
# of the benign tumours, and judges the other half and the malignant ones.

# %%
benign = clean[tumours.target == 1]
malignant = clean[tumours.target == 0]
guard = MFAOutlierDetector(novelty=True, contamination=0.01, random_state=0).fit(
    benign[::2]
)
for name, rows in {"new benign": benign[1::2], "malignant": malignant}.items():
    print(f"{name}: {np.mean(guard.predict(rows) == -1):.1%} are called outliers")

# %%
suspects = malignant[guard.predict(malignant) == -1]
for sentence in guard.explain(suspects[:3]).sentences(top=2):
    print("-", sentence)

# %% [markdown]
# Without `novelty=True`, the training rows may hold the outliers that are to be found. `guard.save("guard.safetensors")`
# keeps it.
#
# ## On the command line
#
# The same, from one file to another. `reasons.csv` has the best reasons of each outlier.
#
# ```sh
# factormix outliers detector.safetensors rows.csv --fit -o outliers.csv --explain --reasons reasons.csv
# ```
#
# [Outliers, and why](../outliers.md) says what the modes and scores mean, and
# [the benchmark](../benchmarks-outliers.md) compares the detector with ten others on 25 tables.
