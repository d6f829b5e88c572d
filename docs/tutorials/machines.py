# %% [markdown]
# # Many processes, many machines
#
# Several processes train one mixture. Each takes a share of the rows of every batch. They exchange only the statistics of a step,
# whose size does not depend on the number of rows. The result is the same as with one process, up to rounding.
#
# `torchrun`, which comes with torch, starts the processes. Here are two on one machine. Several machines need two more options,
# shown at the end.
#
# ## A command

# %%
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import factormix

X = load_digits().data
np.save("rows.npy", X)
options = ["-m", "factormix", "train", "rows.npy", "--n-components", "20", "--random-state", "0"]
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(command):
    """Run a command, and print its output."""
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())


run([*torchrun, "--nproc-per-node=2", *options, "-o", "two.safetensors"])

# %% [markdown]
# As typed in a shell:
#
# ```sh
# torchrun --standalone --nproc-per-node=2 \
#     -m factormix train rows.npy --n-components 20 -o two.safetensors
# ```
#
# One process prints for all and writes the file. Is it the same model as with one process?

# %%
run([sys.executable, *options, "-o", "one.safetensors"])
one, two = (factormix.load(f"{name}.safetensors") for name in ("one", "two"))
print(f"log-likelihood by one {one.score(X):.4f}, by two {two.score(X):.4f}")
print(f"largest difference of means: {np.abs(one.means_ - two.means_).max():.1e}")

# %% [markdown]
# Up to rounding, it is. A run this small does not get faster, because most of its time goes into connecting the processes.
# `benchmarks/distributed.py` measures the gain for larger runs.
#
# ## A script
#
# `MFA().fit(X)` in a script that torchrun starts does the same. Every process passes all rows to `fit`, or a source such as a folder
# that all can read, and `fit` takes its share. Afterwards each process has the model.

# %%
Path("script.py").write_text("""
import os
import numpy as np
import factormix

X = np.load("rows.npy", mmap_mode="r")
model = factormix.MFA(n_components=20, random_state=0).fit(X)
if os.environ["RANK"] == "0":
    print(f"{os.environ['WORLD_SIZE']} processes, log-likelihood {model.score(X):.4f}")
""")
run([*torchrun, "--nproc-per-node=2", "script.py"])

# %% [markdown]
# ## More components than one process can hold
#
# By default all processes hold all components. With `mesh="components"`, or `--mesh components`, each holds some of them, and no
# process needs the whole model during training. `--mesh 2x4` is two processes along the data times four along the components.

# %%
run([*torchrun, "--nproc-per-node=2", *options, "--mesh", "components", "-o", "parts.safetensors"])
parts = factormix.load("parts.safetensors")
print(f"log-likelihood {parts.score(X):.4f}")

# %% [markdown]
# ## Several machines
#
# Run the same command on each machine, with the number of machines and the address of the first. All machines must be able to read
# the rows. torchrun's documentation calls this an *elastic launch*.
#
# ```text
# torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint first-machine:29500 \
#     -m factormix train /data/shards -o model.safetensors --n-components 1000 --checkpoint run --resume
# ```
#
# CPUs communicate by gloo, GPUs by nccl. With `--checkpoint run --resume` the same command starts a run or continues it: run it again
# after the loss of a machine. [Streams and large data](../streams.md) covers sources and checkpoints.
#
# Everything above ran on one machine without GPUs, as do the tests in `tests/training/test_processes.py`.
