"""evaluate() against the metrics themselves, results through JSON, comparisons, bad input."""

import json
import math

import pytest
import torch
from torch import nn

from aftermap import metrics as m
from aftermap.baselines import KNN, Detector, Deterministic, Energy, Ensemble, Mahalanobis, MCDropout, Particles
from aftermap.errors import DataError, InputError, NotFittedError, ShapeError, UnsupportedError
from aftermap.evaluation import FGSM, Results, TargetedAttack, compare, evaluate
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.predictive import Prediction
from tests.baselines.test_contract import make_net, seeded


def batches(n=60, seed=1, shift=0.0, outputs=4):
    generator = seeded(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator) + shift
    y = torch.randint(outputs, (n,), generator=generator)
    return [(x[:25], y[:25]), (x[25:], y[25:])]


def joined(data):
    return tuple(torch.cat(parts) for parts in zip(*data, strict=True))


def ensemble():
    return Ensemble([make_net(seed=s) for s in (0, 4, 5)])


def test_classification_numbers():
    data, other = batches(), batches(40, seed=2, shift=3.0)
    predictor = ensemble()
    found = evaluate(predictor, data, ood={"far": other}, n_resamples=20)
    (x, y), (far, _) = joined(data), joined(other)
    p, q = predictor.predict(x), predictor.predict(far)
    assert found["accuracy"] == pytest.approx(m.accuracy(p.mean, y))
    assert found["nll"] == pytest.approx(m.nll(p.mean, y))
    assert found["ece"] == pytest.approx(m.ece(p.mean, y))
    assert found["brier"] == pytest.approx(m.brier(p.mean, y))
    assert found["auroc_errors"] == pytest.approx(m.auroc(p.total, m.misclassified(p.mean, y)))
    assert found["mutual_information"] == pytest.approx(p.epistemic.mean().item())
    for score in ("entropy", "mutual_information", "variance", "max_probability"):
        expected = m.auroc(*m.labelled_scores(p.score(score), q.score(score)))
        assert found[f"far/{score}/auroc"] == pytest.approx(expected)
    assert found["far/entropy/fpr95"] == pytest.approx(m.fpr_at_tpr(*m.labelled_scores(p.total, q.total)))
    for metric in found.flat().values():
        assert metric.lower <= metric.upper
    assert found.metrics["nll"].lower < found["nll"] < found.metrics["nll"].upper


def test_table_has_one_row_per_input():
    data, other = batches(), batches(40, seed=2)
    found = evaluate(ensemble(), data, ood={"far": other}, n_resamples=0)
    assert {len(column) for column in found.table.values()} == {100}
    assert found.table["set"].count("far") == 40
    assert found.table["nll"][99] is None
    x, y = joined(data)
    assert found.table["target"][:60] == y.tolist()
    assert found.table["correct"][3] == (ensemble().predict(x[3:4]).labels.item() == y[3].item())
    assert sum(found.table["nll"][:60]) / 60 == pytest.approx(found["nll"])
    assert evaluate(ensemble(), data, n_resamples=0, table=False).table == {}


def test_regression_numbers():
    generator = seeded()
    x = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(50, 2, dtype=torch.float64, generator=generator)
    net = make_net(2)
    la = Laplace(net, Gaussian(noise=0.8)).fit([(x, y)])
    found, p = evaluate(la, [(x[:20], y[:20]), (x[20:], y[20:])], n_resamples=10), la.predict(x)
    assert found["rmse"] == pytest.approx(m.rmse(p.mean, y))
    assert found["nll"] == pytest.approx(-p.log_prob(y).mean().item())
    assert found["crps"] == pytest.approx(m.crps_gaussian(p.mean, p.total, y))
    assert found["coverage_0.9"] == pytest.approx(m.coverage(*p.interval(0.9), y))
    assert found["width_0.9"] == pytest.approx(m.mean_width(*p.interval(0.9)))
    assert found["chi_square"] == pytest.approx(m.chi_square(p.mean, p.total, y))
    assert found["interval_score_0.95"] == pytest.approx(m.interval_score(*p.interval(0.95), y))


