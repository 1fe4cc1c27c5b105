"""What is done to a user's network: its buffers, its wrappers, and operations that lack derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from aftermap import HessianFree, Laplace
from aftermap.curvature import fit_curvature
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.structures.hessian import full_hessian
from aftermap.errors import InputError, UnsupportedError
from aftermap.likelihoods import Categorical
from aftermap.models import autograd_errors_explained, call_model, evaluating, functional_outputs, update_bn
from aftermap.optim import IVON, VOGN
from aftermap.posteriors import DualPosterior

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def randomise(model: nn.Module) -> nn.Module:
    g = generator(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g))
    return model.double().eval()


X, Y = randn(30, 3), torch.randint(3, (30,), generator=generator(1))


def plain_network() -> nn.Module:
    return randomise(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


class MovingAverage(nn.Module):
    """Updates its buffers on every forward pass.

    Args:
        update: "in place" (only written to), "in place, then used" (the graph holds the updated tensor) or "assigned".
    """

    def __init__(self, update: str) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))  # no rule covers the scale
        self.update = update
        self.register_buffer("average", torch.full((3,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x) * self.scale
        if self.update == "assigned":
            self.average, self.calls = 0.9 * self.average + 0.1 * outputs.detach().mean(0), self.calls + 1
            return outputs
        if self.update == "in place":
            self.average.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
            self.calls += 1
            return outputs
        self.average.mul_(0.5)
        return outputs * self.average


UPDATES = ["in place", "in place, then used", "assigned"]


def laplace_calls(model: nn.Module, structure: str) -> list[Any]:
    """Everything that a Laplace approximation does with the network."""
    laplace = Laplace(model, "classification", structure=structure, prior_precision=100.0).fit(
        [(X[:20], Y[:20]), (X[20:], Y[20:])]
    )
    first = laplace.predict(X[:4], link="probit").mean
    assert_close(laplace.predict(X[:4], link="probit").mean, first)
    results = [first, laplace.function_samples(X[:2], 2, generator()), laplace.variance_of(lambda f: f(X[:1])[0, 0])]
    if structure != "low_rank":
        results.append(laplace.predict(X[:4], kind="sampling", samples=3, generator=generator()).mean)
    return results


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full", "low_rank", "hessian"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_buffers_that_the_forward_pass_updates_stay_as_they_were(update: str, structure: str) -> None:
    model = randomise(MovingAverage(update))
    before = {n: (b, b.clone()) for n, b in model.named_buffers()}
    laplace_calls(model, structure)
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert_close(buffer, before[name][1], rtol=0, atol=0)


@pytest.mark.parametrize("update", UPDATES)
def test_hessian_free_leaves_buffers_as_they_were(update: str) -> None:
    model = randomise(MovingAverage(update))
    before = copy.deepcopy(dict(model.named_buffers()))
    HessianFree(model, "classification").fit([(X, Y)], polish=True)
    for name, buffer in model.named_buffers():
        assert_close(buffer, before[name], rtol=0, atol=0)


def test_a_buffer_that_two_modules_share_stays_one_tensor_during_a_call() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.register_buffer("own", torch.zeros(1))
            self.inner.register_buffer("other", self.own)

        def forward(self, x: Tensor) -> Tensor:
            self.own += 1
            return x + self.inner.other

    model = Shares()
    assert_close(call_model(model, torch.zeros(2, 1)), torch.ones(2, 1))
    assert float(model.own) == 0


def test_training_updates_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    update_bn(model, [(X, Y)])
    assert_close(model[0].running_mean, X.mean(0))
    model.train()
    call_model(model, X + 1, update_buffers=True)
    assert not torch.allclose(model[0].running_mean, X.mean(0))


# Wrappers.


def test_data_parallel_does_what_the_network_inside_does() -> None:
    plain = plain_network()
    wrapped = nn.DataParallel(plain)
    for structure in ("kron", "low_rank"):
        for found, expected in zip(laplace_calls(wrapped, structure), laplace_calls(plain, structure), strict=True):
            assert_close(found, expected, **TIGHT)
    free = [HessianFree(m, "classification").fit([(X, Y)], polish=True) for m in (wrapped, plain)]
    asked = [f.variance_of(lambda network: network(X[:1])[0, 0]) for f in free]
    assert_close(asked[0], asked[1], rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_matrix_free_and_hessian_of_data_parallel() -> None:
    plain = plain_network()
    hessians = [full_hessian(m, [(X, Y)], Categorical()).matrix for m in (nn.DataParallel(plain), plain)]
    assert_close(hessians[0], hessians[1], **TIGHT)
    found, expected = (
        Laplace(m, "classification", structure="matrix_free").fit([(X, Y)]).predict(X[:4], link="probit").mean
        for m in (nn.DataParallel(plain), plain)
    )
    assert_close(found, expected, **TIGHT)


@pytest.fixture
def process_group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize("structure", ["kron", "low_rank", "kfra"])
def test_forward_passes_go_by_distributed_data_parallel(structure: str) -> None:
    """Its own forward pass sends buffers to all processes, and would wait for those that have fewer batches."""
    norm = randomise(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))
    expected = laplace_calls(norm, structure)
    wrapped = DistributedDataParallel(norm)
    messages: list[int] = []
    wrapped.register_forward_pre_hook(lambda *_: messages.append(1))
    for found, value in zip(laplace_calls(wrapped, structure), expected, strict=True):
        assert_close(found, value, **TIGHT)
    assert not messages


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: nn.DataParallel(nn.DataParallel(net))])
def test_kfra_of_wrapped_networks(wrap: Callable[[nn.Module], nn.Module]) -> None:
    for plain in (plain_network(), randomise(nn.Linear(3, 3))):
        found, expected = (fit_curvature(m, [(X, Y)], "classification", structure="kfra") for m in (wrap(plain), plain))
        assert_close(found.to_dense(), expected.to_dense(), **TIGHT)


def test_compiled_networks_run_as_they_were_written_everywhere() -> None:
    plain = plain_network()
    compilations: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(1)
        return graph.forward

    compiled: Any = torch.compile(copy.deepcopy(plain), backend=backend)
    for structure in ("kron", "low_rank"):
        for found, expected in zip(laplace_calls(compiled, structure), laplace_calls(plain, structure), strict=True):
            assert_close(found, expected, **TIGHT)
    HessianFree(compiled, "classification").fit([(X, Y)], polish=True)
    params = {n: 2 * p.detach() for n, p in compiled.named_parameters()}
    doubled = {n: 2 * p.detach() for n, p in plain.named_parameters()}
    assert_close(functional_outputs(compiled, params, X), functional_outputs(plain, doubled, X), **TIGHT)
    # A scale without a rule takes the per-example fallback.
    scaled: Any = torch.compile(randomise(MovingAverage("assigned")), backend=backend)
    assert fit_curvature(scaled, [(X, Y)], "classification").n_data == len(X)
    assert not compilations


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, X)], ids=["script", "trace"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused_with_what_to_do(make: Callable[[nn.Module], Any]) -> None:
    scripted = make(plain_network())
    for start in (
        lambda: Laplace(scripted, "classification").fit([(X, Y)]),
        lambda: Laplace(scripted, "classification", structure="matrix_free").fit([(X, Y)]),
        lambda: HessianFree(scripted, "classification").fit([(X, Y)]),
        lambda: GGNOperator(scripted, [(X, Y)], Categorical()),
    ):
        with pytest.raises(UnsupportedError, match="TorchScript.*Pass the Python module"):
            start()


class Checkpointed(nn.Module):
    """Its first layer makes the checkpoint's input require a gradient, without which PyTorch only warns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(checkpoint(self.inner, self.first(x), use_reentrant=True)))


