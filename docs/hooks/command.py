"""The page of the command `cpejax`, from what the command itself says with `--help`."""

from __future__ import annotations

import inspect
from typing import Any

import typer


def page() -> str:
    """All subcommands, with their text and their options."""
    from cpejax.runs.cli import app

    group: Any = typer.main.get_command(app)
    out = ["# The command", text(group), "", "[From the shell](../infer.md) explains runs, folders and data files."]
    for name, command in group.commands.items():
        out += [f"## `cpejax {name}`", text(command), options(command)]
    return "\n\n".join(out) + "\n"


def text(command: Any) -> str:
    """What the command says of itself."""
    return inspect.cleandoc(command.help or "")


def options(command: Any) -> str:
    """A table of the arguments and options."""
    lines = ["| | default | |", "|---|---|---|"]
    for parameter in command.params:
        names = ", ".join(f"`{name}`" for name in getattr(parameter, "opts", [parameter.name]))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name}`"
        elif parameter.metavar:
            names += f" `{parameter.metavar}`"
        if parameter.name == "help":
            continue
        default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        default = "" if default in (None, False, ...) or parameter.required else str(default)
        words = (getattr(parameter, "help", "") or "").replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {names} | {default} | {words} |")
    return "\n".join(lines)
