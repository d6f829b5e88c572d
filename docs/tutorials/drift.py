# %% [markdown]
# # A stream with drift
#
# Rows arrive without end, and their distribution changes. Each batch is scored by the current model, then learned, then
# discarded, so memory does not grow.
#
# ## The stream
#
# 30 sensors on a machine with two states, *idle* and *busy*. Three things happen:
#
# - from row 20,000 to row 30,000 the sensors warm up, and all readings shift gradually: **drift**;
# - at row 40,000 a new state appears, *overload*: **novelty**;
# - from row 52,000 to row 52,200 two sensors are swapped: a **fault**.

# %%
from pathlib import Path

import numpy as np

from factormix import MFA, stream
from factormix.solvers import NaturalGradient

random = np.random.default_rng(0)
D, BATCH, END = 30, 200, 60_000
centres = random.normal(size=(3, D)) * 2  # idle, busy, overload
loadings = random.normal(size=(3, D, 3))  # each state varies in three ways
slide = random.normal(size=D) * 3


def readings():
    """Yield batches of sensor readings."""
    for first in range(0, END, BATCH):
        shares = [0.45, 0.45, 0.1] if first >= 40_000 else [0.5, 0.5, 0.0]
        state = random.choice(3, size=BATCH, p=shares)
        latent = random.normal(size=(BATCH, 3))
        rows = centres[state] + np.einsum("ndl,nl->nd", loadings[state], latent)
        rows += 0.3 * random.normal(size=(BATCH, D))
        rows += slide * np.clip((first - 20_000) / 10_000, 0, 1)
        if 52_000 <= first < 52_200:
            rows[:, [3, 17]] = rows[:, [17, 3]]
        yield rows


# %% [markdown]
# ## Evaluate, then train
#
# `stream` scores each batch before the model learns it. `forgetting=0.1` remembers about the last ten batches. Without it, all
# rows count alike, which is right only if nothing changes.


# %%
def watch_stream(forgetting):
    """Return the median score of each batch, and its share of alarms."""
    solver = NaturalGradient(forgetting=forgetting)
    model = MFA(6, 3, solver=solver, batch_size=BATCH, random_state=0)
    medians, alarms, usual = [], [], []
    global random
    random = np.random.default_rng(1)  # the same stream again
    for part in stream(model, readings(), batch_size=BATCH):
        limit = np.quantile(np.concatenate(usual[-50:]), 0.001) if usual else -np.inf
        medians.append(np.median(part.scores))
        alarms.append(np.mean(part.scores < limit))
        if not np.isnan(part.scores).any():
            usual.append(part.scores)
    return model, np.array(medians), np.array(alarms)


_, unforgetting, _ = watch_stream(None)
model, forgetting, alarms = watch_stream(0.1)
for name, scores in {
    "all rows count alike": unforgetting,
    "forgetting=0.1": forgetting,
}.items():
    before, after = np.nanmean(scores[60:100]), np.nanmean(scores[160:195])
    print(f"{name:22s} before the drift {before:6.1f}, after it {after:6.1f}")

# %% [markdown]
# The model that forgets is soon as good as before. The other needs far longer, because old values keep their influence.

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(8, 4.6), layout="constrained")
upper, lower = figure.subplots(2, sharex=True)
place = np.arange(len(forgetting)) * BATCH
upper.plot(place, unforgetting, color="#b0b0b0", label="all rows count alike")
upper.plot(place, forgetting, color="#2f6db3", label="forgetting=0.1")
upper.set(
    ylabel="median log-likelihood",
    ylim=(np.nanquantile(unforgetting, 0.02) - 5, np.nanmax(forgetting) + 5),
)
upper.legend(loc="lower left")
lower.bar(place, 100 * alarms, width=BATCH, color="#b3372f")
lower.set(ylabel="alarms, %", xlabel="rows so far")
for axes in (upper, lower):
    axes.axvspan(20_000, 30_000, color="#f0e6c8", zorder=0)
    axes.axvline(40_000, color="k", linestyle=":", linewidth=1)
    axes.axvline(52_000, color="k", linestyle=":", linewidth=1)
figure

# %% [markdown]
# Shaded: the drift. Dotted: the new state, and the fault. An alarm is a score below the 0.1% quantile of the last 50 batches.


# %%
def share(start, end):
    return f"{alarms[start // BATCH : end // BATCH].mean():.1%}"


print("alarms while nothing happens:  ", share(10_000, 20_000))
print("alarms during the drift:       ", share(20_000, 30_000))
print(
    "first batch of the new state:  ",
    share(40_000, 40_200),
    "(a tenth of its rows are new)",
)
print("five batches later:            ", share(41_000, 41_200))
print("batch with the fault:          ", share(52_000, 52_200))

# %% [markdown]
# The new state raises alarms until the model has learned it. The fault raises alarms at once, though every sensor stays in its
# range.
#
# ## Saving the model
#
# `model.position_` is the position in the stream. It is saved with the model, so that an interrupted stream continues there.

# %%
model.save("sensors.safetensors")
size = Path("sensors.safetensors").stat().st_size // 1024
print(f"{model.position_:,} rows were learned; the file has {size} KiB")

# %% [markdown]
# On the command line, `factormix watch` does the same with lines of CSV or JSON as they arrive:
#
# ```sh
# factormix train rows.csv -o model.safetensors --n-components 6
# factormix watch model.safetensors --alert 0.001 --forgetting 0.1 --learn-alerts < new.csv > scores.csv
# ```
#
# [Streams and large data](../streams.md) covers sources, checkpoints and failures.
