"""Compiled programs beside one another. XLA divides single operations among the cores, which helps large ones only."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


def cores() -> int:
    """How many programs can run beside one another: the cores this process may use; one with an accelerator."""
    if jax.default_backend() != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_each(function: Any, arguments: list[tuple], threads: ThreadPoolExecutor) -> list[Callable]:
    """A compiled program for each of some arguments. Those that look alike share one; different ones take a core each.

    Traced here, not on the threads, which do not see the user's settings of JAX (`with jax.default_device(...)`).
    """
    lowered = [function.lower(*each) for each in arguments]
    texts = [program.as_text() for program in lowered]
    different = dict(zip(texts, lowered, strict=True))
    compiled = dict(zip(different, threads.map(lambda program: program.compile(), different.values()), strict=True))
    return [compiled[text] for text in texts]


def on_cores(function: Any, arguments: list[tuple]) -> list[Any]:
    """What a compiled function returns for each of some arguments, which differ in their numbers only."""
    workers = min(cores(), len(arguments))
    if workers == 1:
        return [function(*each) for each in arguments]
    program = function.lower(*arguments[0]).compile()
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda each: jax.block_until_ready(program(*each)), arguments))
