"""The options of the command `cpejax`, each once for all its subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cpejax.inference.registry import METHODS
from cpejax.runs.folder import DEFAULTS

REFINE = ("auto", "program", "learned", "no")


def _check_refine(value: str | None) -> str | None:
    if value is not None and value not in REFINE:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(REFINE)}.")
    return value


ModelPath = Annotated[Path, typer.Argument(metavar="MODEL.py", help="A Python file that defines `program`.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
Out = Annotated[Path, typer.Option("--out", metavar="RUN", help="The folder of the run.")]
Given = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The observed data: JSON, CSV, npz or NetCDF, with a value for each data site. "
        "Left out: that of the run, if it was begun with one, or `data` in the model file.",
    ),
]
Simulations = Annotated[
    int | None,
    typer.Option(
        min=20,
        metavar="N",
        help="Simulations to train on. Left out: `infer` draws new ones all the time where JAX can run the program.",
        show_default=str(DEFAULTS["simulations"]),
    ),
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Decides all random numbers.", show_default="0")
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method", metavar="NAME", help=f"{', '.join(METHODS)}.", show_default="that of the model file, or CPE"
    ),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Maximum number of epochs to train for.", show_default="2000")
]
Steps = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Gradient steps to train for.", show_default="20000")
]
Draws = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Draws from the posterior.", show_default=str(DEFAULTS["draws"]))
]
Refine = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Whether draws are refined by a likelihood: auto (where that helps), program (by the program's own "
        "density), learned, or no.",
        show_default="auto",
        callback=_check_refine,
    ),
]
CheckSimulations = Annotated[
    int | None,
    typer.Option(
        min=20, metavar="N", help="New simulations to check with.", show_default=str(DEFAULTS["check_simulations"])
    ),
]
Truth = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The true parameters, if they are known, to be shown beside the posterior."),
]
Fitted = Annotated[
    Path | None,
    typer.Option("--fit", metavar="RUN", help="Use the model that this run has fitted; nothing is trained."),
]
Timeout = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="What one call of a simulator on the host may take; 0: no limit."),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="WHO",
        help="Who calls simulators on the host: a number of processes on this machine, `slurm`, or `slurm:20` for 20 "
        "jobs, as dask's configuration describes them. Left out: this process.",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        metavar="I/N", help="Simulate one of N parts, from 1: a job of an array. `fit` takes those that are there."
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Instead of an error, replace what the run has made, or begun, from other inputs, and what is damaged.",
    ),
]
