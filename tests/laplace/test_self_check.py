"""The check on held-out data: an improvement passes, a collapse does not, and a posterior that does nothing is told of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import aftermap as am
from aftermap.batches import Batch, iterate
from aftermap.errors import DataError, StatisticalWarning
from aftermap.laplace import Laplace, SelfCheck, check_predictive
from aftermap.laplace.self_check import _compare, _significant, network_at_chance
from aftermap.likelihoods import Bernoulli
from aftermap.predictive import Prediction
from tests.laplace.problems import Data, classes, generator, mlp, new_classes, normal, regression, trained


def batches(data: Data) -> list[Batch]:
    return list(iterate(data, device=torch.device("cpu"), dtype=torch.float64))


def answers(p: Tensor, epistemic: float = 0.1) -> Prediction:
    kind = "classification" if p.shape[-1] > 1 else "binary"
    shape = p.shape[:-1] if kind == "classification" else p.shape
    spread = torch.full(shape, epistemic, dtype=torch.float64)
    return Prediction(kind, p, spread, spread, 2 * spread)


def compared(plain: Tensor, bayes: Tensor, targets: Tensor, epistemic: float = 0.1) -> SelfCheck:
    return _compare(answers(plain), answers(bayes, epistemic), targets)


def probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("seed", range(20))
def test_an_improvement_never_fails(seed: int) -> None:
    """However much less sure the predictive is: a smaller loss with the same answers is better."""
    y = torch.randint(5, (60,), generator=generator(seed))
    logits = (1 + 20 * torch.rand(1, generator=generator(seed)).double()) * normal(60, 5, seed=seed)
    for t in (1.5, 5.0, 50.0, 1e4):
        check = compared(probabilities(logits), probabilities(logits / t), y)
        better = check.bayes_nll <= check.map_nll
        assert not check.collapsed or not better
        assert check.difference == check.bayes_nll - check.map_nll
    assert not compared(probabilities(logits), probabilities(logits), y).collapsed


def test_a_worse_likelihood_fails_where_it_is_more_than_chance() -> None:
    y = torch.arange(4).repeat(50)
    right = 4 * torch.eye(4, dtype=torch.float64).repeat(50, 1)
    assert not compared(probabilities(right), probabilities(right / 4), y).passed
    # The same change on average, by a few data that lost much: 2 of 200 are chance.
    few = right.clone()
    few[:2] = -few[:2]
    check = compared(probabilities(right), probabilities(few), y)
    assert check.difference > 0.05
    assert check.difference < 2 * check.standard_error
    assert check.passed
    # A small loss does not matter, however certain it is.
    check = compared(probabilities(right), probabilities(right / 1.1), y)
    assert 0 < 10 * check.standard_error < check.difference < 0.05
    assert check.passed


@pytest.mark.parametrize(("errors", "passes"), [(1.9, True), (2.1, False)])
def test_two_standard_errors_are_chance(errors: float, passes: bool) -> None:
    """The losses of half of the data rise by a + b and those of the others by a − b: the mean is a, its standard error about b/√N."""
    n, b = 400, 4.0
    a = errors * b * (n / (n - 1)) ** 0.5 / n**0.5
    losses = torch.full((n,), 6.0, dtype=torch.float64)
    changed = losses + a + torch.where(torch.arange(n) % 2 == 0, b, -b)

    def answered(loss: Tensor) -> Tensor:
        """Three probabilities of which the first has this loss, and is never the largest one."""
        p = (-loss).exp()
        return torch.stack([p, 0.5 - p / 2 + 1e-3, 0.5 - p / 2 - 1e-3], -1)

    check = compared(answered(losses), answered(changed), torch.zeros(n, dtype=torch.int64))
    assert check.difference == pytest.approx(errors * check.standard_error)
    assert check.difference > 0.05
    assert check.collapsed is not passes


def test_numbers_of_the_report() -> None:
    y = torch.arange(3).repeat(20)
    one, two = normal(60, 3, seed=1), normal(60, 3, seed=2)
    check = compared(probabilities(one), probabilities(two), y)
    losses = [nn.functional.cross_entropy(f, y, reduction="none") for f in (one, two)]
    assert (check.map_nll, check.bayes_nll) == pytest.approx([float(x.mean()) for x in losses])
    assert check.standard_error == pytest.approx(float((losses[1] - losses[0]).std() / 60**0.5))
    assert (check.map_accuracy, check.bayes_accuracy) == pytest.approx(
        [float((f.argmax(1) == y).double().mean()) for f in (one, two)]
    )
    assert check.map_confidence == pytest.approx(float(probabilities(one).amax(1).mean()))
    assert check.n_data == 60
    assert f"negative log-likelihood {check.map_nll:.3f} -> {check.bayes_nll:.3f}" in check.message


def test_a_network_that_knows_outputs_in_small_units_is_not_at_chance() -> None:
    y = normal(40, 2, seed=3) * torch.tensor([1.0, 1000.0], dtype=torch.float64)
    other = normal(40, 2, seed=4) * torch.tensor([1.0, 1000.0], dtype=torch.float64)

    def at_chance(mean: Tensor) -> bool:
        variance = torch.ones_like(mean)
        answer = Prediction("regression", mean, variance, variance, 2 * variance)
        return _compare(answer, answer, y).at_chance

    assert not at_chance(torch.stack([y[:, 0] + 0.1 * other[:, 0], other[:, 1]], 1))
    assert at_chance(other)
    assert at_chance(y.mean(0).expand_as(y))


def test_a_network_at_the_level_of_chance_is_said_to_be_one() -> None:
    said = "no better than always answering with the most frequent class"
    y = torch.tensor([0] * 30 + [1] * 20 + [2] * 10)
    always = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64).expand(60, 3)
    check = compared(always, always, y)
    assert check.map_accuracy == 0.5
    assert said in check.message
    assert check.at_chance
    assert not check.passed
    assert check.state == "FAILED"
    knowing = 0.7 * nn.functional.one_hot(y, 3).double() + 0.1
    assert said not in compared(knowing, knowing, y).message
    binary = torch.tensor([1.0] * 40 + [0.0] * 20, dtype=torch.float64)[:, None]
    yes = torch.full((60, 1), 0.9, dtype=torch.float64)
    assert said in compared(yes, yes, binary).message
    assert said not in compared(0.8 * binary + 0.1, 0.8 * binary + 0.1, binary).message
    # A network that was never trained, through the facade.
    untrained = Laplace(mlp(), "classification", prior_precision=10.0).fit(classes(), progress=False)
    assert said in check_predictive(untrained, batches(new_classes(300))).message
    # A rare class: always the same answer, but the probabilities know where it is.
    rare = torch.tensor([0] * 90 + [1] * 10)
    aware = torch.where(rare[:, None] == 1, torch.tensor([0.6, 0.4]), torch.tensor([0.95, 0.05])).double()
    assert compared(aware, aware, rare).passed
    # Too few data to tell, and an overconfident network whose temperature was found.
    assert compared(always[:10], always[:10], y[:10]).passed
    one_wrong = torch.tensor([0] * 90 + [1] * 10)
    sharp = torch.where(one_wrong[:, None] == 1, torch.tensor([0.999, 0.001]), torch.tensor([0.9999, 0.0001])).double()
    assert compared(sharp, aware, one_wrong).passed
    assert not compared(sharp, sharp, one_wrong).passed


def test_yes_and_no_are_two_classes() -> None:
    """One output of a yes or no knows as much as the two classes of the same probabilities."""
    rare = torch.tensor([0] * 90 + [1] * 10)
    even = torch.tensor([0, 1] * 50)
    third = torch.tensor([0, 0, 1] * 30)
    overconfident = torch.where(
        torch.arange(100) % 10 < 6, 1e-9, 1 - 1e-9
    ).double()  # right for 60 of 100, and always sure
    cases = {
        "always no": (torch.full((100,), 0.05).double(), rare),
        "the frequency": (torch.full((100,), 0.1 + 1e-6).double(), rare),
        "no, but it knows where": (torch.where(rare == 1, 0.4, 0.05).double(), rare),
        "worse than the frequency": (torch.full((90,), 0.2).double(), third),
        "nearly the frequency": (torch.where(third == 1, 0.34, 0.33).double(), third),
        "right more often": ((even - overconfident).abs(), even),
        "as often": ((even - torch.where(torch.arange(100) % 4 < 2, 0.2, 0.8)).abs().double(), even),
    }
    found = {}
    for name, (p, y) in cases.items():
        two = compared(torch.stack([1 - p, p], -1), torch.stack([1 - p, p], -1), y)
        one = compared(p[:, None], p[:, None], y[:, None].double())
        assert one.at_chance is two.at_chance, name
        assert one.map_nll == pytest.approx(two.map_nll)
        found[name] = one.at_chance
    assert {name for name, at_chance in found.items() if at_chance} == {
        "always no", "the frequency", "worse than the frequency", "as often"
    }  # fmt: skip


def test_labels_that_are_left_out_do_not_tell_what_is_frequent() -> None:
    """Pixels without a class are labelled −100; here every second one."""
    y = torch.tensor([0] * 8 + [3] * 12)
    knowing = 0.6 * nn.functional.one_hot(y, 4).double() + 0.1
    ignorant = torch.full((20, 4), 0.25, dtype=torch.float64)
    for p in (knowing, ignorant):
        alone = compared(p, p, y)
        images, labels = p[:, None].expand(20, 2, 4), torch.stack([y, torch.full((20,), -100)], 1)
        assert _compare(answers(images), answers(images), labels).at_chance is alone.at_chance is (p is ignorant)


def test_a_regression_that_is_no_better_than_the_mean_is_said_to_be_none() -> None:
    y = normal(60, 2, seed=3)

    def check(mean: Tensor) -> SelfCheck:
        ones = torch.ones(60, 2, dtype=torch.float64)
        answer = Prediction("regression", mean, ones, ones, 2 * ones)
        return _compare(answer, answer, y)

    assert not check(normal(60, 2, seed=4)).passed
    assert "no better than always answering with the mean of the targets" in check(normal(60, 2, seed=4)).message
    assert check(y + 0.5 * normal(60, 2, seed=4)).passed


def test_a_posterior_that_adds_nothing_is_said_to_add_nothing() -> None:
    said = "the posterior adds nothing to the network's own answers"
    model = trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"), steps=60)
    wide = Laplace(model, "classification").fit(classes(), progress=False)
    check = check_predictive(wide, batches(new_classes(100)))
    assert not check.adds_nothing
    assert said not in check.message
    narrow = Laplace(model, "classification").fit(classes(), progress=False).narrow(1e8)
    check = check_predictive(narrow, batches(new_classes(100)))
    assert check.adds_nothing
    assert check.passed
    assert said in check.message
    assert check.difference == pytest.approx(0.0, abs=1e-4)
    # A temperature alone changes the answers.
    warm = narrow.tune(new_classes(100))
    assert not check_predictive(warm, batches(new_classes(100))).adds_nothing
    for factor, nothing in ((1.0, False), (1e9, True)):
        numbers = Laplace(mlp(1, 6, 1), "regression").fit(regression(), progress=False).narrow(factor)
        assert check_predictive(numbers, batches(regression(seed=14))).adds_nothing is nothing


def test_the_networks_own_answers_are_not_divided_by_the_temperature_that_was_found() -> None:
    model = trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"), decay=0.01, steps=60)
    laplace = Laplace(model, "classification").fit(classes(), progress=False).tune(new_classes(100))
    assert laplace.output_temperature > 1.1
    ((x, y),) = new_classes(100)
    check = check_predictive(laplace, batches([(x, y)]))
    with torch.no_grad():
        assert check.map_nll == pytest.approx(float(nn.functional.cross_entropy(model(x), y)), rel=1e-9)
    assert check.passed
    assert check.difference < -0.1


def test_the_limit_is_per_label_and_not_per_image() -> None:
    """A difference that does not matter at one position does not matter at a thousand."""
    logits = 3 * normal(20, 500, 4, seed=1)
    y = torch.distributions.Categorical(logits=logits).sample()
    y[:, ::7] = -100
    for t, passes in ((1.05, True), (4.0, False)):
        dense = compared(probabilities(logits), probabilities(logits / t), y)
        kept = y.reshape(-1) >= 0
        flat = logits.reshape(-1, 4)[kept]
        alone = compared(probabilities(flat), probabilities(flat / t), y.reshape(-1)[kept])
        assert dense.passed is alone.passed is passes
        assert dense.map_accuracy == pytest.approx(alone.map_accuracy)
        assert dense.difference == pytest.approx(alone.difference)
        assert dense.map_nll == pytest.approx(alone.map_nll)


def test_few_data_and_none() -> None:
    laplace = Laplace(mlp(), "classification").fit(classes(), progress=False)
    ((x, y),) = new_classes(1)
    check = check_predictive(laplace, batches([(x, y)]))
    assert check.n_data == 1
    assert check.passed  # one datum proves nothing
    with pytest.raises(DataError, match="no labelled data to check the predictive on"):
        check_predictive(laplace, [])
    assert check_predictive(laplace, batches(classes()), limit=10).n_data == 20


def test_the_same_result_every_time() -> None:
    laplace = Laplace(mlp(), "classification").fit(classes(), progress=False)
    state = torch.get_rng_state()
    for kind in ("linearised", "sampling"):
        one, two = (check_predictive(laplace, batches(classes()), kind=kind, samples=7) for _ in range(2))
        assert one == two
    assert_close(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_a_network_at_chance_on_its_training_data_is_noticed_without_labels(kind: str) -> None:
    x = normal(200, 3, seed=1)
    y = {
        "classification": (x[:, 0] > 0.5).long() + (x[:, 1] > 0).long(),
        "binary": (x[:, :1] > 0.3).double(),
        "regression": x[:, :1] + 0.1 * normal(200, 1, seed=2),
    }[kind]
    loss = {"classification": F.cross_entropy, "binary": F.binary_cross_entropy_with_logits, "regression": F.mse_loss}
    outputs = 3 if kind == "classification" else 1
    untrained = mlp(3, 6, outputs, seed=5)
    with torch.no_grad():  # far from the labels, as outputs of a network whose weights were not loaded can be
        untrained[-1].weight.mul_(-1.0).add_(normal(outputs, 6, seed=3))
    good = trained(mlp(3, 6, outputs), [(x, y)], lambda f, t: len(f) * loss[kind](f, t), decay=0.1, steps=100)
    with pytest.warns(StatisticalWarning, match="no better than always answering .*: did you load the trained weights"):
        check = am.fit(untrained, kind, [(x, y)], verbose=False).report.check
    assert check.at_chance
    assert check.state == "FAILED"
    check = am.fit(good, kind, [(x, y)], verbose=False).report.check
    assert not check.at_chance


def test_a_network_that_is_right_no_more_often_but_knows_the_rare_class_is_not_at_chance() -> None:
    # Never above one half, and far too unsure of itself: only at a lower temperature does its likelihood beat the frequencies.
    y = (torch.arange(400) % 20 == 0).double()[:, None]
    outputs = 0.6 * y - 0.9 + 0.01 * normal(400, 1)
    assert network_at_chance(Bernoulli(), outputs, y) is None
    assert "the most frequent class" in str(network_at_chance(Bernoulli(), 0 * outputs, y))


@pytest.mark.parametrize(("count", "said"), [(19, False), (20, True)])
def test_chance_is_told_from_knowledge_by_twenty_labels(count: int, said: bool) -> None:
    y = torch.arange(count) % 2
    even = torch.full((count, 2), 0.5, dtype=torch.float64)
    assert compared(even, even, y).at_chance is said
    single = torch.full((count, 1), 0.5, dtype=torch.float64)
    assert compared(single, single, y[:, None].double()).at_chance is said
    values = normal(count, 1, seed=1)
    answer = Prediction("regression", 0 * values, *(torch.ones_like(values) for _ in range(3)))
    assert _compare(answer, answer, values).at_chance is said


@pytest.mark.parametrize(("change", "nothing"), [(0.9e-3, True), (1.1e-3, False)])
def test_what_nobody_notices(change: float, nothing: bool) -> None:
    """A thousandth of a probability, of a nat, or of the standard deviation of an answer."""
    y = torch.arange(2).repeat(20)
    sure = torch.tensor([[0.7, 0.3]], dtype=torch.float64).repeat(40, 1)
    moved = sure.clone()
    moved[7] += torch.tensor([change, -change], dtype=torch.float64)
    assert compared(sure, moved, y, epistemic=1e-6).adds_nothing is nothing
    assert compared(sure, sure, y, epistemic=change).adds_nothing is nothing
    one = torch.ones(40, 1, dtype=torch.float64)
    plain, bayes = (Prediction("regression", one, v * one, one, one) for v in (0.0, change**2))
    assert _compare(plain, bayes, normal(40, 1)).adds_nothing is nothing


def test_fewer_hits_are_chance_up_to_two_deviations_of_those_that_changed() -> None:
    plain = torch.ones(100, dtype=torch.bool)
    for lost, gained, significant in ((4, 0, False), (5, 0, True), (13, 3, True), (12, 4, False), (3, 13, False)):
        one, two = plain.clone(), plain.clone()
        one[:gained] = False
        two[gained : gained + lost] = False
        assert _significant(one, two) is significant, (lost, gained)
