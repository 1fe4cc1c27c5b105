"""The linearised predictive against dense Jacobians: every structure, every layer type, every form of the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aftermap.batches import tensors_of
from aftermap.curvature import reference
from aftermap.errors import InputError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.predictive import differentiable_latent
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.curvature.layer_cases import CASES, randomise
from tests.curvature.models import MODELS
from tests.laplace.problems import classes, dense_covariance, generator, mlp, normal, seeded

STRUCTURES = ["kron", "ekfac", "diagonal", "full", "low_rank"]
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
# A dense covariance over their parameters would take minutes.
BIG = {
    "conv1d_shift",
    "conv2d_shift",
    "conv2d_shift_dilated",
    "conv2d_shift_groups",
    "conv3d_shift",
    "transpose2d_wide",
}


class Headed(nn.Module):
    """A layer, a nonlinearity, and a few random combinations of its outputs: [N, 3]."""

    def __init__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.layer, self.rest = layer, inputs[1:]
        with torch.no_grad():
            width = layer(*inputs)[0].numel()
        self.register_buffer("mix", normal(width, 3, seed=9) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x, *self.rest)).flatten(1) @ self.mix


def made(model: nn.Module, inputs: Any, structure: str, **options: Any) -> Laplace:
    """A posterior of a regression: the curvature does not depend on the targets' values."""
    with torch.no_grad():
        outputs = (
            model(**inputs)
            if isinstance(inputs, dict)
            else model(*inputs)
            if isinstance(inputs, tuple)
            else model(inputs)
        )
    laplace = Laplace(model, Gaussian(0.7), structure=structure, prior_precision=0.8, rank=7, **options)
    return laplace.fit([(inputs, torch.zeros_like(outputs))], generator=generator(), progress=False)


def check_covariance(laplace: Laplace, inputs: Any) -> None:
    """Covariance, variances and layers' parts against J Σ Jᵀ."""
    lines = reference.jacobian(laplace.model, inputs, laplace.posterior.names)
    wanted = dense_covariance(laplace, lines)
    found = laplace.predict(inputs)
    assert found.latent_cov is not None
    size, *space, width = found.latent_mean.shape
    blocks = wanted.reshape(size, -1, width, lines.shape[1] // width, width)
    blocks = torch.stack([blocks[:, r, :, r] for r in range(blocks.shape[1])], 1).reshape(size, *space, width, width)
    torch.testing.assert_close(found.latent_cov, blocks, **CLOSE)
    variances = wanted.diagonal(dim1=1, dim2=2).reshape(found.latent_mean.shape)
    torch.testing.assert_close(laplace.predict(inputs, diagonal=True).latent_var, variances, **CLOSE)
    parts = laplace.variance_by_layer(inputs)
    torch.testing.assert_close(torch.stack(list(parts.values())).sum(0), variances, **CLOSE)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal"])
@pytest.mark.parametrize("case", [c for c in CASES if c not in BIG])
def test_every_layer(case: str, structure: str) -> None:
    layer, inputs = CASES[case]()
    layer = randomise(layer.double()).eval()
    model = Headed(layer, inputs).eval()
    before = ModelSnapshot.of(model)
    check_covariance(made(model, inputs[0], structure), inputs[0])
    check_unchanged(model, before)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "name", ["pixels", "several_calls", "tied_all", "tied_embedding", "inplace_tokens", "class_token"]
)
def test_some_models_in_every_structure(name: str, structure: str) -> None:
    model, inputs = seeded_model(name)
    check_covariance(made(model, inputs, structure), inputs)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_kronecker_factors(name: str) -> None:
    model, inputs = seeded_model(name)
    check_covariance(made(model, inputs, "kron"), inputs)


def seeded_model(name: str) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        model, inputs = MODELS[name]()
    return model.double().eval(), inputs


@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
@pytest.mark.parametrize("structure", [*STRUCTURES, "kfra", "hessian"])
def test_every_structure_of_a_classifier(structure: str) -> None:
    data, model = classes(), mlp()
    laplace = Laplace(model, "classification", structure=structure, prior_precision=30.0, rank=9)
    laplace.fit(data, generator=generator(), progress=False)
    check_covariance(laplace, data[0][0])


@pytest.mark.parametrize("damping", ["factored", "pi"])
def test_other_dampings(damping: str) -> None:
    data, model = classes(), mlp()
    laplace = Laplace(model, "classification", damping=damping, prior_precision=0.7).fit(data, progress=False)
    check_covariance(laplace, data[0][0])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_chosen_outputs(structure: str) -> None:
    model, x = mlp(), normal(6, 3, seed=5)
    laplace = made(model, x, structure)
    whole, chosen = laplace.predict(x), laplace.predict(x, outputs=[3, 1])
    torch.testing.assert_close(chosen.mean, whole.mean[:, [3, 1]])
    torch.testing.assert_close(chosen.latent_cov, whole.latent_cov[:, [3, 1]][:, :, [3, 1]], **CLOSE)
    variances = laplace.predict(x, outputs=[2], diagonal=True)
    torch.testing.assert_close(variances.epistemic, whole.epistemic[:, [2]], **CLOSE)


