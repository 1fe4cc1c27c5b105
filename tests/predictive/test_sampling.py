"""The sampling predictive: the network under weight samples, and the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import InputError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.params import swapped
from aftermap.predictive import draw_weights, sampled_outputs
from aftermap.predictive import sampling as module
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, seeded


def fitted(structure: str = "kron", **options: object) -> Laplace:
    return Laplace(mlp(), "classification", structure=structure, **options).fit(classes(), progress=False)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
def test_probabilities_are_averaged_and_not_logits(structure: str) -> None:
    laplace = fitted(structure)
    x = classes()[0][0]
    weights = laplace.ensemble(7, generator(3))
    found = laplace.predict(x, kind="sampling", weights=weights)
    each = []
    for one in weights:
        with swapped(laplace.model, one), torch.no_grad():
            each.append(laplace.model(x).softmax(-1))
    probabilities = torch.stack(each)
    torch.testing.assert_close(found.mean, probabilities.mean(0))
    entropy = -(probabilities * probabilities.log()).sum(-1)
    total = -(found.mean * found.mean.log()).sum(-1)
    torch.testing.assert_close(found.aleatoric, entropy.mean(0))
    torch.testing.assert_close(found.epistemic, total - entropy.mean(0))


def test_the_same_generator_gives_the_same_samples_and_an_ensemble_is_fixed() -> None:
    laplace, x = fitted(), classes()[0][0]
    one = laplace.predict(x, kind="sampling", samples=5, generator=generator(3))
    two = laplace.predict(x, kind="sampling", weights=laplace.ensemble(5, generator(3)))
    torch.testing.assert_close(one.mean, two.mean, rtol=0, atol=0)
    other = laplace.predict(x, kind="sampling", samples=5, generator=generator(4))
    assert not torch.equal(one.mean, other.mean)


def test_chunks_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    laplace, x = fitted(), classes()[0][0]
    monkeypatch.setattr(module, "_NUMBERS", 3 * laplace.posterior.n_params)
    taken = []
    real = module.draw_weights

    def watched(posterior: object, count: int, generator: torch.Generator | None = None) -> list[dict[str, Tensor]]:
        taken.append(count)
        return real(posterior, count, generator)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "draw_weights", watched)
    values = sampled_outputs(laplace.model, laplace.posterior, x, 8, generator(1))
    assert values.shape == (8, len(x), 4)
    assert taken == [3, 3, 2]
    assert laplace.function_samples(x, 7, generator(1)).shape == (7, len(x), 4)
    assert taken == [3, 3, 2, 3, 3, 1]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.limit = nn.Linear(3, 4), 0, 10**9

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.limit:
            raise RuntimeError("out of luck")
        return self.inner(x)


def test_the_weights_come_back_after_an_exception() -> None:
    model = seeded(Fails)
    laplace = Laplace(model, "classification").fit(classes(), progress=False)
    before = ModelSnapshot.of(model)
    model.limit = model.calls + 2
    with pytest.raises(InputError, match="the model does not accept inputs.*out of luck"):
        laplace.predict(classes()[0][0], kind="sampling", samples=5)
    check_unchanged(model, before)
    model.limit = 10**9
    assert laplace.predict(classes()[0][0]).mean.shape == (20, 4)


@pytest.mark.parametrize("count", [0, -3, 2.5, True])
def test_bad_counts(count: object) -> None:
    laplace = fitted()
    with pytest.raises(InputError, match="must be a whole number of at least 1"):
        laplace.predict(classes()[0][0], kind="sampling", samples=count)  # type: ignore[arg-type]


def test_weights_of_another_network() -> None:
    laplace = fitted()
    with pytest.raises(InputError, match="no parameter called other"):
        laplace.predict(classes()[0][0], kind="sampling", weights=[{"other": torch.zeros(2)}])
    wrong = {n: v[..., None] for n, v in laplace.ensemble(1)[0].items()}
    with pytest.raises(InputError, match="0.weight has shape"):
        laplace.predict(classes()[0][0], kind="sampling", weights=[wrong])
    with pytest.raises(InputError, match="weights= holds no sample"):
        laplace.predict(classes()[0][0], kind="sampling", weights=[])


def test_differentiable_in_the_inputs() -> None:
    laplace = Laplace(mlp(3, 5, 2), Gaussian(0.5)).fit([(normal(9, 3), normal(9, 2, seed=1))], progress=False)
    weights = draw_weights(laplace.posterior, 4, generator(1))
    x = normal(2, 3, seed=4).requires_grad_()

    def mean(at: Tensor) -> Tensor:
        return laplace.predict(at, kind="sampling", weights=weights, differentiable=True).mean

    assert torch.autograd.gradcheck(mean, (x,))
    assert not laplace.predict(x, kind="sampling", weights=weights).mean.requires_grad


def test_regression_variance_is_that_of_the_samples() -> None:
    laplace = Laplace(mlp(3, 5, 2), Gaussian(0.5)).fit([(normal(9, 3), normal(9, 2, seed=1))], progress=False)
    x = normal(4, 3, seed=5)
    values = sampled_outputs(laplace.model, laplace.posterior, x, 6, generator(2)).detach()
    found = laplace.predict(x, kind="sampling", samples=6, generator=generator(2))
    torch.testing.assert_close(found.mean, values.mean(0))
    torch.testing.assert_close(found.epistemic, values.var(0, correction=0))
    torch.testing.assert_close(found.total, values.var(0, correction=0) + 0.25)


def test_a_last_layer_posterior_samples_only_that() -> None:
    laplace = fitted(params="last_layer")
    weights = laplace.ensemble(2, generator(1))
    assert list(weights[0]) == ["2.weight", "2.bias"]
    assert laplace.predict(classes()[0][0], kind="sampling", weights=weights).mean.shape == (20, 4)
