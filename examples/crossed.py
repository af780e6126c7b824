"""Three raters judge the same five items: crossed plates.

Every rating depends on a rater and on an item, so given the ratings raters depend on one another through the items. The
posterior program draws the raters one by one, after that the items as a template: one plate is unrolled.

    cpejax graph examples/crossed.py
"""

import numpyro
import numpyro.distributions as dist

import cpejax as cpe

RATERS, ITEMS = 3, 5

observed = ["rating"]


def program():
    """Ratings: the quality of the item, plus the severity of the rater, plus noise."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("raters", RATERS, dim=-2):
        severity = numpyro.sample("severity", dist.Normal(0.0, 1.0))
    with numpyro.plate("items", ITEMS, dim=-1):
        quality = numpyro.sample("quality", dist.Normal(0.0, spread))
    with numpyro.plate("raters", RATERS, dim=-2), numpyro.plate("items", ITEMS, dim=-1):
        numpyro.sample("rating", dist.Normal(quality + severity, sigma))


if __name__ == "__main__":
    graph = cpe.Model(program, observed=observed).graph
    print(graph)
    print(cpe.invert(graph))