def step(optimiser: Any, model: nn.Module) -> Any:
    return optimiser.step(lambda: F.cross_entropy(model(X), Y))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    "start",
    [
        *[
            lambda m, s=s: Laplace(m, "classification", structure=s).fit([(X, Y)])
            for s in ("kron", "diagonal", "full", "low_rank", "matrix_free", "hessian")
        ],
        lambda m: HessianFree(m, "classification").fit([(X, Y)], polish=True),
        lambda m: GGNOperator(m, [(X, Y)], Categorical()).to_dense(),
        lambda m: GGNOperator(m, [(X, Y)], Categorical()).noise(1),
        lambda m: full_hessian(m, [(X, Y)], Categorical()),
        lambda m: DualPosterior.from_data(m, [(X, Y)], "classification"),
        lambda m: step(VOGN(m, lr=0.01, n_data=30), m),
        lambda m: step(IVON(m, lr=0.01, n_data=30), m),
    ],
)
def test_reentrant_checkpoints_are_refused_with_what_to_do(start: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(UnsupportedError, match="checkpoint.*use_reentrant=False"):
        start(randomise(Checkpointed()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_parameters_after_a_reentrant_checkpoint_can_be_fitted() -> None:
    laplace = Laplace(randomise(Checkpointed()), "classification", params="last_layer").fit([(X, Y)])
    assert laplace.predict(X[:2]).mean.shape == (2, 3)


def test_other_errors_of_autograd_come_through() -> None:
    with pytest.raises(RuntimeError, match="of the user"), autograd_errors_explained():
        raise RuntimeError("of the user")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(3, 4), nn.Linear(4, 3)
        self.attend = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.attend(self.embed(x), src_mask=mask).mean(1))


CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
ADDITIVE = torch.zeros(5, 5, dtype=torch.float64).masked_fill(CAUSAL, -torch.inf)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "low_rank"])
def test_an_additive_mask_does_what_a_boolean_one_does(structure: str) -> None:
    model, x = randomise(Masked()), randn(4, 5, 3)
    means = [
        Laplace(model, "classification", structure=structure)
        .fit([((x, mask), Y[:4])])
        .predict((x, mask), link="probit")
        .mean
        for mask in (CAUSAL, ADDITIVE)
    ]
    assert_close(means[1], means[0], rtol=1e-7, atol=1e-9)


