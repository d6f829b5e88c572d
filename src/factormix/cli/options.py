"""Arguments and options that commands share: how they are declared, parsed, checked and used."""

from __future__ import annotations

import csv
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import open_output, print_note
from factormix.defaults import (
    DTYPE,
    MAX_FACTORS,
    N_INIT,
    NOISE,
    SCALING,
    SOLVER,
    SOLVER_NAMES,
)
from factormix.errors import InputError, require_package

if TYPE_CHECKING:
    from factormix.data.readers.base import TableRows
    from factormix.estimators import MFA

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model file of factormix train.")]

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A .csv, .tsv, .jsonl, .xlsx, .parquet, .arrow, .npy, .npz, .safetensors or .pt file,"
        " also .csv.gz and the like, or a folder of images, of Parquet or Arrow files, or of .npy,"
        " .safetensors or .pt shards; - is standard input, with CSV or JSON lines.",
    ),
]

Device = Annotated[
    str | None, typer.Option(help="Where to compute: cpu, cuda, mps.", show_default="cpu")
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

ImageShape = Annotated[
    str | None,
    typer.Option(
        metavar="HEIGHTxWIDTH[x3]",
        help="Shape of the rows as images.",
        show_default="the training images' shape",
    ),
]

MaxEpochs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum number of passes over the data.", show_default="the solver's"
    ),
]


@dataclass(frozen=True)
class Training:
    """The options of ``MFA`` that train and select share; None takes the estimator's default."""

    solver: Annotated[
        str | None,
        typer.Option(help=f"How to train: {' or '.join(SOLVER_NAMES)}.", show_default=SOLVER),
    ] = None
    max_precision: Annotated[
        float | None,
        typer.Option(
            help="Upper bound on the precisions, 1 / variance, in units of the data.",
            show_default="from the data",
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows per step.", show_default="the solver's")
    ] = None
    max_epochs: MaxEpochs = None
    n_init: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Random starts on the first rows; the best continues.",
            show_default=str(N_INIT),
        ),
    ] = None
    random_state: Annotated[
        int | None,
        typer.Option(min=0, help="Seed, for the same result every time.", show_default="a new one"),
    ] = None
    scaling: Annotated[
        str | None,
        typer.Option(
            help="How training standardises the data: global, feature or none.",
            show_default=SCALING,
        ),
    ] = None
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.", show_default=DTYPE)] = (
        None
    )
    max_factors: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of factors of a component, with --n-factors auto.",
            show_default=f"{MAX_FACTORS}, or one less than the number of features",
        ),
    ] = None
    noise: Annotated[
        str | None,
        typer.Option(
            help="Noise variances of the components: their own (component), one for each feature"
            " that all share (tied), or one for each component (isotropic).",
            show_default=NOISE,
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as arguments of ``MFA``."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found | ({"scaling": None} if self.scaling == "none" else {})


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Parse an image shape such as 28x28 or 32x32x3."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x3)?", text):
        raise InputError(
            f"{text!r} is not an image shape: give HEIGHTxWIDTH, as in 28x28 or 32x32x3."
        )
    return tuple(map(int, text.split("x")))


def parse_seconds(text: str, option: str) -> float:
    """Parse a time such as 60s, 5m, 1.5h or 90, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if not found:
        raise InputError(f"{option} {text!r} is not a time: give seconds, as in 60s, or 5m, or 1h.")
    return float(found[1]) * {"h": 3600, "m": 60}.get(found[2], 1)


def check_output(path: Path, suffixes: tuple[str, ...], *inputs: Path) -> None:
    """Check, before any work, that a file can be written and is none of the inputs."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{path} has an unknown ending: name it {' or '.join(suffixes)}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the path of a file.")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist: create it or name another.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write to the folder {path.parent}: name another.")
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise InputError(f"{path} is both input and output: name another output.")


def check_model_output(path: Path, data: Path, *, resume: bool = False) -> None:
    """Check that a model can be written to a path and replaces nothing but a model."""
    from factormix.training.serialization import is_model

    check_output(path, (), data)
    if path.exists() and not resume and not is_model(path):
        raise InputError(
            f"{path} exists and is not a factormix model: name another file, or remove it."
        )


