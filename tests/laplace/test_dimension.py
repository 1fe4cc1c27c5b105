"""The effective dimension: against dense traces, without labels, and posteriors brought to it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import aftermap as am
from aftermap.batches import Batch, iterate
from aftermap.curvature.passes.products import GGNOperator
from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.krylov import TraceEstimate
from aftermap.laplace import Laplace, SelfConsistentResult
from aftermap.laplace.dimension import (
    DimensionResult,
    block_dimension,
    effective_dimension,
    is_normalised,
    match_dimension,
)
from aftermap.laplace.examples import informative_examples
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.dimension_worker import normalised
from tests.laplace.problems import classes, generator, mlp, normal, regression, seeded, trained

DATA = Path(os.environ.get("AFTERMAP_DATA", Path(__file__).parents[3] / "shared" / "data"))


by_heart = pytest.mark.filterwarnings("ignore:matched to the effective dimension")


def batches(data: list[tuple[Tensor, Tensor]]) -> list[Batch]:
    return list(iterate(data, device=torch.device("cpu"), dtype=torch.float64))


def problem() -> tuple[nn.Module, GGNOperator, Tensor, Tensor]:
    """A classifier, its operator, the dense G and a prior with two precisions."""
    model = trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"), decay=0.1, steps=60)
    operator = GGNOperator(model, classes(), Categorical())
    prior = torch.cat([torch.full((20,), 0.7), torch.full((24,), 1.9)]).double()
    return model, operator, operator.to_dense(), prior


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_each_draw_is_exact_when_the_bounds_meet(scale: float) -> None:
    _, operator, dense, prior = problem()
    found, bounds, steps = effective_dimension(
        operator, prior, scale, draws=5, steps=44, settled=1 + 1e-9, generator=generator(3)
    )
    drawn = operator.noise(5, generator(3))
    each = scale * (drawn * torch.linalg.solve(scale * dense + torch.diag(prior), drawn)).sum(0)
    assert found.value == pytest.approx(float(each.mean()), rel=1e-6)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)
    assert found.standard_error == pytest.approx(float(each.std() / 5**0.5), rel=1e-5)
    assert steps <= 44


def test_the_bounds_enclose_the_value_at_every_step() -> None:
    _, operator, dense, prior = problem()
    drawn = operator.noise(3, generator(3))
    truth = float((drawn * torch.linalg.solve(dense + torch.diag(prior), drawn)).sum(0).mean())
    gaps = []
    for steps in (1, 2, 4, 7):
        found, (lower, upper), made = effective_dimension(
            operator, prior, draws=3, steps=steps, settled=1.0, generator=generator(3)
        )
        assert lower <= truth * (1 + 1e-9)
        assert truth <= upper * (1 + 1e-9)
        assert lower <= found.value <= upper
        assert made == steps
        gaps.append(upper - lower)
    assert gaps == sorted(gaps, reverse=True)


def test_the_mean_over_draws_is_the_trace() -> None:
    _, operator, dense, prior = problem()
    truth = float(torch.linalg.solve(dense + torch.diag(prior), dense).trace())
    found, _, _ = effective_dimension(operator, prior, draws=300, steps=44, settled=1.001, generator=generator(1))
    assert abs(found.value - truth) < 4 * found.standard_error
    assert found.standard_error < 0.08 * truth
    # The identity: γ is the variance of the outputs on the data, weighted with the curvature of the loss.
    model = operator._model
    full = Laplace(model, "classification", structure="full").fit(classes(), progress=False)
    full.with_prior({"0": 0.7, "2": 1.9})
    x = torch.cat([b[0] for b in classes()])
    latent = full.predict(x)
    curvature = Categorical().hessian(latent.latent_mean)
    assert float((curvature * latent.latent_cov).sum()) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_blocks_against_their_dense_covariance(structure: str) -> None:
    model, operator, dense, _ = problem()
    la = Laplace(model, "classification", structure=structure, data_scale=2.0).fit(classes(), progress=False)
    truth = float(2 * torch.linalg.solve(la.posterior.to_dense(), dense).trace())
    found = block_dimension(operator, la.posterior, 2000, generator(4))
    assert abs(found.value - truth) < 4 * found.standard_error
    assert found.standard_error < 0.05 * truth


def test_all_data_are_kept_where_there_are_few() -> None:
    model = problem()[0]
    chosen = informative_examples(model, batches(classes()), Categorical(), 60, generator(0))
    assert sum(b.size for b in chosen) == 60
    assert all(bool((b.weight == 1).all()) for b in chosen)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_over_the_sample_are_unbiased(weighted: bool) -> None:
    model = problem()[0]
    data = batches(classes(90))
    if weighted:
        data = [replace(b, weight=torch.linspace(0.5, 3, b.size, dtype=torch.float64)) for b in data]
    weights = [torch.ones(b.size, dtype=torch.float64) if b.weight is None else b.weight for b in data]
    # A sum that the sampling knows nothing of: Σ w_n tr(Λ_n) ‖x_n‖².
    values = [Categorical().hessian(model(b.inputs).detach()).diagonal(dim1=1, dim2=2).sum(1) for b in data]
    truth = sum(float((w * t * b.inputs.square().sum(1)).sum()) for w, t, b in zip(weights, values, data, strict=True))
    sums = []
    for seed in range(200):
        chosen = informative_examples(model, data, Categorical(), 12, generator(seed))
        assert sum(b.size for b in chosen) == 12
        total = 0.0
        for b in chosen:
            trace = Categorical().hessian(model(b.inputs).detach()).diagonal(dim1=1, dim2=2).sum(1)
            total += float((b.weight * trace * b.inputs.square().sum(1)).sum())
        sums.append(total)
    found = torch.tensor(sums, dtype=torch.float64)
    assert abs(float(found.mean()) - truth) < 4 * float(found.std()) / 200**0.5
    assert float(found.std()) < 0.6 * truth


def test_mappings_and_sequences_of_many_lengths() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4).double()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens.mean(1))

    data = [Batch({"tokens": normal(5, n, 3, seed=n)}, torch.arange(5) % 4, None, 5) for n in (2, 3, 3)]
    chosen = informative_examples(Mean(), data, Categorical(), 9, generator(0))
    assert sum(b.size for b in chosen) == 9
    assert all(len(b.inputs["tokens"]) == b.size == len(b.targets) for b in chosen)


@by_heart
def test_the_width_is_matched() -> None:
    model = normalised()
    before = ModelSnapshot.of(model)
    la = Laplace(model, "classification").fit(classes(), progress=False).tune(method="evidence")
    precision = {k: float(v) for k, v in la.prior_precision.items()}
    dense = GGNOperator(model, classes(), Categorical()).to_dense()
    wide = float(torch.linalg.solve(la.posterior.to_dense(), dense).trace())
    prior = la.posterior.prior.vector(la.posterior.names)
    gamma = float(torch.linalg.solve(dense + torch.diag(prior), dense).trace())
    la.tune(method="dimension")
    check_unchanged(model, before)
    found = la.tuning
    assert isinstance(found, DimensionResult)
    assert found.gamma.value == pytest.approx(gamma, rel=0.4)
    assert found.before.value == pytest.approx(wide, rel=0.4)
    assert la.data_scale == found.data_scale == pytest.approx(found.before.value / found.gamma.value)
    for layer, value in la.prior_precision.items():
        assert float(value) == pytest.approx(found.factor * precision[layer], rel=1e-6)
        assert found.precision[layer] == pytest.approx(float(value), rel=1e-6)
    # The covariance is the old one, divided by the factor.
    matched = float(torch.linalg.solve(la.posterior.to_dense(), dense).trace())
    assert matched * found.factor == pytest.approx(wide, rel=1e-6)
    assert found.n_examples == 60


def test_a_full_posterior_is_matched_already() -> None:
    model, _, _, _ = problem()
    la = Laplace(model, "classification", structure="full").fit(classes(), progress=False)
    found = match_dimension(
        model, batches(classes()), Categorical(), la.posterior, draws=200, steps=44, generator=generator(5)
    )
    assert found.factor == pytest.approx(1.0, abs=4 * found.before.standard_error / found.before.value)


def test_a_small_dimension_is_known_as_well_as_a_large_one() -> None:
    """Two draws of few determined parameters may be off by half; the default makes as many as they need."""
    model, _, _, _ = problem()
    la = Laplace(model, "classification", prior_precision=30.0).fit(classes(), progress=False)

    def gamma(seed: int, draws: int | None) -> float:
        found = match_dimension(
            model, batches(classes()), Categorical(), la.posterior, draws=draws, generator=generator(seed)
        )
        return found.gamma.value

    truth = gamma(100, 2000)
    assert truth < 20
    ratios = torch.tensor([gamma(seed, None) / truth for seed in range(8)])
    few = torch.tensor([gamma(seed, 2) / truth for seed in range(8)])
    assert float((ratios - 1).abs().max()) < 0.3 < float((few - 1).abs().max())


def test_labels_have_no_influence() -> None:
    model = normalised()
    la = Laplace(model, "classification").fit(classes(), progress=False)
    other = [(x, (y + 1) % 4) for x, y in classes()]
    one, two = (
        match_dimension(model, batches(d), Categorical(), la.posterior, generator=generator(0))
        for d in (classes(), other)
    )
    assert one == two


def test_which_networks_are_normalised() -> None:
    assert is_normalised(normalised())
    assert not is_normalised(mlp())


def test_a_regression_keeps_its_noise() -> None:
    la = Laplace(trained(mlp(1, 6, 1), regression(), nn.MSELoss(reduction="sum")), "regression").fit(
        regression(), progress=False
    )
    level = float(la.tune(method="evidence").hyperparameters.noise)
    la.tune(method="dimension")
    assert float(la.hyperparameters.noise) == pytest.approx(level, rel=1e-3)
    assert float(la.posterior.scale) == pytest.approx(la.data_scale / level**2, rel=1e-3)


@by_heart
def test_the_same_result_every_time_and_more_data_can_be_added() -> None:
    first, second = classes()
    model = normalised()
    la = Laplace(model, "classification").fit([first], progress=False).fit([second], update=True, progress=False)
    whole = Laplace(model, "classification").fit(classes(), progress=False)
    scale = la.tune(method="dimension").data_scale
    assert la.tune(method="dimension").data_scale == pytest.approx(scale, rel=1e-2)
    assert la.tune(method="evidence").data_scale == pytest.approx(1.0)
    for found in (la, whole):
        found.tune(method="dimension")
    assert la.tuning.n_examples == whole.tuning.n_examples == 60


def test_a_part_of_the_data_is_warned_of() -> None:
    data = classes(600)
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4)))
    model = trained(net, data, nn.CrossEntropyLoss(reduction="sum"), decay=0.3, steps=60)
    x, y = torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data])
    part = DataLoader(Subset(TensorDataset(x, y), range(20)), batch_size=8)
    # New data of the same kind.
    new = normal(2000, 3, seed=50)
    labels = (new @ normal(3, 4, seed=3) + 0.7 * normal(2000, 4, seed=51)).argmax(1)

    def nll(la: Laplace) -> float:
        return float(-la.predict(new, generator=generator()).log_prob(labels).mean())

    few = Laplace(model, "classification").fit(part, progress=False)
    with pytest.warns(StatisticalWarning, match=r"the 20 data of this fit, .*dataset holds 600\).*data_scale=N / 20\)"):
        few.tune(method="dimension")
    assert isinstance(few.tuning, DimensionResult)
    plain = float(nn.functional.cross_entropy(model(new).detach(), labels))
    assert nll(few) > plain + 0.05
    # With their true number, and with all of them, it is well, and nothing is said.
    for la in (
        Laplace(model, "classification", data_scale=30.0).fit(part, progress=False),
        Laplace(model, "classification").fit(data, progress=False),
    ):
        la.tune(method="dimension")
        assert isinstance(la.tuning, DimensionResult)
        assert nll(la) < plain + 0.02


def test_a_network_that_knows_its_data_by_heart_is_told_of_that() -> None:
    la = Laplace(normalised(), "classification", data_scale=1.5).fit(classes(), progress=False)
    with pytest.warns(
        StatisticalWarning, match=r"each counted as 1\.5, .*trained on more data than these: .* by heart"
    ):
        la.tune(method="dimension")
    assert isinstance(la.tuning, DimensionResult)


def test_bad_input() -> None:
    model, operator, _, prior = problem()
    fitted = Laplace(model, "classification").fit(classes(), progress=False)
    fitted._fitted = replace(fitted.fitted, data=None)
    with pytest.raises(InputError, match="method='dimension' passes over the training data again"):
        fitted.tune(method="dimension")
    before = fitted.posterior
    with pytest.raises(InputError, match="examples=.* must be a whole number"):
        match_dimension(model, batches(classes()), Categorical(), before, examples=0)
    with pytest.raises(InputError, match="draws=.* must be a whole number"):
        effective_dimension(operator, prior, draws=0)
    with pytest.raises(InputError, match="steps=.* must be a whole number"):
        effective_dimension(operator, prior, steps=True)
    matrix_free = Laplace(model, "classification", structure="matrix_free").fit(classes(), progress=False)
    with pytest.raises(InputError, match="got a MatrixFreePosterior, which has every term already"):
        match_dimension(model, batches(classes()), Categorical(), matrix_free.posterior)
    sure = mlp()
    with torch.no_grad():
        sure[2].bias.copy_(torch.tensor([1e6, 0.0, 0.0, 0.0]))
    with pytest.raises(DataError, match="the curvature of the loss is zero at every example"):
        informative_examples(sure, batches(classes()), Categorical(), 5, generator(0))


def test_after_an_error_the_old_values_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    la = Laplace(normalised(), "classification").fit(classes(), progress=False)
    posterior = la.posterior

    def broken(*_: object, **__: object) -> DimensionResult:
        raise DataError("no")

    monkeypatch.setattr("aftermap.laplace.tune.match_dimension", broken)
    with pytest.raises(DataError, match="no"):
        la.tune(method="dimension")
    assert la.posterior is posterior
    assert la.data_scale == 1.0


def test_gaussian_curvature_is_uniform_and_the_sample_too() -> None:
    model = mlp(1, 6, 1)
    chosen = informative_examples(model, batches(regression()), Gaussian(1.0), 15, generator(2))
    weights = torch.cat([b.weight for b in chosen])
    assert len(weights) == 15
    torch.testing.assert_close(weights, weights[:1].expand(15))


@pytest.mark.slow
def test_a_pretrained_residual_network_without_validation_labels() -> None:
    """ResNet-20 with BatchNorm: the evidence alone collapses, am.fit without any validation data does not."""
    if not (DATA / "models" / "cifar10_resnet20.npz").exists():
        pytest.skip(f"needs cifar10 and models in {DATA}")
    pytest.importorskip("PIL", reason="needs Pillow to read the images")
    from examples.resnet20_cifar10 import ResNet20, images
    from examples.resnet20_cifar10 import batches as split

    weights = np.load(DATA / "models" / "cifar10_resnet20.npz")
    model = ResNet20()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    model.eval()
    labels = np.load(DATA / "cifar10" / "labels.npz")
    train = split(
        images(DATA / "cifar10" / "train_00000_09999.webp", 300),
        torch.from_numpy(labels["train_labels_all"][:300]).long(),
    )
    x = images(DATA / "cifar10" / "test_10k.webp", 10_000)[5_000:5_200]
    y = torch.from_numpy(labels["test_labels"][5_000:5_200]).long()

    def nll(la: Laplace) -> float:
        made = [la.predict(part, link="mc", samples=256, generator=generator()) for part in x.split(100)]
        return float(-torch.cat([m.mean for m in made])[torch.arange(200), y].log().mean())

    # The network saw 50,000 images, of which 300 stand for all here.
    la = am.fit(model, train, structure="kron", verbose=False, data_scale=50_000 / 300)
    assert isinstance(la.tuning, SelfConsistentResult)
    assert la.report.check.passed
    with torch.no_grad():
        plain = float(nn.functional.cross_entropy(model(x), y))
    matched = nll(la)
    assert matched < plain
    assert nll(la.tune(method="evidence")) > plain + 0.1


@pytest.mark.parametrize(("factor", "words"), [(2.0, "2 times smaller"), (0.5, "2 times larger")])
def test_a_result_is_told_in_words(factor: float, words: str) -> None:
    found = DimensionResult(
        TraceEstimate(40.0, 3.0), (30.0, 50.0), TraceEstimate(40.0 * factor, 1.5), factor, factor, {}, 80, 4
    )
    assert str(found) == (
        f"the data determine 40 ± 3 parameters, where the posterior counted {40 * factor:.3g} ± 1.5: its covariance is made {words}"
    )
