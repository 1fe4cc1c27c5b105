"""Figures of where the uncertainty sits: what they show, that nothing is cut off, and what they refuse."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from aftermap.analysis.figures import where as figures
from aftermap.analysis.figures.style import save_svg
from aftermap.analysis.where import Where
from aftermap.laplace import Laplace
from tests.analysis.cases import fitted, generator, look, normal, seeded, wave

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def image_result() -> Where:
    net = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 5, (2, 3)),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(20, 3),
        )
    )
    x, y = normal(12, 1, 8, 8, seed=1), torch.arange(12) % 3
    la = Laplace(net, "classification").fit([(x, y)], progress=False)
    return la.where(
        [(x, y)], top=5, calibration=True, draws=2, generator=generator(), classes=["cat", "dog", "ostrich"]
    )


@pytest.fixture(scope="module")
def full_result() -> Where:
    return fitted("full").where(look(), top=3, calibration=True, draws=2, generator=generator())


def check_inside(figure) -> None:
    """Nothing that is drawn lies beyond the figure's edges."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    edge = 0.04  # inches: text boxes are a little larger than their letters
    assert drawn.x0 >= -edge
    assert drawn.y0 >= -edge
    assert drawn.x1 <= width + edge
    assert drawn.y1 <= height + edge


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_is_drawn_and_holds_its_labels(name: str, image_result: Where, full_result: Where) -> None:
    check_inside(image_result.figure(name))
    check_inside(full_result.figure(name))
    text = save_svg(full_result.figure(name))
    assert text.startswith("<svg")
    assert text == save_svg(full_result.figure(name))
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_layer_shares_draw_the_numbers(full_result: Where) -> None:
    figure = full_result.figure("layers")
    (ax,) = figure.axes
    (bars,) = ax.containers
    own = [k.predictive_share for k in full_result.layers]
    assert [bar.get_width() for bar in bars] == [share / sum(own) for share in own]
    assert full_result.in_common == pytest.approx(1 - sum(own))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "2"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first layer is on top
    assert figures.layer_shares(["a"], [1.0], ax=ax) is ax


def test_filter_maps_of_every_kind_of_layer(image_result: Where) -> None:
    first = image_result.figure("filters")
    pictures = [ax.images[0].get_array() for ax in first.axes if ax.images]
    assert len(pictures) == 8  # four filters: weights above, deviations below
    weight, _ = image_result.weights("0")
    assert pictures[1].tolist() == weight.value[1, 0].tolist()
    assert pictures[5].tolist() == weight.deviation[1, 0].tolist()
    check_inside(image_result.figure("filters", layer="2", channel=3, limit=2))
    check_inside(image_result.figure("filters", layer="5"))
    with pytest.raises(Exception, match="channel=9 does not exist; the filters have 4 input channels"):
        image_result.figure("filters", layer="2", channel=9)
    with pytest.raises(Exception, match="there is no layer 'fc'"):
        image_result.figure("filters", layer="fc")


def test_many_layers_are_drawn_as_a_picture() -> None:
    names = [f"encoder.block.{i}.attention.projection" for i in range(25)]
    counts = {n: [1, 5, 2, 0] for n in names}
    figure = figures.weight_histograms(counts, counts, [0, 0.25, 0.5, 0.75, 1], [-2, -1, 0, 1, 2], title="many")
    check_inside(figure)
    assert figure.axes[0].images[0].get_array().shape == (25, 4)
    check_inside(figures.layer_shares(names, [1 / 25] * 25).figure)
    check_inside(figures.class_matrix(torch.eye(40), [f"class number {i}" for i in range(40)]).figure)


def test_vectors_and_regressions_have_figures_too() -> None:
    net, data = wave(outputs=1)
    found = Laplace(net, "regression").fit(data, progress=False).where(data, top=3)
    for name in ("layers", "filters", "weights", "classes", "inputs", "saliency"):
        check_inside(found.figure(name))
    assert "±" in found.figure("inputs").axes[0].get_title()
    with pytest.raises(Exception, match="there are no pairs of true and predicted classes"):
        found.figure("pairs")
    with pytest.raises(Exception, match="the calibration test was not asked for"):
        found.figure("calibration")


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Exception, match="got 3 names, but 2 shares"):
        figures.layer_shares(["a", "b", "c"], [0.5, 0.5])
    with pytest.raises(Exception, match=r"draws weights \[O, I\]"):
        figures.filter_maps(torch.ones(3), torch.ones(3))
    with pytest.raises(Exception, match="got 2 labels for a matrix of shape"):
        figures.class_matrix(torch.ones(3, 3), ["a", "b"])
    with pytest.raises(Exception, match="got 1 inputs, but 2 captions"):
        figures.uncertain_inputs([torch.ones(1, 2)], [1.0], [1.0], ["a", "b"])
    with pytest.raises(Exception, match="got 1 inputs, but 2 captions"):
        figures.saliency_maps([torch.ones(1, 2)], torch.ones(1, 2), ["a", "b"])
