"""`aftermap demo`: the whole way in a minute, on scikit-learn's digits."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from aftermap.cli import options as o
from aftermap.cli.builtin import Network, build_network
from aftermap.cli.console import Reporter, check_writable
from aftermap.cli.evaluate import compare_with_map
from aftermap.cli.fit import PosteriorOptions, fit_posterior, prior_in_words
from aftermap.cli.report import where_for_report, write_for
from aftermap.cli.sources import Batches, DataFormat, Source
from aftermap.cli.store import Fitted, calibrate, describe_fit, save_fitted
from aftermap.data import Examples, builtin, photograph_patches, split
from aftermap.evaluation import rotate
from aftermap.posteriors.io import check_replaceable, replaced_folder
from aftermap.progress import progress

__all__ = ["demo"]

_FILES = ("report.html", "results.json", "posterior")


@o.command(without=("device", "force", "config"))
def demo(
    output: Annotated[Path, o.option("The folder for the report.", "--output", "-o")] = Path("demo"),
    epochs: Annotated[int, o.option("The number of passes that train the network.", min=1)] = 30,
    *,
    run: o.RunOptions,
) -> int:
    """See it at work in a minute: train a small network on handwritten digits, make it Bayesian, test it, write a report.

    The network should doubt digits that lie on their side and pieces of photographs: it has never seen any.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: several threads would only wait for each other
    try:
        return _show(output, epochs, run.seed, run.reporter)
    finally:
        torch.set_num_threads(threads)


def _show(output: Path, epochs: int, seed: int, reporter: Reporter) -> int:
    """Trains, fits, tests and reports: all that the demo shows."""
    check_replaceable(output, True, _FILES)
    check_writable(output)
    started = time.perf_counter()
    parts = split(builtin("digits"), validation=0.2, test=0.25)
    sources = {name: _source(part, f"builtin:digits:{name}") for name, part in parts.items()}
    model, model_config = _network(parts["train"], epochs, seed)
    trained = time.perf_counter()
    reporter.line(f"trained a small network on {len(parts['train']):,} digits in {trained - started:.0f} s")
    laplace = fit_posterior(
        model, sources["train"], sources["validation"], "classification", PosteriorOptions(), reporter, seed
    )
    reporter.line(
        f"made it Bayesian in {time.perf_counter() - trained:.0f} s: {laplace.structure}, {prior_in_words(laplace)}"
    )
    reporter.line(str(laplace.tuning))
    extras = describe_fit(model_config, sources["train"], DataFormat(), "classification", seed)
    extras["tuning"] = str(laplace.tuning)
    predictive = Fitted(laplace, model, extras, {}).predict_options("auto", 200)
    extras["thresholds"], reference = calibrate(laplace, sources["validation"].batches, predictive, 0.05, seed)
    fitted = Fitted(laplace, model, extras, reference)
    test = parts["test"]
    unusual = {
        "rotated": _source(replace(test, inputs=rotate(test.inputs, 90.0), targets=None), "digits on their side"),
        "photographs": _source(photograph_patches(len(test), 8, seed=seed), "patches of photographs"),
    }
    compared = compare_with_map(fitted, sources["test"], unusual, options=predictive, seed=seed)
    shares = where_for_report(fitted, sources["test"], seed)
    with replaced_folder(output, overwrite=True, known=_FILES) as place:
        save_fitted(laplace, place / "posterior", extras, reference, overwrite=False)
        compared.bayesian.to_json(place / "results.json", table=False)
        title = "What a small network knows about digits"
        write_for(
            place / "report.html", fitted, compared, shares, sources["test"], title=title, options=predictive, seed=seed
        )
    compared.report_to(reporter, "test digits")
    reporter.line()
    reporter.line("where the uncertainty sits (share of the predictive variance):")
    for layer in shares.layers:
        share = layer.predictive_share
        reporter.line(f"  {layer.name:12}{share:6.1%}  {'█' * round(30 * share)}")
    reporter.line()
    reporter.line(f"report: {output / 'report.html'} ({time.perf_counter() - started:.0f} s in all)")
    reporter.result({**compared.to_dict(), "report": str(output / "report.html")})
    return compared.code


def _source(examples: Examples, spec: str) -> Source:
    return Source(spec, examples.name, Batches(examples, 200), examples)


def _network(data: Examples, epochs: int, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Trains a small convolutional network with Adam."""
    options = {"shape": list(data.inputs.shape[1:]), "outputs": 10}
    torch.manual_seed(seed)
    model: Network = build_network("cnn", options["shape"], 10)  # type: ignore[arg-type]
    model.standardise.set_from(data.inputs)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.zeros(len(data)) if data.targets is None else data.targets
    for _ in progress(range(epochs), description="training"):
        for index in torch.randperm(len(data), generator=generator).split(50):
            optimiser.zero_grad()
            F.cross_entropy(model(data.inputs[index]), targets[index]).backward()
            optimiser.step()
    return model.eval(), {"spec": "builtin:cnn", "options": options}
