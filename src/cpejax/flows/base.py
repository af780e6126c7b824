"""What every flow gives the engine, and the recipes that flows are built by. Methods differ only in their flow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.coordinates.standardise import Fixed
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program


class Flow(eqx.Module):
    """A posterior estimator: an Equinox module with `coordinates`, `loss`, `sample` and `log_prob`.

    All else has defaults. `docs/methods.md` shows a complete one.

    `coordinates`: the prior coordinates of the program. By them the engine knows the graph, the prior's support, and
    the program that a saved flow belongs to.
    """

    coordinates: eqx.AbstractVar[Coordinates]

    # What a flow must have

    def loss(self, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
        """The training loss of a batch of `prepare`d rows."""
        raise NotImplementedError

    def sample(self, data: Values, n: int, key: PRNGKeyArray) -> tuple[Values, dict[str, Array]]:
        """`n` draws for one observation, `{site: (n, *shape)}`, and counts that say how they came about (`clipped`).

        Counts that are whole numbers are added up, others are the worst of something. What `draw_options` returns are
        further arguments. `data` may hold parameters too where `lacks` allows it, or `any_subset`; they are not drawn.
        """
        raise NotImplementedError

    def log_prob(self, values: Values, data: Values) -> Float[Array, " n"]:
        """The log-density of `n` draws for one observation, in the user's parameters.

        What `density_options` returns are further arguments. Of a flow that may leave the support this is the density
        of what it proposes: the engine's draws, which are those inside, have a density that is higher by the factor
        1 / acceptance rate.
        """
        raise NotImplementedError

    # What a flow may have

    def prepare(self, values: Values) -> Any:
        """What the loss reads of simulations, computed once: a pytree whose leaves lead with the simulations' axis."""
        return values

    def validation_loss(self, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
        """The loss less noisily, for comparing epochs: it has the same rows and key in all of them.

        With one noise a row instead of two, FMPE on two moons kept the weights of epoch 53 of 100, and was worse by it.
        """
        return jax.lax.map(lambda k: self.loss(rows, k), jax.random.split(key, 2)).mean()

    def draw_options(self) -> dict[str, Any]:
        """What `sample` takes besides data, `n` and key, from what a user asks for.

        A flow declares options as keyword arguments with defaults. They are checked here, and those that the draws do
        not depend on are left out: the attributes of draws have what is returned.
        """
        return {}

    def density_options(self) -> dict[str, Any]:
        """What `log_prob` takes besides draws and data, from what a user asks for; declared as `draw_options` are."""
        return {}

    def log_probs(self, values: Values, data: Values, **options: Any) -> Float[Array, "n k"]:
        """`log_prob` where it is random: `k` independent estimates. Exact densities have one column."""
        return self.log_prob(values, data, **options)[:, None]

    def description(self) -> dict[str, Any]:
        """What of the flow's structure comes from the simulations, as JSON, so that it can be built without them."""
        return {}

    def numbers_per_draw(self) -> int:
        """How many values a draw holds in memory at once, so that sampling can go in chunks.

        Unless a flow knows better, as many as the longest axes of its weights have together, and its sites.
        """
        sites = sum(math.prod(site.shape) for site in self.coordinates.graph.sites.values())
        return sites + sum(max(w.shape, default=1) for w in jax.tree.leaves(trainable(self)[0]))

    @property
    def may_leave_support(self) -> bool:
        """Whether `sample` may propose draws outside the prior's support, or not finite; the engine redraws these."""
        return False

    @property
    def any_subset(self) -> bool:
        """Whether `sample` and `log_probs` take any subset of the sites as data, and give the rest."""
        return False

    def lacks(self, given: Collection[str]) -> dict[str, list[str]] | None:
        """Of given parameters, those that cannot be given without others, and which; `None`: none can be given at all.

        What is given with all that it lacks comes before the rest in the order of the posterior program, so that the
        rest can be drawn given it.
        """
        del given
        return None

    @property
    def least_loss(self) -> float:
        """A bound below which no validation loss can be."""
        return -math.inf

    def divide(self, rows: Any, most: int) -> list[tuple[Flow, Any]]:
        """Flows that can be trained in parallel, each on a core of its own, and the rows of each; no more than `most`.

        Their losses add up to the whole's. One part, the flow itself, where all weights depend on one another.
        """
        del most
        return [(self, rows)]

    def rows_of_part(self, part: Flow, rows: Any) -> Any:
        """Of prepared rows, those that a part of `divide` reads."""
        del part
        return rows

    def joined(self, parts: Sequence[Flow]) -> Flow:
        """The whole again, from trained parts."""
        return parts[0]


class Method:
    """A recipe for a flow: a frozen dataclass of options, which `cpe.fit(..., method=...)` builds the flow by.

    A subclass names its `flow`, a subclass of `Flow`. That gets the program (without arguments), its graph and the
    simulations, then by name the method's options, `key`, and `like`: `None`, or the `description` of a saved flow that
    is to be built alike from one simulation of zeros. `training`: the learning rate and weight decay that training has
    unless the user says otherwise.

    Subclasses are known by their name from their definition on, so that a saved posterior finds its method again.
    """

    by_name: ClassVar[dict[str, type[Method]]] = {}
    flow: ClassVar[type[Any]]
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.0}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "flow"):  # a part of others
            return
        other = Method.by_name.get(cls.__name__)
        if other is not None and other.__module__ != cls.__module__:  # in one module it is the same one, defined anew
            raise ValueError(
                f"There is a method '{cls.__name__}' in {other.__module__} already, so that saved posteriors would not "
                f"know which is theirs: call the one in {cls.__module__} otherwise."
            )
        Method.by_name[cls.__name__] = cls

    def options(self) -> dict[str, Any]:
        """The options by name."""
        if not is_dataclass(self):
            raise TypeError(f"{type(self).__name__} is no dataclass: write @dataclass(frozen=True) above its class.")
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def build(
        self,
        program: Program,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        *,
        key: PRNGKeyArray,
        like: Mapping[str, Any] | None = None,
    ) -> Flow:
        """The flow for a program without arguments, standardised by simulations."""
        flow: Flow = self.flow(program, graph, simulations, **self.options(), like=like, key=key)
        return flow

    def least_weights(self) -> int:
        """A bound below which the flow's weights cannot be: a file that has less was altered, and nothing is built."""
        return 0


