"""Section 5.1 and appendix E: twenty data of a cubic, a network of 78 weights, and the posterior that HMC finds (claims R1 to R5).

The paper leaves open the transfer function (here ReLU), the prior (here N(0, 10) and N(0, 1) for every weight, the same for the network,
the Laplace approximations and HMC), the scale of the data (here raw) and how the network was trained (here by Adam from several starts, the
best of which is brought to its mode by L-BFGS). The noise is known: σ = 3.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.analysis.figures import CATEGORIES, finish, save_svg
from aftermap.baselines import Particles
from aftermap.likelihoods import Gaussian
from experiments.framework import NOT_RUN, Job, Paired, Results, Verdict, judged, mean_and_error, paired, work_folder
from experiments.ritter2018.settings import Toy
from experiments.ritter2018.tempering import Perceptron, sample

__all__ = ["METHODS", "figures", "jobs", "tables", "verdicts"]

NOISE = 3.0
GRID = torch.linspace(-6, 6, 61, dtype=torch.float64)[:, None]
METHODS: dict[str, dict[str, str]] = {
    "kron": {"structure": "kron", "damping": "factored"},
    "kron_exact_prior": {"structure": "kron"},
    "diagonal": {"structure": "diagonal", "curvature": "sampled"},
    "full": {"structure": "full", "curvature": "sampled"},
}
NAMES = {
    "kron": "Kronecker-factored",
    "kron_exact_prior": "Kronecker with the exact prior",
    "diagonal": "diagonal",
    "full": "full",
    "linearised_untuned": "linearised, untuned",
    "hmc": "HMC",
}
PAPER = ("kron", "diagonal", "full")
Data = tuple[Tensor, Tensor]


def jobs(settings: Toy) -> Iterator[Job]:
    """The Laplace approximations of every seed, and the chains of the first ones."""
    for prior in settings.priors:
        for seed in range(settings.seeds_under(prior)):
            yield Job(f"toy/laplace_{prior}/seed{seed}", partial(_laplace, settings, prior, seed))
        for seed in range(settings.hmc_seeds):
            yield Job(f"toy/hmc_{prior}/seed{seed}", partial(_hmc, settings, prior, seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _data(seed: int) -> tuple[Data, Data]:
    """Twenty data to train on and twenty to tune on."""
    examples = am.data.toy("cubic", 40, generator=_generator(seed))
    assert examples.targets is not None
    x, y = examples.inputs.double(), examples.targets.double()
    return (x[:20], y[:20]), (x[20:], y[20:])


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1)).double().eval()


def _energy(outputs: Tensor, y: Tensor, prior: float, parameters: Any) -> Tensor:
    penalty = sum(p.square().sum() for p in parameters)
    return (outputs - y).square().sum() / (2 * NOISE**2) + 0.5 * prior * penalty


def _trained(settings: Toy, prior: float, seed: int) -> nn.Sequential:
    """The network at the best mode that was found; kept, since two jobs need it."""
    network, file = _network(), work_folder("toy") / f"prior{prior}_seed{seed}.pt"
    if file.is_file():
        network.load_state_dict(torch.load(file, weights_only=True))
        return network
    (x, y), _ = _data(seed)
    with torch.random.fork_rng():
        torch.manual_seed(1000 + seed)
        starts = [_network() for _ in range(settings.restarts)]
    stacked, _ = torch.func.stack_module_state(starts)
    energies = torch.func.vmap(lambda p: _energy(torch.func.functional_call(network, p, x), y, prior, p.values()))
    optimiser = torch.optim.Adam(stacked.values(), lr=5e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.1 ** (1 / settings.steps))
    for _ in range(settings.steps):
        optimiser.zero_grad()
        energies(stacked).sum().backward()
        optimiser.step()
        schedule.step()
    best = int(energies(stacked).argmin())
    network.load_state_dict({name: value[best].detach() for name, value in stacked.items()})
    polish = torch.optim.LBFGS(network.parameters(), max_iter=500, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        polish.zero_grad()
        energy = _energy(network(x), y, prior, network.parameters())
        energy.backward()
        return energy

    polish.step(closure)
    torch.save(network.state_dict(), file)
    return network


def _measured(mean: Tensor, deviation: Tensor, log_prob: Tensor) -> dict[str, Any]:
    """Numbers at the grid, at the twenty data and at the validation data, which follow one another."""
    inside = GRID[:, 0].abs() <= 4
    truth = GRID[:, 0] ** 3
    on_grid = mean[: len(GRID)]
    return {
        "validation": float(log_prob.mean()),
        "rmse": float((on_grid - truth)[inside].square().mean().sqrt()),
        "mean_deviation": float(deviation[: len(GRID)].mean()),
        "curves": {
            "mean": on_grid.tolist(),
            "deviation": deviation[: len(GRID)].tolist(),
            "data": deviation[len(GRID) : len(GRID) + 20].tolist(),
        },
    }


def _predicted(la: am.Laplace, points: Tensor, targets: Tensor, samples: int, seed: int, kind: str) -> dict[str, Any]:
    p = la.predict(points, kind=kind, samples=samples, generator=_generator(seed))
    at = p[-20:].log_prob(targets)
    return _measured(p.mean[:, 0], p.epistemic[:, 0].sqrt(), at)


def _made(network: nn.Module, data: Data, method: str, prior: float, seed: int, scale: float = 1.0) -> am.Laplace:
    options = {"prior_precision": prior, "data_scale": scale, **METHODS[method]}
    return am.Laplace(network, Gaussian(NOISE), **options).fit([data], generator=_generator(seed), progress=False)


def _width(la: am.Laplace) -> float:
    """The mean log standard deviation of a weight."""
    return float(torch.cat([v.flatten() for v in la.posterior.marginal_variance().values()]).log().mean() / 2)


def _laplace(settings: Toy, prior: float, seed: int) -> dict[str, Any]:
    train, held_out = _data(seed)
    network = _trained(settings, prior, seed)
    points = torch.cat([GRID, train[0], held_out[0]])
    found: dict[str, Any] = {"curves": {"x": train[0][:, 0].tolist(), "y": train[1][:, 0].tolist()}}
    with torch.no_grad():
        outputs = network(GRID)[:, 0]
        found["network_rmse"] = float((outputs - GRID[:, 0] ** 3)[GRID[:, 0].abs() <= 4].square().mean().sqrt())
        found["curves"]["network"] = outputs.tolist()
    exact = am.Laplace(network, Gaussian(NOISE), structure="full", curvature="exact", prior_precision=prior)
    exact.fit([train], progress=False)
    found["ggn_rank"] = int(torch.linalg.matrix_rank(exact.posterior.to_dense() - prior * torch.eye(78).double()))
    found["linearised_untuned"] = _predicted(exact, points, held_out[1], settings.samples, seed, "linearised")
    found["parameters"] = sum(p.numel() for p in network.parameters())
    for method in METHODS:
        la = _made(network, train, method, prior, seed)
        found[f"{method}_untuned"] = _predicted(la, points, held_out[1], settings.samples, seed, "sampling")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", am.errors.StatisticalWarning)  # The edge of the grid is reported below.
            la.tune(
                [held_out],
                method="grid",
                kind="sampling",
                noise=False,
                samples=settings.tuning_samples,
                precisions=settings.ratios,
                scales=settings.scales,
            )
        result = la.tuning
        assert result is not None
        found[method] = {
            **_predicted(la, points, held_out[1], settings.samples, seed, "sampling"),
            "scale": la.data_scale,
            "precision": float(result.precision),
            "width": _width(la),
        }
    for base in ("kron", "kron_exact_prior"):
        for other in ("diagonal", "full"):  # The pair of the other, in the same Kronecker posterior.
            scale, precision = found[other]["scale"], found[other]["precision"]
            found[f"width_of_{base}_with_{other}"] = _width(_made(network, train, base, precision, seed, scale))
    for key, value in found.items():  # Curves of all methods go to one place, which results.json has with four digits.
        if key != "curves" and isinstance(value, dict):
            found["curves"][key] = value.pop("curves")
    return found


def _split_r_hat(draws: Tensor) -> float:
    """The largest split R-hat of the outputs [chains, draws, points]."""
    half = draws.shape[1] // 2
    parts = torch.cat([draws[:, :half], draws[:, half : 2 * half]])
    within = parts.var(1).mean(0)
    between = parts.mean(1).var(0)
    return float(((half - 1) / half + between / within).sqrt().max())


def _hmc(settings: Toy, prior: float, seed: int) -> dict[str, Any]:
    """Four chains with replica exchange, which start at networks before any training."""
    (x, y), held_out = _data(seed)
    network, potential = _network(), Perceptron(x, y, NOISE, 7)
    with torch.random.fork_rng():
        torch.manual_seed(2000 + seed)
        starts = [potential.flat(list(_network().parameters())) for _ in range(4 * settings.temperatures)]
    found = sample(
        potential,
        np.stack(starts).reshape(4, settings.temperatures, -1),
        precision=prior,
        hottest=settings.hottest,
        warmup=settings.warmup,
        draws=settings.draws,
        thin=settings.thin,
        leapfrogs=settings.leapfrogs,
        seed=seed,
    )
    layers = [torch.from_numpy(part).double() for part in potential.layers(np.concatenate(found.draws))]
    names = [name.removesuffix(".weight") for name, _ in network.named_parameters() if name.endswith(".weight")]
    weights = []
    for row in zip(*layers, strict=True):
        pairs = zip(names, row, strict=True)
        weights.append(
            {k: v for n, part in pairs for k, v in ((f"{n}.weight", part[:, :-1]), (f"{n}.bias", part[:, -1]))}
        )
    points = torch.cat([GRID, x, held_out[0]])
    p = Particles(network, weights, Gaussian(NOISE)).predict(points)
    assert p.samples is not None
    outputs = p.samples[..., 0].reshape(4, settings.draws, -1)
    near = torch.cat([GRID[:, 0].abs() <= 4, torch.ones(40, dtype=torch.bool)])
    return {
        **_measured(p.mean[:, 0], p.epistemic[:, 0].sqrt(), p[-20:].log_prob(held_out[1])),
        "r_hat": _split_r_hat(outputs[..., near]),
        "r_hat_far": _split_r_hat(outputs[..., ~near]),
        "acceptance": float(found.acceptance.min()),
        "exchanges": float(found.exchanges.min()),
        "temperatures": found.temperatures.tolist(),
        "step_size": float(found.step_sizes[0]),
    }


# Verdicts


def verdicts(results: Results) -> list[Verdict]:
    """R1 to R5, under the first prior."""
    return _under(results, results.settings.toy.priors[0])


def tables(results: Results) -> str:
    """What comes out under the other priors."""
    lines = []
    for prior in results.settings.toy.priors[1:]:
        found = [v for v in _under(results, prior) if v.verdict != NOT_RUN]
        if not found:
            continue
        lines += [
            f"The toy under the prior N(0, {1 / prior:g}) instead of N(0, 10):",
            "",
            "| | ours | verdict |",
            "|---|---|---|",
        ]
        lines += [
            f"| {v.id} | {v.ours} | {v.verdict}".replace("|x|", "\\|x\\|") + (f": {v.reason} |" if v.reason else " |")
            for v in found
        ]
    return "\n".join(lines)


def _under(results: Results, prior: float) -> list[Verdict]:
    toy: Toy = results.settings.toy
    values = {key.replace(f"_{prior}/", "/"): value for key, value in results.values.items() if f"_{prior}/" in key}
    own = Results(values, results.settings)
    laplace = {"toy/laplace/*": toy.seeds_under(prior)}
    both = {"toy/hmc/*": toy.hmc_seeds, **laplace}
    return [
        *judged(own, both, ("R1", "R2"), lambda r: [_agreement(r), _growth(r)]),
        *judged(own, laplace, ("R3", "R4", "R5"), lambda r: [_regularisation(r), _untuned(r), _rank(r)]),
    ]


def _pairs(results: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Laplace and HMC of the same seeds."""
    return [
        (results.values[key.replace("hmc", "laplace")], value)
        for key, value in sorted(results.among("toy/hmc/*").items())
    ]


