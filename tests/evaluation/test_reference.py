"""The reference of held-out scores: ranks against counting, the promise against full conformal prediction and by simulation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import aftermap as am
from aftermap.errors import DataError, InputError
from aftermap.evaluation import Reference, Threshold, choose_threshold, evaluate, variance_ratio
from aftermap.evaluation.reference import FLAG_SCORES, default_score, either_threshold
from aftermap.predictive import Prediction
from tests.baselines.test_contract import seeded


def classes(entropy: Tensor, information: Tensor, **more: Tensor) -> Prediction:
    """A prediction with these scores, whatever its probabilities are."""
    mean = torch.full((len(entropy), 2), 0.5, dtype=torch.float64)
    return Prediction("classification", mean, information, entropy - information, entropy, **more)


def correlated(n: int, rho: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, n, dtype=torch.float64, generator=generator)
    return first, rho * first + math.sqrt(1 - rho**2) * second


# Ranks


@pytest.mark.parametrize("steps", [1000.0, 2.0])  # without ties, and with many
def test_either_is_the_larger_share_of_smaller_scores(steps):
    generator = seeded()
    usual, new = ((torch.rand(2, n, generator=generator) * steps).floor() for n in (150, 40))
    scores = Reference.from_predictions(classes(*usual)).score(classes(*new))
    expected = [max(float((u < v[i]).double().mean()) for u, v in zip(usual, new, strict=True)) for i in range(40)]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_scores_without_numbers_are_the_most_unusual():
    usual = classes(*torch.rand(2, 99, generator=seeded()))
    broken = classes(torch.tensor([math.nan, math.inf]), torch.tensor([0.5, 0.5]))
    reference = Reference.from_predictions(usual)
    assert reference.score(broken).tolist() == [1.0, 1.0]
    assert reference.flag(broken).all()


def test_the_ranks_do_not_change_with_the_scale_of_a_score():
    usual, new = torch.rand(2, 2, 120, dtype=torch.float64, generator=seeded())
    scores = Reference.from_predictions(classes(*usual)).score(classes(*new))
    warped = Reference.from_predictions(classes(usual[0].exp(), usual[1] ** 3)).score(
        classes(new[0].exp(), new[1] ** 3)
    )
    assert torch.equal(scores, warped)


def test_a_network_alone_is_judged_by_its_entropy():
    entropy = torch.rand(200, dtype=torch.float64, generator=seeded())
    reference = Reference.from_predictions(classes(entropy, torch.zeros(200)))
    by_entropy = (entropy[:, None] > entropy[None]).double().mean(1)
    assert torch.equal(reference.score(classes(entropy, torch.zeros(200))), by_entropy)


def test_thinned_references_flag_as_whole_ones(monkeypatch):
    usual = torch.randn(2, 7000, generator=seeded())
    new = classes(*(1.5 * torch.randn(2, 5000, generator=seeded(1))))
    thin = Reference.from_predictions(classes(*usual))
    monkeypatch.setattr("aftermap.evaluation.reference._EXACT", 10_000)
    whole = Reference.from_predictions(classes(*usual))
    assert len(thin.positions) < 2010 < len(whole.positions) == 7000
    assert torch.equal(thin.flag(new), whole.flag(new))
    difference = whole.score(new) - thin.score(new)
    assert 0 <= difference.min().item() <= difference.max().item() <= 0.0011  # careful, by at most a step of 0.1 %
    highest = whole.score(new) > 1 - 1000 / 7000
    assert torch.equal(whole.score(new)[highest], thin.score(new)[highest])
    for kind in ("entropy", "mutual_information"):
        assert thin.threshold(kind) == whole.threshold(kind)


# The promise


def full_conformal(usual: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The p-values of full conformal prediction, input by input: all n + 1 inputs are ranked together."""
    values = []
    for each in zip(*new, strict=True):
        together = [torch.cat([u, e[None]]) for u, e in zip(usual, each, strict=True)]
        ranks = torch.stack([(s[:, None] > s[None]).sum(1) for s in together]).amax(0)
        values.append((ranks >= ranks[-1]).double().mean())
    return torch.stack(values)


