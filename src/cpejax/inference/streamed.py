"""Simulations that need not fit into memory: a block of their folder for each epoch, read while the one before runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax.flows.base import Flow
from cpejax.inference.fresh import MOST_INVALID
from cpejax.inference.rows import check_sites, prepare
from cpejax.inference.settings import Training
from cpejax.inference.values import centre
from cpejax.program.graph import Graph
from cpejax.program.opened import OpenSimulations
from cpejax.program.simulations import Simulations, finite_rows
from cpejax.util.keys import key_words

READ_WHOLE = 2**30
"""Bytes, in float32, of a folder that is read into memory, where training takes about seven times as much
(`benchmarks/streaming.py`)."""
BLOCK_BYTES = 2**25
"""Bytes, in float32, of a block and of the sample: with what it takes to prepare them, training stays below 2 GiB."""
BLOCK_ROWS = 50_000
"""Maximum number of simulations in a block: enough that what an epoch costs besides its steps does not count."""
SLICES = 256
"""The number of slices, of consecutive simulations, in a block: so few reads are fast, and so many a fair sample of a
folder even if neighbours in it were alike."""
HELD_OUT = 10_000
"""Maximum number of simulations that are held out: no more are needed to compare epochs."""
HELD_OUT_SHARE = 0.1
"""The same as a share of a block, after each of which they are evaluated."""
FEW_HELD_OUT, FEW_HELD_OUT_SHARE = 1000, 0.25
"""Where that share is fewer: so many, but no greater a share than that."""


def is_streamed(simulations: Any) -> TypeGuard[OpenSimulations]:
    """Whether simulations stay in their folder, and are read block by block."""
    return isinstance(simulations, OpenSimulations) and simulations.bytes > READ_WHOLE


class Blocks:
    """The simulations of a folder in random order, cut into blocks of `rows` each.

    What is shuffled are slices; inside a block training shuffles simulations. `key` and the number of a pass determine
    the order. The first slices of another order are a sample, by which values are standardised and epochs compared.
    """

    def __init__(self, opened: OpenSimulations, graph: Graph, *, key: PRNGKeyArray):
        check_sites(opened, graph)
        self.opened, self.graph, self.seed = opened, graph, key_words(key)
        most = max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, opened.bytes // opened.n)))
        self.most = min(most, opened.n)
        self.slice = max(1, self.most // SLICES)
        starts = np.arange(0, opened.n, self.slice)
        order = np.random.default_rng(self.seed).permutation(len(starts))
        self.starts, self.held_out = starts, np.empty(0, np.int64)
        self.dropped: set[int] = set()
        self.sampled = self._numbers(order[: -(-self.most // self.slice)])[: self.most]

    def _numbers(self, which: np.ndarray) -> np.ndarray:
        """The numbers of the simulations in some slices that are not held out."""
        numbers = (self.starts[which][:, None] + np.arange(self.slice)).ravel()
        numbers = numbers[numbers < self.opened.n]
        return numbers[~np.isin(numbers, self.held_out)]

    def sample(self) -> dict[str, np.ndarray]:
        """The sample; `sampled` are the numbers of those that are finite."""
        values = self.read(self.sampled)
        self.sampled = self.sampled[self.finite(self.sampled, values)]
        return values

    def finite(self, numbers: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Which simulations are finite; the numbers of the others are `dropped`."""
        good = np.all(list(finite_rows(values, self.graph).values()), axis=0)
        self.dropped.update(numbers[~good].tolist())
        return np.asarray(good)

    def hold_out(self, numbers: np.ndarray, batch: int) -> None:
        """Leave simulations out of all blocks, and cut the others into whole batches."""
        self.held_out = np.sort(numbers)
        held = np.bincount(self.held_out // self.slice, minlength=len(self.starts))
        self.sizes = np.minimum(self.slice, self.opened.n - self.starts) - held
        left = int(self.sizes.sum())
        self.count = max(1, left // max(self.most, batch))
        self.rows = left // self.count // batch * batch or left

    @property
    def words(self) -> str:
        """What an epoch is."""
        size = f"{self.opened.bytes / 2**30:.1f} GiB in float32"
        return (
            f"The {self.opened.n:,} simulations in {self.opened.folder}, {size}, are read while it trains: an epoch "
            f"is a block of {self.rows:,}, and {self.count} epochs are a pass."
        )

    def numbers(self, epoch: int) -> np.ndarray:
        """The simulations of an epoch: in each `count` epochs, no simulation twice."""
        number, i = divmod(epoch, self.count)
        order = np.random.default_rng([*self.seed, number]).permutation(len(self.starts))
        ends = np.cumsum(self.sizes[order])
        start = i * self.rows
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, start + self.rows, side="left"))
        skip = start - int(ends[first] - self.sizes[order[first]])
        return self._numbers(order[first : last + 1])[skip : skip + self.rows]

    def read(self, numbers: np.ndarray, offset: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Simulations by their numbers, `{site: (k, *shape)}`; less an offset, in float32."""
        out = self.opened.take(numbers, self.graph.sites)
        if offset is not None:
            out = {name: centre(x, offset.get(name)) for name, x in out.items()}
        return self.graph.without_masked(out)


class StreamedRows:
    """For each epoch a block of the simulations in a folder. `made` counts them, but for the sample.

    The places of those that are not finite are taken by others of the same block.
    """

    def __init__(self, blocks: Blocks, flow: Flow, offset: Mapping[str, np.ndarray]):
        self.blocks, self.flow, self.offset = blocks, flow, offset

    def __call__(self, epoch: int) -> Any:
        blocks = self.blocks
        numbers = blocks.numbers(epoch)
        values = blocks.read(numbers, self.offset)
        good = blocks.finite(numbers, values)
        if not good.all():
            bad = int((~good).sum())
            if bad > MOST_INVALID * len(good):
                raise ValueError(
                    f"{bad} of {len(good)} simulations of {blocks.opened.folder} ({100 * bad / len(good):.1f} %) are "
                    f"not finite, the first is number {int(numbers[~good][0])}; more than {100 * MOST_INVALID:g} % are "
                    "an error, for leaving them out biases the posterior if they are accidents."
                )
            which = np.flatnonzero(good)[np.arange(len(good)) % int(good.sum())]
            numbers, values = numbers[which], {name: x[which] for name, x in values.items()}
        return prepare(self.flow, Simulations(values, blocks.graph), numbers=numbers)

    @property
    def made(self) -> int:
        """How many simulations there are besides the sample, but for those that are known not to be finite."""
        blocks = self.blocks
        return blocks.opened.n - len(blocks.sampled) - len(blocks.dropped)

    @property
    def note(self) -> str:
        """What was left out."""
        what = f"{len(self.blocks.dropped)} of the simulations that were read are not finite, and left out."
        return what if self.blocks.dropped else ""


def held_out_of(settings: Training, blocks: Blocks) -> Training:
    """The options by which a part of the sample is held out: of all simulations the share that the user asked for."""
    sampled = len(blocks.sampled)
    most = max(int(HELD_OUT_SHARE * sampled), min(FEW_HELD_OUT, int(FEW_HELD_OUT_SHARE * sampled)))
    most = min(round(settings.validation * blocks.opened.n), HELD_OUT, most)
    return replace(settings, validation=max(most, 1) / sampled)


def in_blocks(settings: Training, blocks: Blocks) -> Training:
    """The options by which training on blocks takes as many passes over all simulations as it would in memory."""
    batch = min(settings.batch_size, blocks.rows)
    epochs = settings.epochs(int(blocks.sizes.sum()) // batch) * blocks.count
    steps = epochs * (blocks.rows // batch)
    return replace(settings, max_epochs=epochs, steps=steps, patience=settings.patience * blocks.count)
