"""What is done to a user's network: calling it, looking at its modes, outputs and weights, and putting everything back.

A forward pass as a pure function of chosen parameters writes to nothing of the model. `WeightsFingerprint` notices when the weights
are no longer those that a posterior was fitted around. `update_bn` gives BatchNorm layers the running statistics that belong
to the mean or to a draw of the weights.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from aftermap.batches import Unpack, describe, iterate, tensors_of
from aftermap.distributed import is_sharded
from aftermap.errors import AftermapError, InputError, ShapeError, UnsupportedError
from aftermap.linalg import all_finite
from aftermap.params import Params, places_by_name

__all__ = [
    "WeightsFingerprint",
    "autograd_errors_explained",
    "call_model",
    "check_device",
    "check_is_network",
    "check_modes",
    "check_not_causal",
    "check_not_scripted",
    "check_not_sharded",
    "check_outputs",
    "chosen_parameters",
    "evaluating",
    "evaluation_mode",
    "explain_model_errors",
    "functional_outputs",
    "only_require_grad",
    "prepare_forward_mode",
    "unchanged_buffers",
    "update_bn",
    "without_wrappers",
]

# Hooks and flags change a network for a while, and everybody who uses it sees them: one thread at a time works on networks.
_ONE_THREAD = threading.RLock()
_ENTRIES = 64
# Integer buffers with more entries than this are quantised weights, not statistics: nobody copies them.
_LARGEST_INTEGER_BUFFER = 1 << 20


def call_model(model: Callable[..., Any], inputs: Any, *, update_buffers: bool = False) -> Tensor:
    """Runs the model on a batch's inputs and finds the tensor among what it returns.

    A tensor is passed as it is, a tuple as positional and a mapping as keyword arguments. From a returned object or
    mapping the ``logits`` are taken (Hugging Face models), from a tuple or list its only tensor. Compiled modules run as
    they were written, and a DataParallel wrapper is passed by. So is DistributedDataParallel, except in training: its forward pass
    sends buffers to all processes, and would wait for those that have fewer batches.

    Args:
        model: The network, or a function that runs it.
        inputs: The arguments of the network.
        update_buffers: Whether to keep what the model writes to its buffers (training). Otherwise a module's buffers
            are the same before and after, and every call starts from the same ones.
    """
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = inputs if isinstance(inputs, Mapping) else {}
    while isinstance(model, nn.DataParallel) or (isinstance(model, DistributedDataParallel) and not update_buffers):
        model = model.module
    with _eager(), nullcontext() if update_buffers else unchanged_buffers(model):
        outputs = model(*args, **kwargs)
    if isinstance(outputs, Tensor):
        return outputs
    entry = outputs.get("logits") if isinstance(outputs, Mapping) else None
    for logits in (entry, getattr(outputs, "logits", None)):
        if isinstance(logits, Tensor):
            return logits
    if isinstance(outputs, tuple | list) and len(outputs) == 1 and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise ShapeError(
        f"the model returned {describe(outputs)}; it must return a tensor [N, ..., C] or an object with .logits. "
        "Wrap it in a module that picks the output"
    )


def _eager() -> AbstractContextManager[Any]:
    """Inside, torch.compile'd modules run as they were written: a compiled graph has no hooks, and may be specialised."""
    # Whoever has compiled something has imported this; importing it here would take a second.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def unchanged_buffers(model: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module works on copies of its buffers; afterwards its own tensors are back in their places.

    Values are not written back into the module's tensors: the graph of the outputs may hold them.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [(m, dict(m._buffers)) for m in modules if m._buffers]
    copies: dict[int, Tensor] = {}  # a buffer that several modules share stays one tensor
    try:
        for module, buffers in before:
            for name, buffer in buffers.items():
                if buffer is not None and _is_copied(buffer):
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def _is_copied(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex() or buffer.numel() <= _LARGEST_INTEGER_BUFFER


def check_not_scripted(model: nn.Module) -> None:
    """Raises for TorchScript, which has no hooks and takes no other weights.

    >>> check_not_scripted(nn.Linear(2, 1))
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"the model is a TorchScript module ({type(model).__name__}, from torch.jit.script, trace or load), whose layers "
            "cannot be observed and whose weights cannot be exchanged. Pass the Python module that it was made from, with the "
            "same weights: model.load_state_dict(scripted.state_dict())"
        )


@contextmanager
def autograd_errors_explained() -> Iterator[None]:
    """Says what to do where PyTorch cannot differentiate the network: re-entrant checkpoints, functions of the old style.

    Also a decorator of functions that differentiate a network.

    Raises:
        UnsupportedError: An operation failed in autograd; this stands instead of PyTorch's own RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise UnsupportedError(
                "the network uses re-entrant checkpointing, which allows only loss.backward(), and no gradient of outputs. Pass "
                "use_reentrant=False to torch.utils.checkpoint.checkpoint (in Hugging Face models "
                "gradient_checkpointing_enable({'use_reentrant': False}), or gradient_checkpointing_disable())"
            ) from error
        if "is not implemented" in str(error) and "derivative for" in str(error):
            raise UnsupportedError(
                f"an operation of the network can be differentiated only once ({error}), and products with the Gauss-Newton matrix need "
                "it twice, or forwards. Use structure='kron', 'diagonal', 'full' or 'subset', or write the operation in others "
                "(((a[:, None] - b) ** 2).sum(-1) for torch.cdist, say)"
            ) from error
        if "must override the setup_context" in str(error):
            raise UnsupportedError(
                "the network uses a torch.autograd.Function without setup_context (re-entrant checkpointing is one), which "
                "torch.func cannot differentiate. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or give a "
                "Function of your own a setup_context"
            ) from error
        raise


