"""The posteriors that are compared, all with the same prior and the same noise, and the large network of the amortised form."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.errors import NumericalWarning, StatisticalWarning
from aftermap.krylov import conjugate_gradient
from aftermap.predictive import Prediction
from experiments.mcinerney2024.problems import Problem, gap_split, loss_of, network, spread_features, train

__all__ = ["APPROXIMATIONS", "METHODS", "predictions", "rank_correlation", "spread", "wide_network"]

APPROXIMATIONS: dict[str, dict[str, Any]] = {
    "ggn": {"structure": "full"},
    "kron": {"structure": "kron"},
    "diagonal": {"structure": "diagonal"},
    "last_layer": {"structure": "full", "params": "last_layer"},
}
METHODS = ("hfl", "exact", *APPROXIMATIONS)


@contextmanager
def _quiet() -> Iterator[None]:
    """The Hessian of the data alone is often indefinite; what is flagged is counted instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.simplefilter("ignore", StatisticalWarning)
        yield


def predictions(
    model: nn.Module, problem: Problem, prior: float, tolerance: float
) -> tuple[dict[str, Prediction], dict[str, Any]]:
    """The predictions of every method at the queries, and how Hessian-free Laplace went."""
    data = [(problem.x, problem.y)]
    link = "auto" if problem.outputs == 1 else "probit"  # without a random number
    found: dict[str, Prediction] = {}
    with _quiet():
        hfl = am.HessianFree(model, problem.likelihood, prior_precision=prior, strict=False, tolerance=tolerance).fit(
            data
        )
        found["hfl"] = hfl.predict(problem.queries, link=link)
        for name, options in {"exact": {"structure": "hessian"}, **APPROXIMATIONS}.items():
            la = am.Laplace(model, problem.likelihood, prior_precision=prior, **options).fit(data)
            found[name] = la.predict(problem.queries, link=link)
    assert hfl.report is not None
    assert hfl.map_report is not None
    statuses = [r.status for r in hfl.report.functionals]
    facts = {
        "weights": sum(p.numel() for p in model.parameters()),
        "rows": len(problem.x),
        "decrement": hfl.map_report.decrement,
        "flagged": sum(s != "ok" for s in statuses),
        "functionals": len(statuses),
    }
    return found, facts


def spread(prediction: Prediction) -> Tensor:
    """The standard deviation of the output of a regression, or of the difference of the two largest logits [N]."""
    if prediction.kind == "regression":
        return prediction.epistemic[:, 0].sqrt()
    assert prediction.latent_mean is not None
    assert prediction.latent_cov is not None
    top = prediction.latent_mean.topk(2).indices
    contrast = torch.zeros_like(prediction.latent_mean)
    contrast.scatter_(1, top[:, :1], 1.0).scatter_(1, top[:, 1:], -1.0)
    return torch.einsum("nc,ncd,nd->n", contrast, prediction.latent_cov, contrast).sqrt()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, over the entries that both have."""
    known = a.isfinite() & b.isfinite()
    ranks = torch.stack([v[known].argsort().argsort().double() for v in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    done = work()
    return done, time.process_time() - start


def _exact_variances(
    model: nn.Module, problem: Problem, prior: float, tolerance: float
) -> tuple[Tensor, dict[str, Any]]:
    """gᵀH⁻¹g with the exact Hessian of the negative log posterior, by conjugate gradients on products with it."""
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [s.numel() for s in shapes]
    centre = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        parts = {n: t.reshape(s) for n, t, s in zip(names, theta.split(sizes), shapes, strict=True)}
        result: Tensor = torch.func.functional_call(model, parts, (x,))
        return result

    gradient = torch.func.grad(lambda theta: loss_of(problem, outputs(theta, problem.x)))

    def product(v: Tensor) -> Tensor:
        columns = [torch.func.jvp(gradient, (centre,), (c,))[1] for c in v.T]
        return torch.stack(columns, 1) + prior * v

    slope = torch.func.vmap(torch.func.grad(lambda theta, x: outputs(theta, x[None])[0, 0]), (None, 0))
    slopes, J = slope(centre, problem.queries), slope(centre, problem.x)
    noise = float(problem.likelihood.noise)  # type: ignore[attr-defined]
    core = J @ J.T / prior + noise**2 * torch.eye(len(J), dtype=J.dtype)

    def precondition(v: Tensor) -> Tensor:
        """The inverse of the Gauss-Newton matrix, by Woodbury's identity over the few data."""
        return (v - J.T @ torch.linalg.solve(core, J @ v) / prior) / prior

    right = slopes.T.contiguous()
    solved = conjugate_gradient(product, right, preconditioner=precondition, tolerance=tolerance, max_iterations=200)
    variances = (slopes.T * solved.solution).sum(0)
    return variances, {"cg_iterations": solved.iterations, "cg_residual": float(solved.residual.max())}


