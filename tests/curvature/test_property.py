"""Random small networks from the supported layers, against brute force in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from aftermap.curvature import Factors, fit_curvature, reference
from aftermap.curvature.structures.kron import KronBlock
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.curvature.layer_cases import randomise

ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.Softplus, lambda: nn.ReLU(inplace=True), lambda: nn.SiLU(inplace=True), nn.PReLU]


class Residual(nn.Module):
    """x + F(x), the sum in place or not."""

    def __init__(self, inner: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.clone())  # an activation inside may work in place
        if self.in_place:
            y += x
            return y
        return x + y


class Pooled(nn.Module):
    """Mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Attend(nn.Module):
    """Self-attention as a layer of one argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def _join(draw: Any, layers: list[nn.Module], block: nn.Module) -> None:
    how = draw(st.sampled_from(["plain", "residual", "in_place"]))
    if how == "in_place" and isinstance(block, nn.Sequential):
        block = nn.Sequential(*reversed(block))  # an activation needs its output unchanged, a layer does not
    layers.append(block if how == "plain" else Residual(block, how == "in_place"))


def _flat(draw: Any, layers: list[nn.Module], width: int) -> int:
    for _ in range(draw(st.integers(0, 2))):
        activation = draw(st.sampled_from(ACTIVATIONS))
        if draw(st.booleans()):
            _join(draw, layers, nn.Sequential(nn.Linear(width, width, bias=draw(st.booleans())), activation()))
        else:
            wider = draw(st.integers(2, 5))
            layers += [nn.Linear(width, wider, bias=draw(st.booleans())), activation()]
            width = wider
        norm = draw(st.sampled_from([None, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm]))
        layers += [] if norm is None else [norm(width)]
    return width


def _image(draw: Any, layers: list[nn.Module], channels: int, size: tuple[int, int]) -> int:
    for _ in range(draw(st.integers(1, 2))):
        groups = draw(st.sampled_from([1, channels]))
        mode = draw(st.sampled_from(["zeros", "circular", "replicate"]))
        same = nn.Conv2d(channels, channels, 3, padding="same", groups=groups, padding_mode=mode)
        activation = draw(st.sampled_from(ACTIVATIONS))()
        if draw(st.booleans()):
            _join(draw, layers, nn.Sequential(same, activation))
        else:
            wider = channels + 1
            options = {"bias": draw(st.booleans()), "dilation": draw(st.integers(1, 2))}
            kind = draw(st.sampled_from([nn.Conv2d, nn.ConvTranspose2d]))
            layer = kind(channels, wider, 2, padding=draw(st.integers(0, 1)), **options)
            layers += [layer, nn.AdaptiveAvgPool2d(size), activation]
            channels = wider
        norm = draw(st.sampled_from([None, "batch", "group"]))
        if norm is not None:
            layers.append(nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(1, channels))
    return channels


@st.composite
def networks(draw: Any) -> tuple[nn.Module, Tensor, Tensor, Likelihood]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["flat", "image", "tokens"]))
    n, outputs = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    layers: list[nn.Module] = []
    positions: tuple[int, ...] = ()
    if kind == "flat":
        x = torch.randn(n, 3, dtype=torch.float64)
        width = _flat(draw, layers, 3)
    elif kind == "image":
        x = torch.randn(n, 2, 3, 4, dtype=torch.float64)
        channels = _image(draw, layers, 2, (3, 4))
        pooled = draw(st.booleans())
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if pooled else [nn.Flatten()]
        width = channels if pooled else channels * 12
    else:
        x = torch.randint(5, (n, 3))
        layers += [nn.Embedding(5, 4, padding_idx=draw(st.sampled_from([None, 1])))]
        _join(draw, layers, draw(st.sampled_from([Attend, lambda w: nn.Linear(w, w)]))(4))
        layers += [nn.LayerNorm(4), nn.Linear(4, 3), draw(st.sampled_from(ACTIVATIONS))()]
        width = 3
        if draw(st.booleans()):
            layers += [Pooled()]
        else:
            positions = (3,)
    model = randomise(nn.Sequential(*layers, nn.Linear(width, outputs))).double().eval()
    likelihood = draw(st.sampled_from([Categorical(), Gaussian(noise=0.7), Bernoulli(), Poisson()]))
    y = torch.randint(2, (n, *positions) if isinstance(likelihood, Categorical) else (n, *positions, outputs))
    return model, x, y.double() if isinstance(likelihood, Gaussian) else y, likelihood


def _fit(model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, structure: str) -> Factors:
    return fit_curvature(model, [(x, y)], likelihood, structure=structure, curvature="exact", progress=False)


def _close(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * scale + 1e-13)


@settings(max_examples=120, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_networks(case: tuple[nn.Module, Tensor, Tensor, Likelihood]) -> None:
    model, x, y, likelihood = case
    before = ModelSnapshot.of(model)
    truth = reference.ggn(model, x, likelihood, y)
    full, diagonal, ekfac, kron = (_fit(*case, s) for s in ("full", "diagonal", "ekfac", "kron"))
    assert all(t.by_rule for t in full.treatment.values()), full.summary()
    _close(full.to_dense(), truth)
    _close(torch.cat([diagonal.diagonal()[n].reshape(-1) for n in full.names]), truth.diagonal())
    _close(torch.tensor(ekfac.trace(), dtype=torch.float64), truth.trace())
    start, place = 0, {}
    for name, shape in full.shapes.items():
        size = torch.Size(shape).numel()
        place[name] = torch.arange(start, start + size)
        start += size
    modules = dict(model.named_modules())
    for block in kron.blocks:
        index = torch.cat([place[n] for n in block.shapes])
        if not isinstance(block, KronBlock):
            _close(block.to_dense(), truth[index[:, None], index])
        elif type(modules.get(block.name)) in (nn.Linear, nn.Conv2d):
            A, B, rows = reference.kron_factors(block.name, model, x, likelihood, y)
            _close(block.inputs, A)
            _close(block.outputs, B)
            _close(block.rows, torch.full_like(block.rows, rows))
            if rows == 1:
                _close(block.to_dense(), truth[index[:, None], index])
    check_unchanged(model, before)