def _log_ratios(results: Results, method: str) -> Tensor:
    """Log ratio of standard deviations to HMC's [seeds, grid]."""
    rows = [
        [math.log(a / b) for a, b in zip(la["curves"][method]["deviation"], hmc["curves"]["deviation"], strict=True)]
        for la, hmc in _pairs(results)
    ]
    return torch.tensor(rows)


def _chains(results: Results) -> str:
    worst, far = (max(results.numbers("toy/hmc/*", name)) for name in ("r_hat", "r_hat_far"))
    said = f"R̂ of HMC's outputs at most {worst:.3f} for |x| ≤ 4, {far:.3f} beyond"
    return said + ("" if max(worst, far) < 1.01 else "; above the wanted 1.01")


def _widths(results: Results) -> str:
    """How wide the tuned posteriors are, seed by seed: the likelihood of twenty validation data decides it."""

    def row(values: list[float]) -> str:
        return ", ".join(f"{v:.1f}" for v in values)

    found = [f"{NAMES[m]} {row([la[m]['mean_deviation'] for la, _ in _pairs(results)])}" for m in PAPER]
    hmc = row([hmc["mean_deviation"] for _, hmc in _pairs(results)])
    return f"the mean standard deviation differs between seeds, as twenty validation data happen to decide: {'; '.join(found)}; HMC's is {hmc}"


