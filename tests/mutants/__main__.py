"""How many small errors in the numerical core do the tests find? `make mutants`, or `python -m tests.mutants --sample 60`.

Every mutant is a copy of one file with one error in it. The tests that belong to the file run until one fails; a mutant with
which none fails has survived, and needs a test, or a sentence in `equivalent.json` that says why nothing can tell it from the original.

Results are written after every mutant, so that the program goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.mutants.mutations import Mutation, mutate, mutations_of

__all__ = ["EQUIVALENT", "RESULTS", "TESTS", "all_mutations", "main", "summary"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "aftermap"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent.json")

_STRUCTURES = ("tests/curvature/structures", "tests/curvature/test_kinds.py")
_POSTERIORS = ("tests/posteriors/test_contract.py", "tests/posteriors/test_sampling.py")
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
    "curvature/rules/linear.py": ("tests/curvature/rules/test_layer_rules.py", "tests/curvature/test_kinds.py"),
    "curvature/rules/scale.py": ("tests/curvature/rules/test_layer_rules.py", "tests/curvature/test_kinds.py"),
    "curvature/rules/convolution.py": ("tests/curvature/rules/test_convolution.py", "tests/curvature/rules/test_layer_rules.py"),
    "curvature/structures/eigenbasis.py": ("tests/curvature/structures/test_eigenbasis.py", *_STRUCTURES, *_POSTERIORS),
    "curvature/structures/kron.py": (*_STRUCTURES, *_POSTERIORS, "tests/laplace/test_exact.py"),
    "curvature/structures/ekfac.py": (*_STRUCTURES, *_POSTERIORS, "tests/curvature/test_engine_models.py"),
    "curvature/structures/diagonal.py": (*_STRUCTURES, *_POSTERIORS),
    "curvature/structures/full.py": (*_STRUCTURES, *_POSTERIORS),
    "curvature/structures/low_rank.py": (*_STRUCTURES, *_POSTERIORS),
    "curvature/structures/layer_covariance.py": ("tests/posteriors/test_functional.py", *_STRUCTURES),
    "curvature/structures/kfra.py": ("tests/curvature/structures/test_kfra.py",),
    "curvature/structures/subset.py": ("tests/curvature/test_subset.py",),
    "laplace/evidence.py": ("tests/laplace/test_evidence.py", "tests/laplace/test_exact.py", "tests/laplace/test_tune.py"),
    "laplace/regression_rule.py": ("tests/laplace/test_regression_rule.py",),
    "laplace/validation.py": ("tests/laplace/test_validation_rule.py", "tests/laplace/test_validation_tune.py"),
    "laplace/dimension.py": ("tests/laplace/test_dimension.py",),
    "predictive/links.py": ("tests/predictive/test_links.py", "tests/predictive/test_links_other.py", "tests/laplace/test_output_temperature.py"),
    "predictive/linearised.py": ("tests/predictive/test_linearised.py", "tests/predictive/test_predictor.py"),
    "predictive/quadrature.py": ("tests/predictive/test_quadrature.py", "tests/predictive/test_links.py"),
    "optim/vogn.py": ("tests/optim/test_fixed_points.py", "tests/optim/test_first_steps.py", "tests/optim/test_contract.py", "tests/optim/test_posterior.py"),
    "optim/ivon.py": ("tests/optim/test_ivon.py", "tests/optim/test_first_steps.py", "tests/optim/test_contract.py"),
    "optim/kfac.py": ("tests/optim/test_kfac.py", "tests/optim/test_first_steps.py", "tests/optim/test_contract.py"),
    "metrics/calibration.py": ("tests/metrics/test_calibration.py",),
    "metrics/scoring.py": ("tests/metrics/test_scoring.py",),
    "metrics/detection.py": ("tests/metrics/test_detection.py",),
    "metrics/regression.py": ("tests/metrics/test_regression.py", "tests/metrics/test_intervals.py"),
    "hessian_free/pushes.py": ("tests/hessian_free/test_pushes.py", "tests/hessian_free/test_oracles.py"),
    "hessian_free/objective.py": ("tests/hessian_free/test_oracles.py", "tests/hessian_free/test_minimise.py"),
}  # fmt: skip


def all_mutations() -> list[Mutation]:
    """Every mutation of the numerical core, in the order of `TESTS`."""
    return [m for file in TESTS for m in mutations_of((SOURCE / file).read_text(), file)]


def _sampled(mutations: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Some mutations: files, and operators in a file, are drawn from equally often, so that long ones do not hide the others."""
    source = random.Random(seed)
    waiting: dict[str, dict[str, list[Mutation]]] = {}
    for mutation in mutations:
        waiting.setdefault(mutation.file, {}).setdefault(mutation.operator, []).append(mutation)
    rounds: list[list[Mutation]] = []
    for operators in waiting.values():
        lists = [source.sample(several, len(several)) for several in operators.values()]
        source.shuffle(lists)
        rounds.append([m for turn in zip_longest(*lists) for m in turn if m is not None])
    source.shuffle(rounds)
    return [m for turn in zip_longest(*rounds) for m in turn if m is not None][:count]


