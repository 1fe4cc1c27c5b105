"""The edges of what a fit may be given: the right answer, against a dense computation in float64, or a message that says what to do."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.curvature import reference
from aftermap.errors import AftermapError, DataError, InputError, NumericalError, NumericalWarning
from aftermap.likelihoods import Categorical, Gaussian

PRIOR = 2.0


def net(seed: int = 0, inputs: int = 3, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()


def rows(count: int, width: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def dense(
    model: nn.Module, x: Tensor, y: Tensor, asked: Tensor, prior: float = PRIOR, likelihood: Any = None
) -> Tensor:
    """J Σ Jᵀ [N, C, C] of the full Gauss-Newton matrix, in float64."""
    double = copy.deepcopy(model).double()
    matrix = reference.ggn(double, x.double(), likelihood or Categorical(), y)
    matrix = matrix + prior * torch.eye(len(matrix), dtype=torch.float64)
    return reference.linearised_covariance(reference.jacobian(double, asked.double()), torch.linalg.inv(matrix))


def assert_matches_dense(
    model: nn.Module, x: Tensor, y: Tensor, *, batches: Any = None, prior: float = PRIOR, rtol: float = 1e-4
) -> None:
    """The full structure is the dense computation; the others give finite predictions whose variances are positive."""
    asked, batches = rows(5, x.shape[1], seed=9), [(x, y)] if batches is None else batches
    expected = dense(model, x, y, asked, prior)
    la = am.Laplace(model, "classification", structure="full", prior_precision=prior).fit(batches)
    found = la.predict(asked).latent_cov.double()
    assert float((found - expected).abs().max()) <= rtol * float(expected.abs().max())
    for structure in ("kron", "ekfac", "diagonal", "low_rank", "subset"):
        prediction = (
            am.Laplace(model, "classification", structure=structure, prior_precision=prior).fit(batches).predict(asked)
        )
        assert bool(torch.isfinite(prediction.mean).all()), structure
        assert bool((prediction.latent_cov.diagonal(dim1=1, dim2=2) > 0).all()), structure
        torch.testing.assert_close(prediction.mean.sum(1), torch.ones(5, dtype=prediction.mean.dtype))


def test_one_datum() -> None:
    assert_matches_dense(net(), rows(1), torch.tensor([2]))


def test_batches_of_one() -> None:
    x, y = rows(7), torch.arange(7) % 3
    assert_matches_dense(net(), x, y, batches=list(zip(x.split(1), y.split(1), strict=True)))


def test_constant_labels() -> None:
    assert_matches_dense(net(), rows(9), torch.full((9,), 1))


def test_duplicated_rows_count_as_often_as_they_come() -> None:
    x = rows(1).expand(6, 3).clone()
    assert_matches_dense(net(), x, torch.zeros(6, dtype=torch.int64))


def test_many_more_weights_than_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 3)).eval()
    assert_matches_dense(model, rows(2), torch.tensor([0, 1]), rtol=1e-3)


def test_dead_units_keep_the_prior() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-50.0, 0.3, -50.0, 0.1]))
    x, y = rows(9), torch.arange(9) % 3
    assert_matches_dense(model, x, y)
    la = am.Laplace(model, "classification", structure="diagonal", prior_precision=PRIOR).fit([(x, y)])
    variance = la.posterior.marginal_variance()["0.weight"]
    torch.testing.assert_close(variance[[0, 2]], torch.full((2, 3), 1 / PRIOR, dtype=variance.dtype))


@pytest.mark.parametrize("prior", [1e-12, 1e12])
def test_extreme_priors(prior: float) -> None:
    """A logistic regression: all weights of one input may grow alike without any change of the probabilities, so they keep the prior."""
    x, y = rows(40).double(), torch.arange(40) % 3
    model = nn.Linear(3, 3).double().eval()
    la = am.Laplace(model, "classification", structure="full", prior_precision=prior).fit([(x, y)])
    asked = rows(5, seed=9).double()
    # The weak prior is below what the decomposition can tell from zero to more than half of the digits, and this is said.
    with pytest.warns(NumericalWarning, match="in float64") if prior < 1 else contextlib.nullcontext():
        found = la.predict(asked, link="probit").latent_cov
    length = asked.square().sum(1) + 1
    if prior > 1:  # The data do not matter.
        expected = length[:, None, None] * torch.eye(3, dtype=torch.float64) / prior
    else:  # They decide all but the common part, whose variance is beyond theirs by twelve digits.
        expected = length[:, None, None] / (3 * prior) * torch.ones(3, 3, dtype=torch.float64)
    # The eigenvalues of the curvature that are zero are known to the rounding of the largest one.
    rounding = 16 * torch.finfo(torch.float64).eps * float(torch.linalg.eigvalsh(la.factors.to_dense()).max()) / prior
    torch.testing.assert_close(found, expected, rtol=0, atol=max(1e-6, rounding) * float(expected.max()))
    assert bool(torch.isfinite(la.log_evidence()))


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_tiny_and_huge_inputs_give_the_right_answer(size: float) -> None:
    x, y = rows(9) * size, torch.arange(9) % 3
    expected = dense(net(), x, y, x[:3])
    for structure in ("full", "low_rank", "subset"):
        la = am.Laplace(net(), "classification", structure=structure, prior_precision=PRIOR).fit([(x, y)])
        found = la.predict(x[:3]).latent_cov.double()
        assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), structure


def test_inputs_whose_squares_overflow_are_refused_by_factors_in_single_precision() -> None:
    x, y = rows(9) * 1e20, torch.arange(9) % 3
    for structure in ("kron", "ekfac", "diagonal"):
        with pytest.raises(NumericalError, match="not finite; check the data"):
            am.Laplace(net(), "classification", structure=structure).fit([(x, y)])
        double = am.Laplace(net().double(), "classification", structure=structure).fit([(x.double(), y)])
        assert bool(torch.isfinite(double.predict(x[:3].double()).latent_cov).all())


def test_one_class_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        InputError, match="have 1 class; at least 2 are needed. For one logit per example use Bernoulli"
    ):
        am.Laplace(net(outputs=1), "classification").fit([(rows(6), torch.zeros(6, dtype=torch.int64))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
def test_half_precision_is_near_single_precision(dtype: torch.dtype, structure: str) -> None:
    x, y = rows(30), torch.arange(30) % 3
    half = net().to(dtype)
    single = copy.deepcopy(half).float()
    one = am.Laplace(half, "classification", structure=structure, prior_precision=PRIOR).fit([(x.to(dtype), y)])
    two = am.Laplace(single, "classification", structure=structure, prior_precision=PRIOR).fit(
        [(x.to(dtype).float(), y)]
    )
    first, second = (la.predict(v, link="probit") for la, v in ((one, x[:5].to(dtype)), (two, x[:5].to(dtype).float())))
    error = (first.latent_cov.float() - second.latent_cov).abs().max() / second.latent_cov.abs().max()
    assert float(error) < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_channels_last_and_expanded_tensors_are_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4, 3)).eval()
    x, y = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    plain = am.Laplace(model, "classification").fit([(x, y)]).factors.to_dense()
    last = am.Laplace(model, "classification").fit([(x.to(memory_format=torch.channels_last), y)]).factors.to_dense()
    torch.testing.assert_close(last, plain, rtol=1e-5, atol=1e-6)
    one, target = x[:1].expand(4, 2, 3, 3), y[:1].expand(4)
    expanded = am.Laplace(model, "classification").fit([(one, target)]).factors.to_dense()
    torch.testing.assert_close(
        expanded, am.Laplace(model, "classification").fit([(one.clone(), target.clone())]).factors.to_dense()
    )


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_callers_mode_of_gradients_does_not_matter(mode: Any) -> None:
    model, x, y = net(), rows(9), torch.arange(9) % 3
    expected = am.Laplace(model, "classification").fit([(x, y)]).predict(x[:3])
    with mode():
        found = am.Laplace(model, "classification").fit([(x, y)]).predict(x[:3])
    torch.testing.assert_close(found.latent_cov, expected.latent_cov)


def test_autocast_is_near_single_precision() -> None:
    model, x, y = net(), rows(30), torch.arange(30) % 3
    expected = am.Laplace(model, "classification").fit([(x, y)]).predict(x[:3], link="probit").latent_cov
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = am.Laplace(model, "classification").fit([(x, y)]).predict(x[:3], link="probit").latent_cov
    assert float((found.float() - expected).abs().max() / expected.abs().max()) < 0.1


class Counting(nn.Module):
    """A network with a buffer that changes in every call, and outputs that do not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def test_buffers_that_change_are_as_before() -> None:
    model, x, y = Counting().eval(), rows(9), torch.arange(9) % 3
    la = am.Laplace(model, "classification", structure="full", prior_precision=PRIOR).fit([(x, y)])
    found = la.predict(x[:4]).latent_cov.double()
    assert float(model.calls) == 0.0
    torch.testing.assert_close(found, dense(net(), x, y, x[:4]), rtol=1e-4, atol=1e-6)


