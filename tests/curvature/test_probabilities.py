"""A network that returns probabilities where logits are needed is noticed; one that returns their logarithms is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.curvature import fit_curvature
from aftermap.errors import StatisticalWarning
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian
from aftermap.likelihoods.discrete import are_probabilities

F64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(*last: nn.Module, outputs: int = 3, dtype: torch.dtype = F64) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs), *last).to(dtype).eval()
    with torch.no_grad():
        for parameter, seed in zip(net.parameters(), range(9), strict=False):
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(seed)))
    return net


def data(outputs: int = 3, dtype: torch.dtype = F64) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(24, 2, generator=seeded(7)).to(dtype)
    y = torch.randint(0, outputs, (24,), generator=seeded(8))
    return [(x[:11], y[:11]), (x[11:], y[11:])]


def warnings_of(call: Callable[[], object]) -> list[str]:
    """What a call warns of that has to do with probabilities; such a network gives reason for other warnings too."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if w.category is StatisticalWarning and "probabilities" in str(w.message)]


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "low_rank", "hessian", "subset"])
def test_every_fit_warns_once(structure: str) -> None:
    found = warnings_of(
        lambda: fit_curvature(network(nn.Softmax(-1)), data(), "classification", structure=structure, progress=False)
    )
    assert len(found) == 1
    assert "Take the softmax away" in found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_laplace_warns(dtype: torch.dtype) -> None:
    net = network(nn.Softmax(-1), dtype=dtype)
    with pytest.warns(StatisticalWarning, match="softmax is applied twice"):
        am.Laplace(net, "classification", structure="diagonal").fit(data(dtype=dtype))


def test_the_one_call_and_a_subnetwork_warn_once() -> None:
    net = network(nn.Softmax(-1))
    assert len(warnings_of(lambda: am.fit(net, data(), verbose=False))) == 1
    some = am.Laplace(net, "classification", params=am.Subnetwork(5))
    assert len(warnings_of(lambda: some.fit(data()))) == 1


def test_binary_outputs_are_judged_by_their_graph() -> None:
    x = data()[0][0]
    y = torch.randint(0, 2, (11, 1), generator=seeded(3)).to(F64)
    with pytest.warns(StatisticalWarning, match=r"ends with a sigmoid.*torch.logit\(p\)"):
        fit_curvature(network(nn.Sigmoid(), outputs=1), [(x, y)], "binary")
    # Logits between 0 and 1 are nothing unusual.
    assert not are_probabilities(Bernoulli(), torch.rand(5, 1))


def test_logarithms_of_probabilities_are_logits() -> None:
    """The curvature, and predictions that do not depend on a shift of all logits, are those of the network without log-softmax."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = am.Laplace(network(), "classification", structure="full").fit(data())
        logarithms = am.Laplace(network(nn.LogSoftmax(-1)), "classification", structure="full").fit(data())
    assert_close(logarithms.factors.to_dense(), plain.factors.to_dense())
    x = data()[1][0]
    one, other = (la.predict(x, link="mc", samples=20000, generator=seeded()) for la in (plain, logarithms))
    assert_close(one.mean, other.mean, rtol=0, atol=0.01)
    one, other = (la.predict(x, kind="sampling", samples=8, generator=seeded()) for la in (plain, logarithms))
    assert_close(one.mean, other.mean)


@pytest.mark.parametrize(
    "likelihood, outputs, wanted",
    [
        (Categorical(), torch.tensor([[0.2, 0.8], [1.0, 0.0]]), True),
        (Categorical(temperature=2.0), torch.tensor([[[0.2, 0.8]], [[0.5, 0.5]]]), True),
        (Categorical(), torch.tensor([[0.2, 0.8], [1.0, 0.1]]), False),
        (Categorical(), torch.tensor([[-0.5, 1.5]]), False),
        (
            Categorical(),
            torch.tensor([[1.0], [1.0]]),
            False,
        ),  # one output is a shape mistake, which has its own message
        (Categorical(), torch.zeros(0, 3), False),
        (Gaussian(), torch.tensor([[0.2, 0.8]]), False),
    ],
)
def test_what_counts_as_probabilities(likelihood: am.likelihoods.Likelihood, outputs: Tensor, wanted: bool) -> None:
    assert are_probabilities(likelihood, outputs) is wanted
