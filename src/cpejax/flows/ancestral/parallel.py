"""Training in parts: no two nodes share a weight, so that each core can train some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from cpejax.flows.ancestral.networks import GroupNet
from cpejax.flows.ancestral.sampling import SamplingFlow
from cpejax.flows.base import Flow

OF_NODES = ("z", "s", "low", "high")
"""What of prepared rows is for each node."""


def divide(flow: SamplingFlow, rows: dict[str, Any], most: int) -> list[tuple[SamplingFlow, Any]]:
    """Parts with some of the nodes each, of about equal work; one where nodes share the weights of embeddings."""
    groups = flow.plan.groups
    shares: list[list[list[int]]] = [[[] for _ in groups] for _ in range(1 if flow.embed else most)]
    work = np.zeros(len(shares))
    for g, group in enumerate(groups):
        for node in range(len(group.nodes)):
            least = int(work.argmin())
            shares[least][g].append(node)
            work[least] += sum(math.prod(flow.plan.shape(stage.plates)) for stage in group.stages)
    parts: list[tuple[SamplingFlow, Any]] = []
    for share in shares:
        if any(share):
            which = [np.array(nodes, int) for nodes in share]
            nets = [_host(net).nodes(nodes) for net, nodes in zip(flow.groups, which, strict=True)]
            parts.append((eqx.tree_at(lambda f: f.groups, flow, nets), rows_of_nodes(rows, which)))
    return parts


def rows_of_nodes(rows: dict[str, Any], which: Sequence[np.ndarray]) -> dict[str, Any]:
    """Of prepared rows, those of some nodes of each group."""
    own = {k: [_host(x)[:, w] for x, w in zip(rows[k], which, strict=True)] for k in OF_NODES if k in rows}
    return {**rows, **own}


def joined(parts: Sequence[Flow]) -> Flow:
    """The whole flow, its nodes in their own order."""

    def join(*nets: GroupNet) -> GroupNet:
        both = jax.tree.map(lambda *w: np.concatenate(w), *map(_host, nets))
        return jax.tree.map(jnp.asarray, both.nodes(np.argsort(both.which.numbers)))

    nets = [part.groups for part in parts if isinstance(part, SamplingFlow)]
    return eqx.tree_at(lambda f: f.groups, parts[0], [join(*each) for each in zip(*nets, strict=True)])


def _host(tree: Any) -> Any:
    """As NumPy arrays: JAX would compile a program for each shape that is cut or put together."""
    return jax.tree.map(np.asarray, tree)
