"""The epidemic of `sir.py`, simulated by the workers of a dask cluster.

Here the cluster is this machine; `dask_jobqueue.SLURMCluster`, or the address of a scheduler that is running, would do
as well, and nothing else would change, nor would the result.

    pip install 'cpejax[cluster]'
    python examples/sir_dask.py
"""

import cloudpickle
import jax
import sir
from distributed import Client, LocalCluster

import cpejax as cpe

# Workers elsewhere cannot import a file of this folder: it goes along.
cloudpickle.register_pickle_by_value(sir)

program, observed, data = sir.program, sir.observed, sir.data


def main(simulations=10_000, draws=4_000, workers=2, **options):
    """Simulate on a cluster, train, and print the posterior."""
    local = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
    with local as cluster, Client(cluster) as client:
        sims = cpe.simulate(program, simulations, key=jax.random.key(0), workers=client, timeout=60)
    posterior = cpe.fit(program, sims, key=jax.random.key(1), **options)
    found = posterior.sample(draws, given=data, key=jax.random.key(2)).posterior
    for name in found.data_vars:
        print(f"{name}: {float(found[name].mean()):.2f} ± {float(found[name].std()):.2f}, true {sir.truth[name]}")


if __name__ == "__main__":  # dask's workers import this file
    main()
