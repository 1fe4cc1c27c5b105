"""What users saved with version 0.1.0 loads and means the same: tests/fixtures/make_version1.py says how it was made.

Only public names are used here, so that the test outlives every move of inner modules. Numbers are compared with a
relative tolerance of 1e-10 where something is computed, and exactly where something is merely read.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import aftermap as am
from aftermap.laplace import load_mixture, read_extras
from aftermap.posteriors import load_posterior
from tests.fixtures.version1_networks import NETWORKS

PLACE = Path(__file__).parent / "fixtures" / "version1"
POSTERIORS: dict[str, Any] = json.loads((PLACE / "posteriors.json").read_text(encoding="utf-8"))
OPTIMIZERS: dict[str, Any] = json.loads((PLACE / "optimizers.json").read_text(encoding="utf-8"))
ARCHITECTURES = ("mlp", "convolution", "transposed", "residual", "attention", "tied", "group_norm", "recurrent")

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved folders, unpacked."""
    place = tmp_path_factory.mktemp("version1")
    with zipfile.ZipFile(PLACE / "posteriors.zip") as archive:
        archive.extractall(place)
    return place


@pytest.fixture(scope="module")
def posteriors() -> Tensors:
    return load_file(PLACE / "posteriors.safetensors")


@pytest.fixture(scope="module")
def optimizers() -> Tensors:
    return load_file(PLACE / "optimizers.safetensors")


@pytest.fixture(scope="module")
def networks() -> Tensors:
    return load_file(PLACE / "networks.safetensors")


