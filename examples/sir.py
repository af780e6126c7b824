"""An epidemic whose simulator is plain NumPy.

Susceptible people are infected, and recover (SIR). Of each day's new infections only a share is reported, with more
scatter than a Poisson distribution has. JAX cannot read the simulator, so it is called on the host (`host=True`).

    cpejax infer examples/sir.py --out sir/ --simulations 30000
"""

import numpy as np
import numpyro
import numpyro.distributions as dist

import cpejax as cpe

PEOPLE, INFECTED, DAYS, EVERY = 10_000, 10, 60, 3
SCATTER = 10.0  # of the reports: variance = mean + mean² / SCATTER

observed = ["cases"]
truth = {"r0": 2.6, "duration": 6.0, "reported": 0.3}
# Reported cases in 20 periods of three days, simulated with these parameters.
data = {"cases": [12, 16, 19, 22, 56, 186, 283, 304, 552, 579, 263, 197, 97, 105, 38, 15, 25, 13, 4, 2]}


def epidemic(rng, r0, duration, reported):
    """Reported cases in each period of three days: `r0` people are infected by each in `duration` days."""
    healthy, ill = PEOPLE - INFECTED, float(INFECTED)
    new = np.zeros(DAYS)
    for day in range(DAYS):
        new[day] = healthy * -np.expm1(-r0 / duration * ill / PEOPLE)
        healthy, ill = healthy - new[day], ill + new[day] - ill * -np.expm1(-1 / duration)
    mean = reported * new.reshape(-1, EVERY).sum(1)
    return rng.poisson(rng.gamma(SCATTER, mean / SCATTER))


def program():
    """Prior and simulator."""
    r0 = numpyro.sample("r0", dist.LogNormal(np.log(2.5), 0.4))
    duration = numpyro.sample("duration", dist.LogNormal(np.log(7.0), 0.3))
    reported = numpyro.sample("reported", dist.Beta(2.0, 4.0))
    numpyro.sample("cases", cpe.Simulator(epidemic, r0, duration, reported, event_shape=(DAYS // EVERY,), host=True))