@pytest.mark.parametrize("rate", [0.05, 0.2])
@pytest.mark.parametrize("rho, steps", [(0.0, 1e9), (0.9, 1e9), (-1.0, 1e9), (0.0, 2.0)])
def test_flags_are_those_of_full_conformal_prediction_but_for_a_few_at_the_edge(rho, steps, rate):
    generator = seeded()
    seen = 0
    for n in (39, 57, 120):
        usual, new = (tuple((steps * s).round() for s in correlated(m, rho, generator)) for m in (n, 300))
        flags = Reference.from_predictions(classes(*usual), false_alarm_rate=rate).flag(classes(*new), "either")
        exact = full_conformal(usual, new) <= rate + 1e-9
        assert not (flags & ~exact).any()
        seen += int(flags.sum())
        if steps > 100:  # with ties a whole group may be at the edge
            assert (full_conformal(usual, new)[~flags] > rate - 2.1 / (n + 1)).all()
    assert seen > 0


@pytest.mark.parametrize("n, repeats", [(50, 1200), (200, 800), (1000, 300)])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_false_alarms_stay_below_the_promised_rate(n, repeats, rho):
    generator, rates = seeded(), []
    for _ in range(repeats):
        first, second = correlated(n + 300, rho, generator)
        threshold = either_threshold([first[:n], second[:n]], 0.05)
        ranks = torch.stack([torch.searchsorted(s[:n].sort().values, s[n:]) for s in (first, second)]).amax(0)
        rates.append(threshold.flag(ranks.double() / n).double().mean())
    found = torch.stack(rates)
    error = found.std().item() / math.sqrt(repeats)
    assert found.mean().item() <= 0.05 + 2 * error
    assert found.mean().item() >= 0.05 - 2 / (n + 1) - 2 * error  # not needlessly careful


def test_the_same_inputs_as_reference_and_judge_would_break_the_promise():
    """The simulation can fail: with the ⌈(n + 1)(1 − α)⌉-th rank of the inputs among themselves 6.6 % are flagged, not 5 %."""
    generator, rates, n = seeded(), [], 59
    for _ in range(800):
        first, second = correlated(n + 300, 0.0, generator)
        own, ranks = (
            torch.stack([torch.searchsorted(s[:n].sort().values, s[part]) for s in (first, second)]).amax(0).double()
            for part in (slice(n), slice(n, None))
        )
        rates.append(choose_threshold(own).flag(ranks).double().mean())
    assert torch.stack(rates).mean().item() > 0.06


def test_how_many_inputs_a_promise_takes():
    scores = torch.rand(2, 199, dtype=torch.float64, generator=seeded())
    for rate, n in ((0.05, 39), (0.01, 199), (0.1, 19)):
        enough, few = (either_threshold(list(scores[:, :m]), rate) for m in (n, n - 1))
        assert enough.value == (n - 0.5) / n  # an input above all of one score is flagged
        assert few.value == math.inf
    reference = Reference.from_predictions(classes(*scores[:, :38]))
    assert reference.default == "entropy"
    assert math.isfinite(reference.threshold().value)
    assert Reference.from_predictions(classes(*scores[:, :39])).default == "either"


# Values and words


