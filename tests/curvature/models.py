"""Networks that people really write, small, in float64: name -> (model, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.curvature.layer_cases import normal

__all__ = ["MODELS", "REFUSED", "Build"]

Build = Callable[[], tuple[nn.Module, Any]]
N = 4


class Apply(nn.Module):
    """Named parts and a function of them."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            else:
                self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * normal(*shape, seed=11))


def _tied_bias() -> Any:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    return Apply(lambda m, x: m.out(torch.tanh(m.b(torch.tanh(m.a(x))))), a=a, b=b, out=nn.Linear(3, 2)), normal(N, 3)


def _tied_all() -> Any:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight, b.bias = a.weight, a.bias
    return nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), nn.Linear(3, 2)), normal(N, 3)


def _tied_embedding() -> Any:
    table, out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    out.weight = table.weight
    return Apply(lambda m, x: m.out(torch.tanh(m.mid(m.table(x)))), table=table, mid=nn.Linear(3, 3), out=out), _ids(5)


def _ids(high: int) -> Tensor:
    return torch.randint(high, (N, 3), generator=torch.Generator().manual_seed(2))


def _tied_convolutions() -> Any:
    a, b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, stride=2)
    b.weight, b.bias = a.weight, a.bias
    return nn.Sequential(a, nn.Tanh(), b, nn.Flatten(), nn.Linear(8, 3)), normal(N, 2, 5, 6)


def _tied_autoencoder() -> Any:
    down, up = nn.Conv2d(2, 3, 2, stride=2), nn.ConvTranspose2d(3, 2, 2, stride=2)
    up.weight = down.weight
    return nn.Sequential(down, nn.Tanh(), up, nn.Flatten(), nn.Linear(16, 2)), normal(N, 2, 2, 4)


def _tied_groups() -> Any:
    a, b = nn.Conv1d(2, 4, 2, bias=False), nn.Conv1d(4, 4, 2, groups=2, bias=False)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b, nn.Flatten(), nn.Linear(12, 2)), normal(N, 2, 5)


def _several_calls() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        for _ in range(3):
            h = torch.tanh(m.cell(h) + h)
        return m.out(h)

    return Apply(run, first=nn.Linear(2, 3), cell=nn.Linear(3, 3), out=nn.Linear(3, 2)), normal(N, 2)


def _functional_use() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(F.linear(torch.tanh(m.a(x)), m.a.weight.T)))

    return Apply(run, a=nn.Linear(4, 3), out=nn.Linear(4, 2)), normal(N, 4)


def _functional_only() -> Any:
    return Apply(
        lambda m, x: m.out(torch.tanh(F.linear(x, m.a.weight))), a=nn.Linear(4, 3), out=nn.Linear(3, 2)
    ), normal(N, 4)


def _inplace() -> Any:
    return nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.SiLU(inplace=True), nn.Linear(4, 2)
    ), normal(N, 3)


def _residual_inplace() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        g = m.b(torch.tanh(h))
        g += h
        g.relu_()
        h = m.c(g).sigmoid_()
        return m.out(h + g)

    return Apply(run, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), out=nn.Linear(4, 2)), normal(N, 3)


def _inplace_tokens() -> Any:
    # A Linear on tokens returns a view, and what works in place on a view rewrites the graph.
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu_()
        g = m.attention(h, h, h, need_weights=False)[0]
        g += h
        return m.out(torch.nn.functional.silu(m.b(g), inplace=True)).mean(1)

    return Apply(
        run, a=nn.Linear(3, 4), attention=nn.MultiheadAttention(4, 2, batch_first=True), b=nn.Linear(4, 5),
        out=nn.Linear(5, 2),
    ), normal(N, 2, 3)  # fmt: skip


def _pixels() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x))).permute(0, 2, 3, 1)

    return Apply(run, a=nn.Conv2d(2, 3, 3, padding=1), b=nn.Conv2d(3, 2, 1)), normal(N, 2, 2, 3)