def check_device(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Returns the device and dtype of a model's parameters; raises where they are spread, not materialised, or in TorchScript."""
    check_not_scripted(model)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise InputError(
            f"the model's parameters are on several devices: {sorted(map(str, devices))}. Move it to one with model.to(device)"
        )
    device = devices.pop() if devices else torch.device("cpu")
    if device.type == "meta":
        raise InputError("the model's parameters are on the meta device and hold no values; load its weights first")
    return device, parameters[0].dtype if parameters else torch.get_default_dtype()


def check_not_sharded(parameters: Iterable[Tensor]) -> None:
    """Raises where the processes hold only parts of the weights, since sums over data need whole ones on every process.

    Raises:
        UnsupportedError: FSDP2 or tensor parallelism has cut a parameter into parts.
    """
    if any(map(is_sharded, parameters)):
        raise UnsupportedError(
            "the model's parameters are cut into parts over the processes (FSDP2 or tensor parallelism), but every process needs whole "
            "weights, each with its own part of the data. Load the full weights (torch.distributed.checkpoint.state_dict."
            "get_model_state_dict with full_state_dict=True) into a model that is not sharded"
        )


@contextmanager
def explain_model_errors(model: nn.Module, inputs: Callable[[], Any]) -> Iterator[None]:
    """Says of an error of the model itself, on inputs that it does not accept, that it is one. Other threads wait meanwhile.

    Args:
        model: The network that may be at fault.
        inputs: A function that hands out what the network was given; it is asked only after an error.

    Raises:
        InputError: Something failed inside, and the model alone fails on the inputs, too.
    """
    try:
        with _ONE_THREAD:
            yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, AftermapError):
            raise
        arguments = inputs()
        try:
            with torch.no_grad():
                call_model(model, arguments)
        except (RuntimeError, TypeError, ValueError, IndexError) as own:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors_of(arguments))
            keys = f" with the keys {', '.join(map(str, arguments))}" if isinstance(arguments, Mapping) else ""
            dtypes = {t.dtype for t in tensors_of(arguments)}
            advice = ""
            if torch.uint8 in dtypes:
                advice = ". Bytes are no numbers to multiply: pass pixels as in training, such as x.float() / 255"
            elif "same dtype" in str(own) and not any(dtype.is_floating_point for dtype in dtypes):
                advice = ". Whole numbers are taken as tokens: pass quantities in floating point, x.float()"
            raise InputError(f"the model does not accept inputs{keys} of shape {shapes}: {own}{advice}") from error
        raise


