"""The contract of a structure: its fits, sums, posteriors and saved folders, on small networks in float64."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature import Factors, Structure, fit_curvature, reference
from aftermap.curvature.structures.base import find_structure
from aftermap.curvature.structures.eigenbasis import DAMPINGS
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.laplace import Laplace, load
from aftermap.likelihoods import Gaussian
from aftermap.posteriors import GaussianPosterior
from aftermap.testing.posterior import check_posterior
from aftermap.testing.predictor import ModelSnapshot, check_unchanged

__all__ = ["check_structure"]

_DATA = 7
# The noise of each output differs, so that no two outputs have the same curvature.
_NOISE = (0.5, 1.0, 2.0)


def check_structure(name: str, *, samples: int = 20_000, tolerance: float = 1e-8) -> dict[str, str]:
    """Fits a registered structure to small networks and checks all that the library asks of it.

    The networks are a perceptron with biases, a convolution, one with a layer that is called twice, one with a weight that
    is used again without its layer, and one with norm layers. The data are the networks' own outputs, so that the exact Hessian is the Gauss-Newton
    matrix and every curvature must be positive semi-definite.

    It checks that the blocks hold every parameter once and are of the declared kinds; the dense matrix is symmetric and
    positive semi-definite, and agrees with diagonal, trace, multiples and tensors that are taken out and put back; the
    order of the data, their split into batches, weights and sums of two fits; the posterior (`check_posterior`:
    products, determinants, samples, other priors) for every damping that is offered, and that other dampings are
    refused; linearised predictions against the Jacobian; a folder that is written and read; the message for a name that
    is not known; that the network is left as it was.

    Args:
        name: The name that was given to `register_structure`.
        samples: The number of weights that are drawn for the mean and the covariance of samples.
        tolerance: The tolerance of comparisons, relative to the largest entry.

    Returns:
        For each thing that does not apply to the structure the reason why: networks that it refuses
        (`UnsupportedError`), and checks that its registration excludes. An empty dictionary means that everything was
        checked.

    Raises:
        AssertionError: Something differs; the message says what, by how much and for which network.
        InputError: No structure has that name.

    >>> check_structure("diagonal", samples=2_000)
    {}
    """
    entry = find_structure(name)
    _check_message(name)
    skipped: dict[str, str] = {}
    if not entry.updatable:
        skipped["sums of two fits"] = "updatable=False"
    if not entry.saveable:
        skipped["a folder"] = "saveable=False"
    if entry.depends_on_batches:
        skipped["splits into batches"] = "depends_on_batches=True"
    for number, (label, make) in enumerate(_NETWORKS.items()):
        case = _Case.make(entry, label, make, tolerance)
        before = ModelSnapshot.of(case.model)
        try:
            factors = case.fit([case.data])
        except UnsupportedError as refusal:
            if number == 0:
                raise AssertionError(f"{case.where} is refused, but every structure must take it: {refusal}") from None
            skipped[label] = str(refusal)
            continue
        except InputError as error:
            raise AssertionError(f"{case.where}: {error}") from error
        _check_blocks(case, factors)
        _check_matrix(case, factors)
        _check_data(case, factors)
        _check_posteriors(case, factors, samples)
        _check_laplace(case)
        check_unchanged(case.model, before)
    return skipped


class _Repeated(nn.Module):
    """A network with a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.twice(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.twice(h)))


