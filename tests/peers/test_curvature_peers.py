"""Curvature equals that of curvlinops, BackPACK and laplace-torch, once their scales are brought to ours.

Ours is a sum over data of the negative log-likelihood; a Kronecker block is outputs ⊗ inputs / rows. What theirs is:

- curvlinops, loss with reduction="sum": gradient factor Σ g gᵀ (ours), input factor already divided, Σ a aᵀ / (N·T) for
  expand and Σ ā āᵀ / N with the mean ā over the T positions for reduce: our inputs / rows. With reduction="mean" the
  gradient factor is divided by N (for MSELoss also by the number of outputs).
- BackPACK, reduction="sum": Σ g² and the diagonal of the GGN as ours. With "mean": Σ g² / N² and the diagonal / N.
- laplace-torch: always reduction="sum"; H is a sum over data; the bias has a block of its own, which is B.
- torch's MSELoss has no 1/2: its output Hessian is 2·I where our Gaussian with unit noise has I.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import fit_curvature
from aftermap.curvature.structures.kron import KronBlock

pytestmark = pytest.mark.peers

Data = list[tuple[Tensor, Tensor]]
CLASSES, SIZES = 3, (4, 7)
COUNT = sum(SIZES)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


class Pooled(nn.Module):
    """The mean over all positions between the first and the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(1)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build().double().eval()


def data_for(shape: tuple[int, ...], *, regression: bool = False) -> Data:
    """Two batches of different size."""
    generator = torch.Generator().manual_seed(5)
    made: Data = []
    for size in SIZES:
        x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (size,), generator=generator)
        made.append((x, torch.randn(size, CLASSES, generator=generator, dtype=torch.float64) if regression else y))
    return made


