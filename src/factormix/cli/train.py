"""``factormix train``: train a model on a file or folder of data."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import (
    format_table,
    ignore_signals,
    print_error,
    print_line,
    print_note,
    stop_code,
)
from factormix.cli.options import (
    Data,
    Device,
    Quiet,
    Reading,
    Training,
    check_model_output,
    load_mixture,
    parse_seconds,
    parse_shape,
    with_shared_options,
)
from factormix.defaults import (
    CANDIDATES,
    DEFAULT_ROWS_PER_COMPONENT,
    MESH,
    MOST_COMPONENTS,
    MOST_FACTORS,
    PATIENCE,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.readers.base import TableRows
    from factormix.estimators import MFA, ConvMFA
    from factormix.training.callbacks import Progress
    from factormix.training.distributed.communicator import Communicator


@with_shared_options
def train(
    context: typer.Context,
    data: Data,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MODEL", help="A file for the model.")
    ],
    n_components: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of components.",
            show_default=f"one for {DEFAULT_ROWS_PER_COMPONENT} rows, at most {MOST_COMPONENTS}",
        ),
    ] = None,
    n_factors: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Number of factors of each component; 0 is a diagonal mixture, auto the number"
            " that the rows of each component support.",
            show_default=f"{MOST_FACTORS}, or one less than the number of features",
        ),
    ] = None,
    *,
    training: Training,
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Number of components that each row is evaluated against; none for all, auto for"
            " as many as a mixture of its size needs.",
            show_default=CANDIDATES,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DATAxCOMPONENTS",
            help="How the processes of torchrun divide the work: data, components, both as in 2x4,"
            " or none.",
            show_default=MESH,
        ),
    ] = None,
    device: Device = None,
    reading: Reading,
    image_size: Annotated[
        str | None,
        typer.Option(metavar="HEIGHTxWIDTH", help="Resize the images of a folder."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="Rows whose likelihood ends the training when it stops rising.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Evaluations of --held-out without a gain before the training ends, about one for"
            " each pass.",
            show_default=str(PATIENCE),
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save numbered checkpoints of the run in a folder."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time between checkpoints.", show_default="60s"),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Number of checkpoints to keep.", show_default="3")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue a stopped run from the newest complete checkpoint in DIR, or from MODEL"
            " if there is none.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a mixture of factor analyzers on DATA and write it to MODEL.

    Ctrl-C stops and keeps the model so far, and --resume continues it. A run is saved every
    minute. MODEL is replaced only by a complete new one. With --checkpoint, a run that is killed
    loses no more than the time between two checkpoints, MODEL is written when training is done, and
    the same command with --resume starts the run or continues it.

    When torchrun starts several processes, they train one model together.
    """
    options = training.given()
    texts = {"n_components": n_components, "n_factors": n_factors, "candidates": candidates}
    for name, text in texts.items():
        if text is not None:
            options[name] = _parse_number(str(text))
    size = parse_image_size(image_size)
    if patience is not None and held_out is None:
        raise InputError("--patience is about held-out rows: give them with --held-out.")

    from factormix.data.features import describe_features, match_columns
    from factormix.estimators import MFA
    from factormix.estimators.validation import check_options
    from factormix.training.callbacks import EarlyStopping

    parsed_mesh, communicator = join_processes(mesh, device)

    def prepare() -> tuple[RunFiles, Path | None, MFA]:
        check_model_output(output, data, resume=resume)
        files = RunFiles(output, checkpoint, every, keep)
        start = files.find_start(resume)
        if start is not None:
            return files, start, _load_unfinished(start, options, device)
        model = MFA(**options, device=device)
        # Reading the data may take long: wrong options must fail before it.
        check_options(model)
        return files, start, model

    files, start, model = communicator.run_together(prepare)

    def read() -> tuple[TableRows, TableRows | None]:
        rows = reading.read(data, model=None if start is None else model, image_size=size)
        if held_out is None:
            return rows, None
        others = reading.read_held_out(held_out, data, rows, size)
        return rows, match_columns(others, describe_features(rows), "training")

    rows, others = communicator.run_together(read)
    callbacks: list[Callable[[Progress], object]] = []
    if others is not None:
        callbacks.append(EarlyStopping(others, patience=patience or EarlyStopping.patience))
    callbacks.append(files.callback)
    model.set_params(verbose=int(not quiet), callbacks=callbacks, mesh=parsed_mesh)
    files.train(model, rows, start, context.obj, communicator)
    if not quiet and communicator.saves:
        print_line(
            _format_summary(model, rows, output, others, whole=communicator.has_all_components)
        )


def _parse_number(text: str) -> int | str | None:
    """Return a number, None for none, or the text, which the estimator checks."""
    if text.isascii() and text.isdigit():
        return int(text)
    return None if text == "none" else text


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    """Parse a height and width such as 28x28."""
    shape = parse_shape(text)
    if shape is None:
        return None
    if len(shape) != 2:
        raise InputError(f"{text!r} is not an image size: give HEIGHTxWIDTH, as in 28x28.")
    return shape[0], shape[1]