def test_a_reference_is_saved_and_read_with_the_same_flags():
    reference = am.Reference.from_predictions(classes(*torch.rand(2, 2500, generator=seeded())), false_alarm_rate=0.1)
    new = classes(*torch.rand(2, 400, generator=seeded(1)))
    again = Reference.from_saved(reference.to_tensors(), reference.to_dict())
    for kind in ("either", "entropy", "mutual_information", "max_probability"):
        assert torch.equal(again.score(new, kind), reference.score(new, kind))
        assert torch.equal(again.flag(new, kind), reference.flag(new, kind))
    assert repr(again) == "Reference(2,500 inputs, 10 % false alarms, flags by either)"
    assert torch.equal(again.by("entropy").flag(new), reference.flag(new, "entropy"))
    tensors = reference.to_tensors()
    with pytest.raises(DataError, match='"positions"'):
        Reference.from_saved({"entropy": tensors["entropy"]}, reference.to_dict())
    with pytest.raises(DataError, match="'entropy' are missing or not in order"):
        Reference.from_saved({**tensors, "entropy": tensors["entropy"].flip(0)}, reference.to_dict())
    with pytest.raises(DataError, match="'mutual_information' are missing"):
        Reference.from_saved({k: v for k, v in tensors.items() if k != "mutual_information"}, reference.to_dict())


def test_batches_of_predictions_are_joined():
    usual = classes(*torch.rand(2, 80, generator=seeded()))
    parts = Reference.from_predictions([usual[:30], usual[30:]])
    assert parts.to_dict() == Reference.from_predictions(usual).to_dict()


def test_numbers_are_flagged_by_their_variance_against_the_noise():
    variance = torch.rand(99, 1, generator=seeded())
    usual = Prediction("regression", variance, variance, torch.ones(99, 1), variance + 1)
    reference = Reference.from_predictions(usual)
    assert reference.default == "mutual_information"
    assert set(reference.thresholds) == {"entropy", "mutual_information", "variance"}
    assert torch.equal(reference.flag(usual), variance[:, 0] > choose_threshold(variance[:, 0]).value)
    # The units of an output do not matter, however large its variance is in them.
    other = torch.rand(99, 1, generator=seeded(1))

    def both(unit: float) -> Prediction:
        epistemic, noise = torch.cat([variance, unit * other], 1), torch.tensor([1.0, unit]).expand(99, 2)
        return Prediction("regression", epistemic, epistemic, noise, epistemic + noise)

    small, large = (Reference.from_predictions(both(unit)).flag(both(unit)) for unit in (1.0, 1e6))
    assert torch.equal(small, large)
    assert small.any()
    with pytest.raises(InputError, match="score='either' is not known"):
        reference.score(usual, "either")
    of_classes = Reference.from_predictions(classes(*torch.rand(2, 99, generator=seeded())))
    with pytest.raises(InputError, match="made of predictions of classes, but the prediction is a regression"):
        of_classes.score(usual)
    with pytest.raises(InputError, match="made of predictions of numbers, but the prediction is a classification"):
        reference.score(classes(*torch.rand(2, 9, generator=seeded())))


def test_wrong_words_and_rates_are_refused():
    usual = classes(*torch.rand(2, 60, generator=seeded()))
    reference = Reference.from_predictions(usual)
    with pytest.raises(InputError, match="score='entropie' is not known; allowed are .*Did you mean 'entropy'"):
        reference.flag(usual, "entropie")
    with pytest.raises(InputError, match="false_alarm_rate"):
        Reference.from_predictions(usual, false_alarm_rate=5)
    with pytest.raises(DataError, match="no NaN"):
        Reference.from_predictions(classes(torch.tensor([math.nan]), torch.zeros(1)))
    with pytest.raises(InputError, match='"either" ranks inputs among held-out ones'):
        usual.score("either")
    assert FLAG_SCORES[0] == "either"


def test_what_a_threshold_says():
    limit = Reference.from_predictions(classes(*torch.rand(2, 1000, generator=seeded())))
    share = (math.floor(limit.threshold().value * 1000) + 1) / 10
    assert limit.describe() == (
        f"its entropy or its mutual information is larger than on {share:g} % of the validation inputs"
    )
    assert 97 < share < 98.5  # both at about half of 5 %, as the two are independent here
    assert limit.describe("max_probability").startswith("its max probability is above 0.")
    assert Threshold(math.inf, "either", 0.05, None, 9).describe() == "never"


