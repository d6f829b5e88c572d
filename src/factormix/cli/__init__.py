"""The command line: ``factormix train``, ``score``, ``sample``, ``info`` and others.

Every command is a thin layer over the Python interface and imports torch only when it runs. Bad
input ends with exit code 2 and one sentence on standard error, an interrupt with 130, SIGTERM with
143.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from factormix.cli.console import (
    INTERRUPTED,
    handle_interrupt,
    handle_termination,
    print_error,
    print_line,
    print_warnings_as_notes,
    stop_code,
)
from factormix.cli.demo import data_app, demo
from factormix.cli.denoise import denoise
from factormix.cli.explore import explore
from factormix.cli.images import images_app
from factormix.cli.impute import impute
from factormix.cli.inspect import compare, info
from factormix.cli.outliers import outliers
from factormix.cli.score import sample, score
from factormix.cli.select import select
from factormix.cli.train import train
from factormix.cli.watch import watch
from factormix.errors import InputError

__all__ = ["app", "main", "run"]

# Some versions of typer bring their own copy of click. In every version, this is the base class of
# its usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    train: (
        "factormix train digits.npy -o digits.safetensors --n-components 49 --random-state 0",
        "factormix train photos/ -o photos.safetensors --image-size 32x32 --max-epochs 20",
        "factormix train digits.npy -o digits.safetensors --resume",
        "factormix train digits.npy -o digits.safetensors --checkpoint run --every 5m --resume",
    ),
    select: (
        "factormix select digits.npy --n-components 5,10,20 --n-factors 0,2,4 -o d.safetensors",
        "factormix select table.csv --criterion bic --table sizes.csv --plot sizes.png",
    ),
    score: (
        "factormix score digits.safetensors new.npy -o scores.csv",
        "factormix score digits.safetensors new.csv | sort -t, -k2 -g | head",
    ),
    impute: (
        "factormix impute imputer.safetensors gaps.csv --fit -o filled.csv",
        "factormix impute table.safetensors gaps.csv -o filled.csv",
        "factormix impute table.safetensors gaps.csv -o ends.csv --interval 0.9",
        "factormix impute table.safetensors gaps.npy -o draws.npy --n-draws 20",
    ),
    sample: (
        "factormix sample photos.safetensors -n 64 -o samples.png --no-noise",
        "factormix sample table.safetensors -n 1000 -o samples.csv",
    ),
    denoise: (
        "factormix denoise noisy.png -o clean.png",
        "factormix denoise scans/ -o clean/ --sigma 20 --resume",
    ),
    outliers: (
        "factormix outliers detector.safetensors rows.csv --fit -o outliers.csv --explain",
        "factormix outliers detector.safetensors clean.csv --fit --novelty --contamination 0.01",
        "factormix outliers detector.safetensors new.csv -o outliers.csv --explain",
        "factormix outliers mixture.safetensors new.npy -o outliers.csv --contamination 0.05",
    ),
    info: (
        "factormix info digits.safetensors",
        "factormix info digits.safetensors --json",
    ),
    explore: (
        "factormix explore digits.safetensors --data digits.npy",
        "factormix explore run --wait   # beside factormix train --checkpoint run --every 2s",
    ),
    compare: (
        "factormix compare small.safetensors large.safetensors --data new.npy",
        "factormix compare before.safetensors after.safetensors --json",
    ),
    demo: ("factormix demo -o factormix-demo",),
    watch: (
        "tail -f sensors.csv | factormix watch model.safetensors --alert 0.001 > scores.csv",
        "factormix watch model.safetensors --alert 0.001 --explain --id machine < sensors.csv",
        "factormix watch model.safetensors --no-learn --format json < events.jsonl",
        "factormix watch model.safetensors rows.npy > scores.csv",
    ),
}

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
for _command, _lines in _EXAMPLES.items():
    _title = "Examples" if len(_lines) > 1 else "Example"
    app.command(epilog="\n  ".join([f"\b\n{_title}:", *_lines]))(_command)
app.add_typer(images_app, name="images")
app.add_typer(data_app, name="data")


@app.callback()
def _show_version_or_help(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from factormix import __version__

        print_line(f"factormix {__version__}")
    elif context.invoked_subcommand is None:
        print_line(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        with print_warnings_as_notes():
            given = list(arguments)
            result = app(given, prog_name="factormix", standalone_mode=False, obj=given)
    except _UsageError as error:
        return print_error(_format_usage_error(error))
    except InputError as error:
        return print_error(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return print_error(f"{where}{error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        return stop_code()
    # Typer turns interrupts into its own exit code, whichever signal was sent.
    if result == INTERRUPTED:
        return stop_code()
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGINT, handle_interrupt)
    signal.signal(signal.SIGTERM, handle_termination)
    sys.exit(run(sys.argv[1:]))


def _format_usage_error(error: Exception) -> str:
    """Describe a mistake in the command line, and name the help to read."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return message.rstrip(". ") + hint
