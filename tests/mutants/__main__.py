"""How many small errors in the numerical core do the tests find? `make mutants`, or `python -m tests.mutants --sample 60`.

Every mutant is a copy of one file with one error in it. The tests that belong to the file run until one fails; a mutant with
which none fails has survived, and needs a test, or a sentence in `equivalent.json` that says why nothing can tell it from the original.
Where the code itself does nothing it is deleted, and its mutants with it. A sample with another seed says how good the tests have become.

Results are written after every mutant, so that the program goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.mutants.mutations import BY_HAND, Mutation, mutate, mutations_of

__all__ = ["EQUIVALENT", "RESULTS", "TESTS", "all_mutations", "by_hand", "main", "summary"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "aftermap"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
NAMED = Path(__file__).with_name("by_hand.json")
EQUIVALENT = Path(__file__).with_name("equivalent.json")

PRELOADED = (
    "numpy", "pytest", "hypothesis", "scipy.stats", "scipy.optimize", "sklearn.metrics", "torch", "torch.func", "torch.distributed.tensor",
    "torch.nn.parallel", "torch.utils.checkpoint", "torch._dynamo",
)  # fmt: skip
_PATIENCE = 20  # So many times its processor time a mutant may take by the clock, on a machine that is shared.
_POSTERIORS = (
    "tests/curvature/test_kinds.py",
    "tests/posteriors/test_contract.py",
    "tests/posteriors/test_sampling.py",
)
# The tests that belong to a file, the quickest first; its own doctests run before all.
TESTS: dict[str, tuple[str, ...]] = {
    "linalg.py": ("tests/test_linalg.py", "tests/test_gram_sum.py"),
    "krylov.py": ("tests/test_krylov.py",),
    "prior.py": ("tests/test_prior.py",),
    "distributed.py": ("tests/test_shares.py", "tests/curvature/test_distributed.py"),
    "likelihoods/gaussian.py": ("tests/test_likelihoods.py", "tests/test_likelihoods_input.py"),
    "likelihoods/discrete.py": ("tests/test_likelihoods.py", "tests/test_likelihoods_input.py"),
    "curvature/passes/vectors.py": ("tests/curvature/passes/test_vectors.py", "tests/curvature/test_kinds.py"),
    "curvature/passes/stream.py": ("tests/curvature/test_engine_conditions.py", "tests/curvature/test_kinds.py"),
    "curvature/passes/products.py": ("tests/curvature/passes/test_products.py", "tests/posteriors/test_ggn_noise.py"),
    "curvature/rules/linear.py": ("tests/curvature/rules/test_rows.py", "tests/curvature/rules/test_layer_rules.py", "tests/curvature/test_kinds.py"),
    "curvature/rules/scale.py": ("tests/curvature/rules/test_rows.py", "tests/curvature/rules/test_layer_rules.py", "tests/curvature/test_kinds.py"),
    "curvature/rules/convolution.py": ("tests/curvature/rules/test_rows.py", "tests/curvature/rules/test_convolution.py", "tests/curvature/rules/test_layer_rules.py"),
    "curvature/structures/eigenbasis.py": ("tests/curvature/structures/test_eigenbasis.py", "tests/curvature/structures/test_damping.py", "tests/curvature/structures/test_ekfac_exact.py", *_POSTERIORS),
    "curvature/structures/kron.py": ("tests/curvature/structures/test_kron_exact.py", "tests/curvature/structures/test_damping.py", *_POSTERIORS, "tests/laplace/test_exact.py", "tests/curvature/structures/test_informed.py", "tests/curvature/structures/test_sketch.py"),
    "curvature/structures/ekfac.py": ("tests/curvature/structures/test_ekfac.py", "tests/curvature/structures/test_ekfac_exact.py", *_POSTERIORS),
    "curvature/structures/diagonal.py": ("tests/curvature/structures/test_informed.py", *_POSTERIORS),
    "curvature/structures/full.py": ("tests/curvature/structures/test_full.py", "tests/curvature/structures/test_hessian.py", *_POSTERIORS),
    "curvature/structures/low_rank.py": ("tests/curvature/structures/test_low_rank.py", "tests/analysis/test_where_calibration.py", "tests/curvature/structures/test_layer_parts.py", *_POSTERIORS),
    "curvature/structures/sketch.py": ("tests/curvature/structures/test_sketch.py",),
    "curvature/structures/layer_covariance.py": ("tests/posteriors/test_functional.py", "tests/posteriors/test_contract.py"),
    "curvature/structures/kfra.py": ("tests/curvature/structures/test_kfra.py",),
    "curvature/structures/subset.py": ("tests/curvature/test_subset.py",),
    "laplace/evidence.py": ("tests/laplace/test_evidence.py", "tests/laplace/test_exact.py", "tests/laplace/test_tune.py"),
    "laplace/regression_rule.py": ("tests/laplace/test_regression_rule.py", "tests/laplace/test_output_noise.py"),
    "laplace/output_noise.py": ("tests/laplace/test_output_noise.py", "tests/laplace/test_validation_distributed.py"),
    "laplace/validation.py": ("tests/laplace/test_validation_rule.py", "tests/laplace/test_validation_tune.py"),
    "laplace/dimension.py": ("tests/laplace/test_dimension.py",),
    "predictive/latent.py": ("tests/predictive/test_latent.py", "tests/laplace/test_output_temperature.py", "tests/predictive/test_links.py", "tests/predictive/test_quadrature.py", "tests/laplace/test_shift.py"),
    "predictive/links.py": ("tests/predictive/test_links.py", "tests/predictive/test_links_other.py", "tests/laplace/test_output_temperature.py"),
    "predictive/linearised.py": ("tests/predictive/test_linearised.py", "tests/predictive/test_margin.py", "tests/predictive/test_predictor.py"),
    "predictive/quadrature.py": ("tests/predictive/test_quadrature.py", "tests/predictive/test_links.py"),
    "optim/vogn.py": ("tests/optim/test_first_steps.py", "tests/optim/test_fixed_points.py", "tests/optim/test_options.py", "tests/optim/test_posterior.py"),
    "optim/ivon.py": ("tests/optim/test_ivon.py", "tests/optim/test_fixed_points.py", "tests/optim/test_contract.py"),
    "optim/kfac.py": ("tests/optim/test_first_steps.py", "tests/optim/test_kfac.py", "tests/optim/test_contract.py"),
    "metrics/calibration.py": ("tests/metrics/test_calibration.py",),
    "metrics/scoring.py": ("tests/metrics/test_scoring.py",),
    "metrics/detection.py": ("tests/metrics/test_detection.py", "tests/metrics/test_selective.py"),
    "metrics/regression.py": ("tests/metrics/test_regression.py", "tests/metrics/test_intervals.py"),
    "hessian_free/pushes.py": ("tests/hessian_free/test_pushes.py", "tests/hessian_free/test_oracles.py"),
    "hessian_free/objective.py": ("tests/hessian_free/test_objective.py", "tests/hessian_free/test_oracles.py", "tests/hessian_free/test_minimise.py"),
    "batches.py": ("tests/test_batches.py", "tests/predictive/test_forms_of_inputs.py"),
    "params.py": ("tests/test_params.py",),
    "draws.py": ("tests/predictive/test_sampling.py", "tests/posteriors/test_sampling.py",),
    "models.py": ("tests/test_models.py",),
    "likelihoods/base.py": ("tests/test_likelihoods.py", "tests/test_likelihoods_input.py",),
    "likelihoods/registry.py": ("tests/test_likelihoods_registry.py", "tests/test_likelihoods.py", "tests/test_likelihoods_input.py"),
    "curvature/fit.py": ("tests/curvature/test_kinds.py", "tests/curvature/test_engine_conditions.py", "tests/curvature/test_bad_input.py",),
    "curvature/passes/backward.py": ("tests/curvature/passes/test_backward.py", "tests/curvature/passes/test_plan.py", "tests/curvature/test_kinds.py", "tests/curvature/test_engine_models.py",),
    "curvature/passes/block.py": ("tests/curvature/test_kinds.py", "tests/curvature/test_engine_conditions.py",),
    "curvature/passes/checkpoint.py": ("tests/curvature/passes/test_checkpoint.py",),
    "curvature/passes/closure.py": ("tests/curvature/passes/test_closure.py", "tests/optim/test_first_steps.py", "tests/optim/test_kfac.py", "tests/optim/test_training.py"),
    "curvature/passes/counts.py": ("tests/curvature/test_kinds.py", "tests/curvature/test_engine_conditions.py",),
    "curvature/passes/fallback.py": ("tests/curvature/test_engine_conditions.py", "tests/curvature/test_engine_corners.py", "tests/curvature/test_engine_models.py",),
    "curvature/passes/gradient_reader.py": ("tests/curvature/passes/test_closure.py", "tests/optim/test_squares.py", "tests/optim/test_first_steps.py",),
    "curvature/passes/last_block.py": ("tests/curvature/passes/test_last_block.py",),
    "curvature/passes/per_example.py": ("tests/curvature/test_engine_conditions.py", "tests/curvature/test_engine_models.py", "tests/posteriors/test_gradients.py",),
    "curvature/passes/plan.py": ("tests/curvature/passes/test_plan.py", "tests/curvature/test_engine_conditions.py", "tests/curvature/test_engine_corners.py", "tests/curvature/test_engine_models.py",),
    "curvature/passes/record.py": ("tests/curvature/passes/test_backward.py", "tests/curvature/passes/test_closure.py", "tests/curvature/test_engine_conditions.py", "tests/curvature/test_engine_corners.py", "tests/curvature/test_engine_models.py",),
    "curvature/reference/curvature.py": ("tests/curvature/reference/test_reference.py", "tests/curvature/test_kinds.py",),
    "curvature/reference/layers.py": ("tests/curvature/reference/test_reference.py", "tests/curvature/rules/test_layer_rules.py", "tests/curvature/rules/test_attention.py",),
    "curvature/rules/attention.py": ("tests/curvature/rules/test_attention.py", "tests/curvature/rules/test_layer_rules.py",),
    "curvature/rules/base.py": ("tests/curvature/rules/test_rows.py", "tests/curvature/rules/test_layer_rules.py", "tests/curvature/rules/test_attention.py", "tests/curvature/rules/test_convolution.py", "tests/curvature/test_kinds.py",),
    "curvature/structures/assign.py": ("tests/curvature/test_bad_input.py", "tests/curvature/test_kinds.py",),
    "curvature/structures/base.py": ("tests/curvature/test_engine_corners.py", "tests/predictive/test_local.py", *_POSTERIORS, "tests/curvature/structures/test_damping.py",),
    "curvature/structures/flat.py": (*_POSTERIORS, "tests/curvature/structures/test_full.py",),
    "curvature/structures/hessian.py": ("tests/curvature/structures/test_hessian.py", *_POSTERIORS,),
    "curvature/structures/layer_parts.py": ("tests/curvature/structures/test_layer_parts.py", "tests/analysis/test_where_calibration.py", "tests/posteriors/test_functional.py",),
    "curvature/structures/subnetwork.py": ("tests/laplace/test_subnetwork.py", *_POSTERIORS,),
    "posteriors/base.py": (*_POSTERIORS, "tests/laplace/test_self_consistent.py", "tests/posteriors/test_functional.py", "tests/posteriors/test_gradients.py",),
    "posteriors/consistency.py": ("tests/posteriors/test_io_damaged.py", "tests/posteriors/test_io.py", "tests/laplace/test_subnetwork.py",),
    "posteriors/dual.py": ("tests/posteriors/test_dual.py",),
    "posteriors/encoding.py": ("tests/posteriors/test_io.py", "tests/posteriors/test_io_damaged.py",),
    "posteriors/files.py": ("tests/posteriors/test_io.py", "tests/posteriors/test_io_damaged.py", "tests/faults/test_damaged_files.py",),
    "posteriors/io.py": ("tests/posteriors/test_io.py", "tests/posteriors/test_io_damaged.py",),
    "posteriors/matrix_free.py": ("tests/posteriors/test_matrix_free.py", "tests/posteriors/test_matrix_free_predictive.py",),
    "posteriors/records.py": ("tests/posteriors/test_io.py", "tests/posteriors/test_io_damaged.py",),
    "posteriors/solver.py": ("tests/posteriors/test_matrix_free.py", "tests/posteriors/test_matrix_free_predictive.py",),
    "predictive/functionals.py": ("tests/posteriors/test_functional.py", "tests/predictive/test_linearised.py",),
    "predictive/prediction.py": ("tests/predictive/test_prediction.py", "tests/predictive/test_prediction_container.py",),
    "predictive/predictor.py": ("tests/predictive/test_predictor.py", "tests/predictive/test_forms_of_inputs.py", "tests/predictive/test_local.py", "tests/predictive/test_margin.py",),
    "predictive/sampling.py": ("tests/predictive/test_sampling.py", "tests/predictive/test_sampling_gradient.py",),
    "predictive/trained.py": ("tests/optim/test_posterior.py", "tests/predictive/test_predictor.py", "tests/laplace/test_output_temperature.py",),
    "laplace/auto.py": ("tests/laplace/test_auto.py", "tests/laplace/test_fit.py", "tests/laplace/test_output_noise.py"),
    "laplace/cost.py": ("tests/laplace/test_cost.py",),
    "laplace/examples.py": ("tests/laplace/test_self_consistent.py", "tests/laplace/test_validation_tune.py",),
    "laplace/fitted.py": ("tests/laplace/test_fit.py", "tests/laplace/test_state.py", "tests/laplace/test_tune.py",),
    "laplace/golden.py": ("tests/laplace/test_tune.py", "tests/laplace/test_self_consistent.py",),
    "laplace/grid.py": ("tests/laplace/test_tune.py", "tests/laplace/test_validation_tune.py",),
    "laplace/laplace.py": ("tests/laplace/test_fit.py", "tests/laplace/test_state.py",),
    "laplace/latents.py": ("tests/laplace/test_self_consistent.py", "tests/laplace/test_validation_tune.py",),
    "laplace/marglik.py": ("tests/laplace/test_marglik.py", "tests/laplace/test_temperature.py"),
    "laplace/mixture.py": ("tests/laplace/test_mixture.py",),
    "laplace/regression.py": ("tests/laplace/test_regression_rule.py", "tests/laplace/test_regression_distributed.py", "tests/laplace/test_tune.py", "tests/laplace/test_auto.py",),
    "laplace/saving.py": ("tests/laplace/test_saving.py", "tests/laplace/test_saving_extras.py",),
    "laplace/selection.py": ("tests/laplace/test_selection.py",),
    "laplace/self_check.py": ("tests/laplace/test_self_check.py",),
    "laplace/self_consistent.py": ("tests/laplace/test_self_consistent.py", "tests/laplace/test_cavities.py",),
    "laplace/stationarity.py": ("tests/laplace/test_stationarity.py",),
    "laplace/subnetwork.py": ("tests/laplace/test_subnetwork.py",),
    "laplace/trained.py": ("tests/laplace/test_trained.py",),
    "laplace/tune.py": ("tests/laplace/test_tune.py", "tests/laplace/test_evidence.py", "tests/laplace/test_self_consistent.py"),
    "optim/base.py": ("tests/optim/test_contract.py", "tests/optim/test_options.py", "tests/optim/test_first_steps.py", "tests/optim/test_bad_input.py", "tests/optim/test_posterior.py", "tests/optim/test_training.py"),
    "optim/noise.py": ("tests/optim/test_noise.py", "tests/optim/test_fixed_points.py",),
    "optim/options.py": ("tests/optim/test_options.py", "tests/optim/test_bad_input.py",),
    "optim/statistics.py": ("tests/optim/test_statistics.py", "tests/optim/test_fixed_points.py", "tests/optim/test_squares.py", "tests/optim/test_first_steps.py",),
    "hessian_free/amortised.py": ("tests/hessian_free/test_amortised.py",),
    "hessian_free/hessian_free.py": ("tests/hessian_free/test_variance_of.py", "tests/hessian_free/test_oracles.py", "tests/hessian_free/test_robustness.py",),
    "hessian_free/minimise.py": ("tests/hessian_free/test_minimise.py", "tests/hessian_free/test_oracles.py", "tests/hessian_free/test_robustness.py"),
    "hessian_free/settings.py": ("tests/hessian_free/test_robustness.py", "tests/hessian_free/test_oracles.py",),
    "metrics/bootstrap.py": ("tests/metrics/test_bootstrap.py",),
    "metrics/streaming.py": ("tests/metrics/test_streaming.py",),
    "metrics/tensors.py": ("tests/metrics",),
    "curvature/structures/rounding.py": ("tests/curvature/structures/test_rounding.py",),
    "laplace/overlap.py": ("tests/laplace/test_overlap.py", "tests/laplace/test_validation_tune.py", "tests/laplace/test_tune.py"),
    "laplace/rehearsal.py": ("tests/laplace/test_rehearsal.py", "tests/laplace/test_cost.py"),
}  # fmt: skip

# What a file refuses is tested in one place for many of them.
LIMITS = "tests/test_limits.py"
LIMITED = {
    "batches.py", "krylov.py", "prior.py", "curvature/passes/products.py", "curvature/passes/vectors.py", "curvature/structures/hessian.py",
    "laplace/fitted.py", "likelihoods/base.py", "likelihoods/discrete.py", "likelihoods/gaussian.py", "metrics/regression.py",
    "metrics/scoring.py", "optim/base.py", "optim/options.py", "posteriors/base.py", "posteriors/dual.py", "posteriors/matrix_free.py",
    "predictive/links.py", "predictive/prediction.py", "predictive/trained.py",
}  # fmt: skip


def all_mutations() -> list[Mutation]:
    """Every mutation of the numerical core, in the order of `TESTS`."""
    return [m for file in TESTS for m in mutations_of((SOURCE / file).read_text(), file)]


def by_hand() -> list[Mutation]:
    """The mutations of `by_hand.json`, which are always tried: errors that the operators do not make."""
    found = []
    for name, entry in json.loads(NAMED.read_text()).items():
        lines = (SOURCE / entry["file"]).read_text().splitlines()
        line = next((n for n, text in enumerate(lines, 1) if entry["before"].splitlines()[0] in text), 0)
        found.append(Mutation(entry["file"], name, BY_HAND, 0, line, entry["before"], entry["after"]))
    return found


def _sampled(mutations: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Some mutations, each as likely as any other: the share that is found of them estimates the share of all.

    Their order follows from the seed and their names, so that a change of the sources hardly changes the sample.
    """
    return sorted(mutations, key=lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest())[:count]


