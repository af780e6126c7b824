"""What is not as it was when a stage was made, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_FILE, PROGRAM = "the model file", "the program"
"""Names of the first two hashes of a model; the others are those of the files that it reads."""


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, in words."""
    return [_difference(name, was.get(name), value) for name, value in now.items() if was.get(name) != value]


def _difference(name: str, was: Any, now: Any) -> str:
    if name in ("simulations", "seed", "draws", "check_simulations", "epochs", "steps"):
        was, now = ("left out" if value is None else value for value in (was, now))
        return f"--{name.replace('_', '-')} was {was}, is {now}"
    if name == "model":
        return f"{changed_in_model(was or {}, now)} has changed since"
    if name == "parts":
        return f"parts {was} of the simulations were there, {now} are"
    if name == "method":
        return f"the method was {was}, is {now}"
    return f"{name} {'is' if name == 'the fitted model' else 'are'} not the same as then"


def changed_in_model(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    if was.get(MODEL_FILE) != now[MODEL_FILE]:
        return "the model file"
    changed = [name for name in {**was, **now} if name != PROGRAM and was.get(name) != now.get(name)]
    return f"{changed[0]}, which the model file reads," if changed else "the program's graph"
