"""From `--model` and `--weights` to a network."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import re
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aftermap import checks
from aftermap.cli.builtin import build_network
from aftermap.cli.trust import search_working_folder_first
from aftermap.errors import DataError, InputError, UnsupportedError
from aftermap.writing import replaced_file

__all__ = [
    "check_device",
    "import_object",
    "load_weights",
    "make_model",
    "read_torch_file",
    "read_weights",
    "save_weights",
]

_NESTED = ("state_dict", "model_state_dict", "model", "net", "weights", "params")
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
_OWN_BUFFERS = ("standardise.mean", "standardise.deviation")


def import_object(spec: str, what: str) -> Any:
    """Imports the object that `pkg.module:name` or `file.py:name` names; the working folder is searched first.

    Raises:
        InputError: There is no such module or name, or the module fails while it is imported.

    >>> import_object("math:pi", "a number")
    3.141592653589793
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{what} is {spec!r}, but must be written pkg.module:name, such as mypkg.nets:build")
    search_working_folder_first()
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise InputError(
                f"{what} {spec!r}: there is no module {error.name!r}, neither installed nor in {Path.cwd()}"
            ) from error
        raise InputError(f"{what} {spec!r}: {place} imports {error.name!r}, which is not installed") from error
    except InputError as error:
        raise InputError(f"{what} {spec!r}: {error}") from None
    except Exception as error:
        raise InputError(f"{what} {spec!r}: importing {place} failed{_where(error)}: {_named(error)}") from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, [n for n in vars(value) if not n.startswith("_")], n=3)
            hint = f". Did you mean {' or '.join(close)}?" if close else ""
            raise InputError(f"{what} {spec!r}: {place} has no {part!r}{hint}")
        value = getattr(value, part)
    return value


def _from_file(file: Path) -> Any:
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _where(error: BaseException) -> str:
    """Says in which line of its user an error arose; nothing where it was already refused by the call in this file."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename == __file__:
        return ""
    return f" in {frames[-1].filename}, line {frames[-1].lineno}"


def check_device(name: str) -> torch.device:
    """Returns a device that is there; "auto" is a graphics card if there is one.

    Raises:
        InputError: There is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is not known; use cpu, cuda, cuda:1, mps or auto") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"--device {name}: {str(error).splitlines()[0]}; use cpu, or auto, which takes a graphics card if there is one"
        ) from error
    return device