def test_chosen_outputs_of_a_last_layer() -> None:
    model, x = mlp(), normal(6, 3, seed=5)
    laplace = made(model, x, "kron", params="last_layer")
    whole, chosen = laplace.predict(x), laplace.predict(x, outputs=[2, 0])
    torch.testing.assert_close(chosen.latent_cov, whole.latent_cov[:, [2, 0]][:, :, [2, 0]], **CLOSE)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_joint_covariance(structure: str) -> None:
    model, x = mlp(), normal(6, 3, seed=5)
    laplace = made(model, x, structure)
    mean, joint = laplace.joint(x)
    lines = reference.jacobian(model, x, laplace.posterior.names).flatten(0, 1)
    wanted = lines @ torch.linalg.inv(laplace.posterior.to_dense()) @ lines.T
    torch.testing.assert_close(joint.reshape(24, 24), wanted, **CLOSE)
    torch.testing.assert_close(mean, model(x).detach())
    # An input's own block is the ordinary covariance.
    own = torch.stack([joint[n, :, n] for n in range(6)])
    torch.testing.assert_close(own, laplace.predict(x).latent_cov, **CLOSE)


@pytest.mark.parametrize("structure", ["kron", "full", "diagonal", "low_rank"])
def test_function_samples_have_the_joint_covariance(structure: str) -> None:
    model, x = mlp(2, 3, 4), normal(2, 2, seed=5)
    laplace = made(model, x, structure)
    drawn = laplace.function_samples(x, 4000, generator(3)).flatten(1)
    mean, joint = laplace.joint(x)
    joint = joint.reshape(8, 8)
    error = (joint.diagonal()[:, None] * joint.diagonal() + joint.square()).sqrt() / 4000**0.5
    assert bool(((drawn.T.cov() - joint).abs() < 5 * error).all())
    assert bool(((drawn.mean(0) - mean.flatten()).abs() < 5 * (joint.diagonal() / 4000).sqrt()).all())