def _agreement(results: Results) -> Verdict:
    inside = GRID[:, 0].abs() <= 4
    conditions, words, failed = [], [], []
    for method in (*PAPER, "linearised_untuned"):
        mean = _log_ratios(results, method)[:, inside].mean(0).exp()
        gap = [la[method]["validation"] - hmc["validation"] for la, hmc in _pairs(results)]
        held = [bool(mean.min() >= 0.5 and mean.max() <= 3), abs(sum(gap) / len(gap)) <= 0.35]
        if method in PAPER:
            conditions += held
            parts = ("standard deviation", "likelihood")
            failed += [f"{what} of {NAMES[method]}" for what, ok in zip(parts, held, strict=True) if not ok]
        words.append(
            f"{NAMES[method]}: ratio {float(mean.min()):.2f} to {float(mean.max()):.2f}, log-likelihood {mean_and_error(gap, 2)} above HMC's"
        )
    words.append(_chains(results))
    reason = f"outside: {', '.join(failed)}; {_widths(results)}"
    return Verdict.of("R1", conditions, "; ".join(words), reason, len(_pairs(results)))


def _of(values: list[float]) -> Paired:
    return paired(values, [0.0] * len(values))


def _growth(results: Results) -> Verdict:
    conditions, words, failed = [], [], []
    for method in (*PAPER, "linearised_untuned"):
        near = [
            sum(math.log(a / b) for a, b in zip(la["curves"][method]["data"], hmc["curves"]["data"], strict=True)) / 20
            for la, hmc in _pairs(results)
        ]
        ratios = _log_ratios(results, method)
        far = ((ratios[:, 0] + ratios[:, -1]) / 2).tolist()
        held = [_of(near).higher, _of(far).lower]
        if method in PAPER:
            conditions += held
            parts = ("wider on the data", "narrower far away")
            failed += [f"{NAMES[method]} {what}" for what, ok in zip(parts, held, strict=True) if not ok]
        words.append(
            f"{NAMES[method]}: ratio {math.exp(_of(near).mean):.2f} on the data, {math.exp(_of(far).mean):.2f} at |x| = 6"
        )
    reason = f"not by more than two standard errors of the log ratio: {', '.join(failed)}; see R1"
    return Verdict.of("R2", conditions, "; ".join(words), reason, len(_pairs(results)))


