"""Draws by a method of the package `sbi`: `python peer_sbi.py IN.npz OUT.npz --method NPE --draws 10000 --seed 0`.

Runs in an environment of its own, with `sbi` and without `cpejax`. IN has `theta` (n, d), `x` (n, m), `observations`
(k, m), and the prior, independent in its scalars: `families` (d,), of `uniform`, `normal` and `lognormal`, with their
two parameters `first` and `second` (d,). OUT gets `draws` (k, draws, d). The last line that is printed is JSON:
weights, epochs, seconds and versions. All options are sbi's defaults. `sbi` and torch are imported where they are used,
so that tools may import this module without them.
"""

import argparse
import json
import resource
import time
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np


def prior_of(families: list[str], first: Any, second: Any) -> Any:
    """The prior as sbi takes it."""
    from sbi.utils import BoxUniform, MultipleIndependent
    from torch.distributions import LogNormal, Normal, Uniform

    if set(families) == {"uniform"}:
        return BoxUniform(first, second)
    known = {"uniform": Uniform, "normal": Normal, "lognormal": LogNormal}
    each = [known[name](a[None], b[None]) for name, a, b in zip(families, first, second, strict=True)]
    return MultipleIndependent(each) if len(each) > 1 else each[0]


def main() -> None:
    """Train, draw, and say what it took."""
    import torch
    from sbi import inference

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulations")
    parser.add_argument("out")
    parser.add_argument("--method", choices=("NPE", "NLE", "FMPE", "NPSE"), required=True)
    parser.add_argument("--draws", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, help="the maximum; by default sbi's")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(args.seed)
    with np.load(args.simulations, allow_pickle=False) as file:
        theta, x, observations, first, second = (
            torch.as_tensor(file[k], dtype=torch.float32) for k in ("theta", "x", "observations", "first", "second")
        )
        families = [str(name) for name in file["families"]]
    began = time.perf_counter()
    trainer = getattr(inference, args.method)(prior_of(families, first, second), show_progress_bars=False)
    limit = {} if args.epochs is None else {"max_num_epochs": args.epochs - 1}  # sbi counts them from 0
    net = trainer.append_simulations(theta, x).train(**limit)
    seconds_fit = time.perf_counter() - began
    posterior = trainer.build_posterior()
    draws, seconds = [], []
    for observation in observations:
        began = time.perf_counter()
        draws.append(posterior.sample((args.draws,), x=observation, show_progress_bars=False).numpy())
        seconds.append(time.perf_counter() - began)
    np.savez(args.out, draws=np.stack(draws))
    result = {
        "weights": sum(weight.numel() for weight in net.parameters()),
        "epochs": int(trainer.summary["epochs_trained"][-1]),
        "seconds_fit": seconds_fit,
        "seconds_draw": seconds,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "versions": {name: version(name) for name in ("sbi", "torch", "numpy")},
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