def networks(bias: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Networks of Linear and Conv2d: what curvlinops has rules for."""
    return {
        "mlp": (
            lambda: nn.Sequential(nn.Linear(5, 4, bias), nn.Tanh(), nn.Linear(4, 6, bias), nn.ReLU(), nn.Linear(6, CLASSES, bias)),
            (5,),
        ),
        "tokens": (
            lambda: nn.Sequential(nn.Linear(5, 4, bias), nn.Tanh(), nn.Linear(4, 6, bias), Pooled(), nn.Linear(6, CLASSES, bias)),
            (8, 5),
        ),
        "convolution": (
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), bias=bias),
                nn.ReLU(),
                nn.Conv2d(4, 5, 2, dilation=(1, 2), bias=bias),
                nn.Flatten(),
                nn.Linear(5 * 3 * 7, CLASSES, bias),
            ),
            (2, 7, 6),
        ),
    }  # fmt: skip


def curvlinops_operator(name: str, model: nn.Module, data: Data, loss: nn.Module, **options: object) -> object:
    curvlinops = pytest.importorskip("curvlinops")
    return getattr(curvlinops, name)(
        model,
        loss,
        list(model.parameters()),
        data,
        check_deterministic=False,
        fisher_type=options.pop("fisher_type", "type-2"),
        separate_weight_and_bias=False,
        **options,
    )


def kron_blocks(model: nn.Module, data: Data, likelihood: str, **options: str) -> dict[str, KronBlock]:
    factors = fit_curvature(model, data, likelihood, structure="kron", progress=False, **options)
    return {b.name: b for b in factors.blocks if isinstance(b, KronBlock)}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("approach", ["expand", "reduce"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["mlp", "tokens", "convolution"])
def test_kron_factors_against_curvlinops(name: str, bias: bool, approach: str, reduction: str) -> None:
    build, shape = networks(bias)[name]
    model, data = seeded(build), data_for(shape)
    theirs = curvlinops_operator(
        "KFACLinearOperator", model, data, nn.CrossEntropyLoss(reduction=reduction), kfac_approx=approach
    )
    theirs.compute_kronecker_factors()
    ours = kron_blocks(model, data, "classification", curvature="exact", approach=approach)
    assert set(ours) == set(theirs._input_covariances)
    for layer, block in ours.items():
        assert_close(block.input_mean()[0], theirs._input_covariances[layer], **TIGHT)
        scale = 1 if reduction == "sum" else COUNT
        assert_close(block.outputs[0], scale * theirs._gradient_covariances[layer], **TIGHT)


@pytest.mark.parametrize("name", ["mlp", "tokens", "convolution"])
def test_empirical_kron_factors_against_curvlinops(name: str) -> None:
    build, shape = networks(True)[name]
    model, data = seeded(build), data_for(shape)
    loss = nn.CrossEntropyLoss(reduction="sum")
    theirs = curvlinops_operator("KFACLinearOperator", model, data, loss, fisher_type="empirical")
    theirs.compute_kronecker_factors()
    ours = kron_blocks(model, data, "classification", curvature="empirical")
    for layer, block in ours.items():
        assert_close(block.outputs[0], theirs._gradient_covariances[layer], **TIGHT)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_kron_factors_of_regression_against_curvlinops(name: str, reduction: str) -> None:
    build, shape = networks(True)[name]
    model, data = seeded(build), data_for(shape, regression=True)
    theirs = curvlinops_operator("KFACLinearOperator", model, data, nn.MSELoss(reduction=reduction))
    theirs.compute_kronecker_factors()
    ours = kron_blocks(model, data, "regression", curvature="exact")
    for layer, block in ours.items():
        scale = 2 if reduction == "sum" else 2 / (COUNT * CLASSES)
        assert_close(scale * block.outputs[0], theirs._gradient_covariances[layer], **TIGHT)


@pytest.mark.parametrize("name", ["mlp", "tokens", "convolution"])
def test_ekfac_against_curvlinops(name: str) -> None:
    build, shape = networks(True)[name]
    model, data = seeded(build), data_for(shape)
    theirs = curvlinops_operator("EKFACLinearOperator", model, data, nn.CrossEntropyLoss(reduction="sum"))
    size = sum(p.numel() for p in model.parameters())
    dense = theirs @ torch.eye(size, dtype=torch.float64)
    ours = fit_curvature(model, data, "classification", structure="ekfac", curvature="exact", progress=False)
    assert_close(ours.trace(), float(dense.trace()), **TIGHT)
    if name != "convolution":
        # There a factor has a null space, whose basis is free: only the trace is determined.
        assert_close(ours.to_dense(), dense, rtol=1e-7, atol=1e-9)


def layers() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """One layer of each kind that BackPACK has a rule for, and the shape of its input."""
    return {
        "Linear": (lambda: nn.Linear(6, 5), (6,)),
        "Linear without bias": (lambda: nn.Linear(6, 5, bias=False), (6,)),
        "Conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2), (2, 11)),
        "Conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1)), (2, 5, 6)),
        "Conv2d without bias": (lambda: nn.Conv2d(2, 4, (3, 2), dilation=(1, 2), bias=False), (2, 5, 6)),
        "Conv2d with groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 5)),
        "Conv3d": (lambda: nn.Conv3d(2, 3, (2, 1, 2)), (2, 3, 4, 5)),
        "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1), (2, 5)),
        "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 4, (3, 2), stride=(1, 2), padding=(1, 0)), (2, 3, 4)),
        "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, (2, 1, 2)), (2, 3, 2, 4)),
    }


def around(layer: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The layer, a nonlinearity and a head."""
    with torch.no_grad():
        width = layer(torch.zeros(2, *shape, dtype=next(layer.parameters()).dtype)).flatten(1).shape[1]
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, CLASSES))


def backpack_sums(model: nn.Module, data: Data, loss: nn.Module, extension: str, field: str) -> dict[str, Tensor]:
    backpack = pytest.importorskip("backpack")
    extensions = pytest.importorskip("backpack.extensions")
    model, loss = backpack.extend(deepcopy(model)), backpack.extend(loss)
    sums: dict[str, Tensor] = {}
    for x, y in data:
        model.zero_grad()
        with backpack.backpack(getattr(extensions, extension)()), warnings.catch_warnings():
            # Its hook on the first layer fires although the data need no gradient, as it is meant to.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            loss(model(x), y).backward()
        for name, parameter in model.named_parameters():
            found = getattr(parameter, field).detach()
            sums[name] = sums[name] + found if name in sums else found
    return sums


