"""The command line: ``factormix train``, ``score``, ``sample``, ``info`` and others.

Every command is a thin layer over the Python interface and imports torch only when it runs. Bad
input ends with exit code 2 and one sentence on standard error; an interrupt ends with 130, a polite
end of the process (SIGTERM) with 143.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from factormix.cli.console import complain, interrupt, plain_warnings, say, stopped_code, terminate
from factormix.cli.explore import explore
from factormix.cli.impute import impute
from factormix.cli.inspect import compare, info
from factormix.cli.outliers import outliers
from factormix.cli.score import sample, score
from factormix.cli.select import select
from factormix.cli.studies import data_app, demo, reproduce
from factormix.cli.train import TrainCommand, train
from factormix.cli.watch import watch
from factormix.errors import InputError

__all__ = ["app", "main", "run"]

# Depending on its version, typer brings its own copy of click: this names its base in both.
_UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="factormix",
    help="Mixtures of factor analyzers: train, score, sample.",
    epilog="""\b
Examples:
  factormix demo
  factormix train data.npy -o model.safetensors
  factormix score model.safetensors new.csv -o scores.csv""",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)
app.command(
    cls=TrainCommand,
    epilog="""\b
Examples:
  factormix train digits.npy -o digits.safetensors --n-components 49 --random-state 0
  factormix train photos/ -o photos.safetensors --image-size 32x32 --max-epochs 20
  factormix train digits.npy -o digits.safetensors --resume
  factormix train digits.npy -o digits.safetensors --checkpoint run --every 5m --resume""",
)(train)
app.command(
    epilog="""\b
Examples:
  factormix select digits.npy --n-components 5,10,20 --n-factors 0,2,4 -o digits.safetensors
  factormix select table.csv --criterion bic --table sizes.csv --plot sizes.png""",
)(select)
app.command(
    epilog="""\b
Examples:
  factormix score digits.safetensors new.npy -o scores.csv
  factormix score digits.safetensors new.csv | sort -t, -k2 -g | head""",
)(score)
app.command(
    epilog="""\b
Examples:
  factormix impute table.safetensors gaps.csv -o filled.csv
  factormix impute table.safetensors gaps.csv -o ends.csv --interval 0.9
  factormix impute table.safetensors gaps.npy -o draws.npy --n-draws 20""",
)(impute)
app.command(
    epilog="""\b
Examples:
  factormix sample digits.safetensors -n 64 -o samples.png --no-noise
  factormix sample digits.safetensors -n 1000 -o samples.npy --component 3""",
)(sample)
app.command(
    epilog="""\b
Examples:
  factormix outliers detector.safetensors rows.csv --fit -o outliers.csv --explain
  factormix outliers detector.safetensors clean.csv --fit --novelty --contamination 0.01
  factormix outliers detector.safetensors new.csv -o outliers.csv --explain
  factormix outliers mixture.safetensors new.npy -o outliers.csv --contamination 0.05""",
)(outliers)
app.command(
    epilog="""\b
Examples:
  factormix info digits.safetensors
  factormix info digits.safetensors --json""",
)(info)
app.command(
    epilog="""\b
Examples:
  factormix explore digits.safetensors --data digits.npy
  factormix explore run --wait   # beside factormix train --checkpoint run --every 2s""",
)(explore)
app.command(
    epilog="""\b
Examples:
  factormix compare small.safetensors large.safetensors --data new.npy
  factormix compare before.safetensors after.safetensors --json""",
)(compare)
app.command(
    epilog="""\b
Example:
  factormix demo -o factormix-demo""",
)(demo)
app.command(
    epilog="""\b
Examples:
  factormix reproduce --quick -o quick
  factormix reproduce table1 --seeds 5 -o paper""",
)(reproduce)
app.command(
    epilog="""\b
Examples:
  tail -f sensors.csv | factormix watch model.safetensors --alert 0.01 > scores.csv
  factormix watch model.safetensors --no-learn --format json < events.jsonl""",
)(watch)
app.add_typer(data_app, name="data")


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from factormix import __version__

        say(f"factormix {__version__}")
    elif context.invoked_subcommand is None:
        say(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        with plain_warnings():
            result = app(list(arguments), prog_name="factormix", standalone_mode=False)
    except _UsageProblem as error:
        return complain(_usage_sentence(error))
    except InputError as error:
        return complain(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return complain(f"{where}{error.strerror or error}")
    except ImportError as error:
        # A missing extra names the command that installs it; anything else is a defect.
        if "pip install" not in str(error):
            raise
        return complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return stopped_code()
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(run(sys.argv[1:]))


def _usage_sentence(error: Exception) -> str:
    """Say what is wrong with the command line, and which help tells more."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return message.rstrip(". ") + hint
