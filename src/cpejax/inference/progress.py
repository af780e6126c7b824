"""The progress bar of training."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cpejax.inference.settings import History
from cpejax.util.messages import say


class Bar:
    """Epoch, losses, best and time left; silent where there is no terminal."""

    def __init__(self, shown: bool | None):
        self.console = console = Console(stderr=True)
        columns = (
            TextColumn("{task.fields[what]}"),
            BarColumn(),
            TextColumn("epoch {task.completed}/{task.total}  {task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = console.is_terminal if shown is None else shown
        self.progress = Progress(*columns, console=console, disable=not shown)
        self.task = self.progress.add_task("", total=None, what="training")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def begin(self, what: str) -> None:
        """Show that something else is trained now."""
        self.progress.reset(self.task, total=None, what=what, description="")

    def update(self, epoch: int, epochs: int, history: History) -> None:
        text = f"loss {history.train[-1]:.4f}  validation {history.validation[-1]:.4f}  best {history.best:.4f}"
        self.progress.update(self.task, completed=epoch, total=epochs, description=text)

    def say(self, text: str) -> None:
        say(text, self.console)
