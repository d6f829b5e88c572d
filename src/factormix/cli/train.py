"""Where ``factormix train`` keeps a run while it lasts: its model, or numbered checkpoints.

``factormix train``: a model from a file or folder of data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from factormix.cli.console import (
    DTYPE_OPTION,
    SCALING_OPTION,
    SOLVER_OPTION,
    BatchSize,
    Columns,
    Crew,
    Data,
    Device,
    Header,
    Key,
    MaxEpochs,
    MaxPrecision,
    Quiet,
    RandomState,
    check_device,
    check_target,
    complain,
    load_mixture,
    note,
    parse_columns,
    parse_seconds,
    parse_shape,
    read,
    say,
    stopped_code,
    table,
    undisturbed,
)
from factormix.defaults import (
    CANDIDATES,
    DTYPE,
    MESH,
    MOST_FACTORS,
    N_COMPONENTS,
    N_INIT,
    PATIENCE,
    SCALING,
    SOLVER,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.estimators import MFA
if TYPE_CHECKING:
    from factormix.data.readers.base import TableRows
    from factormix.estimators import MFA
    from factormix.training.callbacks import Progress

__all__ = ["Saving", "TrainCommand", "check_model_target", "held_out_rows", "train"]


class Saving:
    """Save a run every now and then, find it again, and tell where it is when it is stopped."""

    def __init__(
        self, output: Path, folder: Path | None, every: str | None, keep: int | None
    ) -> None:
        from factormix.training.callbacks import Checkpoint
        from factormix.training.checkpoints import Checkpoints

        self._output, self._folder = output, folder
        self.arguments = ["--checkpoint", str(folder)] if folder else []
        self.arguments += [f"--every={every}"] if every else []
        self.arguments += [f"--keep={keep}"] if keep else []
        self._checkpoints: Checkpoints | None = None
        if folder is None:
            for option, value in {"--every": every, "--keep": keep}.items():
                if value is not None:
                    raise InputError(
                        f"{option} is about checkpoints: say where they go by --checkpoint."
                    )
            self.watcher: Callable[[Any], object] = Checkpoint(output)
            return
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: give a folder for the checkpoints.")
        seconds = 60.0 if every is None else parse_seconds(every, "--every")
        self._checkpoints = Checkpoints(folder, seconds, 3 if keep is None else keep)
        self.watcher = self._checkpoints

    def begin(self, resume: bool) -> Path | None:
        """Find the model or folder where a run stands that is to go on; None for a new run."""
        begun = self._begun() if resume else None
        if self._checkpoints is not None:
            self._checkpoints.begin(anew=begun is None)
        return begun

    def _begun(self) -> Path | None:
        from factormix.training.checkpoints import checkpoints_in

        if self._folder is None:
            return self._output
        if checkpoints_in(self._folder):
            return self._folder
        if self._output.exists():
            return self._output
        note(f"{self._folder} has no checkpoints yet, and the run begins")
        return None

    def stop(self, model: MFA, again: str, *, at_once: bool) -> None:
        """Save a run that was stopped, where that is left to do, and say how to go on."""
        if at_once:
            complain(f"stopped at once, and {self._folder or self._output} is as it was saved last")
        elif self._checkpoints is None:
            with undisturbed():
                model.save(self._output)
            complain(f"stopped, with the model so far in {self._output}; go on with: {again}")
        else:
            self._tell(self._checkpoints.failed_, again)

    def _tell(self, failed: bool, again: str) -> None:
        """Say which checkpoint a stopped run has."""
        from factormix.training.checkpoints import checkpoints_in

        assert self._folder is not None
        there = checkpoints_in(self._folder)
        if not there:
            complain(f"stopped, and nothing could be saved in {self._folder}: make room there")
        else:
            which = f"with no more than {there[-1]} saved" if failed else f"and saved {there[-1]}"
            complain(f"stopped, {which}; go on with: {again}")


SHOWN = {
    "n_components": N_COMPONENTS,
    "solver": SOLVER,
    "n_init": N_INIT,
    "scaling": SCALING,
    "candidates": CANDIDATES,
    "dtype": DTYPE,
    "mesh": MESH,
    "patience": PATIENCE,
}


class TrainCommand(TyperCommand):
    """Show the estimator's own defaults in the help, where an option that is not given is None."""

    params: list[Any]

    def get_help(self, ctx: Any) -> str:
        """Put the defaults in while they are shown."""
        options = [one for one in self.params if one.name in SHOWN]
        for option in options:
            option.default = SHOWN[option.name]
        try:
            return super().get_help(ctx)
        finally:
            for option in options:
                option.default = None