def make_model(
    spec: str,
    *,
    options: Mapping[str, Any] | None = None,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> nn.Module:
    """Builds a network, in eval mode.

    Args:
        spec: `builtin:NAME`, or `pkg.module:factory`, whose factory takes no arguments and returns a network; the name of a
            network itself will do.
        options: The shape, outputs and rescale of a built-in network.
        weights: A file, or a state dict; None leaves them as the factory does.
        device: The device that the network is put on.
        seed: The seed of weights that the factory draws.

    Raises:
        InputError: There is nothing of that name, the factory fails or returns something else, or the weights do not fit.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if spec.startswith("builtin:"):
            if not options or "shape" not in options:
                raise InputError(f"--model {spec} is built for its data: give them with --train or --data")
            name, outputs = spec.removeprefix("builtin:"), checks.count("outputs", options.get("outputs"))
            build = functools.partial(
                build_network, name, options["shape"], outputs, rescale=bool(options.get("rescale"))
            )
            model: Any = _built(build, spec, weights if isinstance(weights, Mapping) else None)
        else:
            model = _call(import_object(spec, "--model"), spec)
    if weights is not None:
        load_weights(model, weights)
    return model.to(device or torch.device("cpu")).eval()


def _built(build: Callable[[], nn.Module], spec: str, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """Makes a built-in network. Where its weights are there, a shape that is not theirs is refused before memory is taken for it."""
    try:
        if weights is not None:
            with torch.device("meta"):
                _fitting(build(), weights, "")
        return build()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--model {spec} cannot be built for its inputs and outputs: {error}") from error


def _call(factory: Any, spec: str) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise InputError(
            f"--model {spec} is of type {type(factory).__name__}; it must be a function (or class) that returns a module"
        )
    try:
        network = factory()
    except Exception as error:
        raise InputError(
            f"--model {spec} failed{_where(error)}: {_named(error)}. The factory is called without arguments"
        ) from error
    if not isinstance(network, nn.Module):
        raise InputError(
            f"--model {spec} returned an object of type {type(network).__name__}, but must return a torch.nn.Module"
        )
    return network


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Reads a state dict from .safetensors, .npz, or a file of torch.save (without running code).

    A state dict inside a checkpoint is found, and prefixes such as `module.` that every name has are taken off.

    Raises:
        InputError: There is no such file, or it is damaged, or it holds no weights.
        DataError: It is larger than the memory.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"--weights: there is no file {file}" + (": it is a folder" if file.is_dir() else ""))
    checks.memory(f"--weights: {file}", file.stat().st_size)
    try:
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        elif file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                content = {n: torch.from_numpy(arrays[n]) for n in arrays.files}
        else:
            with warnings.catch_warnings():  # Its advice about other formats is given below.
                warnings.simplefilter("ignore")
                content = read_torch_file(file)
    except SafetensorError as error:
        raise InputError(f"--weights: {file} is not a safetensors file: {error}") from error
    except Exception as error:  # torch raises many kinds for a file that is not its own
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise InputError(f"--weights: {_why_unreadable(file, str(error))}") from error
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        what = (
            f"a mapping with {', '.join(map(str, list(content)[:5]))}"
            if isinstance(content, Mapping)
            else type(content).__name__
        )
        raise InputError(f"--weights: {file} holds {what}, no state dict of tensors")
    return {str(k): v for k, v in content.items()}


def read_torch_file(file: Path) -> Any:
    """Reads a file of torch.save without running code, after it has compared the checksums that the file holds.

    PyTorch writes a checksum of every part of the archive and never looks at it, so that a flipped bit would be another weight.

    Raises:
        DataError: A part has another checksum.
    """
    with file.open("rb") as stream:
        is_archive = stream.read(4) == b"PK\x03\x04"  # Files of PyTorch before 1.6 are none.
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            part = archive.testzip()
        if part is not None:
            raise DataError(f"the checksum of its part {part!r} differs")
    return torch.load(file, map_location="cpu", weights_only=True)


def _why_unreadable(file: Path, message: str) -> str:
    """Says what a file is that holds no weights; PyTorch's own message advises to read it in a way that runs its code."""
    rewrite = "Save the weights with torch.save(model.state_dict(), path), or as safetensors"
    name = re.search(r"GLOBAL ([\w.]+)", message)  # only what a name may contain: the file wrote it
    if name:
        return (
            f"{file} does not hold plain weights, but a pickled Python object ({name[1]}), which could run any code when it is "
            f"read. {rewrite}"
        )
    if "TorchScript" in message:
        return (
            f"{file} is a TorchScript archive, a program with its weights. {rewrite} of the network that it was made of"
        )
    with file.open("rb") as stream:
        start = stream.read(2)
    if not start:
        return f"{file} is empty"
    if start == b"PK":
        return f"{file} is damaged, cut short, or holds something else than arrays of numbers. Copy it again. {rewrite}"
    return f"{file} is not a file of weights: neither torch.save nor numpy.savez wrote it, or it is damaged. {rewrite}"


def load_weights(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Puts weights into a model; every name that does not fit is listed.

    Raises:
        InputError: Names or shapes do not fit; the model is unchanged.
    """
    state = dict(weights) if isinstance(weights, Mapping) else read_weights(weights)
    source = "" if isinstance(weights, Mapping) else f" in {weights}"
    try:
        model.load_state_dict(_fitting(model, state, source), strict=False)
    except RuntimeError as error:
        raise UnsupportedError(f"the weights cannot be loaded: {error}") from error


def _fitting(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns the weights under the names of the model, once names and shapes are known to fit."""
    state = dict(weights)
    expected = model.state_dict()
    for prefix in _PREFIXES:
        if not set(expected) & set(state) and all(k.startswith(prefix) for k in state):
            state = {k.removeprefix(prefix): v for k, v in state.items()}
    problems = [
        f"{n} {list(v.shape)} is missing in the file"
        for n, v in expected.items()
        if n not in state and n not in _OWN_BUFFERS
    ]
    problems += [f"{n} {list(v.shape)} is not in the model" for n, v in state.items() if n not in expected]
    problems += [
        f"{n} is {list(state[n].shape)} in the file, {list(v.shape)} in the model"
        for n, v in expected.items()
        if n in state and state[n].shape != v.shape
    ]
    if problems:
        more = [f"… and {len(problems) - 12} more"] if len(problems) > 12 else []
        listed = "\n".join(f"  {p}" for p in [*problems[:12], *more])
        raise InputError(f"the weights{source} do not fit the model {type(model).__name__}:\n{listed}")
    return state


def save_weights(model: nn.Module, file: Path) -> None:
    """Writes a model's state dict as safetensors: first to a neighbour, then moved into place.

    Raises:
        OSError: The disk is full or not writable; what was there before stays.
    """
    # Copies: tied weights would share memory, which safetensors refuses.
    state = {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in model.state_dict().items()}
    try:
        with replaced_file(file) as part:
            save_file(state, part)
    except SafetensorError as error:  # a full disk comes as this
        raise OSError(f"{file} could not be written: {error}") from error
