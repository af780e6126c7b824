"""Errors of the command, in one paragraph."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from cpejax.runs.model_file import Failure, summary


@contextmanager
def errors_in_a_paragraph(debug: bool) -> Iterator[None]:
    """Errors end the command with a sentence, or with `debug` as Python shows them."""
    callbacks = logging.getLogger("jax._src.callback")  # JAX logs the traceback of what a simulator on the host raises
    level = callbacks.level
    if not debug:
        callbacks.setLevel(logging.CRITICAL)
    try:
        yield
    except Failure as failure:
        if debug:
            raise
        _fail(str(failure))
    except Exception as error:
        if debug or isinstance(error, typer.Exit | typer.BadParameter | typer.Abort):
            raise
        _fail(f"{summary(error)} (Run it again with --debug to see where this happened.)")
    finally:
        callbacks.setLevel(level)


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(1)