# Bags of embeddings: their backward pass has no derivative of its own.

INDEX = torch.randint(7, (30, 3), generator=generator(2))


class Bags(nn.Module):
    def __init__(self, mode: str, padding_idx: int | None = None) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding_idx), nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bags(index)))


class MeanOfEmbeddings(nn.Module):
    def __init__(self, like: Bags) -> None:
        super().__init__()
        self.bags, self.out = nn.Embedding(7, 4), like.out
        self.bags.weight = like.bags.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bags(index).mean(1)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_plain_bags_have_the_numbers_and_gradients_of_the_fused_ones(mode: str, padding_idx: int | None) -> None:
    model = randomise(Bags(mode, padding_idx)).bags
    index = torch.cat([INDEX, torch.full((1, 3), 0 if padding_idx is None else padding_idx % 7)])  # one empty bag
    factors = randn(31, 3) if mode == "sum" else None
    vector = randn(31, 4, seed=5)
    expected = model(index, None, factors)
    gradient = torch.autograd.grad(expected, model.weight, vector)
    with evaluating(model):
        found = model(index, None, factors)
        assert "Embedding" not in type(found.grad_fn).__name__
        again = torch.autograd.grad(found, model.weight, vector)
    assert_close(found, expected, **TIGHT)
    assert_close(again, gradient, **TIGHT)


def test_bags_with_offsets_are_left_to_pytorch() -> None:
    bags = nn.EmbeddingBag(7, 4).double()
    flat, offsets = INDEX.reshape(-1), torch.arange(0, 90, 3)
    with evaluating(bags):
        assert_close(bags(flat, offsets), F.embedding_bag(INDEX, bags.weight), **TIGHT)


@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_products_and_the_hessian_of_bags_are_those_of_embeddings() -> None:
    bags = randomise(Bags("mean"))
    embeddings = MeanOfEmbeddings(bags).eval()  # type: ignore[arg-type]
    data = [(INDEX, Y)]
    found, expected = (GGNOperator(m, data, Categorical()).to_dense() for m in (bags, embeddings))
    assert_close(found, expected, **TIGHT)
    hessians = [full_hessian(m, data, Categorical()).matrix for m in (bags, embeddings)]
    assert_close(hessians[0], hessians[1], **TIGHT)
    for structure in ("low_rank", "matrix_free"):
        means = [
            Laplace(m, "classification", structure=structure).fit(data).predict(INDEX[:3], link="probit").mean
            for m in (bags, embeddings)
        ]
        assert_close(means[0], means[1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "option, message",
    [
        ({"max_norm": 0.5}, "max_norm=0.5: its forward pass shortens"),
        ({"scale_grad_by_freq": True}, "no gradient of the outputs"),
    ],
)
def test_embeddings_that_change_with_the_batch_are_refused(kind: Any, option: Any, message: str) -> None:
    def build(module: nn.Module) -> nn.Module:
        bag = isinstance(module, nn.EmbeddingBag)
        return nn.Sequential(module, nn.Identity() if bag else nn.Flatten(), nn.Linear(3 if bag else 6, 3))

    words, y = torch.tensor([[0, 1], [2, 2], [3, 0]]), torch.tensor([0, 1, 2])
    model = build(kind(5, 3, **option))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(InputError, match=message):
        Laplace(model, "classification").fit([(words, y)])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
