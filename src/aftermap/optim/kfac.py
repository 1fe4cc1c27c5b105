"""K-FAC and noisy K-FAC: natural gradient, and natural-gradient variational inference, with Kronecker factors.

With A = E[a aᵀ] (inputs of a layer), B = E[g gᵀ] (its output gradients) and row-major vec(W), the curvature of the mean
loss is B ⊗ A (group by group), and Σ = (τ/N) (B ⊗ A + (c + γ) I)⁻¹. In the eigenbases A = U_A a U_Aᵀ, B = U_B b U_Bᵀ all
of it is elementwise in D.

The equations stand first, with the numbers of docs/mathematics/optimisers.md. A name that ends in an underscore changes its
first argument in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.checks import few
from aftermap.curvature.passes.closure import ClosureReader
from aftermap.curvature.passes.gradient_reader import GradientReader
from aftermap.curvature.passes.plan import Layer
from aftermap.curvature.rules.base import Layout
from aftermap.curvature.structures.base import Block
from aftermap.curvature.structures.eigenbasis import KroneckerEigenbasis, damped_eigenvalues, eigendecompose
from aftermap.curvature.structures.kron import KronAccumulator, KronBlock
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.optim.base import Group
from aftermap.optim.options import Schedule, constructor_options
from aftermap.optim.statistics import StepStatistics, factor_dtype
from aftermap.optim.vogn import DiagonalOptimizer, new_momentum_

__all__ = [
    "KFAC",
    "KronOptimizer",
    "NoisyKFAC",
    "draw_deviation",
    "natural_gradient",
    "new_factors_",
]

_FACTORS = ("factor_inputs", "factor_outputs")
_BASIS = ("basis_inputs", "basis_outputs")
_EIGENVALUES = ("values_inputs", "values_outputs")
_KEYS = (*_FACTORS, *_BASIS, *_EIGENVALUES)  # what the state of a layer's first parameter holds for the layer


def new_factors_(state: dict[str, Tensor], block: KronBlock, n_examples: float, beta: float) -> None:
    """Updates A ← (1 − β₂) A + β₂ Σ a aᵀ / R, B ← (1 − β₂) B + β₂ Σ g gᵀ / M; the first batch's factors are taken as they are.

    Args:
        state: Holds A as "factor_inputs" [g, i, i] and B as "factor_outputs" [g, o, o].
        block: Σ a aᵀ, Σ g gᵀ and the number R of rows, over all batches, calls and processes.
        n_examples: M, the number of examples.
        beta: The weight β₂ of the new batch.
    """
    means = block.input_mean().to(block.inputs.dtype), block.outputs / n_examples
    for key, mean in zip(_FACTORS, means, strict=True):
        if key in state:
            state[key].lerp_(mean.to(state[key].dtype), beta)  # eq. (9)
        else:
            state[key] = mean


def natural_gradient(basis: KroneckerEigenbasis, gradient: Tensor, damped: Tensor) -> Tensor:
    """Returns U_B ((U_Bᵀ M U_A) / D) U_Aᵀ of a gradient or momentum M [g, o, i]."""
    return basis.rotate_back(basis.rotate(gradient) / damped)  # eq. (10)


def draw_deviation(basis: KroneckerEigenbasis, noise: Tensor, damped: Tensor, scale: float) -> Tensor:
    """Draws scale · U_B (Z / √D) U_Aᵀ for standard normal Z [g, o, i]: covariance scale² (U_B ⊗ U_A) D⁻¹ (U_B ⊗ U_A)ᵀ."""
    # Z is isotropic, so it needs no rotation of its own.
    return scale * basis.rotate_back(noise / damped.sqrt())  # eq. (11)


class KronOptimizer(DiagonalOptimizer):
    """An optimiser that gives layers with a weight matrix Kronecker factors and everything else a diagonal.

    KFAC and NoisyKFAC are its final forms.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        options: Mapping[str, Any],
        generator: torch.Generator | None,
    ):
        self._layouts: dict[str, Layout] = {}  # of the factored layers, by the name of their first parameter
        super().__init__(model, params, options, generator)

    def set_prior(self, mean: Mapping[str, Tensor], precision: Mapping[str, Tensor]) -> None:
        """Refuses a prior per weight, which has no place in the eigenbasis of a Kronecker structure.

        Raises:
            UnsupportedError: The method is always refused.
        """
        raise UnsupportedError(
            "a prior precision for each weight does not fit a Kronecker posterior; use VOGN or IVON for continual learning"
        )

    # Reading closures.

    def _make_reader(self, model: nn.Module, names: list[str]) -> ClosureReader:
        def for_matrix(number: int, layer: Layer) -> KronAccumulator:
            parameter = next(iter(layer.named.values()))[1]
            return KronAccumulator(number, layer.layout, "expand", factor_dtype(parameter), parameter.device)

        return ClosureReader(model, names, for_matrix=for_matrix)

    def _current_reader(self) -> ClosureReader | GradientReader:
        reader = super()._current_reader()
        if self._refreshes() or not isinstance(reader, ClosureReader):
            return reader
        return GradientReader(self._network, self._trained())

    def _refreshes(self) -> bool:
        """Tells whether this step refreshes the factors."""
        return self.steps % self.settings.factor_every == 0

    def _closure_reader(self) -> ClosureReader | None:
        """Returns the reader of the factors, once there was a step."""
        reader = None if self._reader is None else self._reader[1]
        return reader if isinstance(reader, ClosureReader) else None

    def _layouts_to_reduce(self) -> list[Layout]:
        reader = self._closure_reader()
        if reader is None or not self._refreshes():
            return []
        return [layer.layout for layer in reader.layers.layers if layer.rule.matrix and not layer.rule.one_hot]

    def _settle(self, disputed: Sequence[Layout]) -> None:
        """Gives a layer for which one process has no factors a diagonal on every process, from now on."""
        reader = self._closure_reader()
        if reader is None or not disputed:
            return
        for layout in disputed:
            reader.without_block.update(layout.names)
            self._forget(layout)
        names = few([layout.name for layout in disputed])
        warnings.warn(
            f"the data of one process use {names} in a way that gives no Kronecker factors (another process warns of the "
            "reason), so on every process these layers have a diagonal from now on. Gradients are not affected",
            StatisticalWarning,
            stacklevel=6,
        )

    # The factored layers and their state.

    def _basis(self, layout: Layout) -> KroneckerEigenbasis | None:
        """Returns the eigenbasis of a layer's factors, once they are decomposed."""
        state = self.state[self._anchor(layout)]
        return KroneckerEigenbasis(state[_BASIS[0]], state[_BASIS[1]]) if _BASIS[0] in state else None

    def _anchor(self, layout: Layout) -> Tensor:
        """Returns the parameter whose state holds a layer's factors."""
        return self._parameters()[layout.names[0]]

    def _layouts_in(self, params: list[Tensor]) -> list[Layout]:
        """Returns the decomposed layers all of whose parameters are in the list."""
        names = {self._names[id(p)] for p in params}
        return [x for x in self._layouts.values() if names.issuperset(x.names) and self._basis(x) is not None]

    def _forget(self, layout: Layout) -> None:
        """Drops the factors of every layer that shares a parameter with this one."""
        for key, old in list(self._layouts.items()):
            if set(old.names) & set(layout.names):
                state = self.state[self._anchor(old)]
                for name in _KEYS:
                    state.pop(name, None)
                del self._layouts[key]

    def _needs_noise(self, group: Group, parameter: Tensor) -> bool:
        if group["deterministic"] or not parameter.requires_grad:
            return False
        name = self._names[id(parameter)]
        for layout in self._layouts.values():
            if name in layout.names:
                params = self._parameters()
                # With a part frozen, the layer's factors no longer fit; the next refresh makes new ones.
                return self._basis(layout) is not None and all(params[n].requires_grad for n in layout.names)
        return super()._needs_noise(group, parameter)

    def _damped_eigenvalues(self, group: Group, layout: Layout) -> Tensor:
        """Returns D [g, o, i]: the eigenvalues of a layer's curvature with c + γ."""
        state = self.state[self._anchor(layout)]
        a, b = (state[key] for key in _EIGENVALUES)
        prior, _ = self._prior(group, [])
        return damped_eigenvalues(b, a, prior=prior + group["damping"], damping=self.settings.damping_form)

    # Drawing and moving.

    def _draw_group(self, group: Group, params: list[Tensor], noise: list[Tensor]) -> list[Tensor]:
        by_name = {self._names[id(p)]: (p, z) for p, z in zip(params, noise, strict=True)}
        drawn: dict[str, Tensor] = {}
        for layout in self._layouts_in(params):
            basis = self._basis(layout)
            if basis is None:
                continue
            block = layout.join({n: by_name[n][1] for n in layout.names}).to(basis.outputs.dtype)
            deviation = draw_deviation(basis, block, self._damped_eigenvalues(group, layout), self.noise_scale())
            for name, value in layout.split(deviation).items():
                mean = by_name[name][0].data
                drawn[name] = mean + value.to(mean.dtype)
        rest = [n for n in by_name if n not in drawn]
        if rest:
            values = super()._draw_group(group, [by_name[n][0] for n in rest], [by_name[n][1] for n in rest])
            drawn.update(zip(rest, values, strict=True))
        return [drawn[n] for n in by_name]

    def _update(self, statistics: StepStatistics) -> None:
        self._refresh(statistics)
        factored = {n for x in self._layouts.values() for n in x.names}
        scale = statistics.grad_scale / statistics.size
        for group in self.param_groups:
            named = [(self._names[id(p)], p) for p in group["params"] if p.requires_grad]
            used = [(n, p) for n, p in named if n in statistics.grads]
            for layout in self._layouts_in([p for _, p in used]):
                self._move(group, layout, statistics.grads, scale)
            for name, p in used:
                if name not in factored and name not in statistics.curvature and "curvature" in self.state[p]:
                    # Between refreshes the diagonal part keeps its curvature: the estimate is what is known.
                    keep = statistics.size / statistics.curvature_scale
                    statistics.curvature[name] = self.state[p]["curvature"] * keep
        statistics.grads = {n: g for n, g in statistics.grads.items() if n not in factored}
        super()._update(statistics)

    def _refresh(self, statistics: StepStatistics) -> None:
        """Takes new factors into the running ones, and decomposes them every ``inverse_every`` steps."""
        for layout in list(self._layouts.values()):
            # The layer is used in another way than before, so it has squares now, and its old factors would never be renewed.
            if layout not in statistics.factors and not statistics.curvature.keys().isdisjoint(layout.names):
                self._forget(layout)
        for layout, block in statistics.factors.items():
            owners = [g for g in self.param_groups if any(self._names[id(p)] in layout.names for p in g["params"])]
            if len(owners) > 1:
                raise InputError(
                    f"the parameters of {layout.name} are in different groups; a Kronecker block needs them in one"
                )
            if self._layouts.get(layout.names[0]) != layout:
                self._forget(layout)
                self._layouts[layout.names[0]] = layout
            state = self.state[self._anchor(layout)]
            new_factors_(state, block, statistics.size, owners[0]["new_curvature_weight"])
        due = self.steps % self.settings.inverse_every == 0
        if statistics.factors and (due or any(self._basis(x) is None for x in self._layouts.values())):
            self._decompose()

    def _decompose(self) -> None:
        """Decomposes the factors of all layers, one precision after the other; over several processes each does its share."""
        by_dtype: dict[torch.dtype, list[Layout]] = {}
        for layout in self._layouts.values():
            by_dtype.setdefault(self.state[self._anchor(layout)][_FACTORS[0]].dtype, []).append(layout)
        for dtype, layouts in by_dtype.items():
            states = [self.state[self._anchor(layout)] for layout in layouts]
            sides = list(zip(("input", "output"), _FACTORS, strict=True))
            matrices = [
                (f"the {side} factor of {layout.name}", state[key])
                for layout, state in zip(layouts, states, strict=True)
                for side, key in sides
            ]
            done = iter(eigendecompose(matrices, dtype))
            for state in states:
                for vectors_key, values_key in zip(_BASIS, _EIGENVALUES, strict=True):
                    state[values_key], state[vectors_key] = next(done)

    def _move(self, group: Group, layout: Layout, grads: Mapping[str, Tensor], scale: float) -> None:
        """Moves one layer: the momentum first, then the mean by the natural gradient (B ⊗ A + (c + γ) I)⁻¹ m."""
        basis = self._basis(layout)
        if basis is None:
            return
        by_name = self._parameters()
        params = [by_name[n] for n in layout.names]
        momentum, mean = self._momenta(params), [p.data for p in params]
        prior, prior_mean = self._prior(group, [])
        normalised = self.settings.momentum_form == "normalised"
        given_grads = [grads[n] for n in layout.names]
        new_momentum_(momentum, given_grads, scale, mean, prior, prior_mean, group["momentum"], normalised=normalised)
        block = layout.join(dict(zip(layout.names, momentum, strict=True))).to(basis.outputs.dtype)
        step = layout.split(natural_gradient(basis, block, self._damped_eigenvalues(group, layout)))
        for parameter, name in zip(mean, layout.names, strict=True):
            parameter.sub_(step[name].to(parameter.dtype), alpha=self._rate(group))

    def _blocks(self) -> list[Block]:
        n, blocks, factored = self.settings.n_effective, list[Block](), set[str]()
        groups = {self._names[id(p)]: g for g in self.param_groups for p in g["params"]}
        for layout in self._layouts.values():
            state = self.state[self._anchor(layout)]
            factored.update(layout.names)
            if not groups[layout.names[0]]["deterministic"] and _FACTORS[0] in state:
                inputs, outputs = (state[key] for key in _FACTORS)
                rows = torch.ones(layout.groups, dtype=torch.float64, device=inputs.device)  # A is a mean already
                blocks.append(KronBlock(layout, inputs, outputs * n, rows))
        return blocks + [b for b in super()._blocks() if not factored.intersection(b.shapes)]

    # State.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; a state of another optimiser or of other parameters raises and changes nothing."""
        super().load_state_dict(state_dict)
        for parameter, _, saved in self._saved_states(state_dict):  # PyTorch casts a state to the parameter's dtype
            for key in _KEYS:
                if key in saved:
                    self.state[parameter][key] = saved[key].to(parameter.device, factor_dtype(parameter), copy=True)

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "factored": [x.to_config() for x in self._layouts.values()]}

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra_state(extra)
        layouts = [Layout.from_config(c) for c in extra["factored"]]
        self._layouts = {x.names[0]: x for x in layouts}


