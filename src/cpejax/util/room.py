"""Room for compiled programs: a process that compiles many must forget some, or the system ends it."""

from __future__ import annotations

from pathlib import Path

import jax

MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
"""Where Linux tells the mappings of a process, a line each, and the maximum number of them."""
SHARE = 0.5
"""The share of these that compiled programs may take."""
EVERY = 100
"""Programs compiled until the mappings are counted again: each takes some ten of them."""


class _Compiled:
    """Counts the programs that JAX compiles in this process."""

    def __init__(self) -> None:
        self.since_counted = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG002
        self.since_counted += event.endswith("/backend_compile_duration")


_compiled = _Compiled()


def make_room() -> bool:
    """Forget all compiled programs if they take half of the mappings that the system allows a process.

    A program that XLA compiles for a CPU takes some ten mappings, a fit with all that belongs to it some thousands, and
    JAX keeps programs for as long as the process lives. Linux allows 65,530 by default; one more cannot be mapped, and
    compilers do not survive that, for instance in a notebook with a dozen fits. What is forgotten is compiled again
    when needed.

    **Returns:** whether they were forgotten.
    """
    if _compiled.since_counted < EVERY or not (MAPS.exists() and MOST_MAPS.exists()):
        return False
    _compiled.since_counted = 0
    with MAPS.open("rb") as file:
        count = sum(1 for _ in file)
    if count < SHARE * int(MOST_MAPS.read_text()):
        return False
    jax.clear_caches()
    return True