def test_binary_counts_and_positions():
    x = torch.randn(30, 3, dtype=torch.float64, generator=seeded())
    labels = (x[:, :1] > 0).double()
    binary = evaluate(Deterministic(nn.Linear(3, 1).double(), "binary"), [(x, labels)], n_resamples=0)
    p = Deterministic(nn.Linear(3, 1).double(), "binary").predict(x)
    assert 0 <= binary["accuracy"] <= 1
    assert p.kind == binary.kind
    counts = evaluate(Deterministic(nn.Linear(3, 2).double(), "counts"), [(x, torch.ones(30, 2))], n_resamples=0)
    assert math.isfinite(counts["nll"])
    tokens = torch.randn(12, 5, 3, dtype=torch.float64, generator=seeded())
    targets = torch.randint(4, (12, 5), generator=seeded())
    targets[0, 2:] = -100
    net = nn.Linear(3, 4).double()
    found = evaluate(Deterministic(net), [(tokens, targets)], n_resamples=0)
    keep = targets != -100
    assert found["accuracy"] == pytest.approx(m.accuracy(net(tokens).softmax(-1)[keep], targets[keep]))


def test_seed_repeats_and_json_round_trip(tmp_path):
    data = batches()
    predictor = MCDropout(make_net(), samples=4)
    settings = {"ood": {"far": batches(20, seed=3)}, "n_resamples": 5, "seed": 3}
    attacks = [FGSM(steps=(0.0, 0.2)), TargetedAttack(iterations=2)]
    first, again = (evaluate(predictor, data, attacks=attacks, name="dropout", **settings) for _ in range(2))
    assert first.to_dict()["metrics"] == again.to_dict()["metrics"]
    assert first.attacks == again.attacks
    assert set(first.attacks) == {"fgsm", "targeted_0"}
    path = tmp_path / "results.json"
    first.to_json(path)
    loaded = Results.from_json(path)
    assert loaded.to_dict() == json.loads(path.read_text())
    assert loaded["far/entropy/auroc"] == first["far/entropy/auroc"]
    assert Results.from_json(first.to_json()).metrics == first.metrics
    facts = first.provenance
    assert facts["data_hash"].startswith("sha256:")
    assert facts["torch"] == torch.__version__
    assert facts["seed"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert "dropout: classification, 60 examples" in str(first)


def test_data_hash_sees_every_change():
    data = batches()
    changed = [(data[0][0], data[0][1].roll(1)), data[1]]
    hashes = [
        evaluate(Deterministic(make_net()), d, n_resamples=0).provenance["data_hash"] for d in (data, data, changed)
    ]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


def test_comparison_table():
    data = batches()
    results = [
        evaluate(p, data, name=n, n_resamples=0) for n, p in (("map", Deterministic(make_net())), ("ens", ensemble()))
    ]
    table = compare(results, ["accuracy", "nll"], extras={"map": {"seconds": 1.25}})
    assert table.best("accuracy") == max(results, key=lambda r: r["accuracy"]).name
    assert table.best("nll") == min(results, key=lambda r: r["nll"]).name
    assert table.to_dict()["map"]["seconds"] == 1.25
    lines = str(table).splitlines()
    assert lines[0].split() == ["method", "accuracy", "nll", "seconds"]
    assert len({len(line) for line in lines[:4]}) == 1
    with pytest.raises(InputError, match="no result has speed"):
        compare(results, ["speed"])
    with pytest.raises(InputError, match="different names"):
        compare([results[0], results[0]])
    with pytest.raises(InputError, match="different data"):
        compare([results[0], evaluate(ensemble(), batches(seed=9), name="other", n_resamples=0)])
    with pytest.raises(InputError, match="no number called"):
        results[0]["speed"]


def test_options_reach_the_predictor():
    net, data = make_net(), batches()
    own = {n: p.detach() for n, p in net.named_parameters()}
    particles = Particles(net, [own, {n: -p for n, p in own.items()}])
    found = evaluate(particles, data, options={"samples": 1}, n_resamples=0)
    assert found["mutual_information"] == pytest.approx(0.0, abs=1e-12)
    assert found.provenance["options"] == {"samples": 1}


def test_bad_input(tmp_path):
    data, net = batches(), make_net()
    with pytest.raises(InputError, match="baselines.Deterministic"):
        evaluate(net, data)
    with pytest.raises(ShapeError, match="OOD set 'wide' has inputs of shape"):
        evaluate(Deterministic(net), data, ood={"wide": [(torch.ones(5, 4).double(), torch.zeros(5))]})
    with pytest.raises(DataError, match="not a single batch"):
        evaluate(Deterministic(net), [])
    with pytest.raises(DataError, match="not a single batch"):
        evaluate(Deterministic(net), data, ood={"none": []})
    with pytest.raises(InputError, match='cannot be called "test"'):
        evaluate(Deterministic(net), data, ood={"test": data})
    with pytest.raises(DataError, match="labels must lie in"):
        evaluate(Deterministic(net), [(data[0][0], data[0][1] + 3)])
    with pytest.raises(InputError, match="must be integers"):
        evaluate(Deterministic(net), [(data[0][0], data[0][1].double())])
    with pytest.raises(DataError, match="not finite"):
        evaluate(Deterministic(net), [(data[0][0] * math.nan, data[0][1])])
    with pytest.raises(InputError, match="allowed are 'entropy'"):
        evaluate(Deterministic(net), data, ood={"far": data}, scores=["surprise"])
    with pytest.raises(InputError, match="n_resamples"):
        evaluate(Deterministic(net), data, n_resamples=1)
    with pytest.raises(InputError, match="attacks must be"):
        evaluate(Deterministic(net), data, attacks=["fgsm"])
    with pytest.raises(DataError, match="no tensor of targets"):
        evaluate(Deterministic(net), [(data[0][0], None)])
    with pytest.raises(DataError, match="not JSON"):
        Results.from_json("{")
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(DataError, match="another schema"):
        Results.from_json(tmp_path / "old.json")


def test_frame_needs_pandas():
    found = evaluate(ensemble(), batches(), n_resamples=0)
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(UnsupportedError, match="needs pandas"):
            found.to_frame()
    else:
        assert len(found.to_frame()) == 60


class Mine:
    """The whole contract: predict(x) and nothing else."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def predict(self, x):
        p = x.softmax(-1) * self.factor
        nats = torch.special.entr(p).sum(-1)
        return Prediction("classification", p, torch.zeros_like(nats), nats, nats)


def test_a_predictor_of_your_own():
    x = torch.randn(20, 3, generator=seeded())
    found = evaluate(Mine(), [(x, x.argmax(1))], ood={"wide": [(x * 5, x.argmax(1))]}, n_resamples=0)
    assert found["accuracy"] == 1.0
    assert "auroc_errors" not in found.metrics  # without a single error there is nothing to detect
    assert "wide/variance/auroc" not in found.flat()
    with pytest.raises(DataError, match="must sum to one"):
        evaluate(Mine(0.9), [(x, x.argmax(1))])
    with pytest.raises(UnsupportedError, match="variance"):
        evaluate(Mine(), [(x, x.argmax(1))], ood={"wide": [(x, x.argmax(1))]}, scores=["variance"])


def detectors_of(net):
    data = batches(80, seed=8)
    return [kind.fit(data) for kind in (Energy(net), KNN(net, k=3), Mahalanobis(net))]


def test_detectors_beside_the_predictor():
    data, other, net = batches(), batches(40, seed=2, shift=3.0), make_net()
    named = {d.name: d for d in detectors_of(net)}
    plain = evaluate(Deterministic(net), data, ood={"far": other}, n_resamples=10)
    found = evaluate(Deterministic(net), data, ood={"far": other}, detectors=list(named.values()), n_resamples=10)
    (x, y), (far, _) = joined(data), joined(other)
    wrong = m.misclassified(net(x).softmax(-1).detach(), y)
    for name, detector in named.items():
        inside, outside = detector.score(x), detector.score(far)
        scores, flags = m.labelled_scores(inside, outside)
        assert found[f"far/{name}/auroc"] == pytest.approx(m.auroc(scores, flags))
        assert found[f"far/{name}/fpr95"] == pytest.approx(m.fpr_at_tpr(scores, flags))
        interval = found.ood["far"][name]["auroc"]
        assert interval.lower < interval.upper
        assert found[f"auroc_errors_{name}"] == pytest.approx(m.auroc(inside, wrong))
        assert found[f"fpr95_errors_{name}"] == pytest.approx(m.fpr_at_tpr(inside, wrong))
        assert found.table[name] == pytest.approx(torch.cat([inside, outside]).tolist())
    assert {k: v for k, v in found.metrics.items() if k in plain.metrics} == dict(plain.metrics)
    assert {s: found.ood["far"][s] for s in plain.ood["far"]} == dict(plain.ood["far"])
    assert compare([found]).best("auroc_errors_knn") == "Deterministic"
    assert Results.from_json(found.to_json()).metrics == found.metrics


def test_detectors_see_the_batches_that_the_predictor_sees():
    data, net = batches(), make_net()
    once = evaluate(Deterministic(net), iter(data), detectors={"neighbours": detectors_of(net)[1]}, n_resamples=0)
    again = evaluate(Deterministic(net), data, detectors={"neighbours": detectors_of(net)[1]}, n_resamples=0)
    assert once["auroc_errors_neighbours"] == again["auroc_errors_neighbours"]
    labels = [(data[0][0], torch.where(torch.arange(25) < 4, -100, data[0][1]))]
    left = evaluate(Deterministic(net), labels, detectors=detectors_of(net)[:1], n_resamples=0)
    x, y = data[0][0][4:], data[0][1][4:]
    wrong = m.misclassified(net(x).softmax(-1).detach(), y)
    assert left["auroc_errors_energy"] == pytest.approx(m.auroc(Energy(net).score(x), wrong))


def test_detectors_of_a_regression():
    x = torch.randn(50, 3, dtype=torch.float64, generator=seeded())
    net, y = make_net(2), torch.randn(50, 2, dtype=torch.float64, generator=seeded(3))
    knn = KNN(net, k=4).fit([(x, y)])
    found = evaluate(
        Deterministic(net, Gaussian(noise=0.5)), [(x, y)], ood={"far": [(x + 9, y)]}, detectors=[knn], n_resamples=0
    )
    assert found["far/knn/auroc"] == pytest.approx(m.auroc(*m.labelled_scores(knn.score(x), knn.score(x + 9))))
    assert "auroc_errors_knn" not in found.metrics
    with pytest.raises(UnsupportedError, match="'energy' is for classification"):
        evaluate(Deterministic(net, Gaussian(noise=0.5)), [(x, y)], detectors=[Energy(net)], n_resamples=0)


def test_bad_detectors():
    data, net = batches(), make_net()
    knn = detectors_of(net)[1]
    with pytest.raises(InputError, match="each of detectors must be a Detector, got str"):
        evaluate(Deterministic(net), data, detectors=["knn"])
    with pytest.raises(InputError, match="cannot be called 'knn'"):
        evaluate(Deterministic(net), data, detectors=[knn, knn])
    with pytest.raises(InputError, match="cannot be called 'entropy'"):
        evaluate(Deterministic(net), data, detectors={"entropy": knn})
    with pytest.raises(NotFittedError, match="call fit"):
        evaluate(Deterministic(net), data, detectors=[KNN(net)])

    class Wrong(Detector):
        name = "wrong"

        def fit(self, data, *, unpack=None):
            return self

        def score(self, x):
            return x

    with pytest.raises(ShapeError, match="one number for each input"):
        evaluate(Deterministic(net), data, detectors=[Wrong(net)])


def test_parts_of_the_uncertainty_are_compared():
    data, other = batches(), batches(40, seed=2, shift=3.0)
    found = evaluate(ensemble(), data, ood={"far": other}, n_resamples=20)
    p, q = ensemble().predict(joined(data)[0]), ensemble().predict(joined(other)[0])
    name = "epistemic_aleatoric_correlation"
    assert found[name] == pytest.approx(m.rank_correlation(p.epistemic, p.aleatoric))
    assert found[f"far/{name}"] == pytest.approx(m.rank_correlation(q.epistemic, q.aleatoric))
    assert -1 <= found.metrics[name].lower < found.metrics[name].upper <= 1
    assert found["augrc"] == pytest.approx(m.augrc(p.total, m.misclassified(p.mean, joined(data)[1])))
    assert found.metrics["augrc"].lower < found["augrc"] < found.metrics["augrc"].upper
    # Without epistemic uncertainty, or with rounding in its place, there is nothing to compare; as where the noise is constant.
    assert name not in evaluate(Deterministic(make_net()), data, n_resamples=0).metrics
    assert name not in evaluate(Ensemble([make_net(), make_net()]), data, n_resamples=0).metrics
    x, y = torch.randn(50, 3, dtype=torch.float64, generator=seeded()), torch.zeros(50, 2, dtype=torch.float64)
    la = Laplace(make_net(2), Gaussian(noise=0.8)).fit([(x, y)])
    assert name not in evaluate(la, [(x, y)], n_resamples=0).metrics


def test_the_units_of_several_outputs_do_not_matter():
    x, y, *parts = torch.randn(4, 80, 2, dtype=torch.float64, generator=seeded())
    epistemic, aleatoric = (v.square() for v in parts)

    class Units:
        def __init__(self, units):
            self.units = torch.tensor(units, dtype=torch.float64)

        def predict(self, inputs):
            place = [int((x == row).all(1).nonzero()) for row in inputs]
            e, a = (v[place] * self.units**2 for v in (epistemic, aleatoric))
            return Prediction("regression", 0 * e, e, a, e + a)

    plain, other = (
        evaluate(Units(units), [(x, y * torch.tensor(units, dtype=torch.float64))], n_resamples=0)
        for units in ((1.0, 1.0), (1.0, 1000.0))
    )
    name = "epistemic_aleatoric_correlation"
    assert other[name] == pytest.approx(plain[name], abs=1e-12)
    risks = [r.curves["risk_coverage"]["risk"] for r in (plain, other)]
    assert risks[0] == pytest.approx(risks[1], rel=1e-9)