class _Tied(nn.Module):
    """A network with a weight that is used once more without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return self.head(h) + torch.sin(h @ self.head.weight.T)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, (2, 3)), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": _perceptron,
    "convolution": _convolution,
    "repeated layer": _Repeated,
    "tied weights": _Tied,
    "norm layers": _norms,
}


@dataclass(frozen=True)
class _Case:
    entry: Structure
    label: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    tolerance: float

    @staticmethod
    def make(entry: Structure, label: str, make: Callable[[], nn.Module], tolerance: float) -> _Case:
        generator = torch.Generator().manual_seed(1)
        shape = (_DATA, 2, 4, 5) if label == "convolution" else (_DATA, 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = make().double().eval()
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            targets = model(inputs)
        return _Case(entry, label, model, inputs, targets, tolerance)

    @property
    def where(self) -> str:
        return f"structure {self.entry.name!r}, network {self.label!r}"

    @property
    def likelihood(self) -> Gaussian:
        return Gaussian(torch.tensor(_NOISE, dtype=torch.float64))

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def some(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[list(index)], self.targets[list(index)]

    def fit(self, data: Sequence[Any]) -> Factors:
        generator = torch.Generator().manual_seed(3)
        return fit_curvature(
            self.model, data, self.likelihood, structure=self.entry.name, generator=generator, progress=False
        )

    def close(self, what: str, got: Tensor, wanted: Tensor) -> None:
        if got.shape != wanted.shape:
            raise AssertionError(f"{what} ({self.where}): shape {tuple(got.shape)} instead of {tuple(wanted.shape)}")
        error = float((got - wanted).abs().max())
        size = float(wanted.abs().max())
        if not error <= self.tolerance * size:
            raise AssertionError(
                f"{what} ({self.where}): the largest error is {error:.3g} where the largest entry is {size:.3g}"
            )

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise AssertionError(f"{self.where}: {problem}")


def _check_message(name: str) -> None:
    try:
        find_structure(f"{name}?")
    except InputError as error:
        if repr(name) not in str(error):
            raise AssertionError(f"the message for an unknown structure does not list {name!r}: {error}") from None


def _check_blocks(case: _Case, factors: Factors) -> None:
    shapes = {n: tuple(p.shape) for n, p in case.model.named_parameters()}
    case.require(factors.shapes == shapes, f"the blocks have the shapes {factors.shapes}, the network {shapes}")
    case.require(set(factors.treatment) == set(shapes), "the treatment list does not name every parameter once")
    case.require(factors.n_data == _DATA, f"{factors.n_data} data were counted, {_DATA} were given")
    for block in factors.blocks:
        case.require(
            isinstance(block, case.entry.blocks),
            f"block {block.name!r} is a {type(block).__name__}; registered are {[b.__name__ for b in case.entry.blocks]}",
        )
    names = [block.name for block in factors.blocks]
    case.require(len(set(names)) == len(names), f"two blocks have one name: {names}")


def _check_matrix(case: _Case, factors: Factors) -> None:
    for block in factors.blocks:
        what, dense = f"of block {block.name!r}", block.to_dense()
        case.require(dense.dtype == torch.float64, f"to_dense {what} is {dense.dtype}, not float64")
        case.require(dense.shape == (block.size,) * 2, f"to_dense {what} has shape {tuple(dense.shape)}")
        case.close(f"to_dense {what} against its transpose", dense.T, dense)
        values = torch.linalg.eigvalsh(dense)
        case.require(
            bool(values[0] >= -case.tolerance * values[-1].clamp_min(0.0)),
            f"to_dense {what} is not positive semi-definite: its eigenvalues lie in [{values[0]:.3g}, {values[-1]:.3g}]",
        )
        diagonal = block.diagonal()
        case.require(
            {n: tuple(d.shape) for n, d in diagonal.items()} == block.shapes, f"diagonal {what} has other shapes"
        )
        flat = torch.cat([diagonal[n].reshape(-1) for n in block.shapes])
        case.close(f"diagonal {what}", flat, dense.diagonal())
        case.close(f"trace {what}", torch.tensor(block.trace(), dtype=torch.float64), dense.trace())
        again = block.with_tensors({k: t.clone() for k, t in block.tensors().items()})
        case.close(f"with_tensors of its own tensors {what}", again.to_dense(), dense)
        case.close(f"scaled {what}", block.scaled(2.5).to_dense(), 2.5 * dense)
    case.require(factors.trace() > 0, "the curvature is zero, although the outputs depend on the weights")


def _check_data(case: _Case, factors: Factors) -> None:
    """Checks that what was summed does not depend on how the data came."""
    first, second = range(2), range(2, _DATA)
    dense = factors.to_dense()
    case.close("the data in another order", case.fit([case.some(range(_DATA)[::-1])]).to_dense(), dense)
    case.close("a multiple", (2.0 * factors).to_dense(), 2 * dense)
    split = case.fit([case.some(first), case.some(second)])
    if not case.entry.depends_on_batches:
        case.close("the data in two batches", split.to_dense(), dense)
        weight = torch.tensor([2.0, *[1.0] * (_DATA - 1)], dtype=torch.float64)
        twice = case.fit([case.some([0]), case.data])
        case.close("a weight of two", case.fit([(*case.data, weight)]).to_dense(), twice.to_dense())
    if case.entry.updatable:
        total = case.fit([case.some(first)]) + case.fit([case.some(second)])
        case.require(total.n_data == _DATA, f"the sum of two fits counts {total.n_data} data of {_DATA}")
        case.close("the sum of two fits", total.to_dense(), split.to_dense())
        return
    try:
        case.fit([case.some(first)]) + case.fit([case.some(second)])
    except InputError:
        return
    raise AssertionError(f"{case.where}: updatable=False, but two fits were added without an InputError")


def _check_posteriors(case: _Case, factors: Factors, samples: int) -> None:
    mean = {n: p.detach() for n, p in case.model.named_parameters()}
    for damping in case.entry.dampings:
        try:
            posterior = GaussianPosterior.from_factors(factors, mean, 0.7, scale=1.3, damping=damping)
            check_posterior(posterior, torch.Generator().manual_seed(4), samples=samples, tolerance=case.tolerance)
        except (AssertionError, InputError) as error:
            raise AssertionError(f"the posterior of {case.where}, damping {damping!r}: {error}") from error
    for damping in sorted(set(DAMPINGS) - set(case.entry.dampings)):
        try:
            Laplace(case.model, case.likelihood, structure=case.entry.name, damping=damping).fit([case.data])
        except InputError:
            continue
        raise AssertionError(f"{case.where}: damping={damping!r} is not offered, but it was not refused")


def _check_laplace(case: _Case) -> None:
    """Checks linearised predictions against the Jacobian, and a folder that is written and read."""
    laplace = Laplace(case.model, case.likelihood, structure=case.entry.name, prior_precision=0.7)
    with warnings.catch_warnings():
        # The residuals are zero, so the weights are no minimum of a loss with a prior.
        warnings.simplefilter("ignore", StatisticalWarning)
        laplace.fit([case.data], generator=torch.Generator().manual_seed(3))
        predicted = laplace.predict(case.inputs)
        covariance = torch.linalg.inv(laplace.posterior.to_dense())
        jacobian = reference.jacobian(case.model, case.inputs)
        wanted = reference.linearised_covariance(jacobian, covariance)
        latent = predicted.latent_cov
        case.require(latent is not None, "predict gives no covariance of the outputs")
        case.close("the covariance of the outputs", torch.as_tensor(latent), wanted)
        case.require(
            bool(torch.isfinite(torch.as_tensor(laplace.log_evidence()))), "the evidence is not a finite number"
        )
        if not case.entry.saveable:
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                laplace.save(Path(folder) / "posterior")
            except InputError as error:
                raise AssertionError(f"{case.where}: {error}") from error
            again = load(Path(folder) / "posterior", case.model)
            case.require(
                torch.equal(again.posterior.to_dense(), laplace.posterior.to_dense()),
                "the precision of a posterior that was saved and read is another",
            )
            case.require(
                torch.equal(torch.as_tensor(again.predict(case.inputs).latent_cov), torch.as_tensor(latent)),
                "a posterior that was saved and read predicts other covariances",
            )
