"""The options of training, and what is known of it afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

DIVERGED = "training diverged"
"""How the reason begins why training stopped, where the loss was not finite."""
OF_THE_METHOD = ("learning_rate", "weight_decay")
"""The options of training whose default depends on the method: its `training` has them."""


@dataclass(frozen=True)
class Training:
    """The options of training.

    The defaults were chosen on two moons and SLCP with 10,000 simulations, by the log-density of fresh simulations
    (docs/inference.md says what is stored of it, and how accurate they are on nine tasks).

    - `batch_size`: simulations in a step.
    - `learning_rate`: of Adam, at its highest. `None`: the method's own.
    - `schedule`: `"cosine"` falls to zero over the run's length, `"constant"` stays.
    - `max_epochs`: the maximum number of epochs, as in the paper. A cosine schedule takes `steps` gradient steps (at
        least 50 epochs) where that is less.
    - `steps`: the length of the schedule in gradient steps.
    - `patience`: after this number of epochs without a better validation loss training goes back to the best weights
        and lets the rate fall, from a quarter of what it was to zero, within as many epochs; then it stops.
    - `validation`: the share of simulations held out for it.
    - `weight_decay`: of AdamW; it keeps networks with many inputs from learning the simulations by heart. `None`: the
        method's own.
    - `average`: keep averaged weights, over the last tenth of the steps so far: the window grows with the run.
    - `devices`: the number of devices that share each batch. `None`: all accelerators, or one CPU; with
        `jax.distributed` those of all processes, each of which calls `fit` alike.
    """

    batch_size: int = 100
    learning_rate: float | None = None
    schedule: str = "cosine"
    max_epochs: int = 2000
    steps: int = 20_000
    patience: int = 25
    validation: float = 0.1
    weight_decay: float | None = None
    average: bool = True
    devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_epochs", "steps", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, found {value!r}.")
            object.__setattr__(self, name, int(value))
        for name, fits, words in (
            ("learning_rate", lambda x: 0 < x < math.inf, "must be a positive number"),
            ("validation", lambda x: 0 < x < 1, "is the share of simulations held out, between 0 and 1"),
            ("weight_decay", lambda x: 0 <= x < math.inf, "must be a number of at least 0"),
        ):
            value = getattr(self, name)
            if value is None and name in OF_THE_METHOD:
                continue
            if not isinstance(value, int | float | np.integer | np.floating) or not fits(value):
                raise ValueError(f"{name} {words}; found {value!r}.")
            object.__setattr__(self, name, float(value))
        if self.devices is not None and (not isinstance(self.devices, int) or self.devices < 1):
            raise ValueError(f"devices must be a whole number of at least 1, found {self.devices!r}.")
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"schedule must be 'cosine' or 'constant', found {self.schedule!r}.")

    def completed(self, own: Mapping[str, float]) -> Training:
        """The options, with the method's own values where they are `None`."""
        missing: dict[str, Any] = {name: own[name] for name in OF_THE_METHOD if getattr(self, name) is None}
        return replace(self, **missing)

    def epochs(self, batches: int) -> int:
        """The maximum number of epochs, of `batches` steps each."""
        if self.schedule == "constant":
            return self.max_epochs
        return min(self.max_epochs, max(50, math.ceil(self.steps / batches)))

    def rate(self, epoch: int, epochs: int, cooling: int | None) -> float:
        """The learning rate of an epoch; `cooling`: the epoch at which patience ended, if it has."""
        warm = min(1.0, (epoch + 1) / 3)
        along = (epoch if cooling is None else cooling) / epochs
        fall = 0.5 * (1 + math.cos(math.pi * along)) if self.schedule == "cosine" else 1.0
        cool = 1.0 if cooling is None else 0.125 * (1 + math.cos(math.pi * (epoch - cooling) / self.patience))
        assert self.learning_rate is not None
        return self.learning_rate * warm * fall * cool


@dataclass
class History:
    """What happened: the losses of each epoch, where the best was, and from which epoch the rate was let fall.

    `held_out` scores the result, in nats: the mean log-density of the true parameters of held-out simulations
    (`log_prob`), that of their prior (`prior`), the standard error of the difference (`error`), the same gain over the
    prior for as many training simulations (`training`), and how many they are (`n`).

    `emulation` says what emulated simulations did: the mean log-density of the true parameters of `n` held-out
    simulations `without` and `with` training on them, the standard error of the difference (`error`), how many
    `simulations` and how many `emulated` ones the second was trained on, and whether it is `used`.

    `refinement` says what the learned likelihood does: the same mean log-density of draws as they are (`plain`) and
    weighted by it (`refined`), with the standard error of the difference.
    """

    train: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best_epoch: int = -1
    cooling: int | None = None
    seconds: float = 0.0
    stopped: str = ""
    held_out: dict[str, float | int] = field(default_factory=dict)
    emulation: dict[str, float | int] = field(default_factory=dict)
    refinement: dict[str, float | int] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The lowest validation loss."""
        return self.validation[self.best_epoch] if self.best_epoch >= 0 else math.inf

    @property
    def informed(self) -> bool:
        """Whether held-out parameters have a higher density than under their prior, beyond two standard errors."""
        gain = self.held_out["log_prob"] - self.held_out["prior"]
        return gain > 2 * self.held_out["error"]  # not where it is NaN

    @property
    def augmented(self) -> str:
        """What `emulation` says, in a sentence; empty where no simulator was learned."""
        found = self.emulation
        if not found:
            return ""
        what = f"{found['simulations']:,} simulations and {found['emulated']:,} emulated ones"
        return (
            f"{'Trained on' if found['used'] else 'Not trained on'} {what}: the mean log-density of the true "
            f"parameters of {found['n']} held-out simulations is {found['without']:.3f} without these, "
            f"{found['with']:.3f} with them: a difference of {found['with'] - found['without']:+.3f} ± "
            f"{found['error']:.3f}."
        )

    @property
    def score(self) -> str:
        """What `held_out` says, in a sentence."""
        found = self.held_out
        gain = found["log_prob"] - found["prior"]
        return (
            f"The mean log-density of the true parameters of {found['n']} held-out simulations is "
            f"{found['log_prob']:.3f}, under their prior {found['prior']:.3f}: a gain of {gain:.3f} ± "
            f"{found['error']:.3f} nats; for as many training simulations it is {found['training']:.3f}."
        )
