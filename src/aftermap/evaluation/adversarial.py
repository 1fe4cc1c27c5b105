"""Attacks on a method's own predictive: fast gradient sign, iterated targeted, and projected gradient.

Gradients are those of log p̄(y | x), with p̄ the method's averaged probabilities under a fixed set of samples (averaging the
gradients of log p_s would attack another model). Steps are scaled per input dimension and, by default, never clipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from aftermap import checks
from aftermap.batches import Unpack, iterate
from aftermap.draws import uniform_like
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.evaluation.predictor import Predictor, accepts, model_of
from aftermap.models import check_device
from aftermap.predictive import Prediction

__all__ = ["FGSM", "PGD", "Attack", "AttackCurve", "TargetedAttack", "input_range", "log_probability_gradient"]


@dataclass(frozen=True)
class AttackCurve:
    """What an attack does as it grows stronger; each list has one entry per step.

    Attributes:
        steps: The step sizes, or the numbers of iterations.
        entropy: The mean entropy of the predictive at each step, in nats.
        accuracy: The share of examples whose true label is still predicted.
        kept: The share of examples for which the method still makes its own original prediction.
        target: The share of examples predicted as the target class; only targeted attacks have it.
        n_data: The number of attacked examples.
        excluded: The number of examples left out because they were predicted as the target before the attack.
        no_gradient: The share of attacked examples whose first gradient was exactly zero, because their probabilities
            are saturated.
    """

    steps: list[float]
    entropy: list[float]
    accuracy: list[float]
    kept: list[float]
    target: list[float]
    n_data: int
    excluded: int
    no_gradient: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the curve as plain values for JSON."""
        return asdict(self)


def input_range(data: Iterable[Any] | Tensor, *, unpack: Unpack | None = None) -> Tensor:
    """Returns the largest minus the smallest value of each input dimension over a data set, which is the unit of a step.

    Args:
        data: The inputs [N, ...], or batches of (x, y).
        unpack: A function that turns a batch of another form into (inputs, targets).

    Returns:
        A tensor of the shape of one input. It is zero where all inputs agree, such as at border pixels, which are then
        never moved.

    >>> input_range(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    tensor([2., 0.])
    """
    if isinstance(data, Tensor):
        return data.amax(0) - data.amin(0)
    low: Tensor | None = None
    high: Tensor | None = None
    for batch in iterate(data, device=torch.device("cpu"), unpack=unpack):
        x = _tensor(batch.inputs)
        low = x.amin(0) if low is None else torch.minimum(low, x.amin(0))
        high = x.amax(0) if high is None else torch.maximum(high, x.amax(0))
    if low is None or high is None:
        raise DataError("the data hold no example")
    return high - low


def _tensor(inputs: Any) -> Tensor:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise UnsupportedError("attacks move an input, which must be a single floating-point tensor")
    return inputs


def _predict(predictor: Predictor, x: Tensor, seed: int, options: Mapping[str, Any], **more: Any) -> Prediction:
    """Predicts with the same samples at every call, since each call gets a generator of the same seed."""
    if accepts(predictor, "generator"):
        more["generator"] = torch.Generator().manual_seed(seed)
    prediction = predictor.predict(x, **options, **more)
    if prediction.kind != "classification" or prediction.mean.dim() != 2:
        raise UnsupportedError(
            f"attacks are for classification with outputs [N, C], this predictor does {prediction.kind}"
        )
    return prediction


