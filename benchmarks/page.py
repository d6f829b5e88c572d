"""The page docs/benchmarks.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from machine import fold_of
from methods import METHODS
from peers import FLOORS
from results import Group
from settings import EM_ITERATIONS, FLOOR, Setting
from summaries import summary, target_table
from targets import Target

from factormix.studies.harness import Table, folded

__all__ = ["compose"]


def compose(
    settings: Sequence[Setting],
    groups: Mapping[str, Mapping[str, Group]],
    lines: Sequence[Target],
    machine: Mapping[str, str],
    figures: Mapping[str, str],
    left_out: Sequence[str] = (),
) -> str:
    """Compose the page; ``figures`` maps names of settings to addresses of pictures, and
    ``left_out`` says which methods could not run.
    """
    parts = [INTRODUCTION, *left_out, "## Verdict", *_verdict(lines)]
    for setting in settings:
        found = groups.get(setting.name)
        if not found:
            continue
        parts += [f"## {setting.title}", _data_line(found)]
        if setting.name in figures:
            parts.append(f"![Log-likelihood, {setting.title}]({figures[setting.name]})")
        parts.append(folded("Numbers", summary(setting, found).markdown()))
    floors = [[f"`{name}`", text] for name, text in FLOORS.items()]
    parts += ["## How the comparison is made", METHOD]
    parts.append(Table("floors", "", ("method", "variance floor"), floors).markdown())
    parts.append(fold_of(machine))
    return "\n\n".join(parts) + "\n"


def _verdict(lines: Sequence[Target]) -> Iterator[str]:
    """Count what was met, show what was not, and fold all of them."""
    counts = Counter(line.verdict.strip("*") for line in lines)
    told = ", ".join(f"{n} {word}" for word, n in counts.most_common())
    yield f"**Of {len(lines)} targets: {told}.** {TARGETS}"
    missed = [line for line in lines if line.met is False]
    if missed:
        yield target_table(missed).markdown()
    yield folded(f"All {len(lines)} targets", target_table(lines).markdown())


def _data_line(groups: Mapping[str, Group]) -> str:
    first = next(r for g in groups.values() for r in g.results)
    seeds = {len(g.results) for g in groups.values()}
    count = f"{min(seeds)}"
    if len(seeds) > 1:
        count += f", {max(seeds)} for the natural solver"
    line = (
        f"{first.rows:,} training rows of {first.features:,} features,"
        f" {first.held_out_rows:,} held out; seeds: {count}."
    )
    if first.true_log_likelihood is not None:
        line += f" The true mixture scores {first.true_log_likelihood:.1f} on the held-out rows."
        shares = {m: g.median(lambda r: r.matched or 0.0) for m, g in groups.items() if g.trained}
        found = ", ".join(f"{METHODS[m].label} {value:.0%}" for m, value in shares.items())
        line += f" Components matched: {found}."
    return line


INTRODUCTION = f"""# Benchmarks

Held-out mean log-likelihood against seconds and against passes over the data, for the solvers of
factormix and the packages one might use instead. All methods run on the same rows and the same
machine, in the same hours and with the same number of threads, with a noise variance of at least
{FLOOR} (1/{1 / FLOOR:.0f}) in data units. `make bench` sets up the peers and runs everything with
its defaults. [The page on scale](benchmarks-scale.md) has the cost of a step and the memory."""

TARGETS = f"""Numbers are medians over the seeds. EM means `MFA(solver="em")` with {EM_ITERATIONS}
iterations from k-means. Natural means `MFA(solver="natural")` with its defaults, from random
values; its time to a likelihood is that of its first checkpoint at or above it."""

METHOD = """- Seconds are those of training alone, from the call to the checkpoint: the clock stands
  still while held-out rows are scored. Starting the process, importing packages and loading data do
  not count.
- One pass reads every training row once. The passes of a k-means start are its iterations and one
  for seeding.
- Every peer starts from the same scikit-learn k-means (one run, k-means++ seeding), whose time
  counts. tgmm and torchgmm have a k-means of their own, which is left out in their favour: tgmm's
  seeding compares every row with all centres so far for each new one, and torchgmm's reads the data
  300 times to find the variance of the features. Our EM starts from ten passes of a k-means of its
  own, whose time and passes count as well.
- Peers keep their own defaults for tolerance and number of iterations. A method whose budget is
  used up is stopped, and what it has reached is shown; longer, it might reach more. A method that
  has no model by then is shown as not finished; what it would reach is unknown.
- With hundreds of components only Adam and scikit-learn's diagonal mixture run beside our natural
  solver and EM, with three times the budget, so that all of it takes hours and not days. In a first
  run with K = 400 on FashionMNIST, neither Adam nor scikit-learn, diagonal or full, had a model
  after 40 s, and our SGD stood below -3,000; after that the list was made.
- SGD takes the paper's steps, but for 15 passes instead of its 15 + 50 epochs, and at the common
  floor, E <= 400, instead of E <= 20.
- One scorer judges the models of all methods from their parameters, not their own functions.
- Components in use have a weight of at least 0.1/K. A component of the synthetic mixture is matched
  when, in the best assignment of means, its mean is nearer than a quarter of the way to the next
  true mean and its weight is right within a factor of 1.5.
- The constants of the natural solver were chosen on a split of the training rows of MNIST and
  FashionMNIST, 8/9 to train and 1/9 to score, and on the synthetic mixture, which therefore is no
  independent test of them. Early versions, with other constants, were also scored on the test rows.
- Adam trains the covariance form `Lambda Lambda' + D` by autograd, in batches of 256, at the best
  of four learning rates in a trial on FashionMNIST, K = 49. The rate was not chosen anew for other
  settings; with K = 400 it falls from its start.

The common variance floor is reached in these ways:"""
