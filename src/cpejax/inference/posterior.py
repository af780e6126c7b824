"""What a user holds after `cpe.fit`: a posterior that draws, scores, finds its mode and saves itself."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float, PRNGKeyArray

from cpejax.coordinates.vector import Vector
from cpejax.flows.base import count_weights
from cpejax.inference.density import check_density, evaluate, evaluate_on_cores
from cpejax.inference.emulator import Emulator
from cpejax.inference.fitted import Fitted
from cpejax.inference.given import check_acceptance, check_draws, check_finite, check_given
from cpejax.inference.likelihood import Likelihood, ProgramLikelihood
from cpejax.inference.mode import climb
from cpejax.inference.refine import combined, refine_each
from cpejax.inference.sampling import MOST_NUMBERS, check_options, draw_on_cores
from cpejax.inference.saving import save
from cpejax.inference.scores import helps
from cpejax.inference.trees import to_tree
from cpejax.program.density import missing_density
from cpejax.program.simulations import check_count
from cpejax.util.keys import check_key, key_words
from cpejax.util.messages import say


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(Fitted):
    """A trained posterior of a program, for any observation.

    Its fields are those of `Fitted`, and `emulator`: the forward program, where `cpe.fit` has learned it as well.
    """

    emulator: Emulator | None = None

    def __repr__(self) -> str:
        return (
            f"Posterior({', '.join(self.graph.parameters)} | {', '.join(self.graph.data)}; "
            f"{type(self.method).__name__}, {self.weights} weights, {self.n_simulations} simulations)"
        )

    @cached_property
    def weights(self) -> int:
        """How many weights are trained."""
        return count_weights(self.flow)

    @cached_property
    def _missing_density(self) -> str:
        """Why the data have no density by the program itself; empty where they have one."""
        if self.offset:
            return f"float32 does not hold the digits of site '{next(iter(self.offset))}'"
        return missing_density(self.flow.coordinates.program, self.graph)

    def likelihood(self, which: str = "program") -> Likelihood:
        """The log-likelihood of the parameters: `"program"`, the program's own density, or `"learned"`.

        >>> posterior.likelihood("program").words
        "the program's own density"
        """
        if which == "program":
            if self._missing_density:
                raise ValueError(
                    f"The program has no density of its data: {self._missing_density}. refine='learned' takes a "
                    "likelihood that is learned from simulations."
                )
            return ProgramLikelihood(self.flow.coordinates.program, self.graph)
        if which == "learned":
            if self.emulator is None:
                raise ValueError(
                    "This posterior has no learned likelihood: it was fitted without an emulator. Fit it with "
                    "emulate=True."
                )
            return self.emulator.likelihood
        raise ValueError(f"likelihood must be 'program' or 'learned', found {which!r}.")

    def likelihood_for(self, refine: bool | str) -> tuple[Likelihood | None, str]:
        """The likelihood that draws are refined by, as `sample` is asked; if there is none, why."""
        if not isinstance(refine, bool | str) or refine not in (False, True, "program", "learned", "auto"):
            raise ValueError(f"refine must be False, True, 'program', 'learned' or 'auto', found {refine!r}.")
        if refine is False:
            return None, ""
        if refine in ("program", "learned"):
            return self.likelihood(str(refine)), ""
        if not self._missing_density:
            return self.likelihood("program"), ""
        learned = self.emulator is not None
        none = f"the program has no density of its data ({self._missing_density}), and no likelihood was learned"
        if refine is True:
            if not learned:
                raise ValueError(f"Draws cannot be refined: {none}.")
            return self.likelihood("learned"), ""
        if not learned:
            return None, none
        score = self.history.refinement
        if not score:
            return None, "no held-out simulations say whether the learned likelihood makes draws better"
        if not helps(score):
            return None, (
                f"on {score['n']} held-out simulations the learned likelihood does not raise the log-density of the "
                f"true parameters: {score['plain']:.3f} without it, {score['refined']:.3f} with it, the difference "
                f"± {score['error']:.3f}"
            )
        return self.likelihood("learned"), ""

    def sample(
        self, n: int, given: Mapping[str, Any], *, key: PRNGKeyArray, refine: bool | str = False, **options: Any
    ) -> xr.DataTree:
        """Draw from the posterior.

        **Arguments:**

        - `n`: draws for each observation.
        - `given`: the observed data, `{site: array}`; each with a leading axis for many observations at once. With
            `cpe.AIO` any sites, parameters among them: the others are drawn. With `cpe.CPE` parameters too that
            are drawn before all others, as `cpe.CPE(first=[...])` makes them: the others are drawn given these.
        - `key`: a JAX key.
        - `refine`: whether draws are moved to prior × likelihood, for each observation anew (docs/refinement.md). With
            `True` by the program's own density where all data sites have one, else by a learned one; `"program"` and
            `"learned"` say which. `"auto"`: by the program's where there is one, by a learned one if it made draws
            better on held-out simulations, and otherwise not at all, and says why. Attributes of the draws are then
            `refined`, `effective_sample_size`, `pareto_k`, `log_evidence`, `log_evidence_error` and others; those of
            many observations are lists.
        - `**options`: those that the method's draws have. For all of the library but `cpe.DiscreteCPE`, `solver`:
            `"euler"`, the default of `cpe.CPE` and `cpe.TriangularCPE`, or `"rk45"`, Dormand-Prince 5(4) with SciPy's
            default tolerances, that of the others; and `steps`, of Euler's method, 20 by default.

        **Returns:** an ArviZ DataTree: `posterior` with the program's names, shapes and plates (dims `chain, draw`,
        then `observation` where there are many), and `observed_data`. Attributes of `posterior` say how it was made.
        Draws that are not finite are never returned: a `FloatingPointError` says of which parameters they are.
        Deterministic sites of the program are there too. A plate that is called like a site or an axis is `…_plate`.

        >>> draws = posterior.sample(50, given={"y": [0.3, 1.2, -0.4]}, key=jax.random.key(2))
        >>> draws.posterior["mu"].shape  # chains, draws
        (1, 50)
        """
        check_count(n, "n, the number of draws,")
        used = check_options(self.flow.draw_options, options, "draws")
        key = check_key(key)
        likelihood, why = self.likelihood_for(refine)
        if why:
            say(f"Draws are not refined: {why}.")
        data, many = check_given(self, given)
        began = time.perf_counter()
        count = len(next(iter(data.values()))) if data else 1
        chunk = max(1, MOST_NUMBERS // self.flow.numbers_per_draw())
        keys = jax.random.split(key, count)
        if likelihood is not None:
            self._check_all_data(data)
            refined = refine_each(self.flow, likelihood, data, int(n), keys=keys, options=used)
            values = {name: np.stack([r.values[name] for r in refined]) for name in refined[0].values}
            check_finite(values)
            found = {"sampling_time": time.perf_counter() - began, **combined(refined)}
            return to_tree(self, values, data, many, self._attributes(key, used, found))
        values, counted = draw_on_cores(self.flow, data, keys, int(n), used, chunk)
        # Whole numbers are counts; others are the worst of something.
        counts = {n: int(np.sum(x)) if x.dtype.kind in "iu" else float(np.max(x)) for n, x in counted.items()}
        drawn = sum(x.size for x in values.values())
        if counts.get("clipped", 0) > 0.01 * drawn:
            say(
                f"Warning: {100 * counts['clipped'] / drawn:.1f} % of the drawn values stand at the limit of what can "
                "be drawn: the furthest that was simulated of a prior with a long tail, or the last that float32 "
                "resolves of others. The data may be beyond all simulations: see cpe.check."
            )
        seconds = time.perf_counter() - began
        acceptance = 1.0
        if self.flow.may_leave_support:
            check_acceptance(self, counted)
            acceptance = counts.pop("accepted") / counts.pop("proposed")
            counts.pop("missing")
        check_finite(values)
        found = {"acceptance_rate": acceptance, "sampling_time": seconds, **counts}
        return to_tree(self, values, data, many, self._attributes(key, used, found))

    def _attributes(self, key: PRNGKeyArray, used: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """What attributes of draws say of how they were made."""
        return {
            **found,
            **used,
            "key": key_words(key),
            "method": type(self.method).__name__,
            "n_simulations": self.n_simulations,
            "inference_library": "cpejax",
            "inference_library_version": version("cpejax"),
            "jax_version": jax.__version__,
            "numpyro_version": version("numpyro"),
            "python_version": platform.python_version(),
        }

    def _check_all_data(self, data: Mapping[str, Any]) -> None:
        missing = [name for name in self.graph.data if name not in data]
        if missing:
            raise ValueError(f"given has no {missing}, but draws are refined by the likelihood of all data.")

    def log_prob(
        self, draws: Mapping[str, Any] | xr.DataTree, given: Mapping[str, Any], **options: Any
    ) -> Float[np.ndarray, "*draws"]:
        """The log-density of draws, in the program's own parameters.

        **Arguments:**

        - `draws`: a DataTree from `sample`, or `{site: (n, *shape)}`. For many observations a DataTree of as many, or
            `{site: (observations, n, *shape)}`, or `{site: (observations, *shape)}` with one draw each.
        - `given`: one observation, `{site: array}`, or many, each site with a leading axis. With parameters among them
            (see `sample`) the density is that of the others given these.
        - `**options`: those that the method's densities have. For all of the library but `cpe.DiscreteCPE`, `steps`: of
            Heun's method, on the same grid as `sample`'s. By default 20 for `cpe.CPE`; the densities of other methods
            are then by Dormand-Prince 5(4).

        **Returns:** an array, `(chain, draw)` for a DataTree and `(n,)` for a dict; for many observations
        `(chain, draw, observation)`, and `(observations, n)` or `(observations,)`. Outside the prior's support the
        log-density is −∞; one that is not a number is an error. Of a method that rejects draws (`acceptance_rate` below
        1) it is the density of what is proposed; that of the draws is higher by the factor 1 / acceptance rate.

        The baselines estimate it in more than 32 dimensions and say with which error; `log_prob_with_error` returns it.
        """
        found, error = self.log_prob_with_error(draws, given, **options)
        inside = np.isfinite(found)
        if error.any() and inside.any():
            say(
                f"log_prob is estimated; its standard error is {np.median(error[inside]):.2g} for half of the draws, "
                f"{error[inside].max():.2g} at most."
            )
        return found

    def log_prob_with_error(
        self, draws: Mapping[str, Any] | xr.DataTree, given: Mapping[str, Any], **options: Any
    ) -> tuple[Float[np.ndarray, "*draws"], Float[np.ndarray, "*draws"]]:
        """`log_prob` and the standard error of each: 0, unless the baselines estimate it in many dimensions."""
        used = check_options(self.flow.density_options, options, "densities")
        data, many = check_given(self, given)
        chunk = max(1, MOST_NUMBERS // (2 * self.flow.numbers_per_draw()))  # twice: with tangents
        count = len(next(iter(data.values()))) if data and many else None
        values, shape = check_draws(self, draws, set(data), count)
        found: Any
        error: Any
        if count is None:
            found, error = evaluate(self.flow, values, {name: x[0] for name, x in data.items()}, used, chunk)
        else:
            found, error = evaluate_on_cores(self.flow, values, data, used, chunk)
        density, spread = (np.asarray(x).reshape(shape) for x in (found, error))
        if count is not None and isinstance(draws, xr.DataTree | xr.Dataset):  # (observation, chain, draw)
            density, spread = (np.moveaxis(x, 0, -1) for x in (density, spread))
        check_density(density)
        return density, spread

    def map(
        self, given: Mapping[str, Any], *, key: PRNGKeyArray, draws: int = 1000, starts: int = 8, steps: int = 300
    ) -> tuple[dict[str, np.ndarray], float]:
        """The parameters with the highest posterior density: the mode, or maximum a posteriori.

        **Arguments:**

        - `given`: one observation, as for `sample`.
        - `key`: a JAX key.
        - `draws`: from the posterior; the `starts` of them that have the highest density are where the search begins.
        - `steps`: of Adam's method from each, with a learning rate that falls from .1 to zero. It moves in
            unconstrained coordinates, standardised by the draws, but what it climbs is the density of the program's own
            parameters, which is that of `log_prob`.

        **Returns:** the parameters, `{site: array}`, and their log-density. Modes depend on how a model is written:
        that of a scale is not that of its logarithm. Where the density is highest at the edge of a support, or has no
        maximum (a hierarchical scale near zero), the search stops on the way there.

        >>> given, key = {"y": [0.3, 1.2, -0.4]}, jax.random.key(3)
        >>> mode, log_density = posterior.map(given, draws=20, starts=2, steps=2, key=key)
        >>> list(mode), type(log_density)
        (['mu'], <class 'float'>)
        """
        for name, value in (("draws", draws), ("starts", starts), ("steps", steps)):
            check_count(value, name)
        data, many = check_given(self, given)
        if many:
            raise ValueError("map takes one observation: the data in given have a leading axis. Call it for each.")
        free = [name for name in self.graph.parameters if name not in data]
        if len(free) + len(data) < len(self.graph.sites):
            raise ValueError(f"map needs all data; given has {sorted(given)}.")
        tree = self.sample(draws, given, key=key)["posterior"].dataset
        drawn = {name: jnp.asarray(tree[name].values[0]) for name in free}
        best = np.argsort(-self.log_prob({name: np.asarray(x) for name, x in drawn.items()}, given))[:starts]
        one = {name: x[0] for name, x in data.items()}
        full = drawn | {name: jnp.broadcast_to(x, (draws, *x.shape)) for name, x in one.items()}
        vector = Vector(self.program, self.graph, full, "unconstrained")
        found = climb(self.flow, vector, {name: x[best] for name, x in full.items()}, one, tuple(free), int(steps))
        candidates = {name: np.concatenate([drawn[name][best], found[name]]) for name in free}
        finite = np.all([np.isfinite(x).reshape(len(x), -1).all(1) for x in candidates.values()], axis=0)
        candidates = {name: x[finite] for name, x in candidates.items()}
        density = self.log_prob(candidates, given)
        top = int(np.argmax(density))
        return {name: np.asarray(x[top]) for name, x in candidates.items()}, float(density[top])

    def save(self, folder: str | Path) -> None:
        """Write the posterior to a folder: `weights.safetensors` and `posterior.json`, and the same of its emulator in
        `emulator/`. `cpe.load` reads it.
        """
        save(self, folder, self.emulator)