def train(
    data: Data,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MODEL", help="Where the model goes.")
    ],
    n_components: Annotated[
        int | None, typer.Option(min=1, help="Components of the mixture.")
    ] = None,
    n_factors: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Latent dimensions of each component; 0 is a diagonal mixture.",
            show_default=f"{MOST_FACTORS}, or one less than there are features",
        ),
    ] = None,
    solver: Annotated[str | None, SOLVER_OPTION] = None,
    max_precision: MaxPrecision = None,
    batch_size: BatchSize = None,
    max_epochs: MaxEpochs = None,
    n_init: Annotated[
        int | None,
        typer.Option(min=1, help="Random starts on the first rows, of which the best goes on."),
    ] = None,
    random_state: RandomState = None,
    scaling: Annotated[str | None, SCALING_OPTION] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Components that each row is evaluated against; none for all, auto for as many as"
            " a mixture of its size needs.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DATAxCOMPONENTS",
            help="How the processes of torchrun divide the work: data, components, both as in 2x4,"
            " or none.",
        ),
    ] = None,
    device: Device = None,
    dtype: Annotated[str | None, DTYPE_OPTION] = None,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    image_size: Annotated[
        str | None,
        typer.Option(metavar="HEIGHTxWIDTH", help="Resize the images of a folder."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="Rows that end the training when their likelihood rises no more.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Looks at --held-out, about one for each pass, without a gain.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep numbered checkpoints of the run in a folder."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time between checkpoints.", show_default="60s"),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Checkpoints that stay.", show_default="3")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with a run that was stopped: from the newest whole checkpoint in DIR, where"
            " one is given and has any, or else from MODEL.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a mixture of factor analyzers on DATA and write it to MODEL.

    Ctrl-C stops and keeps the model so far, and --resume goes on with it. A run is saved every
    minute. MODEL is replaced only by a whole new one. With --checkpoint, a run that is killed loses
    no more than the time between two checkpoints, MODEL is written when training is done, and the
    same command with --resume begins or goes on, whichever is due.

    Started by torchrun, all processes train one model together.
    """
    given = {
        "n_components": n_components,
        "n_factors": n_factors,
        "solver": solver,
        "max_precision": max_precision,
        "batch_size": batch_size,
        "max_epochs": max_epochs,
        "n_init": n_init,
        "random_state": random_state,
        "scaling": scaling,
        "dtype": dtype,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if scaling == "none":
        options["scaling"] = None
    if candidates is not None:
        options["candidates"] = _candidates(candidates)
    crew = Crew(mesh, device)
    size = _image_size(image_size)
    if patience is not None and held_out is None:
        raise InputError("--patience counts looks at held-out rows: give these by --held-out.")

    def prepare() -> tuple[Saving, Path | None, MFA]:
        check_model_target(output, data, resume)
        check_device(device)
        saving = Saving(output, checkpoint, every, keep)
        begun = saving.begin(resume)
        if begun is None:
            return saving, begun, _new_model(options, device)
        return saving, begun, _interrupted_model(begun, options, device)

    saving, begun, model = crew.together(prepare)

    from factormix.data.features import describe_features, match_columns
    from factormix.training.callbacks import EarlyStopping

    reading: dict[str, Any] = {"key": key, "image_size": size, "header": header}
    reading["columns"] = parse_columns(columns)

    def reads() -> tuple[TableRows, TableRows | None]:
        others = None if held_out is None else held_out_rows(held_out, data, reading)
        rows = read(data, **reading)
        return rows, None if others is None else match_columns(
            others, describe_features(rows), "training"
        )

    rows, others = crew.together(reads)
    watchers: list[Callable[[Progress], object]] = []
    if others is not None:
        watchers.append(EarlyStopping(others, patience=patience or EarlyStopping.patience))
    watchers.append(saving.watcher)
    again = ["factormix", "train", str(data), "-o", str(output), "--resume"]
    again += [f"--key={key}"] if key else []
    again += [f"--image-size={image_size}"] if image_size else []
    again += [] if header is None else ["--header" if header else "--no-header"]
    again += [f"--columns={columns}"] if columns else []
    again += ["--held-out", str(held_out)] if held_out else []
    again += [f"--patience={patience}"] if patience else []
    again += saving.arguments
    model.set_params(verbose=int(not quiet), callbacks=watchers, mesh=crew.mesh)
    _fit(model, rows, output, crew, again, saving, resume=begun is not None)
    if not quiet and (crew.first or crew.divided):
        say(_summary(model, rows, output, others, divided=crew.divided))


def held_out_rows(path: Path, data: Path, reading: dict[str, Any]) -> TableRows:
    """Read held-out rows; the options for the data hold for them too where they apply."""
    if path.exists() and data.exists() and path.samefile(data):
        raise InputError(f"{path} is the data to learn from: hold other rows out.")
    suffix, folder = path.suffix.lower(), path.is_dir()
    keyed = suffix in (".npz", ".safetensors")
    kinds = {"key": keyed, "header": suffix == ".csv", "image_size": folder}
    kinds["columns"] = not folder
    return read(path, **{name: value for name, value in reading.items() if kinds[name]})


def _candidates(text: str) -> int | str | None:
    """Return what the option stands for; what is no number, the estimator turns down."""
    if text.isascii() and text.isdigit():
        return int(text)
    return None if text == "none" else text


def _fit(
    model: MFA,
    rows: TableRows,
    output: Path,
    crew: Crew,
    again: list[str],
    saving: Saving,
    *,
    resume: bool,
) -> None:
    """Train, and save whatever there is at the end of it."""
    try:
        (model.resume if resume else model.fit)(rows)
    except KeyboardInterrupt as stop:
        # Training ends between two steps; anything else leaves no whole model.
        if crew.first or crew.divided:
            saving.stop(model, crew.again(again), at_once=bool(stop.args))
        raise typer.Exit(stopped_code()) from None

    def save() -> None:
        if crew.first or crew.divided:
            model.save(output)

    with undisturbed():
        crew.together(save)


def _new_model(options: dict[str, Any], device: str | None) -> MFA:
    from factormix.estimators import MFA
    from factormix.estimators.validation import check_options

    model = MFA(**options, device=device)
    # The data may take long to read: wrong options should not wait for it.
    check_options(model)
    return model


def _interrupted_model(path: Path, options: dict[str, Any], device: str | None) -> MFA:
    """Load a model to go on with; options may be repeated but not changed."""
    model = load_mixture(path, device)
    settings = model.get_params(deep=False)
    settings |= {"solver": model.solver_.name, "n_factors": model.n_factors_}
    for name, value in options.items():
        if settings[name] != value:
            raise InputError(
                f"{path} was begun with {name}={settings[name]!r}, which cannot be changed to"
                f" {value!r} on the way: leave the option out, or train anew without --resume."
            )
    return model


def _image_size(text: str | None) -> tuple[int, int] | None:
    shape = parse_shape(text)
    if shape is None:
        return None
    if len(shape) != 2:
        raise InputError(f"{text!r} is no image size: give HEIGHTxWIDTH, as in 28x28.")
    return shape[0], shape[1]


def check_model_target(output: Path, data: Path, resume: bool) -> None:
    """Check that MODEL can be written, and that nothing but a model would be replaced."""
    from factormix.training.serialization import is_model

    check_target(output, (), data)
    if output.exists() and not resume and not is_model(output):
        raise InputError(
            f"{output} exists and is no factormix model: name another file, or remove it."
        )


def _summary(
    model: MFA, rows: TableRows, output: Path, held_out: TableRows | None, *, divided: bool
) -> str:
    from factormix.core.inspection import components_in_use

    # Of a model that is divided over processes, this one has some of the components only.
    last = model.history_[-1] if divided and model.history_ else {}
    total = model.n_components if divided else len(model.weights_)
    used = last.get("components_in_use") if divided else components_in_use(model.weights_)
    # The progress bar's line ends where it stands.
    sys.stderr.flush()
    others = {} if held_out is None else {"of held-out rows": f"{model.score(held_out):.6g}"}
    return table(
        {
            "rows": f"{rows.n_rows:,}",
            "features": f"{rows.n_features:,}",
            "mean log-likelihood": f"{model.score(rows):.6g}",
            **others,
            "components in use": f"{'?' if used is None else int(used)} of {total}",
            "seconds": f"{model.seconds_:.1f}",
            "model": output,
        }
    )
