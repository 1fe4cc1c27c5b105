"""A fit that was killed goes on: its sums equal those of a fit that was not, bit by bit with the same order of data."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.batches import Batch
from aftermap.curvature.passes.checkpoint import clear_checkpoint, example_hashes
from aftermap.errors import AftermapError, DataError, InputError, StatisticalWarning, UnsupportedError
from tests.curvature.passes.checkpoint_worker import (
    STREAMING,
    Batches,
    Broken,
    examples,
    fit,
    fit_in_group,
    network,
    sums,
)
from tests.processes import from_processes

ROOT = Path(__file__).resolve().parents[3]
CASES = [(s, "exact", 4) for s in STREAMING] + [
    ("ekfac", "exact", 13),
    ("kron", "rademacher", 2),
    ("ekfac", "rademacher", 13),
]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def broken_fit(structure: str, folder: Path, stop: int, **options: Any) -> None:
    with pytest.raises(Broken):
        fit(structure, Batches(*examples(), stop=stop), folder, **options)


@pytest.mark.parametrize(("structure", "curvature", "stop"), CASES)  # 13 is in the second pass
def test_a_resumed_fit_equals_an_uninterrupted_one_bit_by_bit(
    structure: str, curvature: str, stop: int, tmp_path: Path
) -> None:
    options = {} if structure == "kfra" else {"curvature": curvature}
    expected = sums(fit(structure, Batches(*examples()), tmp_path / "whole", **options))
    broken_fit(structure, tmp_path / "folder", stop, **options)
    found = sums(fit(structure, Batches(*examples()), tmp_path / "folder", **options))
    assert_same(found, expected)
    if curvature == "exact":  # A checkpoint changes nothing; random vectors have a generator of their own there.
        assert_same(found, sums(fit(structure, Batches(*examples()), None, **options)))


def test_a_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    options = {"curvature": "sampled", "samples": 2}
    expected = sums(fit("kron", Batches(*examples()), None, generator=generator(), **options))
    broken_fit("kron", tmp_path, 6, generator=generator(), **options)
    assert_same(sums(fit("kron", Batches(*examples()), tmp_path, generator=generator(), **options)), expected)


def test_only_what_is_missing_is_done_again(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.sizes = network("kron"), []

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(len(x))
            return self.inner(x)

    model = Counting().eval()
    with pytest.raises(Broken):
        fit("kron", Batches(*examples(), stop=6), tmp_path, model=model)  # one batch to look at, five to sum
    model.sizes.clear()
    fit("kron", Batches(*examples()), tmp_path, model=model)
    again = sum(size == 4 for size in model.sizes)
    model.sizes.clear()
    fit("kron", Batches(*examples()), None, model=model)
    assert again < sum(size == 4 for size in model.sizes) - 2


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_kill_in_the_middle(structure: str, tmp_path: Path) -> None:
    stop = 5 if structure == "kron" else 13
    command = [sys.executable, "-m", "tests.curvature.passes.checkpoint_worker", structure, str(tmp_path), str(stop)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr.decode()[-2000:]
    assert any(tmp_path.iterdir())
    found = sums(fit(structure, Batches(*examples()), tmp_path))
    assert_same(found, sums(fit(structure, Batches(*examples()), None)))


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
def test_another_order_of_the_data_gives_the_same_sums(structure: str, tmp_path: Path) -> None:
    x, y = examples(dtype=torch.float64)
    expected = sums(fit(structure, Batches(x, y), None, dtype=torch.float64))
    with pytest.raises(Broken):
        fit(structure, Batches(x, y, stop=5), tmp_path, dtype=torch.float64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    found = sums(fit(structure, Batches(x[order], y[order], size=5), tmp_path, dtype=torch.float64))
    assert found["n_data"] == 26
    torch.testing.assert_close(found["dense"], expected["dense"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["loss"], expected["loss"])


def test_kfra_goes_on_only_with_the_same_batches(tmp_path: Path) -> None:
    broken_fit("kfra", tmp_path, 5)
    with pytest.raises(DataError, match="averages over whole batches"):
        fit("kfra", Batches(*examples(), size=5), tmp_path)


def test_other_weights_options_and_data_are_refused_by_name(tmp_path: Path) -> None:
    broken_fit("kron", tmp_path, 5)
    other = network("kron")
    with torch.no_grad():
        other.head.bias[1] += 1e-3
    x, y = examples()
    with pytest.raises(DataError, match=r"belongs to another fit, which differs in weights"):
        fit("kron", Batches(x, y), tmp_path, model=other)
    with pytest.raises(DataError, match=r"differs in structure \(kept: kron, now: diagonal\)"):
        fit("diagonal", Batches(x, y), tmp_path)
    with pytest.raises(DataError, match=r"approach \(kept: expand, now: reduce\)"):
        fit("kron", Batches(x, y), tmp_path, approach="reduce")
    with pytest.raises(DataError, match="differs in parameters"):
        fit("kron", Batches(x, y), tmp_path, params=["head.weight", "head.bias"])
    changed = x.clone()
    changed[1, 0, 0, 0] += 1e-6
    with pytest.raises(DataError, match=r"1 of the 16 examples in the checkpoint .* are not among the data"):
        fit("kron", Batches(changed, y), tmp_path)
    with pytest.raises(DataError, match="not among the data"):
        fit("kron", Batches(x, (y + 1) % 3), tmp_path)
    assert_same(sums(fit("kron", Batches(x, y), tmp_path)), sums(fit("kron", Batches(x, y), None)))


def test_data_that_change_are_refused(tmp_path: Path) -> None:
    steps = itertools.count()

    class Augmenting(Batches):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in super().__iter__():
                yield x + 0.01 * next(steps), y

    with pytest.raises(Broken):
        fit("kron", Augmenting(*examples(), stop=6), tmp_path)
    with pytest.raises(DataError, match="augmentation"):
        fit("kron", Augmenting(*examples()), tmp_path)


@pytest.mark.parametrize("structure", ["low_rank", "subset", "hessian"])
def test_what_is_no_sum_is_refused(structure: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is not such a sum; allowed are"):
        fit(structure, Batches(*examples()), tmp_path)
    assert not any(tmp_path.iterdir())


def test_several_passes_and_subnetworks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="passes=2 is for data that augment themselves"):
        fit("kron", Batches(*examples()), tmp_path, passes=2)
    la = am.Laplace(network("kron"), "classification", structure="full", params=am.Subnetwork(5))
    with pytest.raises(UnsupportedError, match="Subnetwork"):
        la.fit([examples()], checkpoint=tmp_path)


def test_bad_folders_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"holds other files \(thesis.tex\)"):
        fit("kron", Batches(*examples()), tmp_path)
    with pytest.raises(InputError, match="is a file; a checkpoint is a folder"):
        fit("kron", Batches(*examples()), tmp_path / "thesis.tex")
    with pytest.raises(InputError, match="every"):
        fit("kron", Batches(*examples()), tmp_path / "new", every=0)
    clear_checkpoint(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_files_end_in_a_clear_error_or_the_same_sums(tmp_path: Path) -> None:
    broken_fit("kron", tmp_path, 5)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    expected = sums(fit("kron", Batches(*examples()), None))
    generator, told = torch.Generator().manual_seed(0), []
    for trial in range(60):
        place = int(torch.randint(len(content), (), generator=generator))
        damaged = bytearray(content)
        if trial % 3 == 0:
            del damaged[place:]
        elif trial % 3 == 1:
            damaged[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        else:
            damaged[place:place] = b"\x00\xff"
        file.write_bytes(bytes(damaged))
        try:
            found = sums(fit("kron", Batches(*examples()), tmp_path))
        except AftermapError as error:
            told.append(str(error))
        else:
            assert_same(found, expected)
        for left in tmp_path.iterdir():
            left.unlink()
    assert len(told) > 50
    assert all("Delete the folder" in text for text in told)


class Switching(nn.Module):
    """Uses its first layer as a bare tensor where an input is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if bool((x.abs() < 5).all()) else nn.functional.linear(x, self.a.weight, self.a.bias)
        return self.out(torch.tanh(h))


