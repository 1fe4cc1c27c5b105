"""J Σ Jᵀ of every block against the dense product, parameters of one number included."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from aftermap import Laplace
from aftermap.batches import Batch
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.posteriors import GaussianPosterior, Posterior
from aftermap.predictive.linearised import output_gradients
from tests.posteriors.cases import CASES, build, made, posterior_of


def dense(posterior: GaussianPosterior, case: str) -> torch.Tensor:
    model, data = build(CASES[case][0])
    x = data[0][0]
    jacobian = jacrev(lambda p: functional_call(model, {**dict(model.named_parameters()), **p}, (x,)))(posterior.mean)
    lines = torch.cat(
        [jacobian[n].flatten(2) if jacobian[n].dim() > 2 else jacobian[n][..., None] for n in posterior.names], -1
    )
    return lines.detach() @ torch.linalg.inv(posterior.to_dense()) @ lines.detach().transpose(1, 2)


@pytest.fixture(params=[None, 2], ids=["memory for all", "two examples at a time"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits into the working memory at once, the numbers are the same."""
    if request.param is None:
        return
    users = [m for n, m in sys.modules.items() if n.startswith("aftermap.") and hasattr(m, "examples_per_chunk")]
    assert len(users) > 8
    for module in users:
        monkeypatch.setattr(module, "examples_per_chunk", lambda *_: request.param)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("case", CASES)
def test_functional_covariance(case: str) -> None:
    model, _ = made(case)
    _, data = build(CASES[case][0])
    posterior = posterior_of(case, 0.7, scale=1.7)
    batch = Batch(data[0][0], None, None, len(data[0][0]))
    variants = [posterior, posterior.with_prior(2.3, scale=0.4)]
    checked = CheckedPlan(model, list(posterior.names), batch)
    full: list[list[torch.Tensor]] = [[], []]
    variances: list[list[torch.Tensor]] = [[], []]
    for _, _, _, gradients in output_gradients(checked, batch):
        for place, parts in enumerate(posterior.functional_covariance(gradients, variants)):
            full[place].append(torch.stack(parts).sum(0))
        for place, parts in enumerate(posterior.functional_covariance(gradients, variants, diagonal=True)):
            variances[place].append(torch.stack(parts).sum(0))
    for place, variant in enumerate(variants):
        wanted = dense(variant, case)
        torch.testing.assert_close(torch.cat(full[place]), wanted, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(torch.cat(variances[place]), wanted.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("case", ["kron", "full", "diagonal"])
def test_every_posterior_contracts_per_example_gradients(case: str) -> None:
    model, _ = made(case)
    _, data = build(CASES[case][0])
    posterior = posterior_of(case, 0.7, scale=1.7)
    other = posterior.with_prior(2.3, scale=0.4)
    batch = Batch(data[0][0], None, None, len(data[0][0]))
    for _, _, _, gradients in output_gradients(CheckedPlan(model, list(posterior.names), batch), batch):
        for diagonal in (False, True):
            plain = Posterior.functional_covariance(posterior, gradients, [posterior, other], diagonal=diagonal)
            own = posterior.functional_covariance(gradients, [posterior, other], diagonal=diagonal)
            for parts, (whole,) in zip(own, plain, strict=True):
                torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-9, atol=1e-10)


class Tokens(nn.Module):
    """Works on sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).mean(1))


def test_longer_inputs_go_in_smaller_pieces() -> None:
    net, short, long = Tokens(), torch.ones(12, 4, 2), torch.ones(12, 8, 2)
    checked = CheckedPlan(net, [n for n, _ in net.named_parameters()], Batch(short, None, None, 12))
    assert checked.plan.width == 3
    alive = 3 * (4 * 5 + 3)  # three outputs, and what the two layers put out for one short example
    for x, size in ((short, 6), (long, 3)):
        pieces = [part for part, *_ in output_gradients(checked, Batch(x, None, None, 12), numbers=6 * alive)]
        assert [(p.start, p.stop) for p in pieces] == [(k, k + size) for k in range(0, 12, size)]


@pytest.mark.parametrize(
    ("structure", "whole"),
    [("full", True), ("matrix_free", True), ("kron", False), ("diagonal", False), ("low_rank", False)],
)
def test_which_posteriors_have_every_term(structure: str, whole: bool) -> None:
    net, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval(), torch.randn(9, 2)
    laplace = Laplace(net, "regression", structure=structure, rank=4).fit([(x, x[:, :1])], progress=False)
    assert laplace.posterior.has_every_term is whole
    assert laplace.posterior.is_estimated is (structure == "matrix_free")


class Sequences(nn.Module):
    """Tokens with padding, a packed projection of three groups, and layers with fewer and with more positions than features."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width, padding_idx=0)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.narrow, self.head = nn.Linear(2, 3), nn.Linear(3, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(torch.tanh(self.narrow(x.unflatten(-1, (3, 2)))).mean((1, 2)))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal"])
@pytest.mark.parametrize("length", [4, 20])  # fewer and more tokens than there are in the vocabulary, and than features
def test_layers_that_share_their_weights(structure: str, length: int) -> None:
    torch.manual_seed(0)
    model = Sequences().double().eval()
    tokens = torch.randint(0, 11, (5, length))
    tokens[:, 1] = tokens[:, 0]  # a token that comes twice
    tokens[0, 2] = 0  # padding, which has no gradient
    data = [(tokens, torch.tensor([0, 1, 2, 3, 0]))]
    laplace = Laplace(model, "classification", structure=structure, prior_precision=0.7).fit(data, progress=False)
    plan = laplace.factors.treatment
    assert {t.rule for t in plan.values()} == {"EmbeddingRule", "PackedProjectionRule", "LinearRule"}
    posterior = laplace.posterior
    own, outputs = dict(model.named_parameters()), model(tokens)
    rows = [torch.autograd.grad(y, [own[n] for n in posterior.names], retain_graph=True) for y in outputs.flatten()]
    lines = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).unflatten(0, outputs.shape)
    wanted = lines @ torch.linalg.inv(posterior.to_dense()) @ lines.transpose(1, 2)
    found = laplace.predict(tokens)
    torch.testing.assert_close(found.latent_cov, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(laplace.predict(tokens, diagonal=True).latent_var, wanted.diagonal(dim1=1, dim2=2))
