"""The methods by name, as saved posteriors and the command line name them."""

from __future__ import annotations

from collections.abc import Mapping

from cpejax.flows.base import Method

METHODS: Mapping[str, type[Method]] = Method.by_name
"""Those of the library, and every method that has been defined since it was imported."""
