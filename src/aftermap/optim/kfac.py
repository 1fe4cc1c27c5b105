"""K-FAC and noisy K-FAC: natural gradient, and natural-gradient variational inference, with Kronecker factors.

With A = E[a aᵀ] (inputs of a layer), B = E[g gᵀ] (its output gradients) and row-major vec(W), the curvature of the mean
loss is B ⊗ A (group by group), and Σ = (τ/N) (B ⊗ A + (c + γ) I)⁻¹. In the eigenbases A = U_A a U_Aᵀ, B = U_B b U_Bᵀ all
of it is elementwise in D = b aᵀ + c + γ ("exact"), or in D = (b + √(c+γ)/π)(a + π√(c+γ))ᵀ ("factored", which makes Σ a matrix
normal: MN(μ, B̃⁻¹, Ã⁻¹)).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.passes.closure import ClosureReader
from aftermap.curvature.passes.gradient_reader import GradientReader
from aftermap.curvature.passes.plan import Layer
from aftermap.curvature.rules.base import Layout
from aftermap.curvature.structures.base import Block
from aftermap.curvature.structures.kron import KronAccumulator, KronBlock
from aftermap.distributed import shared_out, unwrapped
from aftermap.errors import InputError, UnsupportedError
from aftermap.linalg import psd_eigh
from aftermap.optim.base import Group, momenta
from aftermap.optim.options import Schedule, Settings, check_count, check_word, make_groups, make_settings
from aftermap.optim.statistics import Collected, Factor
from aftermap.optim.vogn import DiagonalOptimizer, add_momentum_, check_model

__all__ = [
    "DAMPING_FORMS",
    "KFAC",
    "Basis",
    "KronOptimizer",
    "NoisyKFAC",
    "decompose",
    "deviation",
    "eigenvalues",
    "precondition",
]

DAMPING_FORMS = ("exact", "factored")
_BASIS = ("basis_inputs", "basis_outputs", "values_inputs", "values_outputs")


@dataclass(frozen=True)
class Basis:
    """Eigendecompositions of a layer's factors.

    Attributes:
        inputs: U_A [g, i, i].
        outputs: U_B [g, o, o].
        input_values: a [g, i].
        output_values: b [g, o].
    """

    inputs: Tensor
    outputs: Tensor
    input_values: Tensor
    output_values: Tensor


def decompose(factors: Sequence[tuple[Tensor, Tensor]]) -> list[Basis]:
    """Eigendecompositions of (A, B) of each layer, in float64; over several processes each does its share."""
    if not factors:
        return []
    matrices = [m for pair in factors for m in pair]

    def work(number: int) -> list[Tensor]:
        values, vectors = psd_eigh(matrices[number], what="a Kronecker factor")
        return [values.to(matrices[number].dtype), vectors.to(matrices[number].dtype)]

    costs = [float(m.shape[0] * m.shape[-1] ** 3) for m in matrices]
    shapes = [[tuple(m.shape[:2]), tuple(m.shape)] for m in matrices]
    done = shared_out(costs, shapes, work, matrices[0])
    return [Basis(done[i][1], done[i + 1][1], done[i][0], done[i + 1][0]) for i in range(0, len(matrices), 2)]


def eigenvalues(basis: Basis, damping: float, form: str) -> Tensor:
    """D [g, o, i]: the curvature with prior and damping (c + γ) in the eigenbasis."""
    a, b = basis.input_values[:, None, :], basis.output_values[:, :, None]
    if form == "exact":
        return b * a + damping
    mean_a, mean_b = a.mean(-1, keepdim=True), b.mean(-2, keepdim=True)
    # π balances the two sides, so that scaling A up and B down changes nothing (Martens & Grosse 2015, section 6.3).
    ratio = (mean_a.clamp_min(1e-30) / mean_b.clamp_min(1e-30)).sqrt()
    root = damping**0.5
    return (b + root / ratio) * (a + root * ratio)


def precondition(basis: Basis, block: Tensor, below: Tensor) -> Tensor:
    """U_B ((U_Bᵀ M U_A) / D) U_Aᵀ of a block M [g, o, i]: the natural gradient."""
    rotated = basis.outputs.transpose(-1, -2) @ block @ basis.inputs
    return basis.outputs @ (rotated / below) @ basis.inputs.transpose(-1, -2)


def deviation(basis: Basis, noise: Tensor, below: Tensor, scale: float) -> Tensor:
    """scale · U_B (Z / √D) U_Aᵀ for standard normal Z [g, o, i]: covariance scale² (U_B ⊗ U_A) D⁻¹ (U_B ⊗ U_A)ᵀ."""
    # Z is isotropic, so it needs no rotation of its own (MATH 1.6).
    return scale * (basis.outputs @ (noise / below.sqrt()) @ basis.inputs.transpose(-1, -2))


class KronOptimizer(DiagonalOptimizer):
    """Layers with a weight matrix get Kronecker factors, everything else a diagonal; use KFAC or NoisyKFAC."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[Group],
        defaults: dict[str, Any],
        settings: Settings,
        generator: torch.Generator | None,
        *,
        factor_every: int,
        inverse_every: int,
        damping_form: str,
    ):
        self.factor_every = check_count("factor_every", factor_every)
        self.inverse_every = check_count("inverse_every", inverse_every)
        self.damping_form = check_word("damping_form", damping_form, DAMPING_FORMS)
        self._layouts: dict[str, Layout] = {}  # factored layers, by the name of their first parameter
        self._gradients: GradientReader | None = None
        super().__init__(model, groups, defaults, settings, generator)

    def set_prior(self, mean: Mapping[str, Tensor], precision: Mapping[str, Tensor]) -> None:
        """Not for a Kronecker structure: a precision per weight has no place in the eigenbasis.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a prior precision for each weight does not fit a Kronecker posterior; use VOGN or IVON for continual learning"
        )

    def _make_watcher(self, model: nn.Module, names: list[str]) -> ClosureReader:
        def for_matrix(number: int, layer: Layer) -> KronAccumulator:
            parameter = next(iter(layer.named.values()))[1]
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            return KronAccumulator(number, layer.layout, "expand", dtype, parameter.device)

        return ClosureReader(model, names, for_matrix=for_matrix)

    def _read(self) -> ClosureReader | GradientReader:
        reader = super()._read()
        if self.steps % self.factor_every == 0 or not isinstance(reader, ClosureReader):
            return reader
        return GradientReader(self._inner, self._trained())

    # Which layers are factored, and their state.

    def _anchor(self, layout: Layout) -> Tensor:
        """The parameter whose state holds a layer's factors."""
        return self._by_name()[layout.names[0]]

    def _by_name(self) -> dict[str, Tensor]:
        return {self._known[id(p)]: p for g in self.param_groups for p in g["params"]}

    def _basis(self, layout: Layout) -> Basis | None:
        state = self.state[self._anchor(layout)]
        return Basis(*(state[k] for k in _BASIS)) if _BASIS[0] in state else None

    def _layouts_in(self, params: list[Tensor]) -> list[Layout]:
        """Factored layers all of whose parameters are in the list."""
        names = {self._known[id(p)] for p in params}
        return [x for x in self._layouts.values() if names.issuperset(x.names) and self._basis(x) is not None]

    def _needs_noise(self, group: Group, parameter: Tensor) -> bool:
        if group["deterministic"] or not parameter.requires_grad:
            return False
        name = self._known[id(parameter)]
        for layout in self._layouts.values():
            if name in layout.names:
                by_name = self._by_name()
                # With a part frozen, the layer's factors no longer fit; the next refresh makes new ones.
                return self._basis(layout) is not None and all(by_name[n].requires_grad for n in layout.names)
        return super()._needs_noise(group, parameter)

    def _below(self, group: Group, layout: Layout, basis: Basis) -> Tensor:
        prior, _ = self._prior(group, [])
        return eigenvalues(basis, prior + group["damping"], self.damping_form)

    # Drawing and moving.

    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        by_name = {self._known[id(p)]: (p, z) for p, z in zip(params, noise, strict=True)}
        drawn: dict[str, Tensor] = {}
        for layout in self._layouts_in(params):
            basis = self._basis(layout)
            if basis is None:
                continue
            block = layout.join({n: by_name[n][1] for n in layout.names})
            away = deviation(basis, block, self._below(group, layout, basis), self.noise_scale())
            drawn.update({n: by_name[n][0].data + v for n, v in layout.split(away).items()})
        rest = [n for n in by_name if n not in drawn]
        if rest:
            values = super()._draw_group(group, [by_name[n][0] for n in rest], [by_name[n][1] for n in rest])
            drawn.update(zip(rest, values, strict=True))
        return [drawn[n] for n in by_name]

    def _factor_shapes(self) -> dict[int, Factor]:
        watcher = self._reader[1] if self._reader is not None else None
        if self.steps % self.factor_every or not isinstance(watcher, ClosureReader) or watcher.plan is None:
            return {}
        found: dict[int, Factor] = {}
        for number in watcher.plan.whole_layers:
            if watcher.has_block(watcher.plan, number):
                layer = watcher.plan.layers[number]
                like, x = next(iter(layer.named.values()))[1], layer.layout
                inputs, outputs = like.new_zeros(x.groups, x.in_, x.in_), like.new_zeros(x.groups, x.out, x.out)
                found[number] = (inputs, outputs, 1)
        return found

    def _update(self, total: Collected) -> None:
        self._add_factors(total)
        covered = {n for x in self._layouts.values() for n in x.names}
        scale = total.grad_scale / total.size
        for group in self.param_groups:
            params = [p for p in group["params"] if p.requires_grad and self._known[id(p)] in total.grads]
            for layout in self._layouts_in(params):
                self._move(group, layout, total.grads, scale)
            for p in params:
                name = self._known[id(p)]
                if name not in covered and name not in total.curvature and "curvature" in self.state[p]:
                    # Between refreshes the diagonal part keeps its curvature: the estimate is what is known.
                    total.curvature[name] = self.state[p]["curvature"] * (total.size / total.curvature_scale)
        total.grads = {n: g for n, g in total.grads.items() if n not in covered}
        super()._update(total)

    def _add_factors(self, total: Collected) -> None:
        if not total.factors or self._reader is None or not isinstance(self._reader[1], ClosureReader):
            return
        layers = self._reader[1].layers.layers
        for number, (inputs, outputs, rows) in total.factors.items():
            layout = layers[number].layout
            owners = {id(g) for g in self.param_groups for p in g["params"] if self._known[id(p)] in layout.names}
            if len(owners) > 1:
                raise InputError(
                    f"the parameters of {layout.name} are in different groups; a Kronecker block needs them in one"
                )
            self._replace(layout)
            state = self.state[self._anchor(layout)]
            new = {"factor_inputs": inputs / (total.size * rows), "factor_outputs": outputs / total.size}
            group = next(g for g in self.param_groups if id(g) in owners)
            for key, value in new.items():
                if key in state:
                    state[key].lerp_(value, group["new_curvature_weight"])
                else:
                    state[key] = value
        if self.steps % self.inverse_every == 0 or any(self._basis(x) is None for x in self._layouts.values()):
            states = [self.state[self._anchor(x)] for x in self._layouts.values()]
            made = decompose([(s["factor_inputs"], s["factor_outputs"]) for s in states])
            for state, basis in zip(states, made, strict=True):
                values = (basis.inputs, basis.outputs, basis.input_values, basis.output_values)
                state.update(zip(_BASIS, values, strict=True))

    def _replace(self, layout: Layout) -> None:
        """Makes ``layout`` the one of its layer; an older one with other parameters loses its factors."""
        for key, old in list(self._layouts.items()):
            if old != layout and set(old.names) & set(layout.names):
                state = self.state[self._anchor(old)]
                for name in ("factor_inputs", "factor_outputs", *_BASIS):
                    state.pop(name, None)
                del self._layouts[key]
        self._layouts[layout.names[0]] = layout

    def _move(self, group: Group, layout: Layout, grads: Mapping[str, Tensor], scale: float) -> None:
        """One layer: momentum, then the natural gradient (B ⊗ A + (c + γ) I)⁻¹ m."""
        basis = self._basis(layout)
        if basis is None:
            return
        by_name = self._by_name()
        params = [by_name[n] for n in layout.names]
        momentum = momenta(self, params)
        prior, prior_mean = self._prior(group, [])
        data = [p.data for p in params]
        normalised, beta = self.settings.momentum_form == "normalised", group["momentum"]
        given = [grads[n] for n in layout.names]
        add_momentum_(momentum, given, scale, data, prior, prior_mean, beta, normalised=normalised)
        block = layout.join(dict(zip(layout.names, momentum, strict=True)))
        step = layout.split(precondition(basis, block, self._below(group, layout, basis)))
        rate = group["lr"] / (1 - beta ** (self.steps + 1)) if normalised else group["lr"]
        for parameter, name in zip(data, layout.names, strict=True):
            parameter.sub_(step[name], alpha=rate)

    def _blocks(self) -> list[Block]:
        n, found, covered = self.settings.n_effective, list[Block](), set[str]()
        groups = {self._known[id(p)]: g for g in self.param_groups for p in g["params"]}
        for layout in self._layouts.values():
            state = self.state[self._anchor(layout)]
            covered.update(layout.names)
            if not groups[layout.names[0]]["deterministic"] and "factor_inputs" in state:
                rows = torch.ones(layout.groups, dtype=torch.float64, device=state["factor_inputs"].device)
                found.append(KronBlock(layout, state["factor_inputs"], state["factor_outputs"] * n, rows))
        return found + [b for b in super()._blocks() if not covered.intersection(b.shapes)]

    # State.

    def _extra(self) -> dict[str, Any]:
        return {**super()._extra(), "factored": [x.to_config() for x in self._layouts.values()]}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        layouts = [Layout.from_config(c) for c in extra["factored"]]
        self._layouts = {x.names[0]: x for x in layouts}


