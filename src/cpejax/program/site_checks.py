"""What sites must be so that a graph can be made of them; each error names the site and the way out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpyro.distributions as dist

from cpejax.program.distributions import unwrap
from cpejax.program.simulator import Simulator
from cpejax.program.tracing import RawSite

AXES = ("chain", "draw", "observation")
"""The axes of draws, which no site can be called; a plate of that name becomes the axis `…_plate`."""
MOST_UNLIKE = 200
"""Members of the largest plate that is unrolled because they differ: each then has weights of its own."""


def check_unlike(plate: str, size: int, why: str) -> None:
    if size > MOST_UNLIKE:
        raise ValueError(
            f"Plate '{plate}' has {size} members that are not exchangeable: {why}. Members of a plate share weights, "
            "and what tells them apart must be a row of an array for each member (a covariate, an error, a time) or an "
            f"array of integers into another plate; up to {MOST_UNLIKE} members would be written out instead. Use such "
            "arrays in the program, with the plate's axis in its place, or draw what is unlike in plates of its own."
        )


def data_sites(raw: Mapping[str, RawSite], observed: Sequence[str] | None) -> set[str]:
    simulators = {name for name, site in raw.items() if isinstance(unwrap(site.fn), Simulator)}
    with_obs = {name for name, site in raw.items() if site.has_obs}
    if observed is None:
        return simulators | with_obs
    check_list(observed)
    for name in observed:
        if name not in raw:
            raise ValueError(f"observed names '{name}', but the program has only the sites {list(raw)}.")
    for name in (simulators | with_obs) - set(observed):
        kind = "a cpe.Simulator" if name in simulators else "given with obs="
        raise ValueError(
            f"Site '{name}' is {kind}, so it is data, but observed={list(observed)} leaves it out. Add it."
        )
    return set(observed)


def check_list(observed: Sequence[str]) -> None:
    if isinstance(observed, str):
        raise TypeError(f"observed must be a list of site names, found the string {observed!r}: write [{observed!r}].")


def check_parameter(name: str, site: RawSite) -> None:
    if site.fn.support is not None and site.fn.support.is_discrete:
        raise ValueError(
            f"Parameter '{name}' is discrete ({type(unwrap(site.fn)).__name__}); only continuous parameters can be "
            "inferred. Sum it out (a Mixture distribution does so), relax it, or, if it is data, name it in observed."
        )
    if isinstance(unwrap(site.fn), dist.Delta):
        raise ValueError(
            f"Parameter '{name}' is a Delta, which has nothing random to infer. "
            f"Write numpyro.deterministic('{name}', ...), or, if it is data, name it in observed=[...]."
        )
    if math.prod(site.shape) == 0:
        raise ValueError(f"Parameter '{name}' has shape {site.shape}, which is empty.")
    if site.mask is not None:
        raise ValueError(
            f"Parameter '{name}' is masked (numpyro.handlers.mask, or obs_mask=), which takes its prior away there; it "
            "cannot be drawn without one. Mask the data alone: put the mask around them, and no obs_mask=."
        )


def check_masks(raw: Mapping[str, RawSite]) -> None:
    """A mask on data says which values are not data; elsewhere it would change a density that is simulated."""
    for name, site in raw.items():
        for parent in sorted(site.parents):
            if raw[parent].mask is not None:
                raise ValueError(
                    f"Site '{name}' reads data site '{parent}', some of whose values are masked, so what is not "
                    "observed would matter after all. Draw the values that are observed as a site of their own."
                )


def check_names(names: Sequence[str]) -> None:
    """Names that draws, which are an ArviZ DataTree, cannot have."""
    for name in names:
        if name in AXES:
            raise ValueError(f"A site is called '{name}', which is the name of an axis of draws. Rename it.")
        if not name:
            raise ValueError("A site has an empty name. Give it one: numpyro.sample('name', ...).")
        if "/" in name:
            raise ValueError(
                f"Site '{name}' has a '/' in its name, which divides groups in an ArviZ DataTree and a NetCDF file. "
                "Rename it; with numpyro.handlers.scope, give another divider, for example divider='.'."
            )