class Experts(nn.Module):
    """Each example goes to one of three experts; the last one never gets any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.head = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)]), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = (x[:, 0] > 0).long(), x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero()[:, 0]
            if len(index):
                out = out.index_add(0, index, expert(x[index]))
        return self.head(torch.tanh(out))


@pytest.mark.filterwarnings("ignore::aftermap.errors.StatisticalWarning")
def test_experts_without_examples_keep_the_prior() -> None:
    model, x, y = Experts().eval(), rows(12), torch.arange(12) % 3
    la = am.Laplace(model, "classification", structure="full", prior_precision=PRIOR).fit([(x, y)])
    variance = la.posterior.marginal_variance()["experts.2.weight"]
    torch.testing.assert_close(variance, torch.full((4, 3), 1 / PRIOR, dtype=variance.dtype))
    double = copy.deepcopy(model).double()
    matrix = reference.ggn(double, x.double(), Categorical(), y)
    torch.testing.assert_close(la.factors.to_dense(), matrix, rtol=1e-4, atol=1e-5)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Returning(nn.Module):
    """The same network with its outputs inside something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = net(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        if self.kind == "dict":
            return {"logits": logits, "hidden": x}
        if self.kind == "tuple":
            return (logits,)
        if self.kind == "ModelOutput":
            return pytest.importorskip("transformers").utils.ModelOutput(logits=logits, hidden_states=(x,))
        return Output(logits, x) if self.kind == "dataclass" else (logits, x)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple", "ModelOutput"])
def test_outputs_inside_something_else(kind: str) -> None:
    x, y = rows(9), torch.arange(9) % 3
    expected = am.Laplace(net(), "classification").fit([(x, y)]).predict(x[:3]).latent_cov
    found = am.Laplace(Returning(kind).eval(), "classification").fit([(x, y)]).predict(x[:3]).latent_cov
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_network_is_the_network(backend: str) -> None:
    x, y = rows(9), torch.arange(9) % 3
    compiled: Any = torch.compile(net(), backend=backend)
    la = am.Laplace(compiled, "classification", structure="full", prior_precision=PRIOR).fit([(x, y)])
    torch.testing.assert_close(la.predict(x[:3]).latent_cov.double(), dense(net(), x, y, x[:3]), rtol=1e-4, atol=1e-6)


def test_several_heads_are_refused_with_what_to_do() -> None:
    x, y = rows(9), torch.arange(9) % 3
    with pytest.raises(AftermapError, match=r"tensors|output"):
        am.Laplace(Returning("heads").eval(), "classification").fit([(x, y)])


class Stream(torch.utils.data.IterableDataset):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter(zip(rows(12), torch.arange(12) % 3, strict=True))


def test_a_loader_without_a_length() -> None:
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    found = am.fit(net(), loader, structure="kron", verbose=False)
    expected = am.Laplace(net(), "classification").fit([(rows(12), torch.arange(12) % 3)])
    torch.testing.assert_close(found.factors.to_dense(), expected.factors.to_dense(), rtol=1e-5, atol=1e-6)


def test_no_data_and_data_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        am.Laplace(net(), "classification").fit([])
    x = rows(4)
    x[2, 1] = torch.inf
    with pytest.raises(DataError, match="not finite"):
        am.Laplace(net(), "classification").fit([(x, torch.arange(4) % 3)])


def test_a_regression_with_one_datum_and_constant_targets() -> None:
    model, x, y = net(outputs=1), rows(1), torch.zeros(1, 1)
    la = am.Laplace(model, Gaussian(noise=0.5), structure="full", prior_precision=PRIOR).fit([(x, y)])
    asked = rows(5, seed=9)
    expected = dense(model, x, y, asked, likelihood=Gaussian(noise=0.5))
    torch.testing.assert_close(la.predict(asked).latent_cov.double(), expected, rtol=1e-4, atol=1e-6)
    constant = am.Laplace(model, "regression").fit([(rows(6), torch.ones(6, 1))])
    assert bool(torch.isfinite(constant.predict(asked).total).all())