def _folded_tokens() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.norm(torch.tanh(m.a(x.flatten(0, 1))))
        return m.out(h.reshape(len(x), -1))

    return Apply(run, a=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), out=nn.Linear(6, 2)), normal(N, 2, 4)


def _folded_frames() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x.flatten(0, 1))).flatten(1)
        return m.out(h.reshape(len(x), -1))

    return Apply(run, a=nn.Conv2d(2, 3, 2), out=nn.Linear(12, 2)), normal(N, 2, 2, 2, 3)


def _folded_time_major() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x.transpose(0, 1).flatten(0, 1)))
        return m.out(h.reshape(x.shape[1], len(x), -1).transpose(0, 1).flatten(1))

    return Apply(run, a=nn.Linear(4, 3), out=nn.Linear(6, 2)), normal(N, 2, 4)


def _sequence_first() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x.transpose(0, 1)))
        return m.out(m.norm(h).mean(0))

    return Apply(run, a=nn.Linear(4, 3), norm=nn.LayerNorm(3), out=nn.Linear(3, 2)), normal(N, 5, 4)


def _positions() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.words(x) + m.places(torch.arange(x.shape[1]))
        return m.out(torch.tanh(m.mid(h)).mean(1))

    return Apply(
        run, words=nn.Embedding(5, 3), places=nn.Embedding(4, 3), mid=nn.Linear(3, 4), out=nn.Linear(4, 2)
    ), _ids(5)


def _class_token() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.cat([m.token.expand(len(x), 1, 3), m.a(x)], 1) + m.places
        h = m.block(h) * m.gain
        return m.out(h[:, 0])

    block = nn.TransformerEncoderLayer(3, 1, 5, dropout=0.0, batch_first=True)
    return Apply(
        run, a=nn.Linear(4, 3), block=block, out=nn.Linear(3, 2), token=parameter(1, 1, 3), places=parameter(3, 3),
        gain=nn.Parameter(torch.tensor(1.3)),
    ), normal(N, 2, 4)  # fmt: skip


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Build:
    def make() -> Any:
        return Apply(
            lambda m, x: m.out(torch.tanh(m.rnn(x)[0][:, -1])),
            rnn=kind(2, 3, batch_first=True, **options),
            out=nn.Linear(3, 2),
        ), normal(N, 4, 2)

    return make


def _weight_norm() -> Any:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(4, 2))
    ), normal(N, 3)


def _spectral() -> Any:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), normal(N, 3)


def _bilinear() -> Any:
    return Apply(lambda m, x, y: m.out(torch.tanh(m.a(x, y))), a=nn.Bilinear(2, 3, 4), out=nn.Linear(4, 2)), (
        normal(N, 2),
        normal(N, 3, seed=1),
    )


def _custom() -> Any:
    return Apply(
        lambda m, x: m.out(torch.tanh(x @ m.matrix) * m.scale),
        matrix=parameter(3, 4), scale=nn.Parameter(torch.tensor(0.7)), out=nn.Linear(4, 2),
    ), normal(N, 3)  # fmt: skip


def _transformer() -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
    return Apply(lambda m, x: m.out(m.encoder(x).mean(1)), encoder=encoder, out=nn.Linear(4, 3)), normal(N, 3, 4)