@dataclass(frozen=True)
class Reading:
    """The options about reading DATA, which several commands share."""

    key: Annotated[
        str | None,
        typer.Option(help="Name of the array in .npz, .safetensors or .pt files, or of a sheet."),
    ] = None
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether the first line of a table has the names of its columns.",
            show_default="guessed",
        ),
    ] = None
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...",
            help="Columns to read, by name or by number from 0; the option can be repeated.",
            show_default="the model's, or all numeric columns",
        ),
    ] = None
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="A,B,...", help="Columns to leave out.")
    ] = None
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            metavar="A,B,...",
            help="Columns that identify rows: not used as features, but copied to the output.",
            show_default="the first non-numeric column, if its first values differ",
        ),
    ] = None

    def read(
        self, path: Path, *, model: Any = None, image_size: tuple[int, int] | None = None
    ) -> TableRows:
        """Read the rows of a file or folder, and print the reader's warnings.

        The columns to read are the columns of ``model``, which may also be other rows.
        ``image_size`` is for folders of images alone.
        """
        from factormix.data.readers import read_rows

        known = getattr(model, "feature_names_in_", getattr(model, "feature_names", None))
        shape = getattr(model, "image_shape_", None)
        if shape is not None and path.is_dir():
            image_size = shape[0], shape[1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = read_rows(
                _restore_address(path),
                key=self.key,
                image_size=image_size,
                header=self.header,
                columns=split_names(self.columns),
                exclude=split_names(self.exclude) or (),
                ids=split_names(self.ids),
                known=None if known is None else list(known),
            )
        for warning in caught:
            if warning.category is UserWarning:
                print_note(str(warning.message))
        return rows

    def read_held_out(
        self, path: Path, data: Path, rows: TableRows, image_size: tuple[int, int] | None = None
    ) -> TableRows:
        """Read held-out rows, with the options for DATA that apply to their file too."""
        if path.exists() and data.exists() and path.samefile(data):
            raise InputError(f"{path} is the training data: hold other rows out.")
        from factormix.data.readers import OPTIONS, find_kind

        kind, _ = find_kind(_restore_address(path))
        given: dict[str, Any] = {
            "key": self.key,
            "header": self.header,
            "image_size": image_size,
        }
        own = {name: given[name] if kind in OPTIONS[name][0] else None for name in given}
        reading = replace(self, key=own["key"], header=own["header"])
        return reading.read(path, model=rows, image_size=own["image_size"])


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of type ``Reading`` or ``Training`` of a command by its options."""
    parameters, groups = list[inspect.Parameter](), dict[str, Any]()
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation in (Reading, Training):
            groups[parameter.name] = parameter.annotation
            options = inspect.signature(parameter.annotation, eval_str=True)
            parameters += options.parameters.values()
        else:
            parameters.append(parameter)
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

    @wraps(command)
    def run_command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {one.name: one.annotation for one in parameters}
    return run_command


def split_names(texts: Sequence[str] | None) -> list[str] | None:
    """Split names at commas; quotes keep a comma in a name."""
    if not texts:
        return None
    return [cell.strip() for row in csv.reader(texts, skipinitialspace=True) for cell in row]


def open_ids(rows: Any) -> Callable[[int], Any]:
    """Return a function that numbers the next n rows and reads the columns that identify them."""
    import pandas as pd

    records, first = rows.records, 0
    take = records.open(records.ids) if records is not None and records.ids else None

    def number_rows(n: int) -> Any:
        nonlocal first
        numbers = pd.DataFrame({"row": range(first, first + n)})
        first += n
        if take is None:
            return numbers
        return pd.concat([numbers, take(n).astype(str).reset_index(drop=True)], axis=1)

    return number_rows


def write_frames(frames: Iterator[Any], path: Path, header: bool = True, **options: Any) -> None:
    """Write data frames, one below the other, to .parquet, or as .csv with options of pandas.

    The option ``schema`` has the Arrow types of the columns of a .parquet file.
    """
    schema = options.pop("schema", None)
    if path.suffix.lower() != ".parquet":
        with open_output(path) as file:
            for frame in frames:
                frame.to_csv(file, index=False, header=header, **options)
                header = False
        return
    from factormix.files import replacing

    pa, pq = (require_package(name, "data") for name in ("pyarrow", "pyarrow.parquet"))

    with replacing(path) as temporary, ExitStack() as stack:
        writer = None
        for frame in frames:
            table = pa.Table.from_pandas(frame, schema, preserve_index=False)
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(temporary, table.schema))
            writer.write_table(table.replace_schema_metadata(writer.schema.metadata))


def load_mixture(path: Path, device: str | None = None) -> MFA:
    """Load a model file that must hold a single mixture."""
    from factormix.estimators import load

    return require_mixture(load(path, device=device), path)


def require_mixture(model: object, path: Path) -> MFA:
    """Return a model that was loaded from a path if it is a single mixture."""
    from factormix.estimators import MFA

    if not isinstance(model, MFA):
        raise InputError(
            f"{path} holds an {type(model).__name__}, and this command needs a mixture: give a"
            " file of factormix train."
        )
    return model


def _restore_address(path: Path) -> Path | str:
    """Return an address such as s3://bucket/folder, whose slashes ``Path`` has merged."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]+):/(.*)", str(path))
    if found is None or path.exists():
        return path
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"