def _regularisation(results: Results) -> Verdict:
    rows = [value for _, value in sorted(results.among("toy/laplace/*").items())]
    conditions, words = [], []
    for base, name in (("kron", "equation 9"), ("kron_exact_prior", "exact prior")):
        shares = []
        for other in ("diagonal", "full"):
            narrower = [row[f"width_of_{base}_with_{other}"] < row[base]["width"] - 1e-9 for row in rows]
            share = sum(narrower) / len(narrower)
            conditions.append(share >= 0.8)
            shares.append(f"{NAMES[other]} {share:.0%}")
        words.append(f"{name}: narrower in {', '.join(shares)} of seeds")
    spread = _middle(
        [max(r[m]["validation"] for m in METHODS) - min(r[m]["validation"] for m in METHODS) for r in rows]
    )
    still = sum(all(r[m]["mean_deviation"] < 0.2 for m in METHODS) for r in rows)
    reason = (
        f"twenty validation data decide little: the tuned likelihoods of the four differ by {spread:.2f} nats in the median, and in {still} "
        "seed(s) all are best without uncertainty; with the exact prior the Kronecker posterior is wider than the diagonal one to begin with (R4)"
    )
    return Verdict.of("R3", conditions, "; ".join(words), reason, len(rows))


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _untuned(results: Results) -> Verdict:
    rows = [value for _, value in sorted(results.among("toy/laplace/*").items())]
    sizes = {m: [row[f"{m}_untuned"]["mean_deviation"] for row in rows] for m in METHODS}
    ratio = [row["full_untuned"]["rmse"] / row["network_rmse"] for row in rows]
    conditions = [
        paired(sizes["full"], sizes["diagonal"]).higher,
        paired(sizes["diagonal"], sizes["kron"]).higher,
        sum(ratio) / len(ratio) > 3,
    ]
    order = ("full", "kron_exact_prior", "diagonal", "kron")
    words = ", ".join(f"{NAMES[m]} {mean_and_error(sizes[m], 1)}" for m in order)
    ours = f"mean standard deviation: {words}; RMSE of the full Monte Carlo mean {mean_and_error(ratio, 1)} times the network's"
    return Verdict.of("R4", conditions, ours, "see the numbers", len(rows))


