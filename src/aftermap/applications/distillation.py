"""Distillation: one deterministic network learns to say what a Bayesian predictive says, at the cost of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines import Deterministic
from aftermap.baselines.base import private_randomness
from aftermap.batches import Unpack, check_inputs, unpack_batch, unpack_inputs
from aftermap.errors import DataError, InputError, NumericalError, ShapeError, UnsupportedError
from aftermap.evaluation.predictor import Predictor, accepts, check_predictor_object, predict_all
from aftermap.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Likelihood
from aftermap.models import call_model, check_device
from aftermap.predictive import Prediction
from aftermap.progress import progress

__all__ = ["Distillation", "distil", "distillation_loss"]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "classification": Categorical,
    "binary": Bernoulli,
    "regression": HeteroscedasticGaussian,
}
_TINY = 1e-30


@dataclass(frozen=True)
class Distillation:
    """A trained student and what it lost.

    Attributes:
        student: A predictor like all others here, which takes one forward pass. All of its uncertainty is in ``total``:
            one network cannot say which part of it more data would remove.
        losses: The mean KL(teacher ‖ student) of every epoch, in nats, as trained (dropout on, at the given
            temperature).
        kl: The mean KL(teacher ‖ student) on the data that were measured on.
        entropy: The mean entropy of the teacher there; for a regression that of the Gaussian with its total variance.
        entropy_student: The mean entropy of the student there.
        entropy_error: The mean over examples of |H student − H teacher|.
        nll: The mean −log p of the teacher on labelled test data; None without such data.
        nll_student: The mean −log p of the student on the same data.
    """

    student: Deterministic
    losses: tuple[float, ...]
    kl: float
    entropy: float
    entropy_student: float
    entropy_error: float
    nll: float | None = None
    nll_student: float | None = None

    @property
    def entropy_difference(self) -> float:
        """The mean entropy of the student less that of the teacher."""
        return self.entropy_student - self.entropy

    @property
    def nll_difference(self) -> float:
        """The NLL of the student less that of the teacher; positive where the student is worse.

        Raises:
            InputError: No labelled data were measured on.
        """
        if self.nll is None or self.nll_student is None:
            raise InputError("the NLL was not measured: pass labelled data, distil(..., test=loader)")
        return self.nll_student - self.nll

    def keeps(self, *, nll: float = 0.02, entropy: float = 0.05) -> bool:
        """Tells whether the student's NLL is at most ``nll`` worse and its mean entropy within ``entropy`` of the teacher's."""
        return self.nll_difference <= nll and abs(self.entropy_difference) <= entropy


def distillation_loss(teacher: Prediction, outputs: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Returns KL(teacher ‖ student) of each example [N], summed over positions and outputs.

    - classification: T² Σ_c q_c (log q_c − log softmax(f/T)_c) with q ∝ p̄^{1/T}, p̄ the teacher's **mean** probabilities;
    - binary: the same of each output's Bernoulli;
    - regression: student outputs are mean μ and log-variance s, the teacher is N(m, v) with its total variance,
      ½ (s − log v + (v + (m − μ)²) e^{−s} − 1).

    T = 1 is the divergence itself. Another temperature has the same optimum where the student can represent the teacher, and
    weighs small probabilities more; T² keeps the size of the gradients.

    Args:
        teacher: The teacher's prediction of N inputs.
        outputs: The student's outputs [N, ..., C], or [N, ..., 2 D] for a regression.
        temperature: The temperature T; a regression leaves it at 1.

    Returns:
        The divergence of each example [N], at least 0 up to rounding.

    Raises:
        ShapeError: The outputs have another shape.
        UnsupportedError: The prediction is of counts or of a likelihood of your own.

    References:
        Hinton, Vinyals, Dean 2015, Distilling the knowledge in a neural network, section 2; Balan et al. 2015, Bayesian dark
        knowledge, eq. (4).

    >>> p = torch.tensor([[0.75, 0.25]])
    >>> nats = torch.special.entr(p).sum(-1)
    >>> distillation_loss(Prediction("classification", p, 0 * nats, nats, nats), p.log()).abs().item() < 1e-6
    True
    """
    if teacher.kind not in _LIKELIHOODS:
        raise UnsupportedError(
            f"a prediction of kind {teacher.kind!r} cannot be distilled; possible are {', '.join(_LIKELIHOODS)}"
        )
    width = teacher.mean.shape[-1] * (2 if teacher.kind == "regression" else 1)
    wanted = (*teacher.mean.shape[:-1], width)
    if tuple(outputs.shape) != wanted:
        extra = ": a mean and a log-variance for each of its outputs" if teacher.kind == "regression" else ""
        raise ShapeError(
            f"the student's outputs have shape {list(outputs.shape)}, but the teacher needs {list(wanted)}{extra}"
        )
    if teacher.kind == "regression":
        mean, log_variance = outputs.chunk(2, -1)
        v = teacher.total.clamp_min(_TINY)
        values = log_variance - v.log() + (v + (teacher.mean - mean).square()) * (-log_variance).exp() - 1
        return 0.5 * values.reshape(len(values), -1).sum(1)
    if teacher.kind == "binary":
        log_p = torch.stack([teacher.mean, 1 - teacher.mean], -1).clamp_min(_TINY).log()
        log_student = torch.stack([F.logsigmoid(outputs / temperature), F.logsigmoid(-outputs / temperature)], -1)
    else:
        log_p = teacher.mean.clamp_min(_TINY).log()
        log_student = F.log_softmax(outputs / temperature, -1)
    log_q = F.log_softmax(log_p / temperature, -1)
    values = log_q.exp() * (log_q - log_student)
    return temperature**2 * values.reshape(len(values), -1).sum(1)


def distil(
    predictor: Predictor,
    student: nn.Module,
    inputs_loader: Iterable[Any],
    *,
    epochs: int = 20,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    temperature: float = 1.0,
    test: Iterable[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    unpack: Unpack | None = None,
    generator: torch.Generator | None = None,
    show: bool | None = None,
) -> Distillation:
    """Trains a student of any size and architecture on what a predictor says about some inputs.

    The teacher is asked once about every input; no labels are used. Inputs should be many and lie where the student will be
    used: also beyond the training data, if it shall doubt there, since a student repeats its teacher only where it saw it.

    Args:
        predictor: The teacher: a classification, binary or regression predictive.
        student: The network that is trained **in place** from its present weights. For a regression it has two outputs
            per target: means, then log-variances.
        inputs_loader: Batches of inputs x, or of (x, y), whose y is not looked at.
        epochs: The number of passes over the inputs.
        optimizer: An optimiser of the student's parameters, or a function that makes one from them. None means
            Adam(lr=1e-3). L-BFGS works, too.
        temperature: The temperature of the loss; see `distillation_loss`.
        test: Batches (x, y) to measure NLL and entropies on. With None the entropies are measured on the inputs.
        options: Options that are passed to the teacher's ``predict``.
        unpack: A function that turns a batch of another form into (inputs, targets).
        generator: The source of the teacher's samples, the order of examples and the student's dropout.
        show: Whether to show a progress bar. None shows it on a terminal.

    Returns:
        The student as a predictor, and what was measured.

    Raises:
        InputError, ShapeError, UnsupportedError: The student, the temperature or the kind of prediction does not fit.
        NumericalError: The loss is not finite.

    >>> x = torch.randn(64, 3)
    >>> teacher = Deterministic(nn.Linear(3, 4))
    >>> found = distil(teacher, nn.Linear(3, 4), [x], epochs=2)
    >>> found.student.predict(x).mean.shape, len(found.losses)
    (torch.Size([64, 4]), 2)
    """
    check_predictor_object(predictor)
    student, epochs = checks.module("distil (for student=)", student), checks.count("epochs", epochs)
    temperature = checks.number("temperature", temperature, above=0)
    predict_options = {**({"generator": generator} if accepts(predictor, "generator") else {}), **(options or {})}
    lessons = _lessons(predictor, student, inputs_loader, predict_options, unpack)
    kind = lessons[0][1].kind
    if kind not in _LIKELIHOODS:
        raise UnsupportedError(
            f"a prediction of kind {kind!r} cannot be distilled; possible are {', '.join(_LIKELIHOODS)}"
        )
    if kind == "regression" and temperature != 1:
        raise InputError(f"temperature={temperature} softens probabilities; a regression has none: leave it at 1")
    losses = _train(student, lessons, epochs, _optimiser(optimizer, student), temperature, generator, show)
    answer = Deterministic(student, _LIKELIHOODS[kind]())
    return _measured(predictor, answer, losses, lessons, test, predict_options, unpack)


Lesson = tuple[Any, Prediction]


def _lessons(
    predictor: Predictor,
    student: nn.Module,
    loader: Iterable[Any],
    predict_options: Mapping[str, Any],
    unpack: Unpack | None,
) -> list[Lesson]:
    """Returns inputs with what the teacher says of them, on the student's device."""
    if isinstance(loader, Tensor):
        raise DataError("inputs_loader must be an iterable of batches, got a tensor; pass [x]")
    device, dtype = check_device(student)
    lessons: list[Lesson] = []
    for raw in loader:
        pair = unpack is not None or (isinstance(raw, tuple | list) and len(raw) in (2, 3))
        batch = unpack_batch(raw, unpack) if pair else unpack_inputs(raw[0] if isinstance(raw, tuple | list) else raw)
        check_inputs(batch.inputs, dtype)
        prediction = predictor.predict(batch.inputs, **predict_options).detach()
        # Only what the loss needs is kept: samples and covariances of a whole data set would fill the memory.
        prediction = Prediction(
            prediction.kind,
            prediction.mean,
            prediction.epistemic,
            prediction.aleatoric,
            prediction.total,
            link=prediction.link,
        )
        lessons.append((batch.to(device).inputs, prediction._map(lambda _, value: value.to(device))))
    if not lessons:
        raise DataError("inputs_loader is empty: not a single batch came")
    return lessons


def _optimiser(optimizer: object, student: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    parameters = [p for p in student.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the student has no parameters to train (requires_grad is False everywhere)")
    if optimizer is None:
        return torch.optim.Adam(parameters, lr=1e-3)
    chosen = optimizer(parameters) if callable(optimizer) else optimizer
    if not isinstance(chosen, torch.optim.Optimizer):
        raise InputError(
            "optimizer must be a torch optimizer of the student's parameters or a function that makes one, "
            f"got {type(chosen).__name__}"
        )
    return chosen


def _train(
    student: nn.Module,
    lessons: list[Lesson],
    epochs: int,
    optimiser: torch.optim.Optimizer,
    temperature: float,
    generator: torch.Generator | None,
    show: bool | None,
) -> tuple[float, ...]:
    device, _ = check_device(student)
    modes = {module: module.training for module in student.modules()}
    losses = []
    student.train()
    try:
        with private_randomness(generator, device):
            for _ in progress(range(epochs), description="distilling", enabled=show):
                total, count = 0.0, 0
                for inputs, prediction in _shuffled(lessons, generator):
                    total += _step(student, optimiser, inputs, prediction, temperature) * len(prediction)
                    count += len(prediction)
                losses.append(total / count)
    finally:
        for module, mode in modes.items():
            module.training = mode
        optimiser.zero_grad(set_to_none=True)
    return tuple(losses)


def _step(
    student: nn.Module, optimiser: torch.optim.Optimizer, inputs: Any, prediction: Prediction, temperature: float
) -> float:
    first: list[float] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = distillation_loss(prediction, call_model(student, inputs, update_buffers=True), temperature).mean()
        if not math.isfinite(loss.item()):
            raise NumericalError(
                f"the distillation loss is {loss.item()}; use a smaller learning rate, or scale the inputs and targets"
            )
        loss.backward()
        first.append(loss.item())
        return loss

    with torch.enable_grad():
        optimiser.step(closure)  # type: ignore[arg-type]
    return first[0]


def _shuffled(lessons: list[Lesson], generator: torch.Generator | None) -> Iterable[Lesson]:
    """Yields the lessons: single tensors are mixed anew at every pass, inputs of several tensors stay in their batches."""
    source = torch.device("cpu") if generator is None else generator.device
    plain = all(isinstance(inputs, Tensor) for inputs, _ in lessons)
    if len(lessons) == 1 or not plain or len({x.shape[1:] for x, _ in lessons}) > 1:
        for place in torch.randperm(len(lessons), generator=generator, device=source).tolist():
            yield lessons[place]
        return
    inputs, answers = torch.cat([x for x, _ in lessons]), Prediction.concatenate([p for _, p in lessons])
    order = torch.randperm(len(inputs), generator=generator, device=source).to(inputs.device)
    for index in order.split(max(len(x) for x, _ in lessons)):
        yield inputs[index], answers[index]


def _measured(
    predictor: Predictor,
    student: Deterministic,
    losses: tuple[float, ...],
    lessons: list[Lesson],
    test: Iterable[Any] | None,
    predict_options: Mapping[str, Any],
    unpack: Unpack | None,
) -> Distillation:
    """Measures teacher and student on the same data."""
    nll: list[float] = []
    if test is None:
        teacher = Prediction.concatenate([answers for _, answers in lessons]).cpu()
        pupil = Prediction.concatenate([student.predict(inputs).cpu() for inputs, _ in lessons])
    else:
        batches = list(test)
        known = predict_all(predictor, batches, options=predict_options, unpack=unpack)
        if known.targets is None:
            raise DataError("the test data have no targets, which the NLL needs")
        teacher = known.prediction
        pupil = predict_all(check_predictor_object(student), batches, unpack=unpack).prediction
        nll = [-prediction.log_prob(known.targets).double().mean().item() for prediction in (teacher, pupil)]
    teacher_entropy, student_entropy = teacher.score("entropy").double(), pupil.score("entropy").double()
    return Distillation(
        student,
        losses,
        kl=_divergence(teacher, pupil),
        entropy=teacher_entropy.mean().item(),
        entropy_student=student_entropy.mean().item(),
        entropy_error=(teacher_entropy - student_entropy).abs().mean().item(),
        nll=nll[0] if nll else None,
        nll_student=nll[1] if nll else None,
    )


def _divergence(teacher: Prediction, pupil: Prediction) -> float:
    mean = pupil.mean.double()
    if teacher.kind == "regression":
        outputs = torch.cat([mean, pupil.total.double().log()], -1)
    else:
        outputs = mean.logit(eps=1e-15) if teacher.kind == "binary" else mean.clamp_min(_TINY).log()
    return distillation_loss(teacher._map(lambda _, value: value.double()), outputs).mean().item()