@pytest.mark.parametrize("kind", layers())
@pytest.mark.parametrize(
    "curvature, extension, field",
    [("empirical", "SumGradSquared", "sum_grad_squared"), ("exact", "DiagGGNExact", "diag_ggn_exact")],
)
def test_diagonals_against_backpack(kind: str, curvature: str, extension: str, field: str) -> None:
    build, shape = layers()[kind]
    model, data = seeded(lambda: around(build(), shape)), data_for(shape)
    theirs = backpack_sums(model, data, nn.CrossEntropyLoss(reduction="sum"), extension, field)
    ours = fit_curvature(model, data, "classification", structure="diagonal", curvature=curvature, progress=False)
    assert_close(ours.diagonal(), theirs, **TIGHT)


@pytest.mark.parametrize(
    "curvature, extension, field, power",
    [("empirical", "SumGradSquared", "sum_grad_squared", 2), ("exact", "DiagGGNExact", "diag_ggn_exact", 1)],
)
def test_backpack_scales_of_a_mean_loss(curvature: str, extension: str, field: str, power: int) -> None:
    build, shape = layers()["Conv2d"]
    model, data = seeded(lambda: around(build(), shape)), data_for(shape)[:1]
    theirs = backpack_sums(model, data, nn.CrossEntropyLoss(reduction="mean"), extension, field)
    ours = fit_curvature(model, data, "classification", structure="diagonal", curvature=curvature, progress=False)
    assert_close(ours.diagonal(), {n: v * SIZES[0] ** power for n, v in theirs.items()}, **TIGHT)


def test_diagonal_of_regression_against_backpack() -> None:
    build, shape = layers()["Conv2d"]
    model, data = seeded(lambda: around(build(), shape)), data_for(shape, regression=True)
    theirs = backpack_sums(model, data, nn.MSELoss(reduction="sum"), "DiagGGNExact", "diag_ggn_exact")
    ours = fit_curvature(model, data, "regression", structure="diagonal", curvature="exact", progress=False)
    assert_close({n: 2 * v for n, v in ours.diagonal().items()}, theirs, **TIGHT)


def fitted_laplace(kind: str, model: nn.Module, data: Data, likelihood: str) -> object:
    laplace = pytest.importorskip("laplace")
    whole = (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    # The peer asks len(loader.dataset) for N and cuts batches of its own.
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*whole), batch_size=SIZES[1])
    made = getattr(laplace, kind)(deepcopy(model), likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(loader)
    return made


@pytest.fixture
def double() -> object:
    """laplace-torch multiplies with torch.eye of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_full_ggn_against_laplace_torch(likelihood: str) -> None:
    build, shape = networks(True)["mlp"]
    model, data = seeded(build), data_for(shape, regression=likelihood == "regression")
    theirs = fitted_laplace("FullLaplace", model, data, likelihood)
    ours = fit_curvature(model, data, likelihood, structure="full", curvature="exact", progress=False)
    assert_close(ours.to_dense(), theirs.H, **TIGHT)


@pytest.mark.usefixtures("double")
def test_diagonal_against_laplace_torch() -> None:
    build, shape = networks(True)["convolution"]
    model, data = seeded(build), data_for(shape)
    theirs = fitted_laplace("DiagLaplace", model, data, "classification")
    ours = fit_curvature(model, data, "classification", structure="diagonal", curvature="exact", progress=False)
    assert_close(torch.cat([v.flatten() for v in ours.diagonal().values()]), theirs.H, **TIGHT)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_kron_factors_against_laplace_torch(name: str) -> None:
    build, shape = networks(True)[name]
    model, data = seeded(build), data_for(shape)
    theirs = iter(fitted_laplace("KronLaplace", model, data, "classification").H_facs.kfacs)
    for block in kron_blocks(model, data, "classification", curvature="exact").values():
        outputs, inputs = next(theirs)
        (alone,) = next(theirs)  # the bias's own block
        assert_close(block.input_mean()[0, :-1, :-1], inputs, **TIGHT)
        assert_close(block.outputs[0], outputs, **TIGHT)
        assert_close(block.outputs[0], alone, **TIGHT)
    assert next(theirs, None) is None