@pytest.mark.parametrize(
    "names, expected",
    [
        (("entropy", "max_probability", "variance"), "entropy"),
        (("entropy", "mutual_information", "variance"), "mutual_information"),
        (("variance",), "variance"),
    ],
)
def test_the_default_of_folders_without_either(names, expected):
    assert default_score({n: Threshold(1.0, n, 0.05, None, 99) for n in names}) == expected


# Evaluation


class Fixed:
    """A predictor that knows its answers: column 0 of the inputs is the entropy, column 1 the mutual information."""

    def predict(self, x: Tensor) -> Prediction:
        latent = torch.zeros(len(x), 2)
        return classes(x[:, 0], x[:, 1], latent_mean=latent, latent_var=x[:, 1:2].expand(-1, 2))


def test_evaluate_reports_what_is_flagged():
    usual, test, other = (scale * torch.rand(300, 2, generator=seeded(i)) for i, scale in enumerate((1.0, 1.0, 2.0)))
    reference = Reference.from_predictions(Fixed().predict(usual))
    data, ood = [(test, torch.zeros(300).long())], {"far": [(other, None)]}
    results = evaluate(Fixed(), data, ood=ood, reference=reference, n_resamples=0)
    flags = reference.flag(Fixed().predict(other))
    assert results["far/either/detected"] == flags.double().mean().item() > 0.6
    assert results["flagged"] == reference.flag(Fixed().predict(test)).double().mean().item()
    assert results.metrics["flagged"].lower < results["flagged"] < results.metrics["flagged"].upper
    assert results.table["flag"][300:] == flags.tolist()
    assert results.table["either"][300:] == reference.score(Fixed().predict(other)).tolist()
    assert results["far/either/auroc"] > results["far/entropy/auroc"]
    assert results["far/variance/median_ratio"] == pytest.approx(
        (other[:, 1].median() / test[:, 1].median()).item(), rel=1e-6
    )
    assert results.provenance["flagged_by"] == "either"
    entropy = evaluate(Fixed(), data, reference=reference.by("entropy"), n_resamples=0)
    assert entropy["flagged"] == reference.flag(Fixed().predict(test), "entropy").double().mean().item()
    plain = evaluate(Fixed(), data, ood=ood, n_resamples=0)
    assert "either" not in plain.table
    assert "flagged" not in plain.metrics


def test_evaluate_refuses_wrong_scores_before_it_predicts():
    def never(x: Tensor) -> Prediction:
        raise AssertionError("nothing should be predicted")

    predictor = Fixed()
    predictor.predict = never  # type: ignore[method-assign]
    data = [(torch.rand(5, 2), torch.zeros(5).long())]
    with pytest.raises(InputError, match="scores='entropie' is not known"):
        evaluate(predictor, data, scores=["entropie"], table=False)
    with pytest.raises(InputError, match='"either" compares inputs with held-out ones'):
        evaluate(predictor, data, scores=["either"])
    with pytest.raises(InputError, match="reference must be a Reference"):
        evaluate(predictor, data, reference=Threshold(1.0, "entropy", 0.05, None, 9))  # type: ignore[arg-type]


def test_variance_ratio_needs_the_variance_of_outputs():
    ones = torch.ones(3)
    usual = classes(ones, ones, latent_mean=torch.zeros(3, 2), latent_var=torch.ones(3, 2))
    assert variance_ratio(usual, usual) == 1.0
    assert variance_ratio(classes(ones, ones, latent_var=torch.ones(3, 2)), usual) is None  # of probabilities only
    still = classes(ones, ones, latent_mean=torch.zeros(3, 2), latent_var=torch.zeros(3, 2))
    assert math.isnan(variance_ratio(still, usual) or 0.0)
    column = torch.ones(3, 1)
    numbers = Prediction("regression", column, column, column, 2 * column, latent_mean=column, latent_var=column)
    assert variance_ratio(numbers, numbers) is None
