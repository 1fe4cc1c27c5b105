"""PosteriorPredictor: options, inputs and what it refuses."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import DataError, InputError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.predictive import PosteriorPredictor, WeightsFingerprint
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, seeded


@pytest.fixture
def laplace() -> Laplace:
    return Laplace(mlp(), "classification").fit(classes(), progress=False)


@pytest.fixture
def regressor() -> Laplace:
    noise = torch.tensor([0.5, 0.7, 0.9, 1.1], dtype=torch.float64)
    return Laplace(mlp(), Gaussian(noise)).fit([(normal(9, 3), normal(9, 4, seed=1))], progress=False)


def test_is_built_from_model_posterior_and_likelihood(laplace: Laplace) -> None:
    own = PosteriorPredictor(laplace.model, laplace.posterior, laplace.likelihood)
    x = classes()[0][0]
    torch.testing.assert_close(own.predict(x).latent_cov, laplace.predict(x).latent_cov, rtol=0, atol=0)
    plain = own.map_prediction(x)
    torch.testing.assert_close(plain.mean, laplace.model(x).softmax(-1).detach())
    torch.testing.assert_close(plain.epistemic, torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("link", ["auto", "mc", "probit", "pairwise", "bridge"])
def test_links(laplace: Laplace, link: str) -> None:
    found = laplace.predict(classes()[0][0], link=link, generator=generator(1))
    torch.testing.assert_close(found.mean.sum(-1), torch.ones(20, dtype=torch.float64))
    again = laplace.predict(classes()[0][0], link=link, generator=generator(1))
    torch.testing.assert_close(found.mean, again.mean, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"kind": "sampling"}, {"differentiable": True}])
def test_chosen_outputs_keep_their_noise(regressor: Laplace, options: dict[str, object]) -> None:
    x = normal(5, 3, seed=7)
    whole = regressor.predict(x, generator=generator(2), **options)  # type: ignore[arg-type]
    some = regressor.predict(x, outputs=[2, 1], generator=generator(2), **options)  # type: ignore[arg-type]
    for name in ("mean", "epistemic", "aleatoric", "total"):
        torch.testing.assert_close(getattr(some, name), getattr(whole, name)[:, [2, 1]])


@pytest.mark.parametrize("outputs", [[4], [-1], [], [1.0], [True]])
@pytest.mark.parametrize("kind", ["linearised", "sampling"])
def test_outputs_that_do_not_exist(regressor: Laplace, outputs: list[int], kind: str) -> None:
    with pytest.raises(InputError, match="must name some of the 4 outputs, 0 to 3"):
        regressor.predict(normal(5, 3), outputs=outputs, kind=kind)


def test_outputs_of_a_classifier(laplace: Laplace) -> None:
    with pytest.raises(InputError, match="outputs= chooses among the outputs of a regression; .*Categorical"):
        laplace.predict(classes()[0][0], outputs=[1])


@pytest.mark.parametrize("link", ["softmax", "bridge"])
def test_bad_options(laplace: Laplace, regressor: Laplace, link: str) -> None:
    with pytest.raises(InputError, match="kind='mc' is not known; allowed are 'linearised', 'margin', 'sampling'"):
        laplace.predict(classes()[0][0], kind="mc")
    with pytest.raises(InputError, match=f"link.*'{link}'"):
        regressor.predict(normal(5, 3), link=link)


def test_inputs_that_are_not_finite(laplace: Laplace) -> None:
    x = classes()[0][0].clone()
    x[3, 1] = float("nan")
    before = ModelSnapshot.of(laplace.model)
    for call in (laplace.predict, laplace.joint, laplace.variance_by_layer):
        with pytest.raises(DataError, match="not finite|NaN"):
            call(x)
    check_unchanged(laplace.model, before)


def test_inputs_of_another_dtype_or_shape(laplace: Laplace) -> None:
    before = ModelSnapshot.of(laplace.model)
    with pytest.raises(DataError, match="float32.*float64"):
        laplace.predict(classes()[0][0].float())
    for kind in ("linearised", "sampling"):
        with pytest.raises(InputError, match=r"the model does not accept inputs of shape \(5, 7\)"):
            laplace.predict(normal(5, 7), kind=kind)
    check_unchanged(laplace.model, before)


def test_a_model_in_training_mode() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 4)))
    laplace = Laplace(model, "classification").fit(classes(), progress=False)
    laplace.predict(classes()[0][0])
    model.train()
    for kind in ("linearised", "sampling"):
        with pytest.raises((InputError, UnsupportedError), match="eval"):
            laplace.predict(classes()[0][0], kind=kind)
    model.eval()
    assert laplace.predict(classes()[0][0]).mean.shape == (20, 4)


@pytest.mark.parametrize("entry", [0, 57, 14_999])
def test_one_changed_weight_among_many_is_noticed(entry: int) -> None:
    model = mlp(3, 3000, 5)
    watch = WeightsFingerprint.of(model)
    watch.check(model)
    with torch.no_grad():
        model[2].weight.view(-1)[entry] *= 1 + 1e-15
    with pytest.raises(InputError, match=r"weights have changed since the fit \(2.weight\)"):
        watch.check(model)


def test_a_changed_buffer_is_noticed() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))
    laplace = Laplace(model, "classification").fit(classes(), progress=False)
    model[1].running_mean += 0.1
    with pytest.raises(InputError, match="1.running_mean"):
        laplace.predict(classes()[0][0])


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor, extra: Tensor) -> dict[str, Tensor]:
        return {"logits": torch.tanh(self.a(x)) + self.b(extra)}


def test_mappings_and_tuples() -> None:
    model = seeded(Keywords)
    x, extra, y = normal(7, 3), normal(7, 2, seed=1), torch.arange(7) % 4
    laplace = Laplace(model, "classification").fit([{"x": x, "extra": extra, "labels": y}], progress=False)
    one, two = laplace.predict({"x": x, "extra": extra}), laplace.predict((x, extra))
    torch.testing.assert_close(one.latent_cov, two.latent_cov)
    with pytest.raises(InputError, match="single tensor"):
        laplace.predict((x, extra), differentiable=True)


def test_predictions_in_inference_and_no_grad_mode(laplace: Laplace) -> None:
    x = classes()[0][0]
    wanted = laplace.predict(x).latent_cov
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(laplace.predict(x).latent_cov, wanted, rtol=0, atol=0)
            assert laplace.predict(x, kind="sampling", samples=2).mean.shape == (20, 4)


def test_an_empty_batch(laplace: Laplace) -> None:
    with pytest.raises(DataError, match="no example"):
        laplace.predict(normal(0, 3))


def test_float32_is_as_good_as_float64() -> None:
    data = classes()
    exact = Laplace(mlp(), "classification").fit(data, progress=False)
    single = Laplace(mlp().float(), "classification").fit([(x.float(), y) for x, y in data], progress=False)
    found = single.predict(data[0][0].float()).latent_cov
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact.predict(data[0][0]).latent_cov, rtol=1e-3, atol=1e-5)


def test_a_copy_of_a_used_predictor_predicts_the_same(laplace: Laplace) -> None:
    x = normal(4, 3)
    before = laplace.predict(x, link="probit")
    copied = deepcopy(laplace)
    torch.testing.assert_close(copied.predict(x, link="probit").mean, before.mean)
