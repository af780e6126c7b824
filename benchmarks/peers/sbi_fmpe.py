"""How long FMPE of the package `sbi` takes, with the network that the paper gives FMPE (appendix C).

    .venv-peers/bin/python benchmarks/peers/sbi_fmpe.py simulations.npz

Runs in the environment that `make peers` builds, and writes one line of JSON. `benchmarks/peer.py` writes the
simulations (`theta`, `x`, and `observations` that are not among them; the prior is uniform from `low` to `high`) and
reads the line. With `--turns` each epoch waits for a line, and is answered by one with its seconds; when there are no
more lines, it continues without them. sbi writes its training log to the working directory.

An epoch is one of sbi's own training loop. Draws and densities are by sbi's defaults: Dormand-Prince 5(4) with its
tolerances, rejection of draws outside the prior. The first observation is for warming up.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from sbi.inference import FMPE
from sbi.neural_nets import posterior_flow_nn
from sbi.utils import BoxUniform
from sbi.utils.vector_field_utils import VectorFieldNet
from torch import Tensor, nn


def mlp(*sizes: int) -> nn.Sequential:
    """Linear maps with a SiLU after each."""
    return nn.Sequential(*(f for a, b in pairwise(sizes) for f in (nn.Linear(a, b), nn.SiLU())))


class PaperNet(VectorFieldNet):
    """Parameters, data and time embedded by two layers each, then two layers of 256 on all three."""

    evaluations = 0  # of the class: sbi works with copies of the network

    def __init__(self, parameters: int, data: int):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(32))
        self.embed_theta = mlp(parameters, 128, 128)
        self.embed_x = mlp(data, 128, 128)
        self.embed_time = mlp(64, 64, 64)
        self.joint = nn.Sequential(mlp(128 + 128 + 64, 256, 256), nn.Linear(256, parameters))

    def forward(self, theta: Tensor, x: Tensor, t: Tensor) -> Tensor:
        PaperNet.evaluations += 1
        angles = 2 * torch.pi * t[:, None] * self.frequencies
        time_features = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
        return self.joint(torch.cat([self.embed_theta(theta), self.embed_x(x), self.embed_time(time_features)], dim=-1))


def wait(word: object) -> None:
    """Say something, and wait until it is answered."""
    print(word, flush=True)
    sys.stdin.readline()


class TimedFMPE(FMPE):
    """FMPE that notes the training part of each epoch; sbi itself notes the whole, with validation."""

    turns = False

    def _train_epoch(self, *args: Any, **kwargs: Any) -> float:
        began = time.perf_counter()
        loss = super()._train_epoch(*args, **kwargs)
        self.training_seconds = [*getattr(self, "training_seconds", []), time.perf_counter() - began]
        return loss

    def _maybe_show_progress(self, *_: Any) -> None:
        """Called at the end of an epoch, which is not timed any more."""
        if self.turns:
            wait(self._summary["epoch_durations_sec"][-1])


class Call(NamedTuple):
    """One call: what it returned, how long it took, and how often it evaluated the network."""

    result: Tensor
    seconds: float
    evaluations: int


def timed(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Call:
    before, began = PaperNet.evaluations, time.perf_counter()
    result = function(*args, **kwargs)
    return Call(result, time.perf_counter() - began, PaperNet.evaluations - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulations", help="an .npz with theta, x, observations, low, high")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument(
        "--epochs", type=int, default=60, help="the steps of the solver grow as the field becomes sharper"
    )
    parser.add_argument("--warm-up", type=int, default=3, help="epochs that are not timed")
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--density", action=argparse.BooleanOptionalAction, default=True, help="time densities too")
    parser.add_argument("--turns", action="store_true", help="wait for a line before each epoch")
    parser.add_argument("--save", help="an .npy for the draws, (observations, draws, parameters)")
    args = parser.parse_args()

    torch.manual_seed(0)
    with np.load(args.simulations) as file:
        theta, x, observations = (torch.as_tensor(file[k], dtype=torch.float32) for k in ("theta", "x", "observations"))
        prior = BoxUniform(torch.as_tensor(file["low"]), torch.as_tensor(file["high"]))
    net = PaperNet(theta.shape[1], x.shape[1])
    trainer = TimedFMPE(prior, vf_estimator=posterior_flow_nn(model=net), show_progress_bars=False)
    trainer.append_simulations(theta, x)
    # sbi counts the epochs from 0 to max_num_epochs, both included, and warns that they are few.
    warnings.filterwarnings("ignore", "Maximum number of epochs")
    if args.turns:
        trainer.turns = True
        wait("ready")
    trainer.train(args.batch, max_num_epochs=args.epochs - 1, stop_after_epochs=args.epochs)
    whole, training = trainer.summary["epoch_durations_sec"][args.warm_up :], trainer.training_seconds[args.warm_up :]

    posterior = trainer.build_posterior()
    first, *rest = observations
    posterior.log_prob(posterior.sample((100,), x=first, show_progress_bars=False), x=first)  # warm-up
    samples = [timed(posterior.sample, (args.draws,), x=x_o, show_progress_bars=False) for x_o in rest]
    if args.save:
        np.save(args.save, np.stack([call.result.numpy() for call in samples]))
    pairs = zip(rest, samples, strict=True) if args.density else []
    densities = [timed(posterior.log_prob, call.result, x=x_o) for x_o, call in pairs]
    result = {
        "versions": {name: version(name) for name in ("sbi", "torch", "zuko", "numpy")}
        | {"python": sys.version.split()[0]},
        "threads": torch.get_num_threads(),
        "weights": sum(p.numel() for p in net.parameters()),
        "training_rows": len(trainer.train_indices),
        "batch": args.batch,
        "epochs": len(trainer.training_seconds),
        "epoch_seconds": statistics.median(whole),
        "epoch_seconds_training_alone": statistics.median(training),
        "draws": args.draws,
        "sample_seconds": statistics.median(call.seconds for call in samples),
        "sample_evaluations": statistics.median(call.evaluations for call in samples),
    }
    if densities:
        result["log_prob_seconds"] = statistics.median(call.seconds for call in densities)
        result["log_prob_evaluations"] = statistics.median(call.evaluations for call in densities)
    json.dump(result, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
