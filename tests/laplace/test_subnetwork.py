"""A subnetwork: the dense submatrix over chosen weights, all others fixed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.curvature import fit_curvature, reference
from aftermap.curvature.structures.subnetwork import SubnetworkBlock
from aftermap.errors import InputError
from aftermap.laplace import Laplace, Subnetwork
from aftermap.laplace.evidence import log_evidence
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, regression

SIZE, PRIOR, SCALE = 17, 0.8, 1.6


def fitted(size: int = SIZE, **options: object) -> Laplace:
    options = {"prior_precision": PRIOR, "data_scale": SCALE, **options}
    return Laplace(mlp(), "classification", params=Subnetwork(size=size), **options).fit(classes(), progress=False)


def inputs() -> tuple[Tensor, Tensor]:
    x, y = zip(*classes(), strict=True)
    return torch.cat(x), torch.cat(y)


def block(laplace: Laplace) -> SubnetworkBlock:
    (found,) = laplace.factors.blocks
    assert isinstance(found, SubnetworkBlock)
    return found


def whole_places(laplace: Laplace) -> Tensor:
    """Places of the chosen weights among all 44."""
    starts, start = {}, 0
    for name, parameter in laplace.model.named_parameters():
        starts[name], start = start, start + parameter.numel()
    return torch.cat([places + starts[n] for n, places in block(laplace).entries.items()])


def dense(laplace: Laplace) -> Tensor:
    """The precision of the chosen weights by brute force [S, S]."""
    x, y = inputs()
    places = whole_places(laplace)
    full = reference.ggn(laplace.model, x, Categorical(), y)
    return SCALE * full[places[:, None], places] + PRIOR * torch.eye(len(places), dtype=torch.float64)


def test_the_weights_are_those_with_the_largest_variance() -> None:
    laplace = fitted()
    x, y = inputs()
    variance = 1 / (SCALE * reference.ggn(laplace.model, x, Categorical(), y).diagonal() + PRIOR)
    wanted = variance.argsort(descending=True)[:SIZE].sort().values
    torch.testing.assert_close(whole_places(laplace), wanted)
    big = Laplace(mlp(), "classification", params=Subnetwork(5, score="magnitude")).fit(classes(), progress=False)
    flat = torch.cat([p.detach().reshape(-1) for p in big.model.parameters()])
    torch.testing.assert_close(whole_places(big), flat.abs().argsort(descending=True)[:5].sort().values)


def test_precision_determinant_and_covariance() -> None:
    laplace = fitted()
    wanted, places = dense(laplace), block(laplace).places
    found = laplace.posterior.to_dense()
    torch.testing.assert_close(found[places[:, None], places], wanted)
    outside = torch.ones(len(found), dtype=torch.bool)
    outside[places] = False
    assert float(found[outside].abs().sum()) == 0.0
    torch.testing.assert_close(laplace.posterior.log_det_precision(), torch.linalg.slogdet(wanted)[1])
    values = {n: normal(3, *v.shape, seed=5) for n, v in laplace.posterior.mean.items()}
    flat = torch.cat([values[n].reshape(3, -1) for n in laplace.posterior.names], 1)
    product = laplace.posterior.covariance_mv(values)
    moved = torch.cat([product[n].reshape(3, -1) for n in laplace.posterior.names], 1)
    torch.testing.assert_close(moved[:, places], flat[:, places] @ torch.linalg.inv(wanted))
    assert float(moved[:, outside].abs().sum()) == 0.0
    variance = torch.cat([v.reshape(-1) for v in laplace.posterior.marginal_variance().values()])
    torch.testing.assert_close(variance[places], torch.linalg.inv(wanted).diagonal())
    assert float(variance[outside].abs().sum()) == 0.0


def test_functional_covariance() -> None:
    laplace, x = fitted(), normal(6, 3, seed=7)
    lines = reference.jacobian(laplace.model, x)[:, :, whole_places(laplace)]
    wanted = lines @ torch.linalg.inv(dense(laplace)) @ lines.transpose(1, 2)
    before = ModelSnapshot.of(laplace.model)
    torch.testing.assert_close(laplace.predict(x).latent_cov, wanted)
    torch.testing.assert_close(laplace.predict(x, diagonal=True).latent_var, wanted.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(laplace.variance_by_layer(x)["subnetwork"], wanted.diagonal(dim1=1, dim2=2))
    joint = laplace.joint(x)[1]
    torch.testing.assert_close(torch.stack([joint[n, :, n] for n in range(6)]), wanted)
    check_unchanged(laplace.model, before)
    full = Laplace(mlp(), "classification", structure="full", prior_precision=PRIOR, data_scale=SCALE)
    whole = full.fit(classes(), progress=False).predict(x)
    assert bool((wanted.diagonal(dim1=1, dim2=2) <= whole.latent_var + 1e-12).all())


def test_samples_move_only_the_chosen_weights() -> None:
    laplace = fitted(4)
    drawn = laplace.sample(30_000, generator(1))
    flat = torch.cat([(drawn[n] - laplace.posterior.mean[n]).reshape(30_000, -1) for n in laplace.posterior.names], 1)
    places = block(laplace).places
    outside = torch.ones(flat.shape[1], dtype=torch.bool)
    outside[places] = False
    assert float(flat[:, outside].abs().max()) == 0.0
    wanted = torch.linalg.inv(dense(laplace))
    error = ((wanted.diagonal()[:, None] * wanted.diagonal() + wanted.square()) / 30_000).sqrt()
    assert bool(((flat[:, places].T.cov() - wanted).abs() < 5 * error).all())
    assert bool((flat[:, places].mean(0).abs() < 5 * (wanted.diagonal() / 30_000).sqrt()).all())


def test_log_prob_is_that_of_the_chosen_weights() -> None:
    laplace = fitted(4)
    one = laplace.ensemble(1, generator(2))[0]
    flat = torch.cat([(one[n] - laplace.posterior.mean[n]).reshape(-1) for n in laplace.posterior.names])
    chosen = flat[block(laplace).places]
    gaussian = torch.distributions.MultivariateNormal(torch.zeros_like(chosen), precision_matrix=dense(laplace))
    torch.testing.assert_close(laplace.posterior.log_prob(one), gaussian.log_prob(chosen))


def test_evidence_counts_only_the_chosen_weights() -> None:
    laplace = fitted()
    x, y = inputs()
    likelihood = -SCALE * nn.functional.cross_entropy(laplace.model(x), y, reduction="sum").detach()
    flat = torch.cat([p.detach().reshape(-1) for p in laplace.model.parameters()])[whole_places(laplace)]
    volume = 0.5 * (torch.linalg.slogdet(dense(laplace))[1] - SIZE * math.log(PRIOR))
    torch.testing.assert_close(laplace.log_evidence(), likelihood - 0.5 * PRIOR * flat.square().sum() - volume)
    gamma = laplace.tune(method="evidence").posterior.effective_parameters()["subnetwork"]
    tau = float(laplace.prior_precision["subnetwork"])
    assert tau * float(flat.square().sum()) == pytest.approx(gamma, rel=1e-3)
    assert 0 < gamma < SIZE


def test_gradients_of_the_evidence() -> None:
    data = regression()
    laplace = Laplace(mlp(1, 6, 1), Gaussian(0.5), params=Subnetwork(7)).fit(data, progress=False)

    def value(logs: Tensor) -> Tensor:
        shared = logs[0].exp()
        prior = laplace.posterior.prior.with_precision(dict.fromkeys(laplace.posterior.names, shared))
        at = replace(laplace.hyperparameters, prior=prior, noise=logs[1].exp())
        posterior = at.applied_to(laplace.posterior, laplace.factors.curvature)
        return log_evidence(posterior, laplace.factors, laplace.base_likelihood, at)

    logs = torch.tensor([0.3, -0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (logs,), eps=1e-5, atol=1e-4, rtol=1e-5)


def test_all_weights_are_the_full_posterior() -> None:
    everything = fitted(44)
    full = Laplace(mlp(), "classification", structure="full", prior_precision=PRIOR, data_scale=SCALE)
    full.fit(classes(), progress=False)
    torch.testing.assert_close(everything.posterior.to_dense(), full.posterior.to_dense())
    torch.testing.assert_close(everything.log_evidence(), full.log_evidence())


def test_updates_keep_the_choice_and_equal_one_fit() -> None:
    first, second = classes()
    laplace = Laplace(mlp(), "classification", params=Subnetwork(SIZE)).fit([first], progress=False)
    places = block(laplace).places
    laplace.fit([second], update=True, progress=False)
    assert torch.equal(block(laplace).places, places)
    x, y = inputs()
    wanted = reference.ggn(laplace.model, x, Categorical(), y)[whole_places(laplace)[:, None], whole_places(laplace)]
    torch.testing.assert_close(block(laplace).matrix, wanted)


def test_saving(tmp_path: Path) -> None:
    laplace, x = fitted().tune(method="evidence"), normal(6, 3, seed=7)
    again = am.load(laplace.save(tmp_path / "posterior"), mlp())
    assert torch.equal(again.predict(x).latent_cov, laplace.predict(x).latent_cov)
    assert torch.equal(again.log_evidence(), laplace.log_evidence())
    again.fit(classes(), update=True, progress=False)
    assert again.n_data == 120


def test_validation_tuning_and_sampling() -> None:
    laplace = fitted()
    laplace.tune(classes(seed=12), precisions=[0.1, 1.0], scales=[1.0, 10.0])
    assert laplace.predict(normal(6, 3), kind="sampling", samples=3).mean.shape == (6, 4)


def test_convolutions_and_parameters_without_rules() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4)).double().eval()
    x, y = normal(9, 2, 3, 4, seed=1), torch.arange(9) % 4
    laplace = Laplace(model, "classification", params=Subnetwork(11, params=["0"])).fit([(x, y)], progress=False)
    assert set(laplace.posterior.names) <= {"0.weight", "0.bias"}
    full = fit_curvature(model, [(x, y)], "classification", structure="full", params=["0"], progress=False).to_dense()
    places = whole_places(laplace)
    torch.testing.assert_close(block(laplace).matrix, full[places[:, None], places])


def test_bad_input() -> None:
    for size in (0, -1, 2.5, True, 30_000):
        with pytest.raises(InputError, match="whole number of weights from 1 to 20,000"):
            Subnetwork(size)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="score='gradient' is not known; allowed are 'variance', 'magnitude'"):
        Subnetwork(3, score="gradient")
    with pytest.raises(InputError, match="a subnetwork of 45 weights cannot be chosen among 44"):
        fitted(45)
    with pytest.raises(InputError, match="a subnetwork has a full covariance: structure='diagonal'"):
        Laplace(mlp(), "classification", params=Subnetwork(3), structure="diagonal")
    one, two = fitted(4), fitted(5)
    with pytest.raises(InputError, match="cannot be added"):
        _ = one.factors + two.factors
