"""Pupils in schools in districts: nested plates.

Nothing couples two schools of a district once the district is drawn, nor two districts, so the posterior program keeps
all plates as templates.

    cpejax graph examples/nested.py
"""

import numpyro
import numpyro.distributions as dist

import cpejax as cpe

DISTRICTS, SCHOOLS, PUPILS = 5, 10, 20

observed = ["score"]


def program():
    """Scores of pupils: a mean, plus effects of district and school, plus noise."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    between = numpyro.sample("tau_district", dist.HalfNormal(1.0))
    within = numpyro.sample("tau_school", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("districts", DISTRICTS, dim=-3):
        district = numpyro.sample("district", dist.Normal(mu, between))
        with numpyro.plate("schools", SCHOOLS, dim=-2):
            school = numpyro.sample("school", dist.Normal(district, within))
            with numpyro.plate("pupils", PUPILS, dim=-1):
                numpyro.sample("score", dist.Normal(school, sigma))


if __name__ == "__main__":
    graph = cpe.Model(program, observed=observed).graph
    print(graph)
    print(cpe.invert(graph))