def log_probability_gradient(
    predictor: Predictor, x: Tensor, labels: Tensor | None, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Tensor:
    r"""Returns the gradient in x of log p̄(y | x), for each input's own label y.

    Since :math:`\nabla \log \bar p_y = \sum_s w_s \nabla \log p_s` with w_s = p_s / Σ p_s, samples that believe in y
    count more.

    Args:
        predictor: A classifier that can predict with ``differentiable=True``.
        x: The inputs [N, ...].
        labels: The labels y [N]. None means the most probable class of each input.
        seed: The seed of the predictor's samples.
        options: Options that are passed to ``predict``. To attack samples of a posterior, fix them:
            `baselines.Particles(model, la.ensemble(20))`.

    Returns:
        The gradients [N, ...], one for each input.

    Raises:
        UnsupportedError: The predictor gives no gradient.
    """
    if not accepts(predictor, "differentiable"):
        raise UnsupportedError(
            f"an attack needs gradients in x, but {type(predictor).__name__}.predict has no argument differentiable="
        )
    point = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        mean = _predict(predictor, point, seed, options or {}, differentiable=True).mean
        if not mean.requires_grad:
            raise UnsupportedError(
                f"{type(predictor).__name__} gave a prediction without a gradient in x: some step of its model is not differentiable"
            )
        chosen = mean.argmax(-1) if labels is None else labels.to(mean.device)
        probabilities = mean.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        others = mean.scatter(-1, chosen.unsqueeze(-1), 0.0).sum(-1)
        # Near certainty log p = log(1 − Σ others) keeps the digits that rounding p to one would lose.
        sure = probabilities > 0.5
        far = torch.log1p(-torch.where(sure, others, 0.0).clamp_max(0.75))
        near = torch.where(sure, 1.0, probabilities).clamp_min(torch.finfo(mean.dtype).tiny).log()
        return torch.autograd.grad(torch.where(sure, far, near).sum(), point)[0].detach()


@dataclass(frozen=True)
class Attack(ABC):
    """An attack on a predictor's inputs, as `evaluate(attacks=[...])` takes it.

    Args:
        scale: The size of a unit step in each input dimension, with the shape of one input (see `input_range`), or one
            number.
        clip: The (lowest, highest) value that an input may take. None, the default, does not clip.
    """

    scale: Tensor | float = 1.0
    clip: tuple[float, float] | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the attack in results."""

    @abstractmethod
    def inputs(
        self, predictor: Predictor, x: Tensor, labels: Tensor, seed: int, options: Mapping[str, Any]
    ) -> tuple[list[float], list[Tensor], Tensor]:
        """Returns the steps, the attacked inputs at each step, and the first gradient."""

    @property
    def target_class(self) -> int | None:
        """The class that the attack aims at, or None."""
        return None

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else x.clamp(*self.clip)

    def _scale(self, x: Tensor) -> Tensor:
        scale = torch.as_tensor(self.scale, dtype=x.dtype, device=x.device)
        if scale.dim() and scale.shape != x.shape[1:]:
            raise ShapeError(f"scale has shape {list(scale.shape)}, but one input has {list(x.shape[1:])}")
        return scale

    def run(
        self,
        predictor: Predictor,
        data: Iterable[Any],
        *,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        unpack: Unpack | None = None,
        max_examples: int | None = None,
    ) -> AttackCurve:
        """Attacks a data set and returns what happens as the attack grows stronger.

        Args:
            predictor: The method whose own predictive is attacked, with the same samples at every step.
            data: Batches of (x, y).
            seed: The seed of the predictor's samples.
            options: Options that are passed to ``predict``.
            unpack: A function that turns a batch of another form into (inputs, targets).
            max_examples: The number of examples after which to stop. None attacks all of them.

        Returns:
            The entropy and the accuracies along the strength of the attack.
        """
        model = model_of(predictor)
        device = torch.device("cpu") if model is None else check_device(model)[0]
        sums: Tensor | None = None
        steps: list[float] = []
        count = excluded = stuck = 0
        chosen = options or {}
        for batch in iterate(data, device=device, unpack=unpack):
            if max_examples is not None and count >= max_examples:
                break
            x, y = _tensor(batch.inputs), batch.targets
            if not isinstance(y, Tensor) or y.is_floating_point():
                raise DataError("attacks need class labels: pass (x, y) batches")
            if max_examples is not None:
                x, y = x[: max_examples - count], y[: max_examples - count]
            with torch.no_grad():
                before = _predict(predictor, x, seed, chosen).labels
            if self.target_class is not None:
                keep = before != self.target_class
                excluded += int((~keep).sum())
                x, y = x[keep], y[keep]
                if len(x) == 0:
                    continue
                with torch.no_grad():  # Predict again, since samples such as dropout masks belong to one batch.
                    before = _predict(predictor, x, seed, chosen).labels
            steps, attacked_inputs, gradient = self.inputs(predictor, x, y, seed, chosen)
            stuck += int((gradient.flatten(1) == 0).all(1).sum())
            rows = []
            for attacked in attacked_inputs:
                with torch.no_grad():
                    prediction = _predict(predictor, attacked, seed, chosen)
                hit = prediction.labels == (-1 if self.target_class is None else self.target_class)
                facts = (prediction.total.double(), prediction.labels == y, prediction.labels == before, hit)
                rows.append(torch.stack([f.double().sum().cpu() for f in facts]))
            sums = torch.stack(rows) if sums is None else sums + torch.stack(rows)
            count += len(x)
        if sums is None:
            raise DataError(
                "no example was left to attack: all were predicted as the target already, or the data are empty"
            )
        entropy, accuracy, unchanged, target = (sums / count).T.tolist()
        target = [] if self.target_class is None else target
        return AttackCurve(steps, entropy, accuracy, unchanged, target, count, excluded, stuck / count)


def _check_steps(steps: Sequence[float]) -> list[float]:
    sizes = [float(s) for s in steps]
    if not sizes or any(s < 0 for s in sizes):
        raise InputError(f"steps must be numbers of at least 0, got {list(steps)!r}")
    return sizes


@final
@dataclass(frozen=True)
class FGSM(Attack):
    r"""The untargeted fast gradient sign attack: it moves away from the class that the method finds most probable.

    .. math::
        x_\mathrm{adv} = x - \eta \odot \mathrm{sgn}(\nabla_x \max_y \log \bar p(y \mid x))

    Args:
        scale: The size of a unit step in each dimension, such as `input_range(test_loader)`.
        clip: The range that inputs are clipped to; see `Attack`.
        steps: The step sizes η to try.

    References:
        Goodfellow, Shlens, Szegedy 2015; Ritter, Botev, Barber 2018, section 5.3.
    """

    steps: Sequence[float] = field(default=(0.0, 0.05, 0.1, 0.2, 0.3))

    @property
    def name(self) -> str:
        return "fgsm"

    def inputs(
        self, predictor: Predictor, x: Tensor, labels: Tensor, seed: int, options: Mapping[str, Any]
    ) -> tuple[list[float], list[Tensor], Tensor]:
        gradient = log_probability_gradient(predictor, x, None, seed=seed, options=options)
        direction = self._scale(x) * gradient.sign()
        steps = _check_steps(self.steps)
        return steps, [self._clipped(x - step * direction) for step in steps], gradient


@final
@dataclass(frozen=True)
class TargetedAttack(Attack):
    r"""An iterated attack towards one class; inputs that are already predicted as that class are left out.

    .. math::
        x^{(t+1)} = x^{(t)} + \eta \odot \mathrm{sgn}(\nabla_x \log \bar p(y_\mathrm{target} \mid x^{(t)})), \quad x^{(0)} = x

    Args:
        scale: The size of a unit step in each dimension.
        clip: The range that inputs are clipped to; see `Attack`.
        target: The index of the class to aim at.
        step: The step size η.
        iterations: The number T of iterations; the curve has T + 1 entries.

    References:
        Ritter, Botev, Barber 2018, section 5.3, following Li, Gal 2017.
    """

    target: int = 0
    step: float = 1e-2
    iterations: int = 50

    @property
    def name(self) -> str:
        return f"targeted_{self.target}"

    @property
    def target_class(self) -> int | None:
        return self.target

    def inputs(
        self, predictor: Predictor, x: Tensor, labels: Tensor, seed: int, options: Mapping[str, Any]
    ) -> tuple[list[float], list[Tensor], Tensor]:
        checks.count("iterations", self.iterations)
        checks.count("target", self.target, 0, advice="Pass the index of the class to aim at")
        aim = torch.full((len(x),), self.target, dtype=torch.long, device=x.device)
        path, first = [x], torch.zeros_like(x)
        for iteration in range(self.iterations):
            gradient = log_probability_gradient(predictor, path[-1], aim, seed=seed, options=options)
            first = gradient if iteration == 0 else first
            path.append(self._clipped(path[-1] + self.step * self._scale(x) * gradient.sign()))
        return [float(t) for t in range(self.iterations + 1)], path, first


@final
@dataclass(frozen=True)
class PGD(Attack):
    r"""The projected gradient attack: the lowest probability of the true label in a box of size ε (scaled) around the input.

    .. math::
        x^{(t+1)} = \Pi_{|x' - x| \le \epsilon \odot s}\big(x^{(t)} - \alpha \odot \mathrm{sgn}(\nabla_x \log \bar p(y \mid x^{(t)}))\big)

    Args:
        scale: The size s of a unit step in each dimension.
        clip: The range that inputs are clipped to; see `Attack`.
        steps: The box sizes ε to try.
        iterations: The number T of iterations. Each moves by α = 2.5 ε / T, so that every corner of the box can be
            reached.
        random_start: Whether to start at a random point of the box instead of at the input.

    References:
        Madry et al. 2018, Towards deep learning models resistant to adversarial attacks, section 2.1.
    """

    steps: Sequence[float] = field(default=(0.0, 0.05, 0.1, 0.2, 0.3))
    iterations: int = 10
    random_start: bool = True

    @property
    def name(self) -> str:
        return "pgd"

    def inputs(
        self, predictor: Predictor, x: Tensor, labels: Tensor, seed: int, options: Mapping[str, Any]
    ) -> tuple[list[float], list[Tensor], Tensor]:
        checks.count("iterations", self.iterations)
        steps, scale, attacked = _check_steps(self.steps), self._scale(x), []
        first = log_probability_gradient(predictor, x, labels, seed=seed, options=options)
        start = (
            2 * uniform_like(x, torch.Generator().manual_seed(seed)).to(x) - 1
            if self.random_start
            else torch.zeros_like(x)
        )
        for size in steps:
            box = size * scale
            now = self._clipped(x + box * start)
            for _ in range(self.iterations if size else 0):
                gradient = log_probability_gradient(predictor, now, labels, seed=seed, options=options)
                stepped = now - 2.5 * box / self.iterations * gradient.sign()
                now = self._clipped(torch.maximum(torch.minimum(stepped, x + box), x - box))
            attacked.append(now)
        return steps, attacked, first
