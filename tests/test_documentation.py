"""The code in the documentation runs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from aftermap.errors import StatisticalWarning

ROOT = Path(__file__).parent.parent


def test_add_a_layer_guide_runs() -> None:
    text = (ROOT / "docs" / "add_a_layer.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"__name__": "add_a_layer"}
    from aftermap.curvature import layers

    before = dict(layers._RULES)
    try:
        exec(compile("\n".join(blocks), "add_a_layer.md", "exec"), names)
        added = set(layers._RULES) - set(before)
        assert [kind.__name__ for kind in added] == ["Transposed"]
    finally:
        layers._RULES.clear()
        layers._RULES.update(before)
    assert len(blocks) == 2


def test_quickstart_runs_and_helps() -> None:
    import runpy

    state = torch.random.get_rng_state()
    try:
        names = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
        with warnings.catch_warnings():
            # After a few epochs the network is not yet overconfident, and the grid's edge (no uncertainty) is right.
            warnings.simplefilter("ignore", StatisticalWarning)
            numbers = names["main"](["--epochs", "6"])
    finally:
        torch.random.set_rng_state(state)
    assert numbers["accuracy"] > 0.9
    assert numbers["nll"] < numbers["nll_network"] + 0.02