def _run_tests(package: Path, file: str, log: Path) -> None:
    """In a child process: the tests of a file against a copy of the library; ends the process with pytest's exit code."""
    os.chdir(ROOT)
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.path.insert(0, str(package))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package), str(ROOT)])
    import pytest

    tests = [str(package / "aftermap" / file), *(t for t in TESTS[file] if (ROOT / t).exists())]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", f"--rootdir={ROOT}", *tests])
    os._exit(int(code))


def _judge(package: Path, mutation: Mutation | None, file: str, seconds: float, log: Path) -> tuple[str, str]:
    """What the tests say of a mutant (None: of the original): "found", "found by time", "survived" or "broken"; and by which test."""
    target, original = package / "aftermap" / file, (SOURCE / file).read_text()
    child: int | None = None
    try:
        if mutation is not None:
            target.write_text(mutate(original, mutation))
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()  # Processes that a test starts end with it.
            _run_tests(package, file, log)
        ended, status = 0, 0
        while not ended and time.monotonic() - started < seconds:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.05)
        if not ended:
            return "found by time", f"no answer after {seconds:.0f} s"
        child = None
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        target.write_text(original)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "survived", ""
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR", "E  "))
    ]
    return "found", (lines[-1] if lines else f"exit code {code}")[:160]


def _seconds_without(package: Path, file: str, known: dict[str, Any], log: Path) -> float:
    """The seconds that the tests of a file take without any mutation; they must pass. What is known of the same tests is taken."""
    paths = [SOURCE / file, *(p for t in TESTS[file] for p in sorted((ROOT / t).rglob("*.py")) or [ROOT / t])]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in paths if p.exists())).hexdigest()
    if known.get(file, {}).get("digest") != digest:
        started = time.monotonic()
        verdict, why = _judge(package, None, file, 900, log)
        if verdict != "survived":
            raise SystemExit(f"{log.read_text()[-3000:]}\nthe tests of {file} fail without any mutation: {why}")
        known[file] = {"digest": digest, "seconds": round(time.monotonic() - started, 1)}
    return float(known[file]["seconds"])


def _keep(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes what is known so far."""
    if not options.only:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The counts of a run, and the survivors that nobody has explained."""
    explained = json.loads(EQUIVALENT.read_text())
    told = results["mutants"]
    counts = Counter(entry["result"] for entry in told.values())
    survivors = sorted(name for name, entry in told.items() if entry["result"] == "survived")
    equivalent = [name for name in survivors if name in explained]
    judged = len(told) - len(equivalent)
    found = counts["found"] + counts["found by time"]
    return {
        "tried": len(told),
        "found": found,
        "equivalent": len(equivalent),
        "survivors": [name for name in survivors if name not in explained],
        "share": found / judged if judged else None,
        "by_operator": {
            op: [sum(e["operator"] == op and e["result"] != "survived" for e in told.values()), sum(e["operator"] == op for e in told.values())]
            for op in sorted({e["operator"] for e in told.values()})
        },
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs a sample of mutants, and goes on with the results that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", help="only these files, such as linalg.py")
    parser.add_argument("--only", help="one mutant by its name, with the output of its tests")
    parser.add_argument("--again", action="store_true", help="try survivors again, after a test was written")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    import numpy  # noqa: F401 (imported once, for all children)
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the tests of a mutant do not outlive the program.
    mutations = [m for m in all_mutations() if not options.files or m.file in options.files]
    chosen = (
        [m for m in mutations if m.name == options.only]
        if options.only
        else _sampled(mutations, options.sample, options.seed)
    )
    results: dict[str, Any] = {"seed": options.seed, "of": len(all_mutations()), "mutants": {}, "baseline": {}}
    if options.results.exists() and not options.only:
        results = json.loads(options.results.read_text())
    with tempfile.TemporaryDirectory() as folder:
        package, log = Path(folder), Path(folder) / "log.txt"
        shutil.copytree(SOURCE, package / "aftermap", ignore=shutil.ignore_patterns("__pycache__"))
        for number, mutation in enumerate(chosen):
            known = results["mutants"].get(mutation.name)
            if known and not (options.again and known["result"] == "survived"):
                continue
            seconds = _seconds_without(package, mutation.file, results["baseline"], log)
            _keep(results, options)
            verdict, why = _judge(package, mutation, mutation.file, 60 + 4 * seconds, log)
            change = f"line {mutation.line}: {mutation.before} -> {mutation.after}"
            _say(f"{number + 1}/{len(chosen)} {verdict}: {mutation.name}, {change} {why}")
            if options.only:
                _say(log.read_text()[-2000:])
                continue
            results["mutants"][mutation.name] = {
                "result": verdict, "operator": mutation.operator, "before": mutation.before, "after": mutation.after, "by": why,
            }  # fmt: skip
            _keep(results, options)
    if options.only:
        return 0
    counted = summary(results)
    _say(json.dumps(counted, indent=1))
    return 1 if counted["survivors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
