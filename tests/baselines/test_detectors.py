"""Detectors against scikit-learn, scipy and closed forms, their invariances, what they leave of the network, and bad input."""

import copy

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance, ShrunkCovariance
from sklearn.neighbors import NearestNeighbors
from torch import nn

from aftermap.baselines import GEN, KNN, Detector, Energy, Mahalanobis, RelativeMahalanobis, ViM
from aftermap.baselines.features import FeatureSample
from aftermap.errors import DataError, InputError, NotFittedError, ShapeError, StatisticalWarning, UnsupportedError

INPUTS, WIDTH, CLASSES, N = 4, 6, 3, 90


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_net(dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Dropout(0.4), nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        net[3].bias.copy_(torch.tensor([2.0, 1.0, 1.5]))
    return net.to(dtype).eval()


def make_data(n=N, seed=1, dtype=torch.float64):
    x = torch.randn(n, INPUTS, dtype=torch.float64, generator=seeded(seed))
    y = torch.arange(n) % CLASSES
    return (x + y[:, None] * 0.7).to(dtype), y


def split(x, y, size):
    return list(zip(x.split(size), y.split(size), strict=True))


def features(net, x):
    return net[:3](x).detach().double().numpy()


def logits(net, x):
    return net(x).detach().double().numpy()


MAKE = {
    "energy": Energy,
    "gen": GEN,
    "knn": lambda net, **options: KNN(net, k=5, **options),
    "mahalanobis": Mahalanobis,
    "relative_mahalanobis": RelativeMahalanobis,
    "vim": ViM,
}
OF_FEATURES = ["knn", "mahalanobis", "relative_mahalanobis", "vim"]


def fitted(name, net=None, data=None):
    net = make_net() if net is None else net
    return MAKE[name](net).fit(split(*(make_data() if data is None else data), 40))


# What each of them computes, by other libraries.


def oracle_energy(net, x, new):
    return -logsumexp(logits(net, new), axis=1)


def oracle_gen(net, x, new):
    p = softmax(logits(net, new), axis=1)
    return (p**0.1 * (1 - p) ** 0.1).sum(1)


def oracle_knn(net, x, new):
    stored, asked = (f / np.linalg.norm(f, axis=1, keepdims=True) for f in (features(net, x), features(net, new)))
    return NearestNeighbors(n_neighbors=5, algorithm="brute").fit(stored).kneighbors(asked)[0][:, -1]


def class_distances(net, x, new):
    y = make_data()[1].numpy()
    train, asked = features(net, x), features(net, new)
    means = np.stack([train[y == c].mean(0) for c in range(CLASSES)])
    shared = EmpiricalCovariance(assume_centered=True).fit(train - means[y])
    return np.stack([shared.mahalanobis(asked - mean) for mean in means]).min(0)


def oracle_relative(net, x, new):
    return class_distances(net, x, new) - EmpiricalCovariance().fit(features(net, x)).mahalanobis(features(net, new))


def oracle_vim(net, x, new):
    weight, bias = net[3].weight.detach().numpy(), net[3].bias.detach().numpy()
    origin = -np.linalg.pinv(weight) @ bias
    train, asked = features(net, x) - origin, features(net, new) - origin
    values, vectors = np.linalg.eigh(EmpiricalCovariance(assume_centered=True).fit(train).covariance_)
    residual = vectors[:, np.argsort(-values)[WIDTH // 2 :]]
    alpha = logits(net, x).max(1).mean() / np.linalg.norm(train @ residual, axis=1).mean()
    return alpha * np.linalg.norm(asked @ residual, axis=1) - logsumexp(logits(net, new), axis=1)


ORACLES = {
    "energy": oracle_energy,
    "gen": oracle_gen,
    "knn": oracle_knn,
    "mahalanobis": class_distances,
    "relative_mahalanobis": oracle_relative,
    "vim": oracle_vim,
}


@pytest.mark.parametrize("name", MAKE)
def test_against_other_libraries(name):
    net, (x, _), (new, _) = make_net(), make_data(), make_data(20, seed=7)
    detector = fitted(name, net)
    assert isinstance(detector, Detector)
    assert detector.name == name
    found = detector.score(new)
    assert found.dtype == torch.float64
    assert found.shape == (20,)
    torch.testing.assert_close(found, torch.from_numpy(ORACLES[name](net, x, new)))


@pytest.mark.parametrize("name", MAKE)
def test_order_and_batches_do_not_matter(name):
    net, (x, y), (new, _) = make_net(), make_data(), make_data(20, seed=7)
    order = torch.randperm(N, generator=seeded(3))
    expected = fitted(name, net).score(new)
    again = MAKE[name](net).fit(split(x[order], y[order], 7))
    torch.testing.assert_close(torch.cat([again.score(part) for part in new.split(3)]), expected)


@pytest.mark.parametrize("name", MAKE)
def test_single_precision_and_training_mode_and_a_generator(name):
    net, new = make_net(torch.float32), make_data(20, seed=7)[0]
    expected = fitted(name).score(new)
    net.train()
    detector = MAKE[name](net).fit(batch for batch in split(*make_data(dtype=torch.float32), 40))
    torch.testing.assert_close(detector.score(new.float()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKE)
def test_the_network_is_left_as_it_was(name):
    net = make_net()
    net[1].train()
    net[0].weight.requires_grad_(False)
    net[3].weight.grad = torch.ones_like(net[3].weight)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    fitted(name, net).score(make_data(5)[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in net] == [False, True, False, False]
    assert [p.requires_grad for p in net.parameters()] == [False, True, True, True]
    assert torch.equal(net[3].weight.grad, torch.ones_like(net[3].weight))
    assert net[0].weight.grad is None
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


@pytest.mark.parametrize("name", ["knn", "mahalanobis", "vim"])
def test_features_far_away_score_higher(name):
    # Identity features: a network whose last layer is all there is.
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES)).double()
    with torch.no_grad():
        net[1].bias.fill_(3.0)
    x, y = make_data()
    x = x * torch.tensor([2.0, 2.0, 0.1, 0.1], dtype=torch.float64) + 5  # away from zero, as KNN sees directions
    detector = MAKE[name](net).fit([(x, y)])
    far = x[:10] + torch.tensor([0.0, 0.0, 40.0, -40.0], dtype=torch.float64)
    assert detector.score(far).min() > detector.score(x).max()


def test_energy_at_a_temperature():
    f = torch.tensor([[3.0, -1.0, 0.5]], dtype=torch.float64)
    found = Energy(nn.Identity(), temperature=2.5).score(f)
    torch.testing.assert_close(found, -2.5 * (f / 2.5).exp().sum(1).log())
    torch.testing.assert_close(Energy(nn.Identity()).score(f + 4), Energy(nn.Identity()).score(f) - 4)


def test_gen_keeps_the_digits_of_confident_answers():
    # Two classes: p (1 − p) = e^a / (1 + e^a)², which is e^−60 where 1 − p rounds to zero.
    f = torch.tensor([[60.0, 0.0], [50.0, 0.0]], dtype=torch.float64)
    found = GEN(nn.Identity(), gamma=0.5).score(f)
    torch.testing.assert_close(found, 2 * torch.tensor([-30.0, -25.0], dtype=torch.float64).exp())
    assert found[0] < found[1]


def test_gen_counts_the_largest_probabilities():
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64)
    found = GEN(nn.Identity(), gamma=0.3, top=2).score(p.log()[:, [3, 0, 2, 1]])
    torch.testing.assert_close(found, torch.tensor([0.25**0.3 + 0.16**0.3], dtype=torch.float64))
    many = torch.zeros(1, 250, dtype=torch.float64)  # 100 of them count
    torch.testing.assert_close(
        GEN(nn.Identity()).score(many), torch.tensor([100 * (249 / 250**2) ** 0.1], dtype=torch.float64)
    )


def linear_net(matrix=None, shift=0.0):
    """A network whose features are A x + shift."""
    net = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(INPUTS) if matrix is None else matrix)
        net[0].bias.fill_(shift)
    return net


@pytest.mark.parametrize("kind", [Mahalanobis, RelativeMahalanobis])
def test_mahalanobis_does_not_see_affine_maps(kind):
    (x, y), (new, _) = make_data(), make_data(15, seed=5)
    matrix = torch.randn(INPUTS, INPUTS, dtype=torch.float64, generator=seeded(4)) * torch.tensor([1.0, 9.0, 30.0, 0.2])
    expected = kind(linear_net()).fit([(x, y)]).score(new)
    torch.testing.assert_close(kind(linear_net(matrix, 100.0)).fit([(x, y)]).score(new), expected, rtol=1e-7, atol=1e-8)


def test_knn_does_not_see_rotations_and_lengths():
    (x, y), (new, _) = make_data(), make_data(15, seed=5)
    rotation = torch.linalg.qr(torch.randn(INPUTS, INPUTS, dtype=torch.float64, generator=seeded(4))).Q
    expected = KNN(linear_net(), k=3).fit([(x, y)]).score(new)
    turned = KNN(linear_net(3.5 * rotation), k=3).fit([(x, y)])
    torch.testing.assert_close(turned.score(new * torch.linspace(0.1, 9, 15)[:, None]), expected)
    assert expected.min() > 0.001


def test_knn_of_training_data_is_zero_and_of_nothing_is_one():
    x, y = make_data()
    detector = KNN(linear_net(), k=1).fit([(x, y)])
    torch.testing.assert_close(detector.score(x), torch.zeros(N, dtype=torch.float64), rtol=0, atol=1e-7)
    torch.testing.assert_close(detector.score(torch.zeros(2, INPUTS).double()), torch.ones(2).double())


def test_knn_in_blocks(monkeypatch):
    (x, y), (new, _) = make_data(), make_data(15, seed=5)
    expected = KNN(linear_net(), k=8).fit([(x, y)]).score(new)
    monkeypatch.setattr("aftermap.baselines.feature_detectors._STORED_ROWS", 6)  # fewer than k
    monkeypatch.setattr("aftermap.baselines.feature_detectors._NEW_ROWS", 4)
    torch.testing.assert_close(KNN(linear_net(), k=8).fit([(x, y)]).score(new), expected)


def test_knn_samples_repeatably_whatever_the_batches():
    (x, y), (new, _) = make_data(), make_data(15, seed=5)

    def of(size, seed, most=30):
        return KNN(linear_net(), k=2, max_features=most, seed=seed).fit(split(x, y, size))

    first = of(90, 0)
    assert first._state.statistics.shape == (30, INPUTS)
    rows = {tuple(r) for r in first._state.statistics.tolist()}
    assert len(rows) == 30
    assert rows <= {tuple(r) for r in x.tolist()}
    # The same rows, to the bit, but in another order, on which the last digits of products may depend.
    assert {tuple(r) for r in of(7, 0)._state.statistics.tolist()} == rows
    torch.testing.assert_close(of(7, 0).score(new), first.score(new), rtol=0, atol=1e-14)
    assert {tuple(r) for r in of(7, 1)._state.statistics.tolist()} != rows
    torch.testing.assert_close(of(7, 1, most=90).score(new), of(90, 0, most=2000).score(new), rtol=0, atol=1e-14)


def test_samples_are_uniform():
    counts = torch.zeros(12)
    for seed in range(300):
        sample = FeatureSample(4, seed)
        for rows in torch.arange(12).split(5):
            sample.add(rows[:, None])
        counts += torch.bincount(sample.rows[:, 0], minlength=12)
    assert counts.sum() == 1200  # each of 12 rows 100 times, with a standard deviation of 8.2
    assert (counts - 100).abs().max() < 33


def test_weights_count_as_copies():
    (x, y), (new, _) = make_data(), make_data(15, seed=5)
    weight = (torch.arange(N) % 3).double()
    for name in ("mahalanobis", "relative_mahalanobis", "vim"):
        weighted = MAKE[name](make_net()).fit([(x, y, weight)])
        copies = MAKE[name](make_net()).fit(
            [(x.repeat_interleave(weight.long(), 0), y.repeat_interleave(weight.long()))]
        )
        torch.testing.assert_close(weighted.score(new), copies.score(new))
    present = KNN(make_net(), k=4).fit([(x, y, (weight > 0).double())])
    torch.testing.assert_close(
        present.score(new), KNN(make_net(), k=4).fit([(x[weight > 0], y[weight > 0])]).score(new)
    )
    with pytest.raises(UnsupportedError, match="Repeat examples"):
        KNN(make_net(), k=4).fit([(x, y, weight)])


def test_means_far_from_zero_keep_their_digits():
    (x, y), (new, _) = make_data(), make_data(15, seed=5)
    expected = Mahalanobis(linear_net()).fit([(x, y)]).score(new)
    far = Mahalanobis(linear_net(shift=1e6)).fit(split(x, y, 11)).score(new)
    torch.testing.assert_close(far, expected, rtol=1e-7, atol=1e-7)


def test_a_singular_covariance_has_a_pseudo_inverse():
    # A feature that is a copy of another one, and one that is constant, change nothing.
    (x, y), (new, _) = make_data(), make_data(15, seed=5)
    wide = nn.Sequential(nn.Linear(INPUTS, INPUTS + 2), nn.Linear(INPUTS + 2, CLASSES)).float()
    with torch.no_grad():
        wide[0].weight.zero_()
        wide[0].bias.zero_()
        wide[0].weight[:INPUTS] = torch.eye(INPUTS)
        wide[0].weight[INPUTS] = wide[0].weight[0] / 3  # rounded to float32: collinear up to rounding only
        wide[0].bias[INPUTS + 1] = 7.0
    narrow = Mahalanobis(linear_net()).fit([(x.float().double(), y)])
    found = Mahalanobis(wide).fit([(x.float(), y)]).score(new.float())
    torch.testing.assert_close(found, narrow.score(new.float().double()), rtol=1e-4, atol=1e-4)


def test_too_few_examples_warn_and_shrinkage_helps():
    x, y = make_data(6)
    net = make_net()
    with pytest.warns(StatisticalWarning, match="6 examples of 3 classes do not span 6 features"):
        singular = Mahalanobis(net).fit([(x, y)])
    assert singular._state.statistics[0].matrix.shape[1] == 3
    shrunk = Mahalanobis(net, shrinkage=0.2).fit([(x, y)])
    train, asked = features(net, x), features(net, make_data(9, seed=3)[0])
    means = np.stack([train[y.numpy() == c].mean(0) for c in range(CLASSES)])
    other = ShrunkCovariance(shrinkage=0.2, assume_centered=True).fit(train - means[y.numpy()])
    expected = np.stack([other.mahalanobis(asked - mean) for mean in means]).min(0)
    torch.testing.assert_close(shrunk.score(make_data(9, seed=3)[0]), torch.from_numpy(expected))


def test_a_class_without_examples_is_no_neighbour():
    x, y = make_data()
    keep = y != 1
    detector = Mahalanobis(make_net()).fit([(x[keep], y[keep])])
    assert detector._state.statistics[0].places.shape[0] == 2
    assert detector.score(x).isfinite().all()


def test_vim_with_a_chosen_dimension_is_the_residual_of_the_origin():
    # Features on a line through the origin u have no residual but in the noise: D = 1 finds the line.
    net, (x, y) = make_net(), make_data()
    detector = ViM(net, dim=1).fit([(x, y)])
    state = detector._state.statistics
    assert state.residual.shape == (WIDTH, WIDTH - 1)
    torch.testing.assert_close(net[3].weight @ state.origin, -net[3].bias.detach())
    mean_residual = state.norms(torch.from_numpy(features(net, x))).mean()
    torch.testing.assert_close(state.alpha * mean_residual, net(x).amax(1).mean().detach())


def test_convolutional_heads_are_averaged_over_positions():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        plain = nn.Sequential(head[0], head[1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    with torch.no_grad():
        head[2].bias.add_(3)
        plain[4].weight.copy_(head[2].weight[:, :, 0, 0])
        plain[4].bias.copy_(head[2].bias)
    head, plain = head.double(), plain.double()
    x = torch.randn(40, 2, 6, 6, dtype=torch.float64, generator=seeded())
    y = torch.arange(40) % 3
    for name in OF_FEATURES:
        found, expected = (MAKE[name](net).fit(split(x, y, 9)).score(x[:7] * 2) for net in (head, plain))
        torch.testing.assert_close(found, expected)


class Tokens(nn.Module):
    def __init__(self, time_first):
        super().__init__()
        self.body, self.head, self.time_first = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES), time_first

    def forward(self, x):  # [N, T, F]
        if self.time_first:
            return self.head(self.body(x.transpose(0, 1))).mean(0)
        return self.head(self.body(x)).mean(1)


def test_tokens_are_averaged_and_other_orders_refused():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, other = Tokens(False).double(), Tokens(True).double()
    x = torch.randn(12, 8, INPUTS, dtype=torch.float64, generator=seeded())
    found = KNN(net, k=2).fit([(x, torch.zeros(12).long())]).score(x[:3] * 2)
    pooled = net.body(x).mean(1).detach().numpy()
    asked = net.body(x[:3] * 2).mean(1).detach().numpy()
    stored, asked = (f / np.linalg.norm(f, axis=1, keepdims=True) for f in (pooled, asked))
    expected = NearestNeighbors(n_neighbors=2, algorithm="brute").fit(stored).kneighbors(asked)[0][:, -1]
    torch.testing.assert_close(found, torch.from_numpy(expected))
    with pytest.raises(UnsupportedError, match="with the examples first"):
        KNN(other, k=2).fit([(x, torch.zeros(12).long())])
    with pytest.raises(UnsupportedError, match="with the examples first"):  # 8 examples of 8 tokens each
        KNN(other, k=2).fit([(x[:8], torch.zeros(8).long())])


def test_another_layer_by_name():
    net, (x, y) = make_net(), make_data()
    found = KNN(net, k=3, layer="0").fit([(x, y)]).score(x[:5] * 1.3)
    torch.testing.assert_close(found, KNN(linear_net(), k=3).fit([(x, y)]).score(x[:5] * 1.3))
    with pytest.raises(InputError, match="layer='4' is not known"):
        KNN(net, k=3, layer="4").fit([(x, y)])


def test_a_regression_has_neighbours_and_nothing_else():
    net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    x = make_data()[0]
    y = x.sum(1, keepdim=True)
    assert KNN(net, k=3).fit([(x, y)]).score(x).shape == (N,)
    for name in set(MAKE) - {"knn"}:
        with pytest.raises(UnsupportedError, match="for a regression KNN works"):
            fitted(name, net, (x, y))
    two = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    for name in set(MAKE) - {"knn"}:
        with pytest.raises(UnsupportedError, match="is for classification with labels"):
            fitted(name, two, (x, y.expand(-1, 2)))


@pytest.mark.parametrize("name", OF_FEATURES)
def test_fits_that_are_missing_or_stale(name):
    net, (x, y) = make_net(), make_data()
    with pytest.raises(NotFittedError, match="call fit"):
        MAKE[name](net).score(x)
    detector = fitted(name, net)
    before = detector.score(x)
    with pytest.raises(DataError, match="not finite"):
        detector.fit([(x, y), (x * torch.nan, y)])
    assert torch.equal(detector.score(x), before)  # a fit that fails changes nothing
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-3
    with pytest.raises(InputError, match=r"weights have changed .* fit it again"):
        detector.score(x)


@pytest.mark.parametrize("name", OF_FEATURES)
def test_bad_data(name):
    net, (x, y) = make_net(), make_data()
    with pytest.raises(DataError, match="empty"):
        MAKE[name](net).fit([])
    with pytest.raises(DataError, match="float32"):
        MAKE[name](net).fit([(x.float(), y)])
    if name != "knn":
        with pytest.raises(DataError, match=r"labels must lie in 0\.\.2 for 3 classes, got 4"):
            MAKE[name](net).fit([(x, y.clamp_min(1) + 3)])
        with pytest.raises(DataError, match="needs class labels"):
            MAKE[name](net).fit([(x, None)])
    tokens = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)).double()
    with pytest.raises(ShapeError, match="one answer per example"):
        MAKE[name](tokens).fit([(x.reshape(30, 3, INPUTS), y.reshape(30, 3))])
    with pytest.raises(UnsupportedError, match="no last layer to read features at"):
        MAKE[name](nn.Identity()).fit([(x, y)])


