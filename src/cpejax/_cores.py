"""Compiled programs beside one another. XLA divides single operations among the cores, which helps large ones only."""

from __future__ import annotations

import functools
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


PRODUCTS_BY_EIGEN: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
"""Of XLA's two libraries for matrix products on a CPU, Eigen's divides middling ones among the cores, and goes on with
other operations meanwhile. YNNPACK's does not; for a program that has a core of its own it is as good or better."""


@functools.cache
def options_for_all_cores() -> dict[str, str | bool]:
    """Options for compiling a program that has all cores to itself; none where this version of XLA has them not."""
    if cores() == 1:
        return {}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=PRODUCTS_BY_EIGEN)
    except jax.errors.JaxRuntimeError:
        return {}
    return PRODUCTS_BY_EIGEN


def compile_each(function: Any, arguments: list[tuple], threads: ThreadPoolExecutor) -> list[Callable]:
    """A compiled program for each of some arguments. Those that look alike share one; different ones take a core each.

    Traced here, not on the threads, which do not see the user's settings of JAX (`with jax.default_device(...)`).
    """
    options = options_for_all_cores() if len(arguments) == 1 else {}
    lowered = [function.lower(*each) for each in arguments]
    texts = [program.as_text() for program in lowered]
    different = dict(zip(texts, lowered, strict=True))
    done = threads.map(lambda program: program.compile(options), different.values())
    compiled = dict(zip(different, done, strict=True))
    return [compiled[text] for text in texts]


def on_cores(function: Any, arguments: list[tuple]) -> list[Any]:
    """What a compiled function returns for each of some arguments, which differ in their numbers only."""
    workers = min(cores(), len(arguments))
    if workers == 1:
        return [function(*each) for each in arguments]
    program = function.lower(*arguments[0]).compile()
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda each: jax.block_until_ready(program(*each)), arguments))
