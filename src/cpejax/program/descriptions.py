"""Descriptions of graphs, compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What one graph has otherwise than another, in sentences; both as `Graph.to_dict` gives them."""
    out = []
    for name in other["sites"]:
        if name not in mine["sites"]:
            out.append(f"site '{name}' is missing")
    for name, site in mine["sites"].items():
        if name not in other["sites"]:
            out.append(f"site '{name}' is new")
            continue
        for what in {**site, **other["sites"][name]}:
            found, expected = site.get(what), other["sites"][name].get(what)
            if found != expected:
                out.append(f"site '{name}' has {what} {found}, expected {expected}")
    for plate in {**mine["plates"], **other["plates"]}:
        found, expected = mine["plates"].get(plate), other["plates"].get(plate)
        if found != expected:
            out.append(f"plate '{plate}' has size {found}, expected {expected}")
    return out + _other_constants(mine, other)


def _other_constants(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    out = []
    here, there = mine.get("constants", {}), other.get("constants", {})
    for name in {**here, **there}:
        if name not in here or name not in there:
            out.append(f"constant '{name}' is {'missing' if name in there else 'new'}")
        elif here[name] != there[name]:
            out.append(f"constant '{name}' (plate {', '.join(here[name]['plates'])}) has other values")
    if mine.get("links", []) != other.get("links", []):
        words = [[f"'{'/'.join(o['from'])}' into '{o['into']}'" for o in d.get("links", [])] for d in (mine, other)]
        out.append(f"the index arrays are {words[0]}, expected {words[1]} with the same values")
    return out