def _rank(results: Results) -> Verdict:
    ranks = results.numbers("toy/laplace/*", "ggn_rank")
    ours = f"rank {min(ranks):.0f} to {max(ranks):.0f} of {results.numbers('toy/laplace/*', 'parameters')[0]:.0f}"
    return Verdict.of("R5", max(ranks) <= 20, ours, "the rank is larger than the number of data", len(ranks))


# Figures


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Figures 1 and 8 of the first seed; returns their captions."""
    prior = results.settings.toy.priors[0]
    la, hmc = (results.values.get(f"toy/{method}_{prior}/seed0") for method in ("laplace", "hmc"))
    if la is None or hmc is None:
        return {}
    _panels(folder / "figure1.svg", la, hmc, "", 150)
    _panels(folder / "figure8.svg", la, hmc, "_untuned", 400)
    shown = "Dots: data; black: the noiseless cubic; red: the network; blue: the mean output with one, two and three standard deviations."
    return {
        "figure1.svg": f"Figure 1: the toy after tuning, first seed, beside the linearised predictive, which needs none. {shown}",
        "figure8.svg": f"Figure 8: the toy without tuning, first seed, and HMC again. {shown}",
    }


def _panels(path: Path, la: dict[str, Any], hmc: dict[str, Any], suffix: str, limit: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 2.2), layout="constrained")
    first, *others = figure.subplots(1, 5, sharey=True)
    x, blue, red = GRID[:, 0].numpy(), CATEGORIES[0], CATEGORIES[1]
    for ax, method in zip((first, *others), (*PAPER, "linearised_untuned", "hmc"), strict=True):
        curves = hmc["curves"] if method == "hmc" else la["curves"][method + suffix if method in PAPER else method]
        mean, deviation = torch.tensor(curves["mean"]).numpy(), torch.tensor(curves["deviation"]).numpy()
        for shade in (3, 2, 1):
            ax.fill_between(x, mean - shade * deviation, mean + shade * deviation, color=blue, alpha=0.2, lw=0)
        ax.plot(x, x**3, color="black", lw=0.8)
        ax.plot(x, la["curves"]["network"], color=red, lw=0.9)
        ax.plot(x, mean, color=blue, lw=0.9)
        ax.scatter(la["curves"]["x"], la["curves"]["y"], s=5, color="black", zorder=3, lw=0)
        ax.set(xlim=(-6, 6), ylim=(-limit, limit), xticks=(-6, -3, 0, 3, 6))
        finish(ax, title=NAMES[method], x="x", y="y" if ax is first else "")
    path.write_text(save_svg(figure), encoding="utf-8")
