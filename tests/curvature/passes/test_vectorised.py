"""PyTorch's vectorised and forward derivatives are wrong for some operations: they are confirmed, and replaced where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.curvature import fit_curvature
from aftermap.curvature.passes.products import GGNOperator, pushed_forward
from aftermap.errors import UnsupportedError
from aftermap.likelihoods import Categorical

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Prototypes(nn.Module):
    """Squared distances to learnt points: the vectorised derivative of `torch.cdist` is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3)
        self.points = nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return -(torch.cdist(self.embed(x), self.points) ** 2)


class Sentence(nn.Module):
    """An embedding with padding, which has no gradient, but moves in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)).mean(1))


class WrongTogether(torch.autograd.Function):
    """tanh, whose derivative is doubled where it is vectorised."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        factor = 2.0 if torch._C._functorch.is_batchedtensor(gradient) else 1.0
        return factor * gradient * (1 - output**2)


class DoubledTogether(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return WrongTogether.apply(x)


def instance_norm() -> nn.Module:
    """Affine InstanceNorm: vectorised, its gradients have a wrong shape."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.Flatten(), nn.Linear(36, 3)
    )


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def inputs(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Sentence):
        return torch.randint(0, 7, (6, 5), generator=generator)
    shape = (6, 2, 5, 5) if isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.Conv2d) else (6, 4)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """J [N, C, P], one gradient of plain autograd for each output."""
    outputs, leaves = model(x), list(model.parameters())
    rows = [torch.autograd.grad(o, leaves, retain_graph=True) for o in outputs.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, tuple(outputs.shape))


def problem(make: Any) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """A model, inputs, labels, J, and the GGN of a classification."""
    model = randomised(make())
    x = inputs(model)
    J, p = jacobian(model, x), model(x).softmax(1).detach()
    Lambda = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return model, x, torch.arange(6) % 3, J, torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J)


def wrong_together() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), DoubledTogether(), nn.Linear(5, 3))


def wrong_together_without_rule() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), DoubledTogether(), nn.Linear(5, 3))


@pytest.mark.parametrize("make", [Prototypes, instance_norm, Sentence, wrong_together, wrong_together_without_rule])
@pytest.mark.parametrize("structure", ["full", "diagonal", "subset"])
def test_curvature_and_predictions_are_those_of_plain_autograd(make: Any, structure: str) -> None:
    model, x, y, J, G = problem(make)
    laplace = am.Laplace(model, "classification", structure=structure, rank=None, subset_size=6).fit([(x, y)])
    assert laplace.posterior.names == tuple(n for n, _ in model.named_parameters())
    expected = torch.diag(G.diagonal()) if structure == "diagonal" else G
    precision = laplace.posterior.to_dense()
    assert_close(precision, expected + torch.eye(len(G), dtype=torch.float64), **CLOSE)
    cov = laplace.predict(x).latent_cov
    assert cov is not None
    truth = J @ torch.linalg.inv(precision) @ J.mT
    centre = torch.eye(3, dtype=torch.float64) - 1 / 3
    assert_close(centre @ cov @ centre, centre @ truth @ centre, **CLOSE)


@pytest.mark.parametrize("make", [instance_norm, Sentence, wrong_together])
def test_products_with_the_ggn_and_low_rank_agree(make: Any) -> None:
    model, x, y, _, G = problem(make)
    assert_close(GGNOperator(model, [(x, y)], Categorical()).to_dense(), G, **CLOSE)
    low_rank = fit_curvature(model, [(x, y)], "classification", structure="low_rank", rank=len(G)).to_dense()
    assert_close(low_rank, G, rtol=1e-7, atol=1e-9)


def test_a_padding_that_comes_only_in_a_later_batch_is_noticed() -> None:
    model, x, y, _, _ = problem(Sentence)
    without = x.clamp_min(1)
    operator = GGNOperator(model, [(without, y), (x, y)], Categorical())
    J = [jacobian(model, each) for each in (without, x)]
    p = [model(each).softmax(1).detach() for each in (without, x)]
    Lambda = [torch.diag_embed(q) - q[:, :, None] * q[:, None] for q in p]
    assert_close(
        operator.to_dense(),
        sum(torch.einsum("ncp,ncd,ndq->pq", a, b, a) for a, b in zip(J, Lambda, strict=True)),
        **CLOSE,
    )


def test_an_operation_that_can_be_differentiated_only_once_is_named() -> None:
    model, x, y, _, _ = problem(Prototypes)
    with pytest.raises(UnsupportedError, match=r"only once .*cdist.*structure='kron'"):
        fit_curvature(model, [(x, y)], "classification", structure="low_rank", rank=3)


@pytest.mark.parametrize("make", [Sentence, wrong_together])
def test_directions_are_pushed_forward_by_the_transpose_of_the_gradient(make: Any) -> None:
    model, x, _, J, _ = problem(make)
    directions = [{n: torch.full_like(p, 0.1 * k) for n, p in model.named_parameters()} for k in (1, 2)]
    pushed = list(pushed_forward(model, dict(model.named_parameters()), x, directions))
    for k, (outputs, change) in enumerate(pushed, 1):
        assert_close(outputs, model(x).detach(), **CLOSE)
        assert_close(change, 0.1 * k * J.sum(2), **CLOSE)


@pytest.mark.parametrize("make", [Prototypes, wrong_together])
def test_differentiable_predictions_agree(make: Any) -> None:
    model, x, y, _, _ = problem(make)
    laplace = am.Laplace(model, "classification", structure="full").fit([(x, y)])
    found = laplace.predict(x, differentiable=True).latent_cov
    assert_close(found, laplace.predictor.joint(x)[1].diagonal(dim1=0, dim2=2).permute(2, 0, 1), **CLOSE)


@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_the_exact_hessian_agrees() -> None:
    model, x, y, _, _ = problem(wrong_together)
    found = fit_curvature(model, [(x, y)], "classification", structure="hessian").to_dense()
    model[1] = nn.Tanh()
    truth = fit_curvature(model, [(x, y)], "classification", structure="hessian").to_dense()
    assert_close(found, truth, **CLOSE)


def test_the_padding_of_an_embedding_is_no_random_variable() -> None:
    """It has no gradient, so its posterior is the prior; drawn weights leave it where it is, as the linear model does."""
    model, x, y, _, _ = problem(Sentence)
    only_padding = torch.zeros(2, 5, dtype=torch.int64)
    laplace = am.Laplace(model, "classification", params=["embed.weight"]).fit([(x, y)])
    prior_variance = laplace.posterior.marginal_variance()["embed.weight"][0]
    assert_close(prior_variance, torch.ones_like(prior_variance), **CLOSE)
    generator = torch.Generator().manual_seed(0)
    for samples in (
        laplace.function_samples(only_padding, 3, generator),
        torch.stack(
            [laplace.predict(only_padding, kind="sampling", samples=2, generator=generator).mean for _ in range(3)]
        ),
    ):
        assert_close(samples, samples[:1].expand_as(samples), **CLOSE)
    assert float(laplace.predict(only_padding).latent_var.max()) == 0.0
    assert float(laplace.function_samples(x, 3, generator).std(0).min()) > 0


def test_a_padding_that_another_layer_shares_is_drawn() -> None:
    """Its row has a gradient there; and the weight of a parametrised embedding is no parameter at all."""

    class Tied(Sentence):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

    tied = randomised(Tied())
    x = inputs(tied)
    laplace = am.Laplace(tied, "classification", structure="diagonal").fit([(x, torch.arange(6))])
    ((name, weight),) = tied.named_parameters()
    moved = weight.detach().clone()
    moved[0] += 1.0
    without = x.clamp_min(1)
    drawn = laplace.predict(without, kind="sampling", weights=[{name: moved}]).mean
    with torch.no_grad():
        weight.copy_(moved)
    assert_close(drawn, tied(without).softmax(1).detach(), **CLOSE)
    model = randomised(Sentence())
    nn.utils.parametrizations.weight_norm(model.embed)
    laplace = am.Laplace(model, "classification", structure="diagonal").fit([(x, torch.arange(6) % 3)])
    assert laplace.predict(x, kind="sampling", samples=2).mean.shape == (6, 3)