def _forget_compiled(source: Path) -> None:
    """Deletes the compiled form of a file, which Python would take for that of another mutant of the same size and second."""
    Path(importlib.util.cache_from_source(str(source))).unlink(missing_ok=True)


def _test_files(file: str) -> list[str]:
    """The test files that belong to a file of the library, with folders opened."""
    besides = (LIMITS,) if file in LIMITED else ()
    found = (p for t in (*besides, *TESTS[file]) for p in (sorted((ROOT / t).rglob("test_*.py")) or [ROOT / t]))
    return list(dict.fromkeys(p.relative_to(ROOT).as_posix() for p in found))


def _run_tests(package: Path, file: str, tests: list[str], left_out: Sequence[str], log: Path, times: Path) -> NoReturn:
    """In a child process: the doctests of a file of a copy of the library, then test files one after the other, up to the first that fails.

    Ends the process with pytest's exit code, and writes how long each took.
    """
    os.chdir(ROOT)
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.path.insert(0, str(package))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package), str(ROOT)])
    import pytest

    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--rootdir={ROOT}",
    ]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # What is imported once is not rewritten.
    options += [f"--deselect={node}" for node in left_out]
    seconds: dict[str, float] = {}
    code = 1
    try:
        for test in ["", *tests]:
            started = time.process_time()
            # Doctests are of the module that the tests import: `importlib` would make a second one, which monkeypatches do not reach.
            target = [f"{ROOT}/{test}"] if test else ["--import-mode=prepend", str(package / "aftermap" / file)]
            code = int(pytest.main([*options, *target]))
            code = (
                0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and not test else code
            )  # A file may have no doctests.
            seconds[test] = round(time.process_time() - started, 2)
            times.write_text(json.dumps(seconds))
            if code:
                break
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _judge(
    package: Path, mutation: Mutation | None, file: str, tests: list[str], limit: float, left_out: Sequence[str] = ()
) -> tuple[str, str]:
    """What the tests, less some, say of a mutant (None: of the original): "found", "found by time" or "survived"; and by which test."""
    target, original = package / "aftermap" / file, (SOURCE / file).read_text()
    log, times = package / "log.txt", package / "times.json"
    child: int | None = None
    try:
        if mutation is not None:
            target.write_text(mutate(original, mutation))
        _forget_compiled(target)
        times.unlink(missing_ok=True)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()  # Processes that a test starts end with it.
            _run_tests(package, file, tests, left_out, log, times)
        ended, status = 0, 0
        while not ended and _used(child) < limit and time.monotonic() - started < _PATIENCE * limit:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            return "found by time", f"no answer after {limit:.0f} s"
        child = None
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        target.write_text(original)
        _forget_compiled(target)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "survived", ""
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR", "E  "))
    ]
    return "found", (lines[-1] if lines else f"exit code {code}").replace(str(package), "")[:160]


