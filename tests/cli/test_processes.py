"""The command line under torchrun: equal results, one writer, and a clear end when a process is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aftermap.cli import sources, training
from aftermap.cli.training import Recipe, Run, make_optimizer
from aftermap.data import Examples
from aftermap.distributed import rank
from aftermap.errors import DataError
from aftermap.likelihoods import Categorical
from aftermap.posteriors.io import load_posterior
from tests.cli.common import Files, invoke, make_files
from tests.processes import free_port, from_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]
ROOT = Path(__file__).resolve().parents[2]

DEADLY = """
import os
import signal

import torch


class Batches:
    passes = 0

    def __iter__(self):
        self.passes += 1
        generator = torch.Generator().manual_seed(5)
        for number in range(6):
            if number == 4 and self.passes > 2 and os.environ.get("RANK") == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.randn(7, 2, generator=generator), torch.arange(7) % 3


batches = Batches()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("files"))


def start(arguments: list[str], world: int, folder: Path) -> list[tuple[int, str, str]]:
    """Runs a command on several processes, as torchrun would; exit codes, standard output and standard error."""
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "aftermap", *arguments],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = [p.communicate(timeout=240) for p in processes]
    return [(p.returncode, *said) for p, said in zip(processes, told, strict=True)]


def test_two_processes_fit_what_one_fits_and_one_of_them_writes(files: Files, tmp_path: Path) -> None:
    more = ["--structure", "kron", "--no-tune", "--batch-size", "32"]
    invoke(*files.fit(tmp_path / "one", *more))
    said = start(files.fit(tmp_path / "two", *more), 2, tmp_path)
    assert [code for code, *_ in said] == [0, 0], said
    assert said[0][1].count("fitted:") == 1
    assert said[1][1] == ""
    one, two = (load_posterior(tmp_path / name).factors for name in ("one", "two"))
    assert two.n_data == one.n_data
    scale = float(one.to_dense().abs().max())
    assert float((one.to_dense() - two.to_dense()).abs().max()) <= 1e-6 * scale
    for verb, arguments, output in (
        ("predict", [str(files.test)], tmp_path / "scored.csv"),
        ("evaluate", ["--test", str(files.test), "--resamples", "0"], tmp_path / "results.json"),
        ("report", ["--test", str(files.test), "--no-where"], tmp_path / "report.html"),
    ):
        options = ["--model", files.model, "-o", str(output)]
        said = start([verb, str(tmp_path / "two"), *arguments, *options], 2, tmp_path)
        assert [code for code, *_ in said] == [0, 0], said
        assert output.exists()
        assert (said[1][1], said[1][2]) == ("", "")


def test_a_process_may_have_no_part_of_few_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Examples(torch.arange(3.0)[:, None], torch.arange(3), "few")
    monkeypatch.setattr(sources, "world_size", lambda: 4)
    parts = []
    for number in range(4):
        monkeypatch.setattr(sources, "rank", lambda number=number: number)
        batches = sources.Batches(data, 2, shared=True)
        assert len(batches) == len(list(batches))
        parts.append([x.flatten().tolist() for x, _ in batches])
    assert parts == [[[0.0]], [[1.0]], [[2.0]], []]


def test_batches_of_fewer_examples_than_processes_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, network, optimizer = unfinished_run(tmp_path)  # 100 examples in batches of 20
    monkeypatch.setattr(training, "world_size", lambda: 21)
    data = Examples(torch.randn(100, 2), torch.arange(100) % 2, "moons")
    with pytest.raises(DataError, match="batches of 20 of the 100 examples cannot be shared out over 21 processes"):
        training.train_network(run, network, optimizer, data, Categorical())
    assert run.step == 0


def gone_on(folder: str) -> dict[str, Any]:
    """What a process finds that goes on with a run; only process 0 has a folder with a checkpoint."""
    run, network, optimizer = unfinished_run(Path(folder) / f"machine {rank()}")
    resumed = run.resume(network, optimizer)
    first = {k: v for k, v in optimizer.state_dict()["state"][0].items() if isinstance(v, torch.Tensor)}
    return {"resumed": resumed, "step": run.step, "weights": network.state_dict(), "state": first}


def unfinished_run(folder: Path) -> tuple[Run, torch.nn.Module, Any]:
    recipe = Recipe(
        "builtin:mlp", {}, "toy:moons", 100, "classification", None, "vogn", 5, 20, 0.1, 1.0, 0.0, 1, 1.0, 0
    )
    network = torch.nn.Linear(2, 2)
    return Run(folder, recipe), network, make_optimizer(recipe, network, Categorical())


def test_all_processes_go_on_where_only_process_0_has_the_checkpoint(tmp_path: Path) -> None:
    run, network, optimizer = unfinished_run(tmp_path / "machine 0")
    x, y = torch.randn(20, 2), torch.arange(20) % 2
    for _ in range(7):
        optimizer.step(lambda: torch.nn.functional.cross_entropy(network(x), y))
    run.folder.mkdir()
    run.step = 7
    run.save(network, optimizer)
    first, second = from_processes(gone_on, 2, tmp_path / "answers", str(tmp_path))
    assert first["resumed"] is second["resumed"] is True
    assert first["step"] == second["step"] == 7
    for found in (first, second):
        torch.testing.assert_close(found["weights"], network.state_dict(), rtol=0, atol=0)
        assert found["state"]
        torch.testing.assert_close(found["state"], first["state"], rtol=0, atol=0)


def test_a_lost_process_ends_the_other_with_one_line(files: Files, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    arguments = [
        "fit",
        "--model",
        files.model,
        "--weights",
        str(files.weights),
        "--train",
        "deadly:batches",
        "--no-tune",
    ]
    arguments += ["--structure", "kron", "--task", "classification", "-o", str(tmp_path / "posterior")]
    (code, _, error), (killed, *_) = start(arguments, 2, tmp_path)
    assert killed == -9
    assert code == 5, error
    lines = [line for line in error.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, error
    assert lines[0].startswith("error: another process has ended or does not answer")
    assert "Traceback" not in error
    assert not (tmp_path / "posterior").exists()