class KFAC(KronOptimizer):
    r"""Natural gradient with Kronecker-factored curvature; no weights are drawn.

    .. math::
        A \leftarrow (1-\beta_2)A + \beta_2\,\tfrac1{MT}\textstyle\sum a a^\top, \quad
        B \leftarrow (1-\beta_2)B + \beta_2\,\tfrac1M\sum g g^\top, \quad
        \mu \leftarrow \mu - \alpha\,(B \otimes A + (\delta/N + \gamma) I)^{-1} m

    with g the gradients of the observed loss at the layer's outputs (empirical Fisher, expand). Parameters outside weight
    matrices get a diagonal.

    Args:
        model: the network.
        lr: α.
        n_data: N.
        params: parameter groups, or None; the parameters of one layer belong in one group.
        momentum: β₁.
        momentum_form: "heavy_ball" or "normalised".
        new_curvature_weight: β₂, the weight of the *new* factors.
        prior_precision: δ.
        prior_mean: μ₀.
        damping: γ.
        damping_form: "exact" (in the eigenbasis) or "factored" (Martens & Grosse 2015, section 6.3).
        factor_every: steps between refreshes of the factors.
        inverse_every: steps between eigendecompositions (shared out over processes).
        batch_norm: "deterministic" or "variational".
        reduction: "mean" or "sum".
        max_grad_norm: shortens the mean gradient.

    >>> net = nn.Linear(3, 2)
    >>> opt = KFAC(net, lr=0.1, n_data=4)
    >>> float(opt.step(lambda: net(torch.ones(4, 3)).square().mean())) > 0
    True

    References:
        Martens & Grosse 2015; Grosse & Martens 2016; Osawa et al. 2019.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        n_data: float | None = None,
        params: Iterable[Any] | None = None,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        prior_mean: float = 0.0,
        damping: float = 1e-2,
        damping_form: str = "exact",
        factor_every: int = 1,
        inverse_every: int = 10,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
    ):
        check_model(model, "KFAC")
        settings = make_settings(
            n_data=n_data,
            sampling=False,
            reduction=reduction,
            momentum_form=momentum_form,
            max_grad_norm=max_grad_norm,
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "new_curvature_weight": new_curvature_weight,
            "prior_precision": prior_precision,
            "prior_mean": prior_mean,
            "damping": damping,
            "deterministic": False,
        }
        super().__init__(
            model,
            make_groups(unwrapped(model), params, batch_norm),
            defaults,
            settings,
            None,
            factor_every=factor_every,
            inverse_every=inverse_every,
            damping_form=damping_form,
        )


class NoisyKFAC(KronOptimizer):
    r"""K-FAC whose weights are drawn from the posterior that its factors describe.

    .. math::
        W = \mu + \sqrt{\tau/N}\; U_B\big(Z / \sqrt{D}\big)U_A^\top, \qquad D = b a^\top + \tau\delta/N + \gamma

    so that Cov(vec W) = (τ/N) (B ⊗ A + (τδ/N + γ) I)⁻¹ exactly; ``damping_form="factored"`` makes it a matrix normal
    MN(μ, (τ/N) B̃⁻¹, Ã⁻¹). The mean moves as in K-FAC with the gradient at W.

    Args:
        model: the network.
        lr: α.
        n_data: N.
        params: parameter groups, or None; the parameters of one layer belong in one group.
        mc_samples: K; the first step is free of noise.
        momentum: β₁.
        momentum_form: "heavy_ball" or "normalised".
        new_curvature_weight: β₂, the weight of the *new* factors.
        prior_precision: δ.
        prior_mean: μ₀.
        damping: γ.
        damping_form: "exact" or "factored".
        temperature: τ, a number or a `Schedule`.
        augmentation: ρ.
        factor_every: steps between refreshes of the factors.
        inverse_every: steps between eigendecompositions (shared out over processes).
        batch_norm: "deterministic" or "variational".
        reduction: "mean" or "sum".
        max_grad_norm: shortens the mean gradient.
        sample_groups: groups of processes that draw different weights.
        generator: gives the seed of the noise.

    >>> net = nn.Linear(3, 2)
    >>> opt = NoisyKFAC(net, lr=0.1, n_data=4)
    >>> float(opt.step(lambda: net(torch.ones(4, 3)).square().mean())) > 0
    True

    References:
        Zhang et al. 2018, Algorithm 2; Osawa et al. 2019.

    Differs from the paper: the prior enters exactly by default, not by a factored approximation.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        n_data: float | None = None,
        params: Iterable[Any] | None = None,
        mc_samples: int = 1,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        prior_mean: float = 0.0,
        damping: float = 1e-2,
        damping_form: str = "exact",
        temperature: float | Schedule = 1.0,
        augmentation: float = 1.0,
        factor_every: int = 1,
        inverse_every: int = 10,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
        sample_groups: int = 1,
        generator: torch.Generator | None = None,
    ):
        check_model(model, "NoisyKFAC")
        settings = make_settings(
            n_data=n_data,
            mc_samples=mc_samples,
            reduction=reduction,
            temperature=temperature,
            augmentation=augmentation,
            momentum_form=momentum_form,
            max_grad_norm=max_grad_norm,
            sample_groups=sample_groups,
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "new_curvature_weight": new_curvature_weight,
            "prior_precision": prior_precision,
            "prior_mean": prior_mean,
            "damping": damping,
            "deterministic": False,
        }
        super().__init__(
            model,
            make_groups(unwrapped(model), params, batch_norm),
            defaults,
            settings,
            generator,
            factor_every=factor_every,
            inverse_every=inverse_every,
            damping_form=damping_form,
        )
