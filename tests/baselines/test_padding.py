"""The row for padding of an embedding has no gradient, so no baseline draws it: it stays what it is in the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap import Laplace
from aftermap.baselines import HMC, MeanField, Particles

TOKENS = torch.tensor([[0, 1, 2], [3, 0, 0], [0, 0, 0], [4, 2, 1]])
LABELS = torch.tensor([0, 1, 0, 1])


class Bag(nn.Module):
    """The mean of embedded tokens, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.embedding(tokens).mean(1))
        return outputs


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Bag().double().eval()
    with torch.no_grad():
        model.embedding.weight[0] = 1.0  # as in a network that was trained elsewhere
    return model


def test_particles_of_a_posterior_are_its_sampled_prediction(model: nn.Module) -> None:
    laplace = Laplace(model, "classification").fit([(TOKENS, LABELS)], progress=False)
    weights = laplace.ensemble(6, torch.Generator().manual_seed(1))
    sampled = laplace.predict(TOKENS, kind="sampling", weights=weights)
    particles = Particles.from_posterior(model, laplace.posterior, 6, generator=torch.Generator().manual_seed(1))
    assert_close(particles.predict(TOKENS).mean, sampled.mean)


def test_weights_that_are_given_keep_their_own_row(model: nn.Module) -> None:
    other = {n: p.detach().clone() for n, p in model.named_parameters()}
    other["embedding.weight"][0] = -1.0
    with torch.no_grad():
        before = model(TOKENS).softmax(-1)
    assert not torch.allclose(Particles(model, [other]).predict(TOKENS).mean, before)


@pytest.mark.parametrize("estimator", ["local", "weights"])
def test_mean_field_draws_no_padding(model: nn.Module, estimator: str) -> None:
    fitted = MeanField(model, estimator=estimator, initial_scale=1e-8, prior_precision=1e16)
    fitted.fit([(TOKENS, LABELS)], epochs=1, lr=1e-12)
    fitted._rho["embedding.weight"].data[0] = 3.0  # where the prior leads it, as no datum says anything of this row
    with torch.no_grad():
        expected = model(TOKENS)
        generator = torch.Generator().manual_seed(0)
        value, _ = fitted._expected_nll(next(iter(_batches(fitted))), 4, generator)
    assert_close(value, nn.functional.cross_entropy(expected, LABELS), rtol=1e-4, atol=0.0)
    assert_close(fitted.predict(TOKENS, samples=3).mean, expected.softmax(-1), rtol=1e-4, atol=1e-6)
    assert_close(fitted.particles(3).predict(TOKENS).mean, expected.softmax(-1), rtol=1e-4, atol=1e-6)


def _batches(fitted: MeanField):  # type: ignore[no-untyped-def]
    from aftermap.baselines.base import batches_of

    return batches_of(fitted.model, [(TOKENS, LABELS)])


def test_the_energy_of_a_chain_sees_the_padding_in_the_prior_alone(model: nn.Module) -> None:
    hmc = HMC(model, prior_precision=2.0)
    batches = list(_batches(hmc))
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    moved = theta.clone()
    moved[:4] += torch.tensor([1.0, -2.0, 0.5, 3.0])
    prior = 0.5 * 2.0 * (moved.square().sum() - theta.square().sum())
    assert_close(hmc.energy(moved, batches) - hmc.energy(theta, batches), prior)
