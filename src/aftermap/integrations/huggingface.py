"""Hugging Face: transformers and their LoRA adapters, with a posterior that is saved beside the model.

`Laplace`, `fit` and `predict` take such models as they are: tokenised batches (a `BatchEncoding` or a dict) go in as keyword
arguments with the labels taken out, and ``.logits`` is taken from what the model returns. What is here makes it short:

    data = batches(loader, model)
    la = Laplace(model, likelihood(model), params=adapters(model)).fit(data).tune()
    save(la, "run/")                        # the model's own files, and run/posterior/
    la = load("run/", model_from_pretrained)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.errors import DataError, InputError
from aftermap.laplace import Laplace, load_laplace
from aftermap.lazy import optional
from aftermap.models import check_not_causal
from aftermap.params import named_parameters

optional("transformers", "hf", "the Hugging Face helpers")

__all__ = ["POSTERIOR", "Batches", "adapters", "batches", "likelihood", "load", "save"]

POSTERIOR = "posterior"

_LABELS = "labels"
_LIKELIHOODS = {
    "single_label_classification": "classification",
    "multi_label_classification": "binary",
    "regression": "regression",
}


def likelihood(model: nn.Module) -> str:
    """Returns the likelihood that a model's configuration asks for.

    ``config.problem_type`` decides; without it one label is a regression and several are classes, as in transformers' own
    losses. (Whether several labels exclude one another is otherwise known from their dtype only.)

    Args:
        model: A model with a ``config``.

    Returns:
        The name "classification", "binary" or "regression".

    Raises:
        InputError: The model has no such configuration.
        UnsupportedError: The model is a causal language model.

    >>> from transformers import BertConfig
    >>> net = nn.Linear(3, 2)
    >>> net.config = BertConfig(num_labels=2)
    >>> likelihood(net)
    'classification'
    """
    check_not_causal(model)
    config = getattr(model, "config", None)
    problem, count = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
    if problem is not None:
        otherwise = "name the likelihood yourself"
        return _LIKELIHOODS[checks.choice("config.problem_type", problem, _LIKELIHOODS, otherwise=otherwise)]
    if not isinstance(count, int):
        raise InputError(
            f"{type(model).__name__} has no config with problem_type or num_labels; name the likelihood yourself: "
            'Laplace(model, "classification")'
        )
    return "regression" if count == 1 else "classification"


def adapters(model: nn.Module, *, head: bool = False) -> list[str]:
    """Returns the names of the active adapters' weights, for ``params=``, whether they require a gradient or not.

    Args:
        model: A model with peft's adapters.
        head: Whether to include the modules that are trained and saved whole, such as the classifier.

    Returns:
        The names of the parameters, in the model's order.

    Raises:
        InputError: There is no adapter.
    """
    tuners = optional("peft.tuners.tuners_utils", "hf", "adapters")
    others = optional("peft.utils.other", "hf", "adapters")
    wanted: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            parts = module.adapter_layer_names
        elif head and isinstance(module, others.ModulesToSaveWrapper):
            parts = ("modules_to_save",)
        else:
            continue
        starts = [".".join(filter(None, (path, part, name))) for part in parts for name in module.active_adapters]
        wanted.update(
            n for n in named_parameters(model) if any(n == start or n.startswith(f"{start}.") for start in starts)
        )
    if not wanted:
        raise InputError(
            f"{type(model).__name__} has no adapter of peft; add one with peft.get_peft_model, or choose params= in another way"
        )
    return [n for n in named_parameters(model) if n in wanted]


class Batches:
    """The batches of a loader with what the model understands, and the labels, as often as wanted.

    Args:
        loader: An iterable of mappings (a DataLoader over tokenised data).
        names: The keys that the model takes.
    """

    def __init__(self, loader: Iterable[Any], names: Iterable[str]):
        self.loader, self.names = loader, frozenset(names)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(self.loader):
            if not isinstance(batch, Mapping):
                raise DataError(
                    f"batch {number} is a {type(batch).__name__}, but tokenised batches are mappings with input_ids and labels"
                )
            label = _LABELS if _LABELS in batch else "label"
            if label not in batch:
                raise DataError(f"batch {number} has the keys {sorted(map(str, batch))}, but no {_LABELS!r}")
            inputs = {k: batch[k] for k in batch if k in self.names and k != label and isinstance(batch[k], Tensor)}
            yield {**inputs, _LABELS: torch.as_tensor(batch[label])}


def batches(loader: Iterable[Any], model: nn.Module) -> Batches:
    """Returns tokenised batches without the columns that the model does not take: texts, identifiers, lengths.

    Args:
        loader: Batches as mappings: input_ids, attention_mask, labels (or label), and anything else.
        model: The model whose ``forward`` names what it takes; adapters are seen through.

    >>> class Net(nn.Module):
    ...     def forward(self, input_ids, **kwargs): ...
    >>> loader = [{"input_ids": torch.zeros(2, 3), "text": ["a", "b"], "idx": torch.arange(2), "label": torch.ones(2)}]
    >>> [sorted(b) for b in batches(loader, Net())]
    [['input_ids', 'labels']]
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    taken = inspect.signature(inner.forward).parameters.values()
    return Batches(loader, [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)])


def save(laplace: Laplace, folder: str | Path, *, tokenizer: Any = None, overwrite: bool = False) -> Path:
    """Writes model and posterior into one folder: what ``save_pretrained`` writes, and a subfolder ``posterior``.

    Args:
        laplace: A fitted approximation of a model with ``save_pretrained``; of an adapter only the adapter's files are
            written.
        folder: The folder to write to, which may hold the model already.
        tokenizer: A tokenizer to save there, too.
        overwrite: Whether to replace a posterior that is already there.

    Returns:
        The folder of the posterior.
    """
    write = getattr(laplace.model, "save_pretrained", None)
    if write is None:
        raise InputError(
            f"{type(laplace.model).__name__} has no save_pretrained; save it in its own way, and the posterior with "
            "laplace.save(folder)"
        )
    place = Path(folder) / POSTERIOR
    if place.exists() and not overwrite:
        raise InputError(f"{place} exists already; choose another folder, or pass overwrite=True to replace it")
    laplace.posterior  # noqa: B018  raises before anything is written, where nothing was fitted
    write(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return laplace.save(place, overwrite=overwrite)


def load(folder: str | Path, model: nn.Module, *, device: torch.device | str | None = None) -> Laplace:
    """Reads the posterior beside a saved model.

    Args:
        folder: A folder that `save` wrote.
        model: The model, loaded with ``from_pretrained`` (or peft's), in evaluation mode.
        device: The device that the posterior goes to. None means the model's.

    Raises:
        InputError: There is no posterior, or the model is another one; every mismatch is named.
    """
    place = Path(folder) / POSTERIOR
    if not place.is_dir():
        raise InputError(
            f"{folder} holds no folder {POSTERIOR!r}; write one with aftermap.integrations.huggingface.save"
        )
    return load_laplace(place, model, device=device)
