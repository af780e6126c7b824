"""Ctrl-C, and the time limit of a simulator on the host, while a compiled call runs."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpejax.program.simulator import Simulator
from cpejax.runs.folder import RunFolder


class Interrupted(Exception):
    """Ctrl-C, where what is finished is kept."""


@contextmanager
def run_watched(run: RunFolder) -> Iterator[None]:
    """Ctrl-C, and the time limit of a simulator on the host, also while a compiled call runs.

    Python handles a signal between two of its own instructions, and the main thread is inside the compiled call that
    calls the simulator, or in the simulator itself, whose exceptions XLA turns into its own. So another thread sees to
    it, and ends the process: all files are whole at any moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread gets signals
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):  # a process in the background keeps ignoring Ctrl-C
        signal.signal(signal.SIGINT, lambda *_: None)
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(run, read, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        os.write(write, b"\0")
        watch.join()
        os.close(read)
        os.close(write)


def _watch(run: RunFolder, read: int, over: threading.Event) -> None:
    while not over.is_set():
        ready, _, _ = select.select([read], [], [], 0.2)
        if ready and signal.SIGINT in os.read(read, 64):
            _leave(run, f"Interrupted. {how_to_resume(run.folder)}", 130)
        call = Simulator.under_way
        if run.timeout and call is not None and time.monotonic() - call[0] > run.timeout:
            _leave(
                run,
                f"Error: {run.model.path}: {call[1]()} has not returned after {run.timeout:g} s. Fix it there, or "
                f"give it more time with --timeout (0 for no limit). {how_to_resume(run.folder)}",
                1,
            )


def _leave(run: RunFolder, message: str, code: int) -> None:
    run.console.show_cursor(True)  # which a progress bar has hidden
    run.console.file.write(f"\n{message}\n")
    run.console.file.flush()
    os._exit(code)


def how_to_resume(folder: Path) -> str:
    """A sentence that says how to resume."""
    return f"What was finished is kept in {folder}: the same command resumes from there."