def wide_network(
    folder: Path,
    name: str,
    seed: int,
    *,
    width: int,
    rows: int,
    queries: int,
    prior: float,
    steps: int,
    tolerance: float,
) -> dict[str, Any]:
    """Hessian-free Laplace per query and amortised, beside conjugate gradients and Kronecker factors."""
    feature = spread_features(folder, name, 3)[seed % 3]
    problem = gap_split(folder, name, feature, seed, queries - queries // 2, rows, queries // 2)
    problem = Problem(problem.x, problem.y, problem.queries, problem.answers, am.likelihoods.Gaussian(noise=0.3), 1)
    # The prior is centred where training begins, as for a pretrained network that is fine-tuned. With a mean of zero training ended on a saddle.
    model = network(problem, (width, width), "tanh", seed)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, training = _timed(lambda: train(model, problem, prior, steps, start))
    data, x, count = [(problem.x, problem.y)], problem.queries, len(problem.queries)
    (exact, facts), cg = _timed(lambda: _exact_variances(model, problem, prior, 1e-4))
    with torch.no_grad():
        signs = model(problem.x)[:, 0].sign()
    with _quiet():
        options: dict[str, Any] = {
            "prior_precision": prior,
            "prior_mean": start,
            "strict": False,
            "tolerance": tolerance,
            "method": "newton_cg",
            "max_steps": 50,  # of Newton; what has not ended then is running away, and is flagged
        }
        hfl, _ = _timed(lambda: am.HessianFree(model, problem.likelihood, **options).fit(data))
        queried, per_query = _timed(lambda: hfl.predict(x).epistemic[:, 0])
        flagged = sum(r.status != "ok" for r in hfl.report.functionals)
        kron = am.Laplace(model, problem.likelihood, prior_precision=prior)
        kron_variances, kron_seconds = _timed(lambda: kron.fit(data).predict(x).epistemic[:, 0])
        free = am.Laplace(model, problem.likelihood, prior_precision=prior, structure="matrix_free")
        ggn_variances, ggn_seconds = _timed(lambda: free.fit(data).predict(x).epistemic[:, 0])
        scores: dict[str, Tensor] = {}
        amortised = 0.0
        for label, reference, weights in (
            ("sign", problem.x, signs),
            ("ones", problem.x, None),
            ("queries", x, None),
        ):
            score, seconds = _timed(lambda r=reference, w=weights: hfl.amortise(r, signs=w).score(x)[:, 0].abs())
            scores[label] = score
            amortised = max(amortised, seconds)
        fine_tuned = hfl.amortise(problem.x, signs=signs)
        _, asking = _timed(lambda: fine_tuned.score(x))
    variances = {
        "hfl": queried,
        "kron": kron_variances,
        "ggn": ggn_variances,
        **{f"amortised_{k}": v for k, v in scores.items()},
    }
    decrement = hfl.map_report.decrement
    return {
        "weights": sum(p.numel() for p in model.parameters()),
        "rows": len(problem.x),
        "decrement": decrement,
        "flagged": flagged,
        "functionals": count,
        **facts,
        **{f"rank_{k}": rank_correlation(v, exact) for k, v in variances.items()},
        "seconds_training": training,
        "seconds_hfl": per_query / count,
        "seconds_cg": cg / count,
        "seconds_ggn": ggn_seconds / count,
        "seconds_kron": kron_seconds / count,
        "seconds_amortised_once": amortised,
        "seconds_amortised": asking / count,
        "sd_exact": exact.sqrt(),
        **{f"sd_{k}": v.clamp_min(0.0).sqrt() for k, v in variances.items()},
    }