def _used(process: int) -> float:
    """The seconds of processor time of a process: on a busy machine the clock says little of what tests have done."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # There is no such folder on some systems: the clock alone decides.
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _times(package: Path) -> dict[str, float]:
    """The seconds of each test file that the last child ran, in its order; the last one failed if the child failed."""
    file = package / "times.json"
    times: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return times


def _ordered(file: str, seconds: dict[str, float]) -> tuple[list[str], float]:
    """The test files of a file, the quickest first, and the time limit for a mutant: several times what they took before."""
    expected = {test: seconds.get(test, 10.0) for test in _test_files(file)}
    return sorted(expected, key=expected.__getitem__), 30 + 3 * sum(expected.values())


def _passes(package: Path, file: str, test: str, node: str, passed: dict[str, str]) -> bool:
    """Whether a test that found a mutant passes without it. It is run once for every version of its file and the mutated file.

    Args:
        package: The copy of the library.
        file: The file that was mutated.
        test: The test file; empty for doctests.
        node: The test in it, by pytest's name; empty if the whole file failed.
        passed: What has passed so far, which is added to.
    """
    content = (SOURCE / file).read_bytes() + ((ROOT / test).read_bytes() if test else b"")
    name, digest = node or test or f"doctests of {file}", hashlib.sha256(content).hexdigest()
    if passed.get(f"{name}, {file}") == digest:
        return True
    verdict, why = _judge(package, None, file, [node or test] if test else [], 600)
    if verdict != "survived":
        _say(f"{(package / 'log.txt').read_text()[-3000:]}\n{name} fails without any mutation: {why}")
        return False
    passed[f"{name}, {file}"] = digest
    return True


def _failed_node(why: str, test: str) -> str:
    """The name of the test in a line of pytest's summary; empty where it names no test of this file.

    >>> _failed_node("FAILED tests/test_a.py::test_b[x - 1-True] - assert 1 == 2", "tests/test_a.py")
    'tests/test_a.py::test_b[x - 1-True]'
    >>> _failed_node("ERROR tests/test_a.py - ImportError", "tests/test_a.py")
    ''
    """
    named = re.match(rf"FAILED ({re.escape(test)}::[^\[\s]+(\[.*?\](?= - |$))?)", why) if test else None
    return named[1] if named else ""


def _note_deleted(results: dict[str, Any], every: Sequence[Mutation]) -> None:
    """Notes which survivors are gone because the code that nothing could tell was deleted."""
    there = {m.name: m.before for m in every}
    for name, entry in results["mutants"].items():
        if entry["result"] == "survived" and entry["operator"] != BY_HAND and there.get(name) != entry["before"]:
            entry["result"] = "deleted"


def _keep(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes what is known so far."""
    if not options.only:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _preload() -> None:
    """Imports once, for all children, what the tests import besides the library."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)  # Threads do not survive a fork.


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The counts of a run, and the survivors that nobody has explained.

    Returns:
        "files" (that mutants were drawn from); "tried", "found", "found_at_first" (before tests were written for survivors), "deleted" (code that
        nothing could tell, and that is gone), "equivalent", "share" and "share_at_first" (of those that can be found), of all mutants that were
        drawn; "samples": the same by the seed of each draw, in their order; "by_operator", with those by hand: [found, tried, deleted or
        equivalent]; "explained": name -> why; "survivors"; and "seconds", the mean time that a mutant took.
    """
    why = json.loads(EQUIVALENT.read_text())
    told = results["mutants"]
    survivors = sorted(name for name, entry in told.items() if entry["result"] == "survived")
    drawn = {name: entry for name, entry in told.items() if entry["operator"] != BY_HAND}
    operators = sorted({entry["operator"] for entry in told.values()}, key=lambda name: (name == BY_HAND, name))
    by_operator = {}
    for operator in operators:
        counted = _counted({name: entry for name, entry in told.items() if entry["operator"] == operator}, why)
        by_operator[operator] = [counted["found"], counted["tried"], counted["deleted"] + counted["equivalent"]]
    return {
        "files": sorted({name.split(":")[0] for name in drawn}),
        **_counted(drawn, why),
        "samples": {
            seed: _counted({name: entry for name, entry in drawn.items() if entry["sample"] == seed}, why)
            for seed in sorted({entry["sample"] for entry in drawn.values()})
        },
        "by_operator": by_operator,
        "explained": {name: why[name] for name in survivors if name in why},
        "survivors": [name for name in survivors if name not in why],
        "seconds": sum(entry["seconds"] for entry in told.values()) / len(told) if told else None,
    }


