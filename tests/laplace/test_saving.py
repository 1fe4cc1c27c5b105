"""Saving and loading the facade: the same bits, and every mismatch named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import aftermap as am
from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.faults.sealing import edit
from tests.laplace.problems import classes, generator, mlp, normal, regression, seeded, trained, untrained

STRUCTURES = ["kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "subset"]


def fitted(structure: str = "kron", **options: object) -> Laplace:
    laplace = Laplace(mlp(), "classification", structure=structure, rank=9, **options)
    return laplace.fit(classes(), generator=generator(), progress=False).tune(method="evidence")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictions_are_the_same_bit_by_bit(structure: str, tmp_path: Path) -> None:
    laplace, x = fitted(structure, temperature=1.3, data_scale=0.8), classes()[0][0]
    place = laplace.save(tmp_path / "posterior")
    model = mlp()
    before = ModelSnapshot.of(model)
    again = am.load(place, model)
    check_unchanged(model, before)
    one, two = laplace.predict(x, generator=generator(1)), again.predict(x, generator=generator(1))
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.latent_cov, two.latent_cov)
    for name, value in laplace.sample(2, generator(2)).items():
        assert torch.equal(value, again.sample(2, generator(2))[name])
    assert torch.equal(laplace.log_evidence(), again.log_evidence())
    assert again.structure == structure
    assert (again.temperature, again.data_scale, again.n_data) == (1.3, 0.8, 60)


@untrained
def test_noise_and_likelihood_are_inside(tmp_path: Path) -> None:
    data = regression()
    model = mlp(1, 6, 1)
    laplace = Laplace(model, Gaussian(0.9), prior_mean=0.1).fit(data, progress=False).tune()
    again = am.load(laplace.save(tmp_path / "one"), model)
    assert float(again.hyperparameters.noise) == float(laplace.hyperparameters.noise) != 0.9
    assert torch.equal(again.predict(data[0][0]).total, laplace.predict(data[0][0]).total)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    weighted = Laplace(mlp(), Categorical(weight=weight, ignore_index=2)).fit(classes(), progress=False)
    likelihood = am.load(weighted.save(tmp_path / "two"), mlp()).likelihood
    assert isinstance(likelihood, Categorical)
    assert likelihood.ignore_index == 2
    torch.testing.assert_close(torch.as_tensor(likelihood.weight, dtype=torch.float64), weight)


def test_a_loaded_posterior_can_be_fitted_further_and_tuned(tmp_path: Path) -> None:
    first, second = classes()
    laplace = Laplace(mlp(), "classification").fit([first], progress=False)
    again = am.load(laplace.save(tmp_path / "posterior"), mlp())
    again.fit([second], update=True, progress=False)
    whole = Laplace(mlp(), "classification").fit(classes(), progress=False)
    torch.testing.assert_close(again.posterior.to_dense(), whole.posterior.to_dense(), rtol=1e-9, atol=1e-10)
    for found in (again, whole):
        found.tune(method="evidence")
    assert float(again.log_evidence()) == pytest.approx(float(whole.log_evidence()), abs=1e-4)


@pytest.mark.parametrize("labels", [False, True])
def test_a_loaded_regression_is_tuned_by_the_rule_of_the_fit_or_says_so(labels: bool, tmp_path: Path) -> None:
    def network() -> nn.Module:
        return trained(mlp(1, 6, 1), regression(), nn.MSELoss(reduction="sum"), decay=0.1, steps=200)

    held_out = regression(30, seed=8) if labels else None
    laplace = Laplace(network(), "regression", structure="full").fit(regression(), progress=False).tune(held_out)
    place, expected = laplace.save(tmp_path / "posterior"), str(laplace.tune(held_out).tuning)
    assert str(am.load(place, network(), train_loader=regression()).tune(held_out).tuning) == expected
    alone = am.load(place, network())
    taken, rule = ("grid", "validation") if labels else ("evidence", "leave_one_out")
    with pytest.warns(StatisticalWarning, match=f"not at hand .*'{taken}' takes the place of '{rule}'"):
        alone.tune(held_out)
    assert str(alone.tune(held_out, train_loader=regression()).tuning) == expected


@pytest.mark.parametrize("params", ["last_layer", ["0"], r".*bias"])
def test_subsets(params: object, tmp_path: Path) -> None:
    laplace, x = fitted(params=params), classes()[0][0]
    again = am.load(laplace.save(tmp_path / "posterior"), mlp())
    assert again.posterior.names == laplace.posterior.names
    assert torch.equal(again.predict(x).latent_cov, laplace.predict(x).latent_cov)


def test_what_was_fitted_around_a_wrapper_says_how_to_load_it(tmp_path: Path) -> None:
    wrapped, x = nn.DataParallel(mlp()), classes()[0][0]
    laplace = Laplace(wrapped, "classification").fit(classes(), progress=False)
    place = laplace.save(tmp_path / "posterior")
    with pytest.raises(
        InputError, match=r"(?s)module.0.weight \(5, 3\) is missing.*pass torch.nn.DataParallel\(model\)"
    ):
        am.load(place, mlp())
    again = am.load(place, nn.DataParallel(mlp()))
    assert torch.equal(again.predict(x).latent_cov, laplace.predict(x).latent_cov)


def test_every_mismatch_is_named(tmp_path: Path) -> None:
    place = fitted().save(tmp_path / "posterior")
    with pytest.raises(InputError, match=r"(?s)0.weight is \(6, 3\) in the model, \(5, 3\) in the file.*2.weight is"):
        am.load(place, mlp(3, 6, 4))
    with pytest.raises(InputError, match=r"2.weight \(4, 5\) is missing in the model"):
        am.load(place, nn.Sequential(nn.Linear(3, 5)).double())
    with pytest.raises(InputError, match=r"0.weight is torch.float32 in the model, torch.float64 in the file"):
        am.load(place, mlp().float())
    with pytest.raises(
        InputError, match=r"not those that .* was fitted around \(other values in 0.weight.*Load the trained"
    ):
        am.load(place, mlp(seed=7))


def test_weights_outside_the_posterior_count_too(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))

    laplace = Laplace(build(), "classification", params="last_layer").fit(classes(), progress=False)
    place = laplace.save(tmp_path / "posterior")
    assert am.load(place, build()).posterior.names == ("2.weight", "2.bias")
    other = build()
    other[1].running_mean += 1
    with pytest.raises(InputError, match="other values outside the posterior's parameters"):
        am.load(place, other)


def test_damaged_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        am.load(tmp_path / "nowhere", mlp())
    place = fitted().save(tmp_path / "posterior")
    weights = place / "posterior.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        am.load(place, mlp())
    weights.write_bytes(whole)
    config = json.loads((place / "config.json").read_text())
    found = json.dumps(config).replace('"laplace"', '"other"')
    (place / "config.json").write_text(found)
    with pytest.raises(DataError):
        am.load(place, mlp())


def test_an_existing_folder_is_kept_unless_told(tmp_path: Path) -> None:
    laplace = fitted()
    place = laplace.save(tmp_path / "posterior")
    with pytest.raises(InputError, match="overwrite"):
        laplace.save(place)
    laplace.with_prior(5.0).save(place, overwrite=True)
    assert {float(v) for v in am.load(place, mlp()).prior_precision.values()} == {5.0}


def test_nothing_is_pickled(tmp_path: Path) -> None:
    place = fitted().save(tmp_path / "posterior")
    assert {f.name for f in place.iterdir()} <= {"config.json", "posterior.safetensors", "reference.safetensors"}
    assert json.loads((place / "config.json").read_text())["format"] == "aftermap posterior"


@untrained
def test_float32_models(tmp_path: Path) -> None:
    model = mlp().float()
    data = [(x.float(), y) for x, y in classes()]
    laplace = Laplace(model, "classification").fit(data, progress=False).tune()
    again = am.load(laplace.save(tmp_path / "posterior"), model)
    assert torch.equal(again.predict(data[0][0]).latent_cov, laplace.predict(data[0][0]).latent_cov)
    assert again.predict(normal(2, 3).float()).mean.dtype == torch.float32


WRONG = [
    ({"noise_level": -1.0}, "noise_level should be a finite number above 0, got -1.0"),
    ({"temperature": "1"}, "temperature should be a finite number above 0, got the text '1'"),
    ({"damping": [[[[[]]]]]}, "damping should be one of 'exact', .*, got a list of 1"),
    ({"rank": 0}, "rank should be a whole number of at least 1 or null, got 0"),
    ({"strict": 1}, "strict should be true or false, got 1"),
    ({"params": ["0.weight"]}, "params are not the parameters of the posterior"),
    ({"structure": "krn"}, "holds what cannot be: .*krn"),
    ({"likelihood": {"name": ["categorical"]}}, "likelihood cannot be made from what is saved"),
    ({"likelihood": {"name": "categorical", "weight": "heavy"}}, "likelihood cannot be made from what is saved"),
    ({"surprise": 1}, "has the unknown entries 'surprise'"),
    ({"method": None}, "does not say which method made its posterior"),
    ({"method": "VOGN"}, "has the unknown entries 'noise_level', 'structure'"),
    ({"extras": [1]}, "extras should be an object, got a list of 1"),
]


@pytest.mark.parametrize("change, message", WRONG, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(WRONG)])
def test_what_is_wrong_in_a_folder_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """Also where its author made the checksums fit."""
    place = Laplace(mlp(), "classification").fit(classes(), progress=False).save(tmp_path / "posterior")
    edit(place, lambda config: config["laplace"].update(change))
    with pytest.raises(DataError, match=message) as found:
        am.load(place, mlp())
    assert str(place) in str(found.value)


def test_a_model_that_does_not_fit_is_refused_before_anything_large_is_read(tmp_path: Path) -> None:
    place = fitted().save(tmp_path / "posterior")
    (place / "posterior.safetensors").unlink()
    with pytest.raises(InputError, match="0.weight is .* in the model"):
        am.load(place, mlp(3, 6, 4))


def test_damping_of_a_trained_posterior(tmp_path: Path) -> None:
    model, (x, y) = mlp(), classes()[0]
    optimizer = am.optim.VOGN(model, n_data=60)
    optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))
    place = optimizer.posterior("classification").save(tmp_path / "posterior")
    for change, message in (
        ({"0.weight": 0.1}, "damping does not have one entry for each parameter"),
        ({"0.weight": [[[[[]]]]]}, "damping.0.weight should be a finite number of at least 0, got a list of 1"),
        ({"0.weight": -1}, "damping.0.weight should be a finite number of at least 0, got -1"),
    ):
        edit(place, lambda config, change=change: config["laplace"].update(damping=change))  # type: ignore[misc]
        with pytest.raises(DataError, match=message):
            am.load(place, model)
