"""What is said to the user while something is computed, on stderr."""

from rich.console import Console


def say(text: str, console: Console | None = None) -> None:
    """Print a sentence as it is: no markup, no colours, wrapped by the terminal."""
    (console or Console(stderr=True)).print(text, highlight=False, markup=False, soft_wrap=True)