def join_processes(mesh: str | None, device: str | None) -> tuple[Any, Communicator]:
    """Return the parsed mesh, and this process among those that torchrun has started."""
    from factormix.estimators.validation import check_device
    from factormix.training.distributed.mesh import join_mesh, local_device, parse_mesh, world

    parsed = MESH if mesh is None else parse_mesh(mesh)
    # A single process checks its device later, with a sentence that names the option.
    place = check_device(device if world()[0] > 1 else "cpu")
    return parsed, join_mesh(parsed, local_device(place))


def _load_unfinished(path: Path, options: dict[str, Any], device: str | None) -> MFA:
    """Load a model to continue; options may be repeated but not changed."""
    model = load_mixture(path, device)
    settings = model.get_params(deep=False)
    settings["solver"] = model.solver_.name
    if settings["n_factors"] != "auto":
        settings["n_factors"] = model.n_factors_
    for name, value in options.items():
        if settings[name] != value:
            raise InputError(
                f"{path} was started with {name}={settings[name]!r}, which cannot become {value!r}"
                " in a resumed run: leave the option out, or train anew without --resume."
            )
    return model


class RunFiles:
    """The files of a training run: its model alone, or a folder of numbered checkpoints."""

    def __init__(
        self, output: Path, folder: Path | None, every: str | None, keep: int | None
    ) -> None:
        from factormix.training.callbacks import Checkpoint
        from factormix.training.checkpoints import Checkpoints

        self._output, self._folder = output, folder
        self._checkpoints: Checkpoints | None = None
        if folder is None:
            for option, value in {"--every": every, "--keep": keep}.items():
                if value is not None:
                    raise InputError(
                        f"{option} is about checkpoints: give their folder with --checkpoint."
                    )
            self.callback: Callable[[Any], object] = Checkpoint(output)
            return
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: give a folder for the checkpoints.")
        seconds = 60.0 if every is None else parse_seconds(every, "--every")
        self._checkpoints = Checkpoints(folder, seconds, 3 if keep is None else keep)
        self.callback = self._checkpoints

    def find_start(self, resume: bool) -> Path | None:
        """Return the model or folder to resume from, None for a new run."""
        start = self._find_saved() if resume else None
        if self._checkpoints is not None:
            self._checkpoints.open(new_run=start is None)
        return start

    def _find_saved(self) -> Path | None:
        from factormix.training.checkpoints import checkpoints_in

        if self._folder is None:
            return self._output
        if checkpoints_in(self._folder):
            return self._folder
        if self._output.exists():
            return self._output
        print_note(f"{self._folder} has no checkpoints yet: the run starts from the beginning")
        return None

    def train(
        self,
        model: MFA | ConvMFA,
        rows: Any,
        start: Path | None,
        arguments: list[str],
        communicator: Communicator,
    ) -> None:
        """Fit a model, or resume from ``start``, and save it, complete or stopped."""
        writes = communicator.saves
        try:
            (model.fit if start is None else model.resume)(rows)
        except KeyboardInterrupt as stop:
            if writes:
                command = format_command(arguments, communicator)
                self.finish_stopped(model, command, bool(stop.args))
            raise typer.Exit(stop_code()) from None
        with ignore_signals():
            communicator.run_together(lambda: model.save(self._output) if writes else None)

    def finish_stopped(self, model: MFA | ConvMFA, command: str, at_once: bool) -> None:
        """Save a stopped run, unless a checkpoint has, and print the command that resumes it.

        Training stops between two steps; a stop ``at_once`` leaves no complete model to save.
        """
        from factormix.training.checkpoints import checkpoints_in

        place = self._folder or self._output
        if at_once:
            saved = place.exists() if self._checkpoints is None else checkpoints_in(place)
            state = f"{place} is as it was last saved" if saved else "nothing is saved yet"
            print_error(f"stopped at once, and {state}")
        elif self._checkpoints is None:
            with ignore_signals():
                model.save(self._output)
            print_error(f"stopped, with the model so far in {place}; continue with: {command}")
        elif not (saved := checkpoints_in(place)):
            print_error(f"stopped, and nothing could be saved in {place}: make room there")
        else:
            failed = self._checkpoints.failed_
            which = f"with no more than {saved[-1]} saved" if failed else f"and saved {saved[-1]}"
            print_error(f"stopped, {which}; continue with: {command}")


def format_command(arguments: list[str], communicator: Communicator) -> str:
    """Write the command that resumes a run; several processes are started by torchrun."""
    command = ["factormix", *arguments, *([] if "--resume" in arguments else ["--resume"])]
    if not communicator.is_single:
        count = os.environ.get("LOCAL_WORLD_SIZE", str(communicator.world.size))
        command = ["torchrun", f"--nproc-per-node={count}", "-m", *command]
    return shlex.join(command)


def _format_summary(
    model: MFA, rows: TableRows, output: Path, held_out: TableRows | None, *, whole: bool
) -> str:
    from factormix.core.inspection import components_in_use

    # One of several ranks may have only some of the components.
    last = model.history_[-1] if not whole and model.history_ else {}
    total = len(model.weights_) if whole else model.n_components_
    used = components_in_use(model.weights_) if whole else last.get("components_in_use")
    # Ends the line of the progress bar.
    sys.stderr.flush()
    others = {} if held_out is None else {"of held-out rows": f"{model.score(held_out):.6g}"}
    return format_table(
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
