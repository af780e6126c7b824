"""Compiled programs in parallel. XLA divides single operations among the cores, which helps large ones only."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from cpejax.util.room import make_room


def cores() -> int:
    """How many programs can run in parallel: the cores this process may use; one with an accelerator."""
    if jax.default_backend() != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_each(programs: list[Any], threads: ThreadPoolExecutor) -> list[Callable]:
    """Lowered programs, compiled. Those that look alike are compiled once; different ones take a core each."""
    texts = [program.as_text() for program in programs]
    different = dict(zip(texts, programs, strict=True))
    done = threads.map(lambda program: program.compile(), different.values())
    compiled = dict(zip(different, done, strict=True))
    return [compiled[text] for text in texts]


def on_cores(function: Any, arguments: list[tuple]) -> list[Any]:
    """What a compiled function returns for each of some arguments, which differ in their values only."""
    make_room()
    workers = min(cores(), len(arguments))
    if workers == 1:
        return [function(*each) for each in arguments]
    program = function.lower(*arguments[0]).compile()
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda each: jax.block_until_ready(program(*each)), arguments))


def channels_last(function: Callable) -> Callable:
    """The same function, in which every convolution has its channels in the last axis.

    On a CPU XLA has one fast convolution, which wants that, and brings others to this form except inside loops, where
    it takes the plain definition instead (jax-ml/jax#12868). A step of training is inside a loop: the gradient of a
    16 × 16 image's convolutions took 30 ms there, and 5 ms by this. A function without convolutions is left as it is.
    """

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _has_convolution(closed.jaxpr):
            return function(*args)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _inner(equation: Any) -> ClosedJaxpr | None:
    """The program that an equation calls once, as it is."""
    inner = equation.params.get("jaxpr")
    return inner if equation.primitive.name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr) else None


def _has_convolution(jaxpr: Jaxpr) -> bool:
    return any(
        e.primitive.name == "conv_general_dilated" or ((inner := _inner(e)) and _has_convolution(inner.jaxpr))
        for e in jaxpr.eqns
    )


def _evaluate(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        inner = _inner(equation)
        if equation.primitive.name == "conv_general_dilated":
            out = [_convolve(*inputs, **equation.params)]
        elif inner is not None and _has_convolution(inner.jaxpr):
            out = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            bind = equation.primitive.get_bind_params(equation.params)
            functions, params = bind if isinstance(bind, tuple) else ((), bind)  # by the version of JAX
            found = equation.primitive.bind(*functions, *inputs, **params)
            out = found if equation.primitive.multiple_results else [found]
        values |= dict(zip(equation.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _convolve(x: Any, weights: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """A convolution by way of one with channels last."""
    (n, c, *space), (o, i, *window), (to_n, to_c, *to_space) = dimension_numbers
    axes = "".join(map(str, range(len(space))))
    out = jax.lax.conv_general_dilated(
        x.transpose(n, *space, c),
        weights.transpose(*window, i, o),
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        **params,
    )
    back = [to_n, *to_space, to_c]
    return out.transpose([back.index(k) for k in range(len(back))])
