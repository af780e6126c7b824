"""Where files that can be made or downloaded again are kept."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_directory() -> Path:
    """`$CPEJAX_CACHE`, or `cpejax` in the platform's place for a user's caches."""
    if chosen := os.environ.get("CPEJAX_CACHE"):
        return Path(chosen).expanduser()
    return user_cache_path("cpejax", appauthor=False)