def test_function_samples_do_not_depend_on_the_batch_they_are_asked_for() -> None:
    model, x = mlp(), normal(6, 3, seed=5)
    laplace = made(model, x, "kron")
    whole = laplace.function_samples(x, 3, generator(1))
    torch.testing.assert_close(laplace.function_samples(x[2:4], 3, generator(1)), whole[:, 2:4])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_differentiable_in_the_inputs(structure: str) -> None:
    model, x = mlp(2, 3, 2), normal(3, 2, seed=5)
    laplace = made(model, x, structure)
    plain = laplace.predict(x)
    wanted = laplace.predict(x.clone().requires_grad_(), differentiable=True)
    torch.testing.assert_close(wanted.latent_cov, plain.latent_cov, **CLOSE)

    def quantity(at: Tensor) -> Tensor:
        found = laplace.predict(at, differentiable=True)
        assert found.latent_cov is not None
        return torch.cat([found.mean.flatten(), found.latent_cov.flatten(), found.epistemic.flatten()])

    assert torch.autograd.gradcheck(quantity, (x.clone().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_differentiable_probabilities() -> None:
    data, model = classes(), mlp()
    laplace = Laplace(model, "classification").fit(data, progress=False)
    x = data[0][0][:2].clone().requires_grad_()
    confidence = laplace.predict(x, differentiable=True, link="pairwise").mean.amax(-1).sum()
    (slope,) = torch.autograd.grad(confidence, x)
    step = 1e-6 * normal(2, 3, seed=8)
    ends = [laplace.predict(x.detach() + s * step, link="pairwise").mean.amax(-1).sum() for s in (1, -1)]
    torch.testing.assert_close((slope * step).sum(), (ends[0] - ends[1]) / 2, rtol=1e-5, atol=1e-12)


class Unbatched(nn.Module):
    """An operation without a rule for vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h * (1.0 if float(h.detach().sum()) > -1e9 else 0.0))


def test_differentiable_without_batching_rules() -> None:
    model, x = seeded(Unbatched), normal(4, 3, seed=5)
    laplace = made(model, x, "kron")
    found = laplace.predict(x.clone().requires_grad_(), differentiable=True)
    torch.testing.assert_close(found.latent_cov, laplace.predict(x).latent_cov, **CLOSE)
    assert found.latent_cov is not None
    assert found.latent_cov.requires_grad


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_last_layer_closed_form_equals_the_general_path(structure: str) -> None:
    data, model = classes(), mlp()
    last = Laplace(model, "classification", structure=structure, params="last_layer").fit(data, progress=False)
    assert last.posterior.names == ("2.weight", "2.bias")
    # The closed form is taken when only the last layer is in the posterior: a reshape behind it hides that.
    hidden = nn.Sequential(*model, nn.Unflatten(1, (4, 1)), nn.Flatten())
    general = Laplace(hidden, "classification", structure=structure, params=["2"]).fit(data, progress=False)
    x = data[1][0]
    torch.testing.assert_close(last.predict(x).latent_cov, general.predict(x).latent_cov, **CLOSE)
    check_covariance(last, x[:7])


@pytest.mark.parametrize("structure", ["kron", "diagonal"])
def test_last_layer_of_three_hundred_classes(structure: str) -> None:
    model = mlp(3, 6, 300)
    x, y = normal(20, 3, seed=6), torch.arange(20) * 15
    laplace = Laplace(model, "classification", structure=structure, params="last_layer", curvature="rademacher")
    laplace.fit([(x, y)], generator=generator(), progress=False)
    found = laplace.predict(x[:2])
    lines = reference.jacobian(model, x[:2], laplace.posterior.names)
    torch.testing.assert_close(found.latent_cov, dense_covariance(laplace, lines), **CLOSE)


def test_token_outputs_are_positions() -> None:
    model = nn.Linear(3, 4).double().eval()
    x, y = normal(5, 2, 3, seed=5), torch.randint(4, (5, 2), generator=generator(1))
    laplace = Laplace(model, "classification").fit([(x, y)], progress=False)
    found = laplace.predict(x)
    assert found.mean.shape == (5, 2, 4)
    assert found.latent_cov is not None
    assert found.latent_cov.shape == (5, 2, 4, 4)
    flat = laplace.predict(x.flatten(0, 1))
    torch.testing.assert_close(found.latent_cov.flatten(0, 1), flat.latent_cov, **CLOSE)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_splitting_a_batch_changes_nothing(structure: str) -> None:
    model, x = mlp(), normal(9, 3, seed=5)
    laplace = made(model, x, structure)
    parts = torch.cat([laplace.predict(p).latent_cov for p in x.split([2, 6, 1])])
    torch.testing.assert_close(laplace.predict(x).latent_cov, parts, **CLOSE)


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Conv2d(4, 200, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 10),
    )


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(80, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            # The storage counts: an expanded view has many elements and no memory.
            self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal"])
@pytest.mark.parametrize("convolutional", [False, True])
def test_memory_never_grows_with_batch_outputs_and_parameters(structure: str, convolutional: bool) -> None:
    model, x = seeded(_convolutional if convolutional else _dense).float(), normal(256, 80, seed=5).float()
    if convolutional:
        x = normal(256, 3, 14, 14, seed=5).float()
    laplace = Laplace(model, "classification", structure=structure, curvature="rademacher")
    laplace.fit([(x[:16], torch.arange(16) % 10)], generator=generator(), progress=False)
    with Largest() as seen:
        laplace.predict(x)
    jacobian = len(x) * 10 * sum(p.numel() for p in model.parameters())
    assert seen.numel > 0
    # Shared positions work through a fixed number of per-example gradients at a time (4 million numbers).
    assert seen.numel < (jacobian / 6 if convolutional else jacobian / 50)


def test_joint_covariance_refuses_what_would_not_fit() -> None:
    model = mlp(3, 60, 7)
    laplace = made(model, normal(4, 3), "diagonal")
    with pytest.raises(InputError, match=r"joint covariance of 60000 inputs with 7 outputs .* function_samples"):
        laplace.joint(normal(60_000, 3))


def test_joint_covariance_is_for_plain_outputs() -> None:
    model, inputs = seeded_model("pixels")
    with pytest.raises(InputError, match=r"over outputs \[N, C\]; this model returns"):
        made(model, inputs, "kron").joint(inputs)


@pytest.mark.parametrize("count", [1, 5])
def test_chosen_outputs_can_be_differentiated_in_the_inputs_too(count: int) -> None:
    laplace = Laplace(mlp(), "classification", structure="full").fit(classes(), progress=False)
    x = normal(count, 3, seed=6)
    whole = differentiable_latent(laplace.model, laplace.posterior, x)
    assert whole.cov is not None
    plain = laplace.predict(x)
    torch.testing.assert_close(whole.cov, plain.latent_cov, **CLOSE)
    torch.testing.assert_close(whole.var, plain.latent_cov.diagonal(dim1=1, dim2=2), **CLOSE)
    for outputs in ([3], [2, 0]):
        some = differentiable_latent(laplace.model, laplace.posterior, x, outputs=outputs)
        torch.testing.assert_close(some.mean, whole.mean)
        torch.testing.assert_close(some.cov, whole.cov[:, outputs][:, :, outputs])
        only = differentiable_latent(laplace.model, laplace.posterior, x, diagonal=True, outputs=outputs)
        assert only.cov is None
        torch.testing.assert_close(only.var, whole.var[:, outputs])
    for wrong in ([4], [-1], []):
        with pytest.raises(InputError, match=r"must name some of the 4 outputs, 0 to 3"):
            differentiable_latent(laplace.model, laplace.posterior, x, outputs=wrong)