def test_bad_options():
    net, (x, y) = make_net(), make_data()
    with pytest.raises(InputError, match="needs a torch.nn.Module"):
        KNN("net")
    with pytest.raises(InputError, match="Store at least k"):
        KNN(net, k=20, max_features=10)
    with pytest.raises(DataError, match="k=100, but the data hold only 90"):
        KNN(net, k=100).fit([(x, y)])
    with pytest.raises(InputError, match="gamma=2"):
        GEN(net, gamma=2)
    with pytest.raises(InputError, match="temperature=0"):
        Energy(net, temperature=0)
    with pytest.raises(InputError, match="shrinkage=-1"):
        Mahalanobis(net, shrinkage=-1)
    with pytest.raises(InputError, match="less than the number of features, which is 6"):
        ViM(net, dim=6).fit([(x, y)])
    constant = torch.ones(20, INPUTS, dtype=torch.float64)
    with pytest.raises(DataError, match="do not vary"):
        Mahalanobis(net).fit([(constant, y[:20])])


def test_vim_refuses_what_it_cannot_match():
    x, y = make_data()
    scaled = nn.Sequential(make_net(), nn.Hardtanh(-0.5, 0.5)).double()
    with pytest.raises(UnsupportedError, match="something follows the layer"):
        ViM(scaled).fit([(x, y)])
    negative = make_net()
    with torch.no_grad():
        negative[3].bias -= 50
    with pytest.raises(DataError, match="no virtual logit can match"):
        ViM(negative).fit([(x, y)])
    flat = nn.Sequential(nn.Linear(INPUTS, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)).float()
    with torch.no_grad():
        flat[1].bias.fill_(0.0)
        flat[0].weight[2:] = flat[0].weight[:1]
        flat[1].weight.abs_()
        flat[0].weight.abs_()
    with pytest.raises(DataError, match="Pass a smaller dim"):
        ViM(flat, dim=4).fit([(x.float().abs(), y)])