def check_options(method: Method) -> None:
    """Options that are whole numbers are at least 1, and words are among those that the option's type names."""
    kinds = get_type_hints(type(method))
    for name, value in method.options().items():
        if get_origin(kinds[name]) is Literal and value not in get_args(kinds[name]):
            raise ValueError(f"{name} must be one of {list(get_args(kinds[name]))}, found {value!r}.")
        counts = kinds[name] is int or (kinds[name] == int | None and value is not None)
        if counts and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, found {value!r}.")


def check_embed(embed: Mapping[str, Any], graph: Graph) -> None:
    """Embeddings are of data sites."""
    for name in embed:
        if name not in graph.data:
            raise ValueError(f"embed names '{name}', but the data sites are {list(graph.data)}.")


def trainable(flow: Flow) -> tuple[Flow, Flow]:
    """Split a flow into its weights and the rest (structure, and arrays set by the simulations)."""

    def fixed(x: Any) -> bool:
        return isinstance(x, Fixed)

    def mask(x: Any) -> Any:
        return jax.tree.map(lambda _: False, x) if fixed(x) else eqx.is_inexact_array(x)

    return eqx.partition(flow, jax.tree.map(mask, flow, is_leaf=fixed))


def count_weights(flow: Flow) -> int:
    """The number of trained scalars."""
    return sum(w.size for w in jax.tree.leaves(trainable(flow)[0]))