def check_is_network(model: object, order: str, place: str = "first") -> None:
    """Raises unless an argument is a network.

    Args:
        model: The argument.
        order: How the call is written, for the message.
        place: Which argument it is, for the message.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(model, nn.Module):
        got = repr(model) if isinstance(model, str) else describe(model)
        if isinstance(model, type) and issubclass(model, nn.Module):
            got = f"the class {model.__name__} itself: call it, {model.__name__}(...), and give it its trained weights"
        elif isinstance(model, Mapping):
            got += ", perhaps weights: build the network and give them to its load_state_dict"
        raise InputError(f"the network, a torch.nn.Module, stands {place}: {order}; got {got[:200]}")


def check_not_causal(model: nn.Module) -> None:
    """Raises for a causal language model of transformers, whose labels are not yet those of its outputs.

    Such a model predicts token t + 1 at position t and shifts the labels inside its own loss. The likelihoods here compare
    outputs and labels position by position, so the fit would be one of copying the present token.

    Raises:
        UnsupportedError: The model is one, itself or behind an adapter.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    name = type(inner).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        raise UnsupportedError(
            f"{name} is a causal language model: its outputs at position t are of token t + 1, while labels are compared position by "
            "position. Wrap it in a module of your own whose forward returns logits[:, :-1], and pass labels[:, 1:] as targets"
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; each module's own mode comes back."""
    before = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def only_require_grad(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, exactly the named parameters require gradients: frozen parts build no graph and cost no memory."""
    wanted = set(names)
    with _ONE_THREAD:
        before = {n: p.requires_grad for n, p in model.named_parameters()}
        try:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(name in wanted)
            yield
        finally:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(before[name])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; every module gets its training flag back, whatever happens.

    Fused attention kernels and bags of embeddings have no forward-mode and no second derivatives, so plain operations are
    used meanwhile.

    >>> net = nn.Dropout(0.5)
    >>> with evaluating(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        bags = any(isinstance(module, nn.EmbeddingBag) for module, _ in flags)
        with sdpa_kernel(SDPBackend.MATH), _PlainEmbeddingBags() if bags else nullcontext():
            yield
    finally:
        for module, training in flags:
            module.training = training


class _PlainEmbeddingBags(TorchFunctionMode):
    """While active, bags of embeddings [N, L] are looked up one by one and then reduced: the same numbers."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding_bag:
            call = inspect.signature(F.embedding_bag).bind(*args, **kwargs)
            call.apply_defaults()
            arguments = call.arguments
            if arguments["input"].dim() == 2 and arguments["max_norm"] is None and not arguments["scale_grad_by_freq"]:
                return _plain_embedding_bag(
                    arguments["input"],
                    arguments["weight"],
                    arguments["mode"],
                    arguments["per_sample_weights"],
                    arguments["padding_idx"],
                )
        return func(*args, **kwargs)


def _plain_embedding_bag(
    index: Tensor, weight: Tensor, mode: str, factors: Tensor | None, padding_idx: int | None
) -> Tensor:
    """Returns the sum, mean or maximum of the rows of ``weight`` [V, D] that each bag [N, L] names: [N, D]."""
    rows = F.embedding(index, weight)
    if factors is not None:
        rows = rows * factors[..., None]
    present = torch.ones_like(index, dtype=torch.bool)[..., None]
    if padding_idx is not None:
        present = (index != padding_idx % len(weight))[..., None]
        rows = torch.where(present, rows, -torch.inf if mode == "max" else 0.0)
    if mode == "sum":
        return rows.sum(1)
    if mode == "mean":
        return rows.sum(1) / present.sum(1).clamp(min=1)
    return torch.where(present.any(1), rows.max(1).values, 0.0)


def chosen_parameters(model: nn.Module, names: Sequence[str] | None) -> Params:
    """Returns the named parameters, detached, in the order of `names`; None means all that require a gradient.

    Raises:
        InputError: A name is unknown or named twice, or nothing is chosen.

    >>> list(chosen_parameters(nn.Linear(2, 3), None))
    ['weight', 'bias']
    """
    check_not_scripted(model)
    available = dict(model.named_parameters())
    if names is None:
        names = [name for name, p in available.items() if p.requires_grad]
    wrong = [name for name in names if name not in available] or [n for n in names if list(names).count(n) > 1]
    if wrong or not names:
        raise InputError(f"got parameter names {wrong or list(names)}; choose some, each once, among {list(available)}")
    return {name: available[name].detach() for name in names}


def functional_outputs(
    model: nn.Module, params: Mapping[str, Tensor], inputs: Any, *, update_buffers: bool = False
) -> Tensor:
    """Returns the outputs [N, ..., C] of the model with other tensors in place of its own; the only way that the model is run so.

    Args:
        model: The network; a DataParallel or DistributedDataParallel wrapper is passed by, and compiled modules run as
            they were written.
        params: Tensors by name: parameters and possibly buffers, by the names that the model itself uses.
        inputs: The inputs as the model takes them.
        update_buffers: Whether to let the model write to its own buffers (training); otherwise it writes to copies.
    """
    tensors: dict[str, Tensor] = dict(params)
    if not update_buffers:
        buffers = {name: tensors.get(name, b) for name, b in model.named_buffers()}
        tensors.update({name: b.detach().clone() for name, b in buffers.items() if _is_copied(b)})
    inner, prefix = without_wrappers(model)
    places = places_by_name(inner)
    given = ((name.removeprefix(prefix), tensor) for name, tensor in tensors.items())
    tensors = {place: tensor for name, tensor in given for place in places.get(name, (name,))}

    def call(*args: Any, **kwargs: Any) -> Any:
        # With tie_weights=True a module that has two names would keep the other tensors.
        return torch.func.functional_call(inner, tensors, args, kwargs, tie_weights=False)

    return call_model(call, inputs)


def without_wrappers(model: nn.Module) -> tuple[nn.Module, str]:
    """Returns the network inside DataParallel and DistributedDataParallel, and what their names put before its own.

    >>> without_wrappers(nn.DataParallel(nn.Linear(2, 1)))
    (Linear(in_features=2, out_features=1, bias=True), 'module.')
    """
    prefix = ""
    while isinstance(model, nn.DataParallel | DistributedDataParallel):
        model, prefix = model.module, f"{prefix}module."
    return model, prefix


@functools.cache
def prepare_forward_mode() -> None:
    """Loads torch's forward-mode rules once: torch warns of its own deprecations while it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


def check_modes(model: nn.Module) -> None:
    """Raises if a layer would make outputs random or dependent on other examples."""
    bad: list[str] = []
    for path, module in model.named_modules():
        if module.training and (_dropout(module) > 0 or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            bad.append(f"{path or 'the model'} ({type(module).__name__})")
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            bad.append(f"{path or 'the model'} ({type(module).__name__} without running statistics)")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise InputError(
            f"these layers are in training mode: {', '.join(bad[:5])}{more}. Batch statistics couple the examples and dropout "
            "makes outputs random, so there is no curvature of one datum. Call model.eval() first "
            "(a BatchNorm needs running statistics)"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(path, module)


def _check_embedding(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raises for embeddings that change their weights, or their gradients, with the batch."""
    kind = f"{path or 'the model'} ({type(module).__name__})"
    if module.max_norm is not None:
        raise InputError(
            f"{kind} has max_norm={module.max_norm}: its forward pass shortens rows of its own weight, so that every look at the network "
            "changes it. Shorten them once, torch.renorm_(weight.data, p, 0, max_norm), and set max_norm = None on the module"
        )
    if module.scale_grad_by_freq:
        raise InputError(
            f"{kind} has scale_grad_by_freq=True: what it hands back is divided by counts in the batch and no gradient of the outputs. "
            "Set scale_grad_by_freq = False on the module; its outputs are the same"
        )


def _dropout(module: nn.Module) -> float:
    """Returns the share that a module drops in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return float(module.p)
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def check_outputs(outputs: Tensor, size: int) -> None:
    """Raises unless outputs are finite floating-point numbers [size, ..., C]."""
    if outputs.dim() < 2 or outputs.shape[0] != size:
        raise ShapeError(
            f"the model returned shape {tuple(outputs.shape)} for {size} examples; allowed is [N, ..., C] with the batch first. "
            "For one output per example add a last dimension, model(x).unsqueeze(-1); for a single example the first, x[None]"
        )
    if not outputs.is_floating_point():
        raise ShapeError(
            f"the model returned {outputs.dtype}; the outputs must be floating-point (logits, means, log rates)"
        )
    if not all_finite(outputs):
        bad = torch.nonzero(~torch.isfinite(outputs.detach()))[0].tolist()
        raise InputError(
            f"the model's outputs are not finite: {outputs[tuple(bad)].item()} at index {bad}. "
            "Check the weights and the scale of the inputs"
        )


@dataclass(frozen=True)
class WeightsFingerprint:
    """A few entries and a checksum of every parameter and floating-point buffer: cheap to compare, no copy of the weights.

    Attributes:
        marks: For each tensor some of its entries, and the sum of all its bits, read as whole numbers: a change of any one
            entry changes it.
    """

    marks: dict[str, tuple[Tensor, int]]

    @staticmethod
    def of(model: nn.Module) -> WeightsFingerprint:
        """Looks at a model."""
        return WeightsFingerprint({n: _marks(t) for n, t in _state(model).items()})

    def check(
        self,
        model: nn.Module,
        since: str = "the fit",
        advice: str = "A Laplace approximation holds around the weights it was fitted at: fit again, or restore them",
    ) -> None:
        """Raises if the model has changed.

        Args:
            model: The model to look at.
            since: The moment at which the model was looked at first, for the message.
            advice: What the message says about the reason and the remedy.
        """
        now = {n: _marks(t) for n, t in _state(model).items() if n in self.marks}
        changed = []
        for name, (entries, total) in self.marks.items():
            if name not in now or now[name][1] != total or not torch.equal(now[name][0], entries):
                changed.append(name)
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise InputError(
                f"the model's weights have changed since {since} ({', '.join(changed[:3])}{more}). {advice}"
            )


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = {n: p.detach() for n, p in model.named_parameters()}
    state.update({n: b for n, b in model.named_buffers() if b.is_floating_point()})
    return state


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _marks(tensor: Tensor) -> tuple[Tensor, int]:
    flat = tensor.detach().reshape(-1)
    entries = flat[:: max(1, flat.numel() // _ENTRIES)].clone()
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return entries, int(flat.view(_WHOLE[flat.element_size()]).sum(dtype=torch.int64))


@torch.no_grad()
def update_bn(model: nn.Module, data: Iterable[Any], *, unpack: Unpack | None = None) -> None:
    """Sets the running statistics of every BatchNorm layer to those of ``data`` under the present weights.

    While training with drawn weights, running statistics are averages over draws. They serve the posterior's average well;
    for the mean alone, or for one draw that is to be kept, they should be made anew: each layer's mean and variance become the
    plain averages over the batches.

    Args:
        model: Any network; modes and momenta are as before afterwards.
        data: Batches: a DataLoader or a list of (x, y).
        unpack: A function that turns a batch of another form into (inputs, targets).

    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    >>> update_bn(net, [(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.zeros(2))])
    >>> net[0].running_mean
    tensor([2., 4.])
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return
    device, dtype = check_device(model)
    with _averaging(model, norms):
        for batch in iterate(data, device=device, dtype=dtype, unpack=unpack):
            call_model(model, batch.inputs, update_buffers=True)


@contextmanager
def _averaging(model: nn.Module, norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Inside, only the BatchNorm layers train, with a cumulative average from zero."""
    modes = [(m, m.training) for m in model.modules()]
    momenta = [m.momentum for m in norms]
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode
