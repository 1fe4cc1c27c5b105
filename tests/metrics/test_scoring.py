from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, InputError, ShapeError


def random_probs(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


def random_labels(*shape: int, n_classes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(n_classes, shape, generator=torch.Generator().manual_seed(seed))


PROBS = random_probs(37, 5)
LABELS = random_labels(37, n_classes=5)


def test_nll_accuracy_and_brier_agree_with_scikit_learn() -> None:
    p, y = PROBS.numpy(), LABELS.numpy()
    assert_close(metrics.nll(PROBS, LABELS), float(sk.log_loss(y, p, labels=range(5))))
    assert_close(metrics.accuracy(PROBS, LABELS), float(sk.accuracy_score(y, p.argmax(1))))
    brute = np.mean([sum((p[i, k] - (y[i] == k)) ** 2 for k in range(5)) for i in range(37)])
    assert_close(metrics.brier(PROBS, LABELS), float(brute))


def test_binary_brier_is_twice_that_of_scikit_learn() -> None:
    probs, labels = random_probs(29, 2), random_labels(29, n_classes=2)
    assert_close(metrics.brier(probs, labels), 2.0 * float(sk.brier_score_loss(labels, probs[:, 1])))


def test_pointwise_values_average_to_the_metrics() -> None:
    assert metrics.pointwise_nll(PROBS, LABELS).shape == (37,)
    assert_close(metrics.pointwise_nll(PROBS, LABELS).mean().item(), metrics.nll(PROBS, LABELS))
    assert_close(metrics.pointwise_brier(PROBS, LABELS).mean().item(), metrics.brier(PROBS, LABELS))
    wrong = metrics.misclassified(PROBS, LABELS)
    assert wrong.dtype == torch.bool
    assert_close(1.0 - wrong.double().mean().item(), metrics.accuracy(PROBS, LABELS))


def test_uniform_and_perfect_predictions_have_closed_forms() -> None:
    uniform = torch.full((7, 4), 0.25)
    labels = random_labels(7, n_classes=4)
    assert_close(metrics.nll(uniform, labels), math.log(4.0))
    assert_close(metrics.brier(uniform, labels), 0.75)
    perfect = torch.nn.functional.one_hot(labels, 4).double()
    assert metrics.nll(perfect, labels) == 0.0
    assert metrics.brier(perfect, labels) == 0.0
    assert metrics.accuracy(perfect, labels) == 1.0


def test_a_label_of_probability_zero_costs_the_floor() -> None:
    assert_close(metrics.nll([[1.0, 0.0]], [1]), -math.log(1e-12))
    # The floor is inside the logarithm only: it does not touch the Brier score.
    assert metrics.brier([[1.0, 0.0]], [1]) == 2.0


def test_tokens_and_pixels_are_flattened() -> None:
    probs, labels = random_probs(6, 3, 7, 5), random_labels(6, 3, 7, n_classes=5)
    for function in (metrics.nll, metrics.accuracy, metrics.brier, metrics.ece, metrics.classwise_ece):
        assert_close(function(probs, labels), function(probs.reshape(-1, 5), labels.reshape(-1)))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.int64])
def test_numpy_lists_and_every_integer_type_are_accepted(dtype: type) -> None:
    expected = metrics.nll(PROBS, LABELS)
    assert_close(metrics.nll(PROBS.numpy(), LABELS.numpy().astype(dtype)), expected)
    assert_close(metrics.nll(PROBS.tolist(), LABELS.tolist()), expected)
    # Reversed and read-only arrays are what torch itself trips over.
    view = PROBS.numpy()[::-1]
    view.flags.writeable = False
    assert_close(metrics.nll(view, LABELS.numpy()[::-1]), expected)


def test_float32_is_computed_in_float64() -> None:
    single = PROBS.float()
    assert metrics.entropy(single).dtype == torch.float64
    assert_close(metrics.nll(single, LABELS), metrics.nll(single.double(), LABELS), rtol=0, atol=0)


def test_input_with_gradient_is_accepted_and_entropy_is_differentiable() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert metrics.nll(logits.softmax(-1), [0, 1, 2, 0]) > 0
    assert metrics.ece(logits.softmax(-1), [0, 1, 2, 0]) >= 0
    assert torch.autograd.gradcheck(lambda f: metrics.entropy(f.softmax(-1)), (logits,))


def test_entropy_closed_forms() -> None:
    assert_close(
        metrics.entropy(torch.full((3, 10), 0.1)),
        torch.full((3,), math.log(10.0)).double(),
        atol=1e-6,
        rtol=0,
    )
    assert metrics.entropy([[0.0, 1.0, 0.0]]).item() == 0.0
    assert_close(metrics.entropy(PROBS), torch.distributions.Categorical(probs=PROBS).entropy())
    assert metrics.entropy(random_probs(2, 3, 5)).shape == (2, 3)


def test_max_probability_is_higher_for_the_more_unusual() -> None:
    score = metrics.max_probability([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]])
    assert_close(score, torch.tensor([0.5, 0.1], dtype=torch.float64))


def test_inverse_ecdf_counts_strictly_above() -> None:
    values = torch.tensor([0.3, 0.1, 0.3, 0.9, 0.5], dtype=torch.float64)
    curve = metrics.inverse_ecdf(values)
    assert_close(curve.thresholds, torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64))
    assert_close(curve.fraction, torch.tensor([0.8, 0.4, 0.2, 0.0], dtype=torch.float64))
    grid = torch.linspace(-0.1, 1.0, 13, dtype=torch.float64)
    brute = torch.stack([(values > h).double().mean() for h in grid])
    assert_close(metrics.inverse_ecdf(values, grid).fraction, brute)


def test_entropy_parts_add_up_and_epistemic_is_the_mean_divergence() -> None:
    samples = random_probs(11, 6, 4)
    parts = metrics.entropy_decomposition(samples)
    assert_close(parts.total, parts.aleatoric + parts.epistemic)
    mean = samples.mean(0)
    divergence = (samples * (samples / mean).log()).sum(-1).mean(0)
    assert_close(parts.epistemic, divergence)
    assert_close(metrics.mutual_information(samples), divergence)
    assert_close(parts.total, metrics.entropy(mean))


def test_equal_samples_have_no_epistemic_part() -> None:
    samples = random_probs(1, 50, 7).expand(9, 50, 7)
    epistemic = metrics.mutual_information(samples)
    assert (epistemic >= 0).all()
    assert_close(epistemic, torch.zeros(50, dtype=torch.float64), atol=1e-14, rtol=0)


def test_covariance_parts_are_those_of_the_one_hot_label() -> None:
    samples = random_probs(11, 6, 4)
    parts = metrics.covariance_decomposition(samples)
    assert parts.total.shape == (6, 4, 4)
    assert_close(parts.total, parts.aleatoric + parts.epistemic)
    for n in range(6):
        p = samples[:, n]
        assert_close(parts.epistemic[n], torch.cov(p.T, correction=0))
        assert_close(parts.aleatoric[n], torch.stack([torch.diag(q) - torch.outer(q, q) for q in p]).mean(0))
    assert metrics.covariance_decomposition(random_probs(3, 2, 6, 4)).total.shape == (2, 6, 4, 4)


def test_covariance_total_is_the_covariance_of_drawn_labels() -> None:
    samples = random_probs(5, 1, 3)
    generator = torch.Generator().manual_seed(4)
    which = torch.randint(5, (200_000,), generator=generator)
    drawn = torch.multinomial(samples[which, 0], 1, generator=generator).squeeze(-1)
    one_hot = torch.nn.functional.one_hot(drawn, 3).double()
    parts = metrics.covariance_decomposition(samples)
    assert_close(one_hot.mean(0), samples.mean(0)[0], atol=5e-3, rtol=0)
    assert_close(torch.cov(one_hot.T), parts.total[0], atol=5e-3, rtol=0)


CLASS_METRICS = [
    metrics.nll,
    metrics.accuracy,
    metrics.brier,
    metrics.misclassified,
    metrics.ece,
    metrics.adaptive_ece,
    metrics.classwise_ece,
    metrics.mce,
    metrics.signed_calibration_error,
    metrics.reliability_bins,
    lambda p, y: metrics.StreamingNLL().update(p, y),
    lambda p, y: metrics.StreamingECE().update(p, y),
]


@pytest.mark.parametrize("metric", CLASS_METRICS)
class TestBadInput:
    def test_logits(self, metric) -> None:
        with pytest.raises(DataError, match=r"must not be negative, got -1 .*logits\.softmax"):
            metric([[2.0, -1.0]], [0])
        with pytest.raises(DataError, match=r"row at index \[1\] sums to 3\.5.*logits\.softmax"):
            metric([[0.5, 0.5], [2.0, 1.5]], [0, 1])

    def test_nan_and_infinity(self, metric) -> None:
        with pytest.raises(DataError, match=r"probs holds 1 NaN or infinite value\(s\) out of 4, .*\[1, 0\]"):
            metric([[0.5, 0.5], [math.nan, 1.0]], [0, 1])
        with pytest.raises(DataError, match="NaN or infinite"):
            metric([[0.5, math.inf]], [0])

    def test_labels_out_of_range(self, metric) -> None:
        with pytest.raises(DataError, match=r"labels must lie in 0\.\.1 for 2 classes, got 2 at index \[1\]"):
            metric([[0.5, 0.5], [0.5, 0.5]], [0, 2])
        with pytest.raises(DataError, match="got -100 .* masked"):
            metric([[0.5, 0.5]], [-100])

    def test_labels_of_the_wrong_kind(self, metric) -> None:
        with pytest.raises(InputError, match=r"labels must be integers .*float64"):
            metric([[0.5, 0.5]], [0.0])
        with pytest.raises(ShapeError, match="one-hot"):
            metric([[0.5, 0.5]], [[0, 1]])

    def test_shapes(self, metric) -> None:
        with pytest.raises(ShapeError, match=r"\[2\], got \[3\] for probs of shape \[2, 2\]"):
            metric([[0.5, 0.5], [0.5, 0.5]], [0, 1, 0])
        with pytest.raises(ShapeError, match=r"torch\.stack"):
            metric([0.5, 0.5], [0, 1])
        with pytest.raises(ShapeError, match="Average the probabilities over samples"):
            metric(random_probs(4, 3, 2), [0, 1, 0])


@pytest.mark.parametrize("metric", [metrics.nll, metrics.accuracy, metrics.brier, metrics.ece])
def test_no_examples(metric) -> None:
    with pytest.raises(DataError, match=r"probs is empty \(shape \[0, 3\]\)"):
        metric(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


def test_sums_within_the_tolerance_are_accepted() -> None:
    assert metrics.nll([[0.50004, 0.50004]], [0]) > 0
    with pytest.raises(DataError, match="sum to one"):
        metrics.nll([[0.5001, 0.5001]], [0])


def test_other_bad_input() -> None:
    with pytest.raises(InputError, match="must be a tensor or an array of numbers, got list"):
        metrics.entropy([["a", "b"]])
    with pytest.raises(InputError, match="must be real, got torch.complex128"):
        metrics.entropy(torch.ones(2, 2, dtype=torch.complex128))
    with pytest.raises(ShapeError, match=r"samples must have shape \[S, N, C\]"):
        metrics.mutual_information(PROBS)
    with pytest.raises(DataError, match="sum to one"):
        metrics.covariance_decomposition(torch.ones(2, 3, 4))
    with pytest.raises(DataError, match="values is empty"):
        metrics.inverse_ecdf([])