def under(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors of one case, without its name."""
    return {k.removeprefix(f"{prefix}/"): v for k, v in tensors.items() if k.startswith(f"{prefix}/")}


def network(name: str, state: Tensors) -> nn.Module:
    """In evaluation mode, with stored weights."""
    made = NETWORKS[name]()
    made.to(next(v.dtype for v in state.values() if v.is_floating_point()))
    made.load_state_dict(state)
    return made.eval()


def assert_same(actual: Tensor, expected: Tensor, what: str, *, single: bool = False) -> None:
    """Equal up to 1e-10 of the value (single precision: 2e-5); zeros that cancellation leaves count against the largest."""
    rtol = 2e-5 if single or expected.dtype == torch.float32 else 1e-10
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.detach(), expected, rtol=rtol, atol=0.01 * rtol * largest, msg=lambda m: f"{what}: {m}"
    )


def assert_says(predictor: Any, expected: Tensors, options: dict[str, Any]) -> None:
    """A posterior's predictions, marginal variances and determinant are those that were stored."""
    prediction, posterior = predictor.predict(expected["inputs"], **options), predictor.posterior
    assert_same(prediction.mean, expected["mean"], "predictive mean")
    assert_same(prediction.latent_cov, expected["latent_cov"], "covariance of the outputs")
    assert_same(posterior.log_det_precision(), expected["log_det_precision"], "log-determinant")
    variance, stored = posterior.marginal_variance(), under(expected, "variance")
    assert list(variance) == list(posterior.names)
    assert set(variance) == set(stored)
    for name, value in variance.items():
        assert_same(value, stored[name], f"marginal variance of {name}")


# Laplace approximations.


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_saved_laplace_says_the_same(name: str, folders: Path, posteriors: Tensors) -> None:
    case, expected = POSTERIORS[name], under(posteriors, name)
    model = network(case["network"], load_file(folders / name / "model.safetensors"))
    laplace = am.load(folders / name, model)
    assert isinstance(laplace, am.Laplace)
    assert_says(laplace, expected, case["predict"])
    assert_same(laplace.log_evidence(), expected["log_evidence"], "log evidence")
    assert laplace.n_data == len(expected["targets"])


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_saved_laplace_takes_another_prior(name: str, folders: Path, posteriors: Tensors) -> None:
    case, expected = POSTERIORS[name], under(posteriors, name)
    model = network(case["network"], load_file(folders / name / "model.safetensors"))
    laplace = am.load(folders / name, model)
    doubled = {n: 2 * v for n, v in laplace.posterior.prior.precision.items()}
    laplace.with_prior(doubled)
    assert_same(
        laplace.posterior.log_det_precision(),
        expected["log_det_of_doubled_prior"],
        "log-determinant of a doubled prior",
    )


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_saved_laplace_can_be_saved_again(name: str, folders: Path, posteriors: Tensors, tmp_path: Path) -> None:
    case, expected = POSTERIORS[name], under(posteriors, name)
    model = network(case["network"], load_file(folders / name / "model.safetensors"))
    again = am.load(am.load(folders / name, model).save(tmp_path / "again"), model)
    assert_says(again, expected, case["predict"])


@pytest.mark.parametrize("name", [n for n in POSTERIORS if not n.startswith("ekfac")])
def test_a_saved_laplace_can_be_fitted_further(name: str, folders: Path, posteriors: Tensors) -> None:
    """The sums over data are in the folder, so the same data once more are the data with weight two."""
    case, expected = POSTERIORS[name], under(posteriors, name)
    model = network(case["network"], load_file(folders / name / "model.safetensors"))
    laplace = am.load(folders / name, model)
    laplace.fit([(expected["inputs"], expected["targets"])], update=True, progress=False)
    assert laplace.n_data == 2 * len(expected["targets"])
    found, stored = laplace.posterior.log_det_precision(), expected["log_det_of_doubled_data"]
    assert_same(found, stored, "log-determinant of doubled data", single=expected["mean"].dtype == torch.float32)


def test_extras_and_reference(folders: Path, posteriors: Tensors) -> None:
    extras = POSTERIORS["thresholds"]["extras"]
    assert extras["thresholds"]["entropy"]["value"] > 0
    assert read_extras(folders / "thresholds") == extras
    reference = load_posterior(folders / "thresholds").reference
    assert reference is not None
    assert torch.equal(reference["entropy"], posteriors["thresholds/entropy"])


def test_a_saved_mixture_says_the_same(folders: Path, posteriors: Tensors) -> None:
    expected = under(posteriors, "mixture")
    models = [network("mlp", under(expected, f"weights/{k}")) for k in range(2)]
    mixture = load_mixture(folders / "mixture", models)
    assert torch.equal(mixture.weights, expected["weights_of_components"])
    assert_same(mixture.log_evidence(), expected["log_evidence"], "log evidence")
    assert_same(mixture.predict(expected["inputs"], link="probit").mean, expected["mean"], "predictive mean")


# Optimisers.


def optimizer_of(name: str, model: nn.Module) -> Any:
    """Built anew with the arguments of the run; a schedule comes from the state."""
    case = OPTIMIZERS[name]
    return getattr(am.optim, case["class"])(model, n_data=40, **case["arguments"])


def saved_state(name: str, tensors: Tensors) -> dict[str, Any]:
    """The state_dict after five steps."""
    state: dict[int, Tensors] = {}
    for key, value in under(tensors, f"{name}/state").items():
        number, entry = key.split("/")
        state.setdefault(int(number), {})[entry] = value.clone()
    return {"state": state, **json.loads(json.dumps(OPTIMIZERS[name]["state"]))}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_state(name: str, optimizers: Tensors) -> None:
    """A step without noise depends on the saved weights, momentum, curvature, factors, priors and schedules alone."""
    expected = under(optimizers, name)
    model = network(OPTIMIZERS[name]["network"], under(expected, "before"))
    optimizer = optimizer_of(name, model)
    optimizer.load_state_dict(saved_state(name, optimizers))
    for group in optimizer.param_groups:
        group["deterministic"] = True
    optimizer.step(lambda: nn.functional.cross_entropy(model(expected["inputs"]), expected["targets"]))
    after = model.state_dict()
    for key, value in under(expected, "after").items():
        assert_same(after[key], value, key)
    moved = [k for k, v in under(expected, "before").items() if not torch.equal(v, expected[f"after/{k}"])]
    assert {k for k, _ in model.named_parameters()} == set(moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_every_buffer_of_its_state(name: str, optimizers: Tensors) -> None:
    expected, saved = under(optimizers, name), saved_state(name, optimizers)
    model = network(OPTIMIZERS[name]["network"], under(expected, "before"))
    optimizer = optimizer_of(name, model)
    optimizer.load_state_dict(saved_state(name, optimizers))
    params = [p for g in optimizer.param_groups for p in g["params"]]
    for number, buffers in saved["state"].items():
        for key in ("momentum", "curvature", "prior_precision", "prior_mean", "factor_inputs", "factor_outputs"):
            if key in buffers:
                assert torch.equal(optimizer.state[params[number]][key], buffers[key])
    assert optimizer.steps == 5
    for group, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in stored.items() if k != "params"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_posterior_of_a_loaded_optimizer_says_the_same(name: str, optimizers: Tensors) -> None:
    case, expected = OPTIMIZERS[name], under(optimizers, name)
    model = network(case["network"], under(expected, "before"))
    optimizer = optimizer_of(name, model)
    optimizer.load_state_dict(saved_state(name, optimizers))
    stored = under(expected, "posterior") | {"inputs": expected["inputs"]}
    assert_says(optimizer.posterior("classification"), stored, case["predict"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_saved_posterior_of_an_optimizer_says_the_same(name: str, folders: Path, optimizers: Tensors) -> None:
    case, expected = OPTIMIZERS[name], under(optimizers, name)
    state = load_file(folders / name / "model.safetensors")
    trained = am.load(folders / name, network(case["network"], state))
    assert isinstance(trained, am.optim.TrainedPosterior)
    assert trained.method == case["class"]
    assert_says(trained, under(expected, "posterior") | {"inputs": expected["inputs"]}, case["predict"])


# Eight networks.


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_precisions_and_predictions_of_networks(name: str, structure: str, networks: Tensors) -> None:
    expected = under(networks, name)
    model, x, y = network(name, under(expected, "weights")), expected["inputs"], expected["targets"]
    laplace = am.Laplace(model, "classification", structure=structure, curvature="exact", prior_precision=0.5)
    laplace.fit([(x[:2], y[:2]), (x[2:], y[2:])], progress=False)
    stored, dense = under(expected, structure), laplace.posterior.to_dense()
    precision = stored["precision"]
    if structure == "diagonal":
        assert torch.equal(dense, dense.diagonal().diag())
        assert_same(dense.diagonal(), precision, "precision")
    else:
        rows, columns = torch.tril_indices(*dense.shape)
        assert_same(dense[rows, columns], precision, "precision")
        assert_same(dense.mT, dense, "transposed precision")
    prediction = laplace.predict(x, link="probit")
    assert_same(prediction.mean, stored["mean"], "predictive mean")
    assert_same(prediction.latent_cov, stored["latent_cov"], "covariance of the outputs")
