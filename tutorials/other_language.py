# %% [markdown]
# # A simulator in another language, on several cores
#
# *You learn: to call a compiled program as a simulator, many rows at a time, on all cores, and to
# survive what can go wrong.*
#
# A gene is switched on and off at random. While it is on, it makes messenger RNA; each molecule decays after some
# time. This *telegraph model* explains why cells with the same genes have very different numbers of molecules
# (Peccoud and Ycart 1995). We count the molecules in 40 cells. How often is the gene switched on, and how much does
# it make in a burst?
#
# ## The program in C
#
# Your simulator may be Fortran, R, Julia, C++ or a binary that nobody dares to touch. All that matters is that it
# takes parameters and gives data. This one is Gillespie's algorithm in C. It reads a line for each row, `seed on off
# make`, and prints a line of 40 numbers.

# %%
import pathlib
import subprocess

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdio.h>

static uint64_t state;
static double uniform(void) {                 /* xorshift */
    state ^= state >> 12; state ^= state << 25; state ^= state >> 27;
    return ((state * 2685821657736338717ULL >> 11) + 0.5) / 9007199254740992.0;
}

int main(void) {
    unsigned long seed; double on, off, make;
    while (scanf("%lu %lf %lf %lf", &seed, &on, &off, &make) == 4) {
        state = 88172645463325252ULL ^ (seed * 6364136223846793005ULL + 1442695040888963407ULL);
        for (int i = 0; i < 20; i++) uniform();
        for (int cell = 0; cell < 40; cell++) {
            double t = 0; int active = uniform() < on / (on + off), n = 0;
            while (1) {                       /* time is in lifetimes of a molecule */
                double flip = active ? off : on, birth = active ? make : 0, all = flip + birth + n;
                t -= log(uniform()) / all;
                if (t > 8) break;
                double u = uniform() * all;
                if (u < flip) active = !active; else if (u < flip + birth) n++; else n--;
            }
            printf("%d ", n);
        }
        printf("\n");
    }
}
"""
pathlib.Path("telegraph.c").write_text(SOURCE)
subprocess.run(["cc", "-O2", "-o", "telegraph", "telegraph.c", "-lm"], check=True)
print(
    subprocess.run(
        "./telegraph",
        input="1 0.5 2.0 40.0\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
)

# %% [markdown]
# ## The simulator in Python
#
# A function that hands rows to the program. Three things make it fast:
#
# * `vectorized=True`: it gets many rows at once, so that the program is started 50 times on each core and not 10,000
#   times;
# * the rows are divided among processes, one for each core. Threads are enough to wait for them;
# * the seed goes in with each row, from the `rng` that cpejax gives. So a run can be repeated, whatever the number of
#   cores.
#
# The order of the cells says nothing, so we sort them. A network then need not learn that.

# %%
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

CORES = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
)


def ask(lines):
    """What the program prints for some lines, `(lines, 40)`."""
    done = subprocess.run(
        "./telegraph",
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"telegraph failed: {done.stderr.strip()}")
    return [line.split() for line in done.stdout.splitlines()]


def telegraph(rng, on, off, make):
    """Molecules in 40 cells, sorted, `(rows, 40)`, for parameters `(rows,)`."""
    seeds = rng.integers(2**31, size=len(on))
    lines = [
        f"{s} {a:.9g} {b:.9g} {c:.9g}"
        for s, a, b, c in zip(seeds, on, off, make, strict=True)
    ]
    parts = [part.tolist() for part in np.array_split(lines, CORES) if len(part)]
    with ThreadPoolExecutor(CORES) as pool:
        answers = [row for part in pool.map(ask, parts) for row in part]
    return np.sort(np.array(answers, float), axis=1)


# %% [markdown]
# ## The model

# %%
import jax
import numpyro.distributions as dist

import cpejax as cpe

prior = {
    "on": dist.LogNormal(0.0, 0.7),
    "off": dist.LogNormal(1.0, 0.7),
    "make": dist.LogNormal(np.log(40.0), 0.5),
}
model = cpe.Model.from_prior(
    prior, telegraph, observed="molecules", host=True, vectorized=True
)

# %% [markdown]
# A long simulation should not be lost when the machine goes down. With `checkpoint=`, what is finished is on disk,
# and the same call resumes from there.

# %%
import time

began = time.perf_counter()
sims = cpe.simulate(model, 10_000, key=jax.random.key(0), checkpoint="parts/")
print(
    f"{sims.n} simulations of 40 cells in {time.perf_counter() - began:.0f} s on {CORES} cores"
)

# %% [markdown]
# ## The posterior

# %%
import arviz_stats

truth = {"on": 0.6, "off": 3.0, "make": 60.0}
cells = telegraph(np.random.default_rng(1), *(np.array([x]) for x in truth.values()))[0]
print("molecules:", cells.astype(int))

post = cpe.fit(model, sims, training=cpe.Training(steps=5_000), key=jax.random.key(1))
draws = post.sample(4_000, given={"molecules": cells}, key=jax.random.key(2))
print(arviz_stats.summary(draws, kind="stats"))
cpe.plot.pair(draws, truth=truth)

# %% [markdown]
# Look at `off` and `make`. Neither is known well, but they lie along a line: what the data know is `make / off`, the
# molecules that one burst makes. A summary by means and standard deviations would hide that.

# %%
burst = (draws.posterior["make"] / draws.posterior["off"]).values
low, median, high = np.quantile(burst, [0.05, 0.5, 0.95])
print(f"molecules in a burst: {median:.0f}, {low:.0f} to {high:.0f} (truth: 20)")

# %% [markdown]
# ## Check

# %%
print(
    cpe.check(post, given={"molecules": cells}, n=500, draws=500, key=jax.random.key(3))
)

# %% [markdown]
# ## What to remember
#
# * Anything that takes numbers and gives numbers is a simulator.
# * Start the program for many rows, not for each; divide the rows among processes.
# * Seeds come from `rng`. A program that seeds itself by the clock cannot be repeated.
# * `checkpoint=` for long simulations; `on_error="nan"` for programs that fail at times ([more](../howto/nan.md)).
