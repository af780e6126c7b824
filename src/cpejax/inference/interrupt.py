"""Ctrl-C while a compiled program runs."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupt:
    """Ctrl-C as a note to stop, because in the middle of a compiled epoch there is no state to return.

    Before the first epoch it raises at once, and is noted all the same: an exception that comes while Python collects
    garbage, as it often does when JAX traces or compiles, is printed and lost. `check` then raises it again.
    """

    def __init__(self) -> None:
        self.came = False
        self.epochs = False
        self.depth = 0

    def __enter__(self) -> Interrupt:
        self.depth += 1
        if self.depth == 1:
            self.before = signal.getsignal(signal.SIGINT)
            # No other thread gets signals; and a process in the background that ignores Ctrl-C continues to do so.
            main = threading.current_thread() is threading.main_thread()
            self.watches = main and self.before is not None and self.before != signal.SIG_IGN
            if self.watches:
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.watches:
            signal.signal(signal.SIGINT, self.before)

    def check(self) -> None:
        """End if Ctrl-C has come before the first epoch."""
        if self.came and not self.epochs:
            raise KeyboardInterrupt

    def wait_for_epochs(self) -> None:
        """From now on there is an epoch to wait for."""
        self.check()
        self.epochs = True

    def _note(self, *_: Any) -> None:
        again, self.came = self.came, True
        if again or not self.epochs:
            raise KeyboardInterrupt
