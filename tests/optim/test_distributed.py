"""Two gloo processes: split data equal one process, different noise equals the average, DDP is never averaged twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.optim.elastic import STEPS
from tests.optim.problems import classifier, make_regression
from tests.optim.ranks import PRESETS, UNEVEN, Branched, Gated, flat, reparametrised_mean, steps, uneven_data
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "src")])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.optim.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(r), "2", str(port), str(folder)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for r in range(2)
    ]
    outputs = [p.communicate(timeout=120)[0].decode() for p in processes]
    assert all(p.returncode == 0 for p in processes), "\n".join(outputs)[-3000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2)]


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_noise_and_split_data_equal_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    net, x, y = classifier()
    losses = steps(PRESETS[name](net), net, x, y, 3)
    for wrapped in ("plain", "ddp", "ddp, own backward"):
        for found in ranks:
            case = found[f"{name} | {wrapped}"]
            assert_close(case["weights"], flat(net))
            assert_close(torch.tensor(case["losses"]), torch.tensor(losses))


@pytest.mark.parametrize("name", ["vogn", "ivon", "noisy kfac"])
def test_two_groups_of_draws_equal_one_process_with_two_draws(ranks: list[dict[str, Any]], name: str) -> None:
    net, x, y = classifier()
    losses = steps(PRESETS[name](net, mc_samples=2), net, x, y, 3)
    for found in ranks:
        case = found[f"{name} | samples"]
        assert_close(case["weights"], flat(net))
        assert_close(torch.tensor(case["losses"]), torch.tensor(losses))


def test_processes_agree_bit_by_bit(ranks: list[dict[str, Any]]) -> None:
    for key, case in ranks[0].items():
        assert torch.equal(case["weights"], ranks[1][key]["weights"]), key


def test_a_layer_that_one_process_does_not_use(ranks: list[dict[str, Any]]) -> None:
    weights = ranks[0]["unused"]["weights"]
    assert bool(torch.isfinite(weights).all())
    assert not torch.equal(weights[-15:-3], torch.full((12,), 0.1, dtype=torch.float64))


@pytest.mark.parametrize("name", ["ogn", "vogn", "kfac"])
def test_a_branch_that_one_process_uses_equals_two_micro_batches(ranks: list[dict[str, Any]], name: str) -> None:
    net, inputs, y = uneven_data(Branched)
    opt = UNEVEN[name](net)
    for _ in range(4):
        for x in reversed(inputs):  # the first batch uses every layer
            with opt.sampled_params():
                F.cross_entropy(net(x), y).backward()
            opt._draws = 0  # both processes draw the same weights
        opt.step()
    for found in ranks:
        assert_close(found[f"Branched | {name}"]["weights"], flat(net))


@pytest.mark.parametrize("name", ["ogn", "kfac"])
@pytest.mark.parametrize("kind", [Branched, Gated])
def test_gradients_of_one_weight_are_added_to_each_other(
    ranks: list[dict[str, Any]], name: str, kind: type[torch.nn.Module]
) -> None:
    """In the first step; also where the rule of a weight holds on one process only."""
    net, inputs, y = uneven_data(kind)
    loss = torch.stack([F.cross_entropy(net(x), y) for x in inputs]).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    pull = 1.0 / 12
    expected = torch.cat([(g + pull * p.detach()).flatten() for g, p in zip(grads, net.parameters(), strict=True)])
    for found in ranks:
        assert_close(found[f"{kind.__name__} | {name}"]["momentum"], expected)


@pytest.mark.parametrize("name", ["kfac", "noisy kfac"])
def test_a_layer_that_one_process_cannot_factor_has_a_diagonal_on_all(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert found[f"Branched | {name}"]["factored"] == ["first.weight", "middle.weight", "last.weight"]
        assert found[f"Gated | {name}"]["factored"] == ["last.weight"]


def test_examples_are_counted_exactly_in_half_precision(ranks: list[dict[str, Any]]) -> None:
    assert [float(found["half"]["weights"]) for found in ranks] == [261.0, 261.0]


def test_the_reparametrised_estimate_is_unbiased_on_one_and_two_processes(ranks: list[dict[str, Any]]) -> None:
    problem = make_regression(orthogonal=False)
    hessian = problem.x.square().sum(0) / problem.noise**2 / problem.n_data
    expected = hessian.expand(3, 4)
    assert_close(reparametrised_mean(6000), expected, rtol=0, atol=0.08 * float(hessian.max()))
    for found in ranks:
        assert_close(found["reparametrised"]["weights"], expected, rtol=0, atol=0.12 * float(hessian.max()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs a system that lists the threads of a process")
def test_no_thread_is_left_when_the_group_is_left(ranks: list[dict[str, Any]]) -> None:
    # One of gloo that needs Python while the interpreter ends would abort the process.
    for found in ranks:
        assert int(found["threads of gloo"]["weights"]) == 0


@pytest.mark.slow
def test_a_killed_process_resumes_and_ends_where_an_uninterrupted_run_ends(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "PYTHONWARNINGS": "ignore"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--monitor-interval=0.2",
    ]
    port = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    script = ["-m", "tests.optim.elastic", str(tmp_path), "noisy kfac"]
    done = subprocess.run([*launch, *port, *script], cwd=ROOT, env=env, capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert {(tmp_path / f"resumed{r}").read_text() for r in range(2)} == {"5"}
    net, x, y = classifier()
    steps(PRESETS["noisy kfac"](net), net, x, y, STEPS)
    for rank in range(2):
        assert_close(torch.load(tmp_path / f"final{rank}.pt", weights_only=True), flat(net))
