"""The curvature of a subset: equal to the full matrix where it has all data, and a draw where it has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import fit_curvature, reference
from aftermap.curvature.passes.plan import PlanCheck
from aftermap.curvature.structures import subset
from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace import Laplace, load
from aftermap.likelihoods import Categorical, Gaussian

pytestmark = pytest.mark.filterwarnings("ignore::aftermap.errors.StatisticalWarning")
assert issubclass(StatisticalWarning, UserWarning)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tied(nn.Module):
    """A weight that is used once more without its layer, and a parameter without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain, self.head = nn.Linear(4, 5), nn.Parameter(torch.linspace(0.5, 2, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.gain
        return self.head(h) + torch.sin(h @ self.head.weight.T)


def perceptron(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "classification": (perceptron(3), "classification"),
    "binary": (perceptron(1), "binary"),
    "regression": (perceptron(1), "regression"),
    "several outputs": (perceptron(2), "regression"),
    "convolution": (convolution, "classification"),
    "tied weights": (Tied, "classification"),
}


def problem(case: str, dtype: torch.dtype, count: int = 12) -> tuple[nn.Module, str, list[Any]]:
    make, likelihood = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = make().to(dtype).eval()
    x = normal(count, 1, 4, 3).to(dtype) if case == "convolution" else normal(count, 4).to(dtype)
    outputs = net(x[:1]).shape[1]
    if likelihood == "regression":
        y: Tensor = normal(count, outputs, seed=1).to(dtype)
    else:
        y = torch.arange(count) % (2 if likelihood == "binary" else outputs)
        y = y[:, None].to(dtype) if likelihood == "binary" else y
    return net, likelihood, [(x[:5], y[:5]), (x[5:], y[5:])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_all_examples_and_all_directions_are_the_full_matrix(case: str, dtype: torch.dtype) -> None:
    net, likelihood, data = problem(case, dtype)
    both = [
        Laplace(net, likelihood, structure=structure, prior_precision=0.3, rank=None).fit(data)
        for structure in ("full", "subset")
    ]
    x = data[0][0]
    full, got = (la.predict(x).latent_cov for la in both)
    assert full is not None
    assert got is not None
    close = {"rtol": 1e-6, "atol": 1e-6 * float(full.abs().max())}
    assert_close(got, full, **close)
    assert_close(both[1].log_evidence(), both[0].log_evidence(), rtol=1e-6, atol=0)
    assert_close(both[1].posterior.log_det_precision(), both[0].posterior.log_det_precision(), rtol=1e-6, atol=1e-6)
    for name, rule in both[0].factors.treatment.items():
        assert both[1].factors.treatment[name].rule == rule.rule


@pytest.mark.parametrize("case", ["classification", "convolution"])
def test_precisions_by_layer_and_weights_of_examples(case: str) -> None:
    net, likelihood, data = problem(case, torch.float64)
    weighted = [(x, y, torch.linspace(0, 2, len(x), dtype=torch.float64)) for x, y in data]
    layers = [n for n, m in net.named_modules() if any(True for _ in m.parameters(recurse=False))]
    prior = {n: 0.2 + k for k, n in enumerate(layers)}
    full, got = (
        Laplace(net, likelihood, structure=s, prior_precision=prior, rank=None).fit(weighted)
        for s in ("full", "subset")
    )
    x = data[1][0]
    assert_close(got.predict(x).latent_cov, full.predict(x).latent_cov, rtol=1e-6, atol=1e-9)
    assert_close(got.log_evidence(), full.log_evidence(), rtol=1e-8, atol=0)
    assert got.n_data == full.n_data


@pytest.mark.parametrize("width", [3, 40], ids=["fewer parameters than rows", "more parameters than rows"])
def test_both_ways_to_the_directions_agree_with_brute_force(width: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
    x, y = normal(10, 4), torch.arange(10) % 3
    dense = reference.ggn(net, x, Categorical(), y)
    block = fit_curvature(net, [(x, y)], "classification", structure="subset", rank=None, progress=False).blocks[0]
    assert_close(block.to_dense(), dense, rtol=0, atol=1e-12 * float(dense.abs().max()))
    vectors, values = block.tensors()["vectors"], block.tensors()["values"]
    assert_close(vectors.T @ vectors, torch.eye(len(values), dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((values.diff() <= 0).all())
    assert len(values) <= 20  # a softmax has one direction less than outputs


def test_a_rank_keeps_the_leading_directions() -> None:
    net, likelihood, data = problem("classification", torch.float64)
    whole, few = (
        fit_curvature(net, data, likelihood, structure="subset", rank=rank, progress=False).blocks[0].tensors()
        for rank in (None, 4)
    )
    assert_close(few["values"], whole["values"][:4])
    assert_close((few["vectors"] * whole["vectors"][:, :4]).sum(0).abs(), torch.ones(4, dtype=torch.float64))


def test_a_draw_is_of_single_examples_that_stand_for_all() -> None:
    net, likelihood, data = problem("classification", torch.float64)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    singles = torch.stack([reference.ggn(net, x[n : n + 1], Categorical(), y[n : n + 1]) for n in range(12)])
    chosen_ever = torch.zeros(12)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"structure": "subset", "rank": None, "subset_size": 3, "progress": False}
        factors = fit_curvature(net, data, likelihood, generator=generator, **options)
        flat = torch.linalg.lstsq(singles.flatten(1).T, factors.to_dense().flatten()[:, None]).solution[:, 0]
        chosen = flat.round() == 4  # 12 / 3
        assert int(chosen.sum()) == 3
        assert_close(flat, 4.0 * chosen.double(), rtol=0, atol=1e-6)
        assert factors.n_data == 12
        chosen_ever += chosen
        again = fit_curvature(net, data, likelihood, generator=torch.Generator().manual_seed(seed), **options)
        assert torch.equal(again.to_dense(), factors.to_dense())
    assert int((chosen_ever > 0).sum()) > 6


def test_an_example_without_weight_is_never_drawn() -> None:
    net, likelihood, data = problem("regression", torch.float64)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    weight = torch.zeros(12, dtype=torch.float64)
    weight[[2, 7, 9]] = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
    options: dict[str, Any] = {"structure": "subset", "rank": None, "progress": False}
    got = fit_curvature(net, [(x, y, weight)], likelihood, subset_size=3, **options)
    full = fit_curvature(net, [(x, y, weight)], likelihood, structure="full", progress=False)
    assert_close(got.to_dense(), full.to_dense())
    with pytest.raises(DataError, match="every example has the weight zero"):
        fit_curvature(net, [(x, y, 0 * weight)], likelihood, **options)


def test_several_passes_draw_from_all_of_them() -> None:
    net, likelihood, data = problem("classification", torch.float64)
    got, full = (
        fit_curvature(net, data, likelihood, structure=s, rank=None, passes=2, progress=False)
        for s in ("subset", "full")
    )
    assert_close(got.to_dense(), full.to_dense())
    assert got.n_data == full.n_data == 12


def test_the_variance_lies_between_full_and_prior() -> None:
    net, likelihood, data = problem("classification", torch.float64)
    x = data[0][0]

    def variance(**options: Any) -> Tensor:
        return Laplace(net, likelihood, prior_precision=0.5, **options).fit(data).predict(x).latent_var

    full, few = variance(structure="full"), variance(structure="subset", rank=3)
    prior = variance(structure="subset", rank=3, data_scale=1e-12)
    assert bool((few >= full * (1 - 1e-9)).all())
    assert bool((few <= prior).all())


def test_a_fit_can_be_updated_and_saved(tmp_path: Path) -> None:
    net, likelihood, data = problem("classification", torch.float64)
    whole = Laplace(net, likelihood, structure="subset", rank=None, subset_size=100).fit(data)
    parts = Laplace(net, likelihood, structure="subset", rank=None, subset_size=100).fit(data[:1])
    parts.fit(data[1:], update=True)
    x = data[0][0]
    assert_close(parts.predict(x).latent_cov, whole.predict(x).latent_cov)
    whole.save(tmp_path / "posterior")
    again = load(tmp_path / "posterior", net)
    assert isinstance(again, Laplace)
    assert (again.structure, again.rank, again.subset_size) == ("subset", None, 100)
    assert torch.equal(torch.as_tensor(again.predict(x).latent_cov), torch.as_tensor(whole.predict(x).latent_cov))


def test_random_vectors_make_one_row_for_each_example() -> None:
    net, likelihood, data = problem("classification", torch.float64)
    factors = fit_curvature(
        net, data, likelihood, structure="subset", curvature="rademacher", rank=None, progress=False
    )
    assert factors.curvature == "rademacher"
    assert len(factors.blocks[0].tensors()["values"]) == 12


def test_every_batch_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    check = PlanCheck.check
    monkeypatch.setattr(PlanCheck, "check", lambda self, record: (seen.append(record.size), check(self, record))[1])
    net, likelihood, data = problem("classification", torch.float64)
    fit_curvature(net, data, likelihood, structure="subset", progress=False)
    assert seen == [5, 7]


def test_a_network_that_takes_another_path_on_a_later_batch_starts_again() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x)
            return out + x @ self.head.weight.T if bool((x.abs() > 2.5).any()) else out

    net = Late().double()
    x = normal(8, 4).clamp(-2, 2)
    x[6, 0] = 3.0
    data = [(x[k : k + 1], torch.zeros(1, 2, dtype=torch.float64)) for k in range(8)]
    with pytest.warns(StatisticalWarning, match="in another way"):
        got = fit_curvature(net, data, Gaussian(1.0), structure="subset", rank=None, progress=False)
    jacobians = [reference.jacobian(net, batch[0])[0] for batch in data]
    wanted = torch.stack([j.T @ j for j in jacobians]).sum(0)
    assert_close(got.to_dense(), wanted)


def test_too_many_numbers_are_refused_before_gradients_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    net, likelihood, data = problem("classification", torch.float64)
    monkeypatch.setattr(subset, "MAX_NUMBERS", 300)
    with pytest.raises(InputError, match=r"12 examples with 2 vectors each in 51 parameters.*subset_size=.*params="):
        fit_curvature(net, [(torch.cat([d[0] for d in data]), torch.cat([d[1] for d in data]))], likelihood,
                      structure="subset", progress=False)  # fmt: skip
    monkeypatch.setattr(subset, "MAX_NUMBERS", 500)
    fit_curvature(net, data, likelihood, structure="subset", subset_size=3, progress=False)


def test_data_that_change_their_length_are_refused() -> None:
    net, likelihood, data = problem("classification", torch.float64)

    class Shrinking:
        def __init__(self) -> None:
            self.rounds = 0

        def __iter__(self) -> Any:
            self.rounds += 1
            return iter(data if self.rounds < 4 else data[:1])

    with pytest.raises(DataError, match="another number when they were read again"):
        fit_curvature(net, Shrinking(), likelihood, structure="subset", progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset_size": 0}, "subset_size=0 must be a whole number of at least 1"),
        ({"rank": 0}, "rank=0 must be a whole number of at least 1"),
        ({"structure": "low_rank", "rank": None}, "rank=None must be a whole number.*'subset'"),
        ({"damping": "factored"}, "damping='factored'"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Laplace(nn.Linear(2, 1), "regression", **{"structure": "subset", **options})


def test_outputs_with_positions_have_a_row_for_each() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    # Sequences of other lengths in the second batch.
    data = [(normal(4, 2, 3), torch.zeros(4, 2, dtype=torch.int64)), (normal(3, 5, 3), torch.zeros(3, 5).long())]
    got, full = (
        fit_curvature(net, data, "classification", structure=s, rank=None, curvature="exact", progress=False)
        for s in ("subset", "full")
    )
    assert_close(got.to_dense(), full.to_dense())
    assert math.isclose(got.loss, full.loss)
