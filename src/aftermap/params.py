"""Parameters by name: selecting them, flattening them, and putting others in their place for a while."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from aftermap import checks
from aftermap.errors import InputError, UnsupportedError

__all__ = [
    "Params",
    "Selection",
    "by_module",
    "check_not_complex",
    "check_parameters",
    "describe_names",
    "flatten",
    "named_parameters",
    "places_by_name",
    "select",
    "swapped",
    "unflatten",
    "weights_hash",
]

Params = dict[str, Tensor]
Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns every parameter once, under the first of its names, in the order of registration."""
    return dict(model.named_parameters())


def places_by_name(model: nn.Module) -> dict[str, list[str]]:
    """Returns every place where the model holds a parameter or buffer, by its name; a module that has several names is one place.

    >>> layer, tied = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    >>> tied.weight = layer.weight
    >>> places_by_name(nn.Sequential(layer, layer, tied))
    {'0.weight': ['0.weight', '2.weight']}
    """
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    return {names[0]: names for names in places.values()}


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the parameters of each module, by the names alone; a parameter of the network itself stands for itself.

    >>> by_module(["fc.weight", "fc.bias", "gain"])
    {'fc': ['fc.weight', 'fc.bias'], 'gain': ['gain']}
    """
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return modules


def check_parameters(model: nn.Module) -> None:
    """Raises for a model that has no parameter to be uncertain about, or whose parameters autograd refuses.

    Raises:
        InputError: It has none in floating point, or was made inside torch.inference_mode().
    """
    every = named_parameters(model).values()
    if any(p.is_inference() for p in every):
        raise InputError(
            "the model was made inside torch.inference_mode(), and autograd refuses such parameters for good; make it outside of it"
        )
    # Of an empty parameter (a layer without outputs, say) there is nothing to be uncertain about.
    if not any(is_lazy(p) or (p.is_floating_point() and p.numel()) for p in every):
        raise InputError(
            f"{type(model).__name__} has no floating-point parameter, so there is nothing to be uncertain about"
        )


def select(model: nn.Module, selection: Selection = "all") -> list[str]:
    """Returns the names of the chosen parameters, in the model's order.

    Args:
        model: Any PyTorch module.
        selection: ``"all"`` (every parameter that requires a gradient), ``"last_layer"`` (the last module in
            order of registration that owns a floating-point parameter), a list of parameter or module names, a regular
            expression that must match a whole parameter name, or a function of (name, parameter).

    Returns:
        Names as in ``model.named_parameters()``; a tied parameter appears once.

    Raises:
        InputError: No parameter is chosen, or a name does not exist.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> select(net, "last_layer")
    ['2.weight', '2.bias']
    >>> select(net, r".*bias")
    ['0.bias', '2.bias']
    """
    every = named_parameters(model)
    lazy = [n for n, p in every.items() if is_lazy(p)]
    if lazy:
        raise InputError(f"{checks.few(lazy, 8)} of the model have no values yet; run one forward pass to make them")
    check_parameters(model)
    parameters = {n: p for n, p in every.items() if p.is_floating_point() and p.numel()}
    if callable(selection):
        names = [n for n, p in parameters.items() if selection(n, p)]
        described = "the given function"
    elif isinstance(selection, str):
        names = _select_by_word(model, parameters, selection)
        described = repr(selection)
    else:
        names = _select_by_names(model, parameters, selection)
        described = repr(list(selection))
    if not names:
        hint = "every parameter is frozen (requires_grad=False)" if selection == "all" else "nothing matched"
        raise InputError(
            f"params={described} selects no parameter: {hint}. This model has: {checks.few(list(parameters), 8)}. "
            'Allowed: "all", "last_layer", "last_block", a list of names, a regular expression for whole names, or a function'
        )
    return names


def _select_by_word(model: nn.Module, parameters: dict[str, nn.Parameter], word: str) -> list[str]:
    if word == "all":
        if any(p.is_complex() and p.requires_grad for p in model.parameters()):
            check_not_complex(dict(model.named_parameters()))
        return [n for n, p in parameters.items() if p.requires_grad]
    if word == "last_block":
        raise InputError(
            "params='last_block' is found by running the network, so it needs data: Laplace, fit_curvature and HessianFree know "
            "it; elsewhere pass the names that aftermap.curvature.find_last_block gives"
        )
    if word == "last_layer":
        owner = [n for n, m in model.named_modules() if any(p is not None for p in m._parameters.values())][-1]
        members = {id(p) for p in model.get_submodule(owner)._parameters.values()}
        return [n for n, p in parameters.items() if id(p) in members]
    if word in parameters or word in dict(model.named_modules()):
        return _select_by_names(model, parameters, [word])
    try:
        pattern = re.compile(word)
    except re.error as error:
        raise InputError(f"params={word!r} is neither a name nor a regular expression: {error}") from error
    return [n for n in parameters if pattern.fullmatch(n)]


def check_not_complex(parameters: Mapping[str, Tensor]) -> None:
    """Raises where a parameter is complex, which would have to be left out.

    Raises:
        UnsupportedError: A parameter is complex.

    >>> check_not_complex({"weight": torch.zeros(2)})
    """
    complex_ones = [n for n, p in parameters.items() if p.is_complex() and p.requires_grad]
    if complex_ones:
        raise UnsupportedError(
            f"{checks.few(complex_ones, 8)} of the model are complex, and a distribution over weights is over real numbers here. Store "
            "real and imaginary parts, nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex in forward; or leave the "
            "complex weights as they are: requires_grad_(False), or name the others in params="
        )


def _select_by_names(model: nn.Module, parameters: dict[str, nn.Parameter], names: Sequence[str]) -> list[str]:
    # A tied parameter may be asked for under any of its names, or through any module that holds it.
    aliases = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    wanted: set[int] = set()
    unknown = []
    for name in names:
        if name in aliases:
            wanted.add(id(aliases[name]))
        elif name in modules:
            wanted.update(id(p) for p in modules[name].parameters())
        else:
            unknown.append(name)
    if unknown:
        raise InputError(
            f"no parameter or module is called {checks.few(unknown, 8)}. This model has: {checks.few(list(parameters), 8)}"
        )
    return [n for n, p in parameters.items() if id(p) in wanted]


def describe_names(model: nn.Module, names: Sequence[str]) -> str:
    """Says in words which modules hold these parameters and no others; single parameters where a module holds more.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    >>> describe_names(net, ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"])
    '2'
    >>> describe_names(net, ["0.weight", "2.1.weight", "2.1.bias"])
    '0.weight and 2.1'
    """
    every = named_parameters(model)
    wanted, known = {id(every[n]) for n in names}, {id(p): n for n, p in every.items()}
    described: list[str] = []
    done: set[int] = set()

    def walk(path: str, module: nn.Module) -> None:
        members = {id(p) for p in module.parameters() if p.is_floating_point()}
        if not (members & wanted) - done:
            return
        if members <= wanted:
            described.append(path or "all parameters")
            done.update(members)
            return
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in wanted - done:
                described.append(known[id(parameter)])
                done.add(id(parameter))
        for name, child in module.named_children():
            walk(f"{path}.{name}" if path else name, child)

    walk("", model)
    return described[0] if len(described) == 1 else f"{', '.join(described[:-1])} and {described[-1]}"


def flatten(params: Params, names: Sequence[str] | None = None) -> Tensor:
    """Concatenates parameters, each row-major, in the order of ``names``.

    >>> flatten({"a": torch.zeros(2, 2), "b": torch.ones(1)})
    tensor([0., 0., 0., 0., 1.])
    """
    return torch.cat([params[n].reshape(-1) for n in (params if names is None else names)])


def unflatten(vector: Tensor, like: Params, names: Sequence[str] | None = None) -> Params:
    """Undoes :func:`flatten`; extra trailing dimensions of ``vector`` [P, ...] move to the front."""
    out: Params = {}
    start = 0
    for name in like if names is None else names:
        size = like[name].numel()
        part = vector[start : start + size]
        out[name] = (
            part.reshape(like[name].shape)
            if vector.dim() == 1
            else part.movedim(0, -1).reshape(*vector.shape[1:], *like[name].shape)
        )
        start += size
    if start != vector.shape[0]:
        raise InputError(f"a vector of length {vector.shape[0]} does not fit parameters with {start} entries")
    return out


def weights_hash(params: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of weights: names, shapes, dtypes and every bit, whatever their order and device.

    >>> one, other = {"a": torch.zeros(2)}, {"a": torch.tensor([0.0, -0.0])}
    >>> weights_hash(one)[:20], weights_hash(one) == weights_hash(other)
    ('sha256:a5a093c49a76e', False)
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        value = params[name].detach().cpu().contiguous()
        # The header's length separates it from the bytes, so that no two sets of weights read the same.
        header = repr((name, tuple(value.shape), str(value.dtype))).encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


@contextmanager
def swapped(model: nn.Module, params: Params) -> Iterator[nn.Module]:
    """Inside, the model has other values in the named parameters; the old ones come back, whatever happens.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> before = net.weight.detach().clone()
    >>> with swapped(net, {"weight": torch.full((1, 1), 5.0)}):
    ...     net(torch.ones(1, 1)).item()
    5.0
    >>> bool(torch.equal(net.weight, before))
    True
    """
    parameters = named_parameters(model)
    unknown = [n for n in params if n not in parameters]
    if unknown:
        raise InputError(f"the model has no parameter called {checks.few(unknown, 8)}")
    wrong = [n for n in params if params[n].shape != parameters[n].shape]
    if wrong:
        name = wrong[0]
        raise InputError(f"{name} has shape {tuple(parameters[name].shape)}, but {tuple(params[name].shape)} was given")
    saved = {n: parameters[n].data for n in params}
    try:
        for name, value in params.items():
            parameters[name].data = value.detach().to(dtype=saved[name].dtype, device=saved[name].device)
        yield model
    finally:
        for name, value in saved.items():
            parameters[name].data = value