def test_a_rule_that_was_given_up_stays_given_up(tmp_path: Path) -> None:
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    x[9] *= 20
    options = {"model": Switching().eval()}
    with pytest.warns(StatisticalWarning, match="starts again"):
        expected = sums(fit("kron", Batches(x, y), None, **options))
    with pytest.raises(Broken), pytest.warns(StatisticalWarning, match="starts again"):
        fit("kron", Batches(x, y, stop=8), tmp_path, **options)  # 1 to look at, 3 before the contradiction, 4 after
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sums(fit("kron", Batches(x, y), tmp_path, **options))
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:.* the network itself is no better than always answering")  # it was not trained
def test_laplace_and_fit_take_a_checkpoint(tmp_path: Path) -> None:
    model, (x, y) = network("kron"), examples()
    expected = am.Laplace(model, "classification").fit(Batches(x, y))
    with pytest.raises(Broken):
        am.Laplace(model, "classification").fit(Batches(x, y, stop=6), checkpoint=tmp_path, every=1)
    found = am.Laplace(model, "classification").fit(Batches(x, y), checkpoint=tmp_path, every=1)
    assert_same(sums(found.factors), sums(expected.factors))
    with pytest.raises(Broken):
        am.fit(model, Batches(x, y, stop=7), structure="ekfac", checkpoint=tmp_path / "other", every=1)
    chosen = am.fit(model, Batches(x, y), structure="ekfac", checkpoint=tmp_path / "other", every=1)
    assert_same(sums(chosen.factors), sums(am.fit(model, Batches(x, y), structure="ekfac").factors))


