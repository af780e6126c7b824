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


Options = dict[str, str | bool]  # what XLA takes; a number as text

WIDE: Options = {"xla_cpu_prefer_vector_width": "512"}
"""Vectors as wide as AVX-512 has them, where a processor has it: XLA takes half, and draws are slower by it."""
PRODUCTS_BY_EIGEN: Options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
"""Of XLA's two libraries for matrix products on a CPU, Eigen's divides middling ones among the cores, and goes on with
other operations meanwhile. YNNPACK's does not; for a program that has a core of its own it is as good or better."""


def options_for_all_cores() -> Options:
    """Options for compiling a program that has all cores to itself."""
    return {} if cores() == 1 else known(WIDE) | known(PRODUCTS_BY_EIGEN)


def known(options: Options) -> Options:
    """Options of XLA's, or none where this version of it does not have them."""
    return dict(_known(tuple(options.items())))


@functools.cache
def _known(options: tuple[tuple[str, str | bool], ...]) -> tuple[tuple[str, str | bool], ...]:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return ()
    return options


def compile_each(programs: list[Any], threads: ThreadPoolExecutor) -> list[Callable]:
    """Lowered programs, compiled. Those that look alike are compiled once; different ones take a core each."""
    options = options_for_all_cores() if len(programs) == 1 else {}
    texts = [program.as_text() for program in programs]
    different = dict(zip(texts, programs, strict=True))
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
