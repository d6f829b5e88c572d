# %% [markdown]
# # Wrong values in a table
#
# Ten measurements of 569 tumours. Eight of the 5,690 values are wrong: each was replaced by the value of another row, so no check of
# ranges would find it. Which ones are they?

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
# ## Which rows
#
# A wrong value contradicts the others in its row, and a density of whole rows detects that. Here are the ten least likely rows; a
# star marks the wrong ones.

# %%
model = MFA(n_components=2, n_factors=4, random_state=0).fit(table)
scores = model.score_samples(table)
oddest = np.argsort(scores)[:10]
print(*(f"{'*' if row in errors else ''}{row}" for row in oddest))

# %% [markdown]
# ## Reasons
#
# `explain` gives the expectation of every value *given all other values of the row*.

# %%
explanation = model.explain(table.iloc[oddest])
for row, sentence in zip(oddest, explanation.sentences(top=1), strict=True):
    print(f"{'*' if row in errors else ' '} {row:3d}: {sentence}")

# %% [markdown]
# The rows without a star are real tumours that are unusual. In the picture, bars are contributions to the score; the longest bar is
# the strongest reason.

# %%
plotting.plot_reasons(explanation[:3])

# %% [markdown]
# ## The true values
#
# The truth is known for the eight wrong values. The largest z-score of the row points at each of them.

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
# All reasons of all rows are available as a data frame.

# %%
explanation.to_frame(top=1).round(3).head(4)

# %% [markdown]
# ## A detector for new rows
#
# `MFAOutlierDetector` is an ensemble of mixtures with a calibrated threshold. With `novelty=True` the training rows are trusted, and
# with `contamination=0.01` one in a hundred clean new rows may be called an outlier. Here it is trained on half of the benign
# tumours, and scores the other half and the malignant ones.

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
# Without `novelty=True`, the training rows may contain the outliers to be found. `guard.save("guard.safetensors")` saves the
# detector.
#
# ## On the command line
#
# The same analysis, from file to file. `reasons.csv` has the strongest reasons for each outlier.
#
# ```sh
# factormix outliers detector.safetensors rows.csv --fit -o outliers.csv --explain --reasons reasons.csv
# ```
#
# [Outliers and explanations](../outliers.md) explains modes and scores, and
# [the benchmark](../benchmarks-outliers.md) compares the detector with ten others on 25 tables.