def test_examples_are_told_apart_by_inputs_targets_and_weights() -> None:
    x, y = torch.zeros(2, 3), torch.tensor([0, 0])
    first = example_hashes(Batch(x, y, None, 2))
    assert first[0] == first[1]
    assert example_hashes(Batch(x, torch.tensor([0, 1]), None, 2))[1] != first[1]
    assert example_hashes(Batch(x, y, torch.tensor([1.0, 2.0]), 2)).unique().numel() == 2
    assert (
        example_hashes(Batch({"a": x, "b": y}, None, None, 2))[0]
        != example_hashes(Batch({"b": x, "a": y}, None, None, 2))[0]
    )
    assert (
        example_hashes(Batch((x, torch.ones(3)), y, None, 2))[0]
        != example_hashes(Batch((x, torch.zeros(3)), y, None, 2))[0]
    )


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    """Two processes, of which one breaks; then one process, or three, with the same data in other parts."""
    stops = {"kron": 4, "ekfac": 11, "diagonal": 3, "full": 3}
    kept = tmp_path / "kept"
    for told in from_processes(fit_in_group, 2, tmp_path / "two", str(kept), stops):
        assert {s: "the loader broke" in text for s, text in told.items()} == dict.fromkeys(stops, True), told
    assert {f.name.split("-")[0] for f in (kept / "ekfac").iterdir()} == {
        "ekfac_Kronecker_factors",
        "bases",
        "ekfac_eigenvalues",
    }
    shutil.copytree(kept, tmp_path / "copy")
    three = from_processes(fit_in_group, 3, tmp_path / "three", str(kept), dict.fromkeys(stops))
    x, y = examples(dtype=torch.float64)
    for structure in stops:
        expected = sums(fit(structure, Batches(x, y), None, dtype=torch.float64))
        alone = sums(fit(structure, Batches(x, y), tmp_path / "copy" / structure, dtype=torch.float64))
        for found in (alone, *(told[structure] for told in three)):
            assert not isinstance(found, str), found
            assert found["n_data"] == 26
            scale = float(expected["dense"].abs().max())
            assert float((found["dense"] - expected["dense"]).abs().max()) <= 1e-8 * scale
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert torch.equal(three[0][structure]["dense"], three[2][structure]["dense"])


def test_what_a_kill_left_of_a_write_is_no_foreign_file(tmp_path: Path) -> None:
    model, (x, y) = network("kron"), examples()
    left = tmp_path / ".kron_curvature-g0000-0of1.safetensors.part"
    left.mkdir()
    (left / ".tmpA1b2C3").write_bytes(b"half")
    expected = am.Laplace(model, "classification").fit(Batches(x, y))
    found = am.Laplace(model, "classification").fit(Batches(x, y), checkpoint=tmp_path, every=1)
    assert_same(sums(found.factors), sums(expected.factors))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    left.mkdir()
    (left / "half").write_bytes(b"half")
    clear_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