def _decoder() -> Any:
    layer = nn.TransformerDecoderLayer(4, 2, 3, dropout=0.0)

    def run(m: Any, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        h = m.layer(x.transpose(0, 1), memory.transpose(0, 1), tgt_mask=mask, tgt_is_causal=True)
        return m.out(h.transpose(0, 1))

    return Apply(run, layer=layer, out=nn.Linear(4, 2)), (normal(N, 3, 4), normal(N, 2, 4, seed=1))


def _unused() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        return m.out(h) + m.detached(x).detach()

    return Apply(
        run, a=nn.Linear(3, 4), out=nn.Linear(4, 2), detached=nn.Linear(3, 2), never=nn.Linear(2, 3), lost=parameter(2)
    ), normal(N, 3)


def _only_custom_counts() -> Any:
    return Apply(
        lambda m, x: m.detached(x).detach() + x @ m.matrix, detached=nn.Linear(3, 2), matrix=parameter(3, 2)
    ), normal(N, 3)


def segment(part: nn.Module, x: Tensor, *, reentrant: bool = False) -> Tensor:
    """A checkpointed call; a plain one inside torch.func, which knows no checkpoints."""
    if torch._C._functorch.maybe_current_level() is not None:
        return part(x)
    return checkpoint(part, x, use_reentrant=reentrant)


def _checkpointed(reentrant: bool) -> Build:
    def make() -> Any:
        def run(m: Any, x: Tensor) -> Tensor:
            return m.out(segment(m.mid, torch.tanh(m.a(x)), reentrant=reentrant))

        return Apply(
            run, a=nn.Linear(3, 4), mid=nn.Sequential(nn.Linear(4, 5), nn.Tanh()), out=nn.Linear(5, 2)
        ), normal(N, 3)

    return make


def _checkpointed_attention() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(segment(m.block, m.a(x)).mean(1))

    block = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
    return Apply(run, a=nn.Linear(3, 4), block=block, out=nn.Linear(4, 2)), normal(N, 2, 3)


def _unused_call() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        m.a(x)  # recorded, but nothing depends on it
        return m.out(torch.tanh(m.a(0.5 * x)))

    return Apply(run, a=nn.Linear(3, 4), out=nn.Linear(4, 2)), normal(N, 3)


def _mapping() -> Any:
    def run(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
        return m.out((torch.tanh(m.words(ids)) * mask[..., None]).sum(1))

    return Apply(run, words=nn.Embedding(5, 3), out=nn.Linear(3, 2)), {"ids": _ids(5), "mask": normal(N, 3).abs()}


class Sparse(nn.Embedding):
    """Sparse gradients in autograd only: the reference cannot flatten them."""

    @property
    def sparse(self) -> bool:
        return torch._C._functorch.maybe_current_level() is None

    @sparse.setter
    def sparse(self, value: bool) -> None:
        """Fixed."""


def _sparse_embedding() -> Any:
    return Apply(
        lambda m, x: m.out(torch.tanh(m.words(x)).mean(1)),
        words=Sparse(6, 3),
        out=nn.Linear(3, 2),
    ), _ids(6)


def _instance_norm() -> Any:
    # The convolution's bias is cancelled by the normalisation: its gradient is rounding noise.
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)
    ), normal(N, 2, 3, 4)


def _separable() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2),
    ), normal(N, 2, 3, 4)  # fmt: skip


MODELS: dict[str, Build] = {
    "tied_bias": _tied_bias,
    "tied_all": _tied_all,
    "tied_embedding": _tied_embedding,
    "tied_convolutions": _tied_convolutions,
    "tied_autoencoder": _tied_autoencoder,
    "tied_groups": _tied_groups,
    "several_calls": _several_calls,
    "functional_use": _functional_use,
    "functional_only": _functional_only,
    "inplace": _inplace,
    "residual_inplace": _residual_inplace,
    "inplace_tokens": _inplace_tokens,
    "pixels": _pixels,
    "folded_tokens": _folded_tokens,
    "folded_frames": _folded_frames,
    "folded_time_major": _folded_time_major,
    "sequence_first": _sequence_first,
    "positions": _positions,
    "class_token": _class_token,
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU, num_layers=2),
    "weight_norm": _weight_norm,
    "spectral": _spectral,
    "bilinear": _bilinear,
    "custom": _custom,
    "transformer": _transformer,
    "decoder": _decoder,
    "unused": _unused,
    "only_custom_counts": _only_custom_counts,
    "checkpointed": _checkpointed(False),
    "unused_call": _unused_call,
    "mapping": _mapping,
    "sparse_embedding": _sparse_embedding,
    "instance_norm": _instance_norm,
    "separable": _separable,
}

# Refused, with a message.
REFUSED: dict[str, Build] = {
    "checkpointed_reentrant": _checkpointed(True),
    "checkpointed_attention": _checkpointed_attention,
}