class KFAC(KronOptimizer):
    r"""Natural gradient with Kronecker-factored curvature; no weights are drawn.

    .. math::
        A \leftarrow (1-\beta_2)A + \beta_2\,\tfrac1R\textstyle\sum a a^\top, \quad
        B \leftarrow (1-\beta_2)B + \beta_2\,\tfrac1M\sum g g^\top, \quad
        \mu \leftarrow \mu - \alpha\,(B \otimes A + (\delta/N + \gamma) I)^{-1} m

    with R rows of inputs, M examples, and g the gradients of the observed loss at the layer's outputs (empirical Fisher,
    expand). Parameters outside weight matrices get a diagonal.

    Args:
        model: The network; a DistributedDataParallel wrapper is seen through.
        lr: α, the learning rate.
        n_data: N, the number of training data, or the data set itself.
        params: Groups of parameters; None means everything that requires a gradient. The parameters of one layer belong in
            one group.
        momentum: β₁, the share of the old momentum.
        momentum_form: "heavy_ball" or "normalised", as in `VOGN`.
        new_curvature_weight: β₂, the weight of the *new* factors.
        prior_precision: δ, the precision of the prior.
        weight_decay: λ, the weight decay on the mean loss, another way to say prior_precision = λN (ρN with augmentation).
        prior_mean: μ₀, the mean of the prior.
        damping: γ, which is added to the curvature.
        damping_form: "exact" (c + γ is added in the eigenbasis, equation 10 of the documentation) or "pi" (it is split between
            the two factors by π: Martens & Grosse 2015, section 6.3; "factored" is an older word for it).
        factor_every: The number of steps between refreshes of the factors.
        inverse_every: The number of steps between eigendecompositions, which are shared out over processes.
        batch_norm: How the parameters of BatchNorm are treated: "deterministic" (no prior) or "variational".
        reduction: How the closure's loss sums over the examples of a batch: "mean" or "sum".
        max_grad_norm: The greatest length of the mean gradient; a longer one is shortened.

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
        n_data: float | Sized | None = None,
        params: Iterable[Any] | None = None,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        weight_decay: float | None = None,
        prior_mean: float = 0.0,
        damping: float = 1e-2,
        damping_form: str = "exact",
        factor_every: int = 1,
        inverse_every: int = 10,
        batch_norm: str = "deterministic",
        reduction: str = "mean",
        max_grad_norm: float | None = None,
    ):
        super().__init__(model, params, {**constructor_options(locals()), "sampling": False}, None)


class NoisyKFAC(KronOptimizer):
    r"""K-FAC whose weights are drawn from the posterior that its factors describe.

    .. math::
        W = \mu + \sqrt{\tau/N}\; U_B\big(Z / \sqrt{D}\big)U_A^\top, \qquad D = b a^\top + \tau\delta/N + \gamma

    so that Cov(vec W) = (τ/N) (B ⊗ A + (τδ/N + γ) I)⁻¹ exactly; ``damping_form="pi"`` makes it a matrix normal
    MN(μ, (τ/N) B̃⁻¹, Ã⁻¹). The mean moves as in K-FAC with the gradient at W.

    Args:
        model: The network; a DistributedDataParallel wrapper is seen through.
        lr: α, the learning rate.
        n_data: N, the number of training data, or the data set itself.
        params: Groups of parameters; None means everything that requires a gradient. The parameters of one layer belong in
            one group.
        mc_samples: K, the number of draws in a step. The first step is free of noise.
        momentum: β₁, the share of the old momentum.
        momentum_form: "heavy_ball" or "normalised", as in `VOGN`.
        new_curvature_weight: β₂, the weight of the *new* factors.
        prior_precision: δ, the precision of the prior.
        weight_decay: λ, the weight decay on the mean loss, another way to say prior_precision = λN (ρN with augmentation).
        prior_mean: μ₀, the mean of the prior.
        damping: γ, which is added to the curvature.
        damping_form: "exact" (c + γ is added in the eigenbasis, equation 10 of the documentation) or "pi" (it is split between
            the two factors by π: Martens & Grosse 2015, section 6.3; "factored" is an older word for it).
        temperature: τ, a number or a `Schedule`.
        augmentation: ρ, which multiplies N when the data are augmented.
        factor_every: The number of steps between refreshes of the factors.
        inverse_every: The number of steps between eigendecompositions, which are shared out over processes.
        batch_norm: How the parameters of BatchNorm are treated: "deterministic" (no prior) or "variational".
        reduction: How the closure's loss sums over the examples of a batch: "mean" or "sum".
        max_grad_norm: The greatest length of the mean gradient; a longer one is shortened.
        sample_groups: The number of groups of processes that draw different weights; with 1 all draw the same.
        generator: The generator that gives the seed of the noise; None derives it from PyTorch's seed.

    >>> net = nn.Linear(3, 2)
    >>> opt = NoisyKFAC(net, lr=0.1, n_data=4)
    >>> float(opt.step(lambda: net(torch.ones(4, 3)).square().mean())) > 0
    True

    References:
        Zhang et al. 2018, Algorithm 2; Osawa et al. 2019.

    It differs from the paper in that the prior enters exactly by default, not by a factored approximation.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        n_data: float | Sized | None = None,
        params: Iterable[Any] | None = None,
        mc_samples: int = 1,
        momentum: float = 0.9,
        momentum_form: str = "heavy_ball",
        new_curvature_weight: float = 0.05,
        prior_precision: float = 1.0,
        weight_decay: float | None = None,
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
        super().__init__(model, params, constructor_options(locals()), generator)
