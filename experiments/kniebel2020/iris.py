"""Perceptron and multilayer perceptron on Iris, small enough for every exact answer (claims W1, W2 in part, W5).

Everything is in double precision, at the mode that L-BFGS finds, with one prior for network, Laplace approximations and HMC.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftermap as am
from experiments.framework import Job, Results, Verdict, judged, mean_and_error
from experiments.kniebel2020.settings import Iris

__all__ = ["NETWORKS", "jobs", "pushed_losses", "tables", "verdicts"]

NETWORKS = ("perceptron", "mlp")
STAND_INS = ("diagonal", "kron")
# A stand-in may be wrong by so much: half or twice.
RANGE = (0.5, 2.0)


def jobs(settings: Iris) -> Iterator[Job]:
    """Curvature and posteriors of both networks, seed by seed."""
    for seed in range(settings.seeds):
        yield Job(f"iris/curvature/seed{seed}", partial(_curvature, settings, seed))
        for network in NETWORKS:
            yield Job(f"iris/{network}/seed{seed}", partial(_posteriors, settings, network, seed))


def _data(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """120 flowers to train on and 30 others, features standardised."""
    iris = am.data.builtin("iris")
    assert iris.targets is not None
    x, y = iris.inputs.double(), iris.targets
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:120], order[120:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    return (x[train], y[train]), (x[test], y[test])


def _network(name: str, hidden: int, activation: type[nn.Module], seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + seed)
        if name == "perceptron":
            return nn.Sequential(nn.Linear(4, 3)).double().eval()
        return nn.Sequential(nn.Linear(4, hidden), activation(), nn.Linear(hidden, 3)).double().eval()


def _trained(settings: Iris, name: str, seed: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    (x, y), _ = _data(seed)
    model = _network(name, settings.hidden, activation, seed)
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=settings.steps,
        max_eval=2 * settings.steps,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        energy = F.cross_entropy(model(x), y, reduction="sum") + 0.5 * settings.prior * penalty
        energy.backward()
        return energy

    optimiser.step(closure)
    return model


def _fitted(model: nn.Module, data: Any, structure: str, prior: float) -> am.Laplace:
    return am.Laplace(model, "classification", structure=structure, prior_precision=prior).fit([data])


def _matrix(model: nn.Module, data: Any, structure: str) -> tuple[Tensor, list[slice]]:
    """The curvature of the data, which need not be positive, and the places of the layers in it."""
    likelihood = am.likelihoods.parse_likelihood("classification")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (block,) = am.curvature.fit_curvature(model, [data], likelihood, structure=structure).blocks
    places, start = [], 0
    sizes: dict[str, int] = {}
    for name, shape in block.shapes.items():
        layer = name.rpartition(".")[0]
        sizes[layer] = sizes.get(layer, 0) + torch.Size(shape).numel()
    for size in sizes.values():
        places.append(slice(start, start + size))
        start += size
    return block.to_dense(), places


def _curvature(settings: Iris, seed: int) -> dict[str, Any]:
    """How far the Gauss-Newton matrix is from the Hessian: in the blocks of single layers, and between layers."""
    numbers: dict[str, Any] = {}
    for label, name, activation in (
        ("perceptron", "perceptron", nn.ReLU),
        ("relu", "mlp", nn.ReLU),
        ("tanh", "mlp", nn.Tanh),
    ):
        model = _trained(settings, name, seed, activation)
        data = _data(seed)[0]
        exact, places = _matrix(model, data, "hessian")
        ggn, _ = _matrix(model, data, "full")
        difference = (exact - ggn).abs()
        numbers[f"{label}_blocks"] = max(float(difference[p, p].max() / exact[p, p].abs().max()) for p in places)
        numbers[f"{label}_whole"] = float(difference.max() / exact.abs().max())
        numbers[f"{label}_diagonal"] = float(difference.diagonal().max() / exact.diagonal().abs().max())
    return numbers


def pushed_losses(model: nn.Module, data: tuple[Tensor, Tensor], places: dict[str, Tensor], push: float) -> Tensor:
    """How much the summed loss rises, on average, when single weights are moved by ± push.

    Args:
        model: The network, which is as it was afterwards.
        data: Inputs and labels.
        places: For each parameter the places in it, row-major, that are moved.
        push: How far.
    """
    x, y = data
    rises = []
    with torch.no_grad():
        before = F.cross_entropy(model(x), y, reduction="sum").double()
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            for place in places.get(name, torch.empty(0)).tolist():
                old, rise = flat[place].clone(), 0.0
                for sign in (-1, 1):
                    flat[place] = old + sign * push
                    rise += 0.5 * float(F.cross_entropy(model(x), y, reduction="sum").double() - before)
                flat[place] = old
                rises.append(rise)
    return torch.tensor(rises, dtype=torch.float64)


def _flat(values: Any) -> Tensor:
    return torch.cat([v.reshape(-1) for v in values.values()])


def _spread(samples: Tensor) -> Tensor:
    """The variance of the probabilities over samples [S, N, C], summed over classes [N]."""
    return samples.double().var(0).sum(-1)


def _posteriors(settings: Iris, network: str, seed: int) -> dict[str, Any]:
    """Marginal standard deviations and predictive variances of every structure and of HMC."""
    train, (x, y) = _data(seed)
    model = _trained(settings, network, seed)
    numbers: dict[str, Any] = {"weights": sum(p.numel() for p in model.parameters())}
    deviations, spreads = {}, {}
    for structure in ("full", *STAND_INS):
        la = _fitted(model, train, structure, settings.prior)
        deviations[structure] = _flat(la.posterior.marginal_variance()).sqrt()
        generator = torch.Generator().manual_seed(seed)
        prediction = la.predict(x, link="mc", samples=settings.samples, generator=generator)
        assert prediction.samples is not None
        spreads[structure] = _spread(prediction.samples)
        numbers[f"nll_{structure}"] = -float(prediction.log_prob(y).mean())
        if structure == "full":
            curvature = la.factors.blocks[0].to_dense().diagonal()
            places = {n: torch.arange(p.numel()) for n, p in model.named_parameters()}
            rises = pushed_losses(model, train, places, settings.push)
            numbers["rank_variance"] = am.metrics.rank_correlation(curvature, deviations[structure])
            numbers["rank_loss"] = am.metrics.rank_correlation(curvature, rises)
    hmc = am.HMC(
        model,
        "classification",
        prior_precision=settings.prior,
        kernel="hmc",
        chains=settings.chains,
        warmup=settings.warmup,
        draws=settings.draws,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # R-hat is among the numbers
        hmc.fit([train], generator=torch.Generator().manual_seed(seed), progress=False)
    prediction = hmc.predict(x)
    assert prediction.samples is not None
    deviations["hmc"], spreads["hmc"] = hmc.draw_table.flatten(0, 1).std(0), _spread(prediction.samples)
    numbers |= {"r_hat": float(hmc.diagnostics.output_r_hat.max()), "nll_hmc": -float(prediction.log_prob(y).mean())}
    for name in STAND_INS:
        for truth in ("full", "hmc"):
            ratio = deviations[name] / deviations[truth]
            numbers[f"sd_{name}_{truth}"] = float(ratio.median())
            numbers[f"rank_sd_{name}_{truth}"] = am.metrics.rank_correlation(deviations[name], deviations[truth])
            numbers[f"variance_{name}_{truth}"] = float(spreads[name].mean() / spreads[truth].mean())
    numbers["sd_full_hmc"] = float((deviations["full"] / deviations["hmc"]).median())
    numbers["variance_full_hmc"] = float(spreads["full"].mean() / spreads["hmc"].mean())
    numbers["curves"] = {name: values.tolist() for name, values in deviations.items()}
    return numbers


# What came out


def verdicts(results: Results) -> list[Verdict]:
    """W1 and W5; W2 needs the images, too."""
    count = results.settings.iris.seeds
    return [
        *judged(results, {"iris/curvature/*": count}, ["W1"], lambda r: [_equal(r)]),
        *judged(results, {f"iris/{n}/*": count for n in NETWORKS}, ["W5"], lambda r: [_stand_in(r)]),
    ]


def _equal(results: Results) -> Verdict:
    worst = {
        f"{label}_{part}": max(results.numbers("iris/curvature/*", f"{label}_{part}"))
        for label in ("perceptron", "relu", "tanh")
        for part in ("blocks", "whole")
    }
    whole = min(results.numbers("iris/curvature/*", "relu_whole"))
    return Verdict.of(
        "W1",
        [worst["relu_blocks"] <= 1e-10, whole <= 1e-10],
        "largest difference relative to the largest entry: ReLU network "
        f"{worst['relu_blocks']:.1g} in blocks of single layers, {whole:.2g} or more in the whole matrix; perceptron {worst['perceptron_whole']:.1g}; "
        f"tanh network {worst['tanh_blocks']:.2g} already in the blocks",
        "equal in the block of each layer, where the network is linear piece by piece, but not between layers: products of weights of "
        "two layers bend the output, with ReLU, too. The diagonal that the thesis uses lies inside the blocks, so it is right there",
        results.settings.iris.seeds,
    )


def _inside(value: float) -> bool:
    return RANGE[0] <= value <= RANGE[1]


def _stand_in(results: Results) -> Verdict:
    conditions, texts, outside = [], [], []
    for network in NETWORKS:
        for name in STAND_INS:
            words = []
            for truth in ("full", "hmc"):
                for kind in ("sd", "variance"):
                    found = results.numbers(f"iris/{network}/*", f"{kind}_{name}_{truth}")
                    mean = sum(found) / len(found)
                    conditions.append(_inside(mean))
                    words.append(f"{mean:.2f}")
                    if not conditions[-1]:
                        outside.append(f"{network}, {name}: {kind} {mean:.2f} of {truth}")
            texts.append(f"{network} {name} {words[0]}, {words[1]} (HMC {words[2]}, {words[3]})")
    return Verdict.of(
        "W5",
        conditions,
        "median ratio of marginal sds and ratio of mean predictive variances to the full matrix (to HMC): "
        + "; ".join(texts),
        "outside half to twice: " + "; ".join(outside),
        results.settings.iris.seeds,
    )


def tables(results: Results) -> str:
    """Iris: every ratio, with R-hat."""
    if not results.among("iris/mlp/*"):
        return ""
    lines = ["### Iris (W5): ratios to the full matrix and to HMC, mean ± standard error over seeds", ""]
    lines += [
        "| network | posterior | sd / full | sd / HMC | predictive variance / full | / HMC | rank of sds with full, HMC |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for network in NETWORKS:
        for name in ("full", *STAND_INS):

            def cell(key: str, network: str = network) -> str:
                return mean_and_error(results.numbers(f"iris/{network}/*", key), 2)

            ranks = f"{cell(f'rank_sd_{name}_full')}, {cell(f'rank_sd_{name}_hmc')}"
            row = [cell(f"{k}_{name}_{t}") for k in ("sd", "variance") for t in ("full", "hmc")]
            lines.append(f"| {network} | {name} | {row[0]} | {row[1]} | {row[2]} | {row[3]} | {ranks} |")
    worst = max(results.numbers("iris/*/*", "r_hat"))
    lines += ["", f"Largest R̂ of an output under HMC: {worst:.3f}."]
    return "\n".join(lines)
