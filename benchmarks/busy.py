"""Fit beside a busy process, in one thread and with default threads, and compare the times.

Each fit is its own process, and the two kinds alternate, so that other work on the machine affects
both. The script prints the median seconds alone and beside one busy process for every two cores. It
fails if a fit with default threads takes more than 1.5 times as long as in one thread.

    python benchmarks/busy.py --rounds 5
    FACTORMIX_DATA=folder python benchmarks/busy.py --cases fashion-mnist
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

from common import busy_process

LARGEST_RATIO = 1.5
"""Largest ratio of a fit beside a busy process to the fit in one thread."""
CASES = {
    "digits": """
from sklearn.datasets import load_digits
X, y = load_digits(return_X_y=True)
X, model = X[y != 0], MFA(10, 3, random_state=0)
""",
    "fashion-mnist": """
X, model = datasets.load("fashion-mnist").data, MFA(49, 4, max_epochs=1, random_state=0)
""",
}
TIMED = """
start = time.perf_counter()
model.fit(X).score(X)
print(time.perf_counter() - start)
"""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Time the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    worst = 0.0
    print(f"{'case':<14} {'busy':>4} {'one thread':>11} {'default':>12} {'ratio':>6}")
    for case in options.cases:
        for busy in (0, max(1, (os.cpu_count() or 1) // 2)):
            with ExitStack() as stack:
                for _ in range(busy):
                    stack.enter_context(busy_process())
                one, free = time_case(case, options.rounds)
            ratio = free / one
            print(f"{case:<14} {busy:>4} {one:>9.2f} s {free:>10.2f} s {ratio:>6.2f}", flush=True)
            worst = max(worst, ratio) if busy else worst
    if worst > LARGEST_RATIO:
        sys.exit(f"beside a busy process a fit took {worst:.2f} times as long as in one thread")


def time_case(case: str, rounds: int) -> tuple[float, float]:
    """Return the median seconds of alternating fits in one thread and with default threads."""
    free = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    one = free | dict.fromkeys(THREAD_VARIABLES, "1")
    pairs = [(time_fit(case, one), time_fit(case, free)) for _ in range(rounds)]
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def time_fit(case: str, environment: dict[str, str]) -> float:
    """Fit once in a new process and return the seconds of the fit and its score."""
    code = "import time\nfrom factormix import MFA, datasets\n" + CASES[case] + TIMED
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    main()