def _counted(entries: Mapping[str, Mapping[str, Any]], why: Mapping[str, str]) -> dict[str, Any]:
    """How many of some mutants were found, at first and in the end, and which share of those that can be found."""
    results = [entry["result"] for entry in entries.values()]
    found = [entry for entry in entries.values() if entry["result"].startswith("found")]
    at_first = sum("survived_at_first" not in entry for entry in found)
    deleted = results.count("deleted")
    equivalent = sum(name in why and entry["result"] == "survived" for name, entry in entries.items())
    judged = len(entries) - deleted - equivalent
    return {
        "tried": len(entries),
        "found": len(found),
        "found_at_first": at_first,
        "deleted": deleted,
        "equivalent": equivalent,
        "share": len(found) / judged if judged else None,
        "share_at_first": at_first / judged if judged else None,
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs a sample of mutants, and goes on with the results that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="which sample: another seed draws other mutants, and the results of all are kept",
    )
    parser.add_argument("--files", nargs="*", help="of the sample, only what is in these files, such as linalg.py")
    parser.add_argument("--only", help="one mutant by its name, with the output of its tests")
    parser.add_argument(
        "--again", action="store_true", help="try survivors that nobody has explained again, after a test was written"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; the same call goes on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    _preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the tests of a mutant do not outlive the program.
    every = all_mutations()
    results: dict[str, Any] = {"of": len(every), "mutants": {}, "passed": {}, "seconds": {}}
    if options.results.exists() and not options.only:
        results = {**json.loads(options.results.read_text()), "of": len(every)}
    _note_deleted(results, every)  # Before survivors are tried again: another expression may have the name now.
    if options.only:
        chosen = [m for m in (*by_hand(), *every) if m.name == options.only]
    else:
        drawn = [*by_hand(), *_sampled(every, options.sample, options.seed)]
        if options.again:
            names = {m.name for m in drawn}
            left = {n for n, entry in results["mutants"].items() if entry["result"] == "survived"} - names
            drawn += [m for m in every if m.name in left]
        chosen = [m for m in drawn if not options.files or m.file in options.files]
    _keep(results, options)  # How many mutants there are now, and what was deleted, holds without a new one.
    explained = json.loads(EQUIVALENT.read_text())
    end, left_out = time.monotonic() + 60 * options.minutes, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder)
        shutil.copytree(SOURCE, package / "aftermap", ignore=shutil.ignore_patterns("__pycache__"))
        for number, mutation in enumerate(chosen):
            known = results["mutants"].get(mutation.name)
            again = options.again and known and known["result"] == "survived" and mutation.name not in explained
            if known and known["before"] == mutation.before and not again:
                continue
            if time.monotonic() > end:
                _say(f"stopped after {options.minutes:g} minutes, before {mutation.name}")
                break
            tests, limit = _ordered(mutation.file, results["seconds"])
            started = time.monotonic()
            while True:
                verdict, why = _judge(package, mutation, mutation.file, tests, limit, left_out)
                seconds, taken = round(time.monotonic() - started, 1), _times(package)
                failed = list(taken)[-1] if taken and verdict == "found" else ""
                results["seconds"].update({test: took for test, took in taken.items() if test not in ("", failed)})
                node = _failed_node(why, failed)
                if verdict != "found" or _passes(package, mutation.file, failed, node, results["passed"]):
                    break
                if not node:
                    raise SystemExit(f"{failed or mutation.file} must pass before mutants can be judged by it")
                left_out.append(node)  # It judges nothing on this machine.
            change = f"line {mutation.line}: {mutation.before} -> {mutation.after}"
            _say(f"{number + 1}/{len(chosen)} {verdict} ({seconds} s): {mutation.name}, {change} {why}")
            if options.only:
                _say((package / "log.txt").read_text()[-2000:])
                continue
            entry = {
                "result": verdict, "operator": mutation.operator, "before": mutation.before, "after": mutation.after,
                "by": why, "seconds": seconds,
            }  # fmt: skip
            if mutation.operator != BY_HAND:
                entry["sample"] = known["sample"] if known else options.seed
            if known and (known["result"] == "survived" or "survived_at_first" in known):
                entry["survived_at_first"] = True
            results["mutants"][mutation.name] = entry
            _keep(results, options)
    if options.only:
        return 0
    counted = summary(results)
    _say(json.dumps(counted, indent=1))
    return 1 if counted["survivors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
