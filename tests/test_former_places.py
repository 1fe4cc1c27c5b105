"""Modules that documentation and examples have shown still pass on their names, for one release."""

from __future__ import annotations

import importlib

import pytest

MOVED = {
    "aftermap.curvature.layers": {
        "aftermap.curvature.rules.base": ["LayerRule", "find_rule", "matrix_layout", "register", "registered_rules"],
        "aftermap.curvature.rules.linear": ["EmbeddingRule", "LinearRule"],
    },
    "aftermap.curvature.rows": {
        "aftermap.curvature.rules.base": ["MatrixRows", "append_ones", "split_vectors", "sum_into_"],
        "aftermap.curvature.rules.linear": ["DenseRows"],
        "aftermap.curvature.rules.scale": ["ScaleRows"],
    },
    "aftermap.posteriors.blocks": {
        "aftermap.curvature.structures.base": ["BlockPosterior", "flatten_batch", "join_flat", "split_flat"],
    },
    "aftermap.data.idx": {"aftermap.data.readers": ["read_idx"]},
}
RENAMED = {
    "aftermap.curvature.rows": {
        "aftermap.curvature.rules.base": {
            "Rows": "InputRows",
            "budget": "examples_per_chunk",
            "merged_vectors": "merge_vectors",
        },
    },
}


@pytest.mark.parametrize("former", RENAMED)
def test_a_former_place_passes_on_what_has_another_name_now(former: str) -> None:
    module = importlib.import_module(former)
    for home, names in RENAMED[former].items():
        for old, new in names.items():
            assert old in module.__all__
            assert getattr(module, old) is getattr(importlib.import_module(home), new)


@pytest.mark.parametrize("former", MOVED)
def test_a_former_place_passes_on_its_names(former: str) -> None:
    module = importlib.import_module(former)
    assert module.__doc__ is not None
    assert "one release" in module.__doc__
    for home, names in MOVED[former].items():
        assert set(names) <= set(module.__all__)
        for name in names:
            assert getattr(module, name) is getattr(importlib.import_module(home), name)
