"""The last block of networks of every build, and what belongs to it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import Batch, unpack_inputs
from aftermap.curvature import find_last_block, fit_curvature, last_block
from aftermap.errors import InputError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.laplace.cost import estimate_costs
from aftermap.likelihoods import Categorical
from aftermap.params import select


def found(net: nn.Module, inputs: Any) -> Any:
    return last_block(net.eval(), unpack_inputs(inputs))


class BasicBlock(nn.Module):
    """A residual block; with ``before`` the norms stand before the convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, *, before: bool = False) -> None:
        super().__init__()
        self.before = before
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs if before else outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if changes
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        if self.before:
            h = self.conv1(torch.relu(self.bn1(x)))
            return skip + self.conv2(torch.relu(self.bn2(h)))
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(skip + self.bn2(self.conv2(h)))


class ResNet(nn.Module):
    """Three stages of three blocks."""

    def __init__(self, *, before: bool = False, hidden: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)

        def stage(inputs: int, outputs: int, stride: int) -> nn.Module:
            rest = [BasicBlock(outputs, outputs, before=before) for _ in range(blocks - 1)]
            return nn.Sequential(BasicBlock(inputs, outputs, stride, before=before), *rest)

        self.layer1, self.layer2, self.layer3 = stage(4, 4, 1), stage(4, 6, 2), stage(6, 8, 2)
        self.norm = nn.BatchNorm2d(8) if before else nn.Identity()
        self.hidden = nn.Linear(8, 8) if hidden else nn.Identity()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        h = torch.relu(self.norm(self.layer3(self.layer2(self.layer1(h)))))
        out: Tensor = self.fc(torch.relu(self.hidden(h.mean((2, 3)))))
        return out


IMAGE = torch.zeros(2, 3, 8, 8)


def test_a_residual_network() -> None:
    net = ResNet()
    block = found(net, IMAGE)
    assert str(block) == "layer3.2 and fc"
    assert (block.block, block.heads) == ("layer3.2", ("fc",))
    wanted = [n for n, _ in net.named_parameters() if n.startswith(("layer3.2.", "fc."))]
    assert list(block.names) == wanted
    assert find_last_block(net, unpack_inputs(IMAGE)) == wanted


def test_a_norm_between_the_block_and_the_head_belongs_to_them() -> None:
    assert str(found(ResNet(before=True), IMAGE)) == "layer3.2, norm and fc"


def test_a_head_with_a_hidden_layer() -> None:
    assert str(found(ResNet(hidden=True), IMAGE)) == "layer3.2, hidden and fc"


def test_one_block_in_each_stage() -> None:
    assert str(found(ResNet(blocks=1), IMAGE)) == "layer3 and fc"


class Encoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return out


@pytest.mark.parametrize("layers", [1, 3])
def test_a_transformer(layers: int) -> None:
    net = Encoder(layers)
    block = found(net, torch.zeros(2, 5, dtype=torch.int64))
    inside = "encoder" if layers == 1 else "encoder.layers.2, encoder.norm"
    assert str(block) == f"{inside} and head"
    assert f"encoder.layers.{layers - 1}.self_attn.out_proj.weight" in block.names


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.proj(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return out


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return out


class ViTBlock(nn.Module):
    """Attention and perceptron are modules of their own; a parameter without a module scales the result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(8), Attention(), nn.LayerNorm(8), Perceptron()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.gamma * self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position = nn.Linear(4, 8), nn.Parameter(torch.zeros(1, 6, 8))
        self.blocks = nn.ModuleList([ViTBlock() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x) + self.position
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h).mean(1))
        return out


def test_attention_and_perceptron_of_a_block_are_no_blocks() -> None:
    block = found(ViT(), torch.zeros(2, 6, 4))
    assert str(block) == "blocks.2, norm and head"
    assert "blocks.2.gamma" in block.names


def lenet() -> nn.Module:
    class LeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)
            self.fc1, self.fc2, self.fc3 = nn.Linear(6 * 16, 10), nn.Linear(10, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.conv2(torch.relu(self.conv1(x)))).flatten(1)
            out: Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(h)))))
            return out

    return LeNet()


def test_plain_networks_have_their_last_hidden_layer() -> None:
    assert str(found(lenet(), IMAGE)) == "fc2 and fc3"
    flat = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    assert str(found(flat, torch.zeros(2, 2))) == "2, 3 and 5"
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert str(found(nn.Sequential(features, nn.Linear(4, 3)), IMAGE)) == "0.2 and 1"


def test_stages_of_plain_layers() -> None:
    stages = [nn.Sequential(nn.Conv2d(c, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU()) for c in (3, 4)]
    net = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert str(found(net, IMAGE)) == "1 and 4"


@pytest.mark.parametrize("net", [nn.Linear(2, 1), nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1))], ids=str)
def test_a_perceptron_has_no_block(net: nn.Module) -> None:
    with pytest.raises(InputError, match="no layer with a weight matrix before the head.*'last_layer' or 'all'"):
        found(net, torch.zeros(2, 2))


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.net(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The decoder is registered first: only the order of execution tells.
        self.out, self.up = nn.Conv2d(4, 2, 1), DoubleConv(12, 4)
        self.down1, self.down2 = DoubleConv(3, 4), DoubleConv(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        joined = torch.cat([first, nn.functional.interpolate(second, scale_factor=2)], 1)
        return self.out(self.up(joined)).movedim(1, -1)


def test_a_u_net_has_its_last_decoder_block() -> None:
    assert str(found(UNet(), IMAGE)) == "out and up"


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return torch.cat([self.left(h), self.right(h)], 1)


def test_both_heads_belong_to_the_block() -> None:
    block = found(TwoHeads(), torch.zeros(2, 3))
    assert block.heads == ("left", "right")
    assert str(block) == "b, left and right"


class Recurrent(nn.Module):
    """A layer that is called twice, and one that runs but does not reach the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.aside, self.head = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.first(x))))))
        self.aside(h)
        out: Tensor = self.head(h)
        return out


def test_a_layer_that_is_called_again_begins_with_its_first_call() -> None:
    assert str(found(Recurrent(), torch.zeros(2, 3))) == "again and head"


class Shared(nn.Module):
    """A norm that the stem has used already runs again after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.layer, self.head = (
            nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(self.norm(self.stem(x))))
        out: Tensor = self.head(self.norm(h))
        return out


def test_a_module_that_ran_before_is_left_out() -> None:
    assert str(found(Shared(), torch.zeros(2, 3))) == "layer and head"


class Functional(nn.Module):
    """The weight of the head is used without a call."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = None if tied else nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(self.embed(x)))))
        return h @ (self.embed.weight if self.weight is None else self.weight).T


@pytest.mark.parametrize(("tied", "name"), [(True, "embed.weight"), (False, "weight")])
def test_a_head_without_a_call_is_refused(tied: bool, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"use {name} directly"):
        found(Functional(tied), torch.zeros(2, dtype=torch.int64))


def test_a_tied_head_belongs_to_the_block_with_all_of_its_uses() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[4].weight = net[0].weight
    assert list(found(net, torch.zeros(2, 3)).names) == ["0.weight", "2.weight", "2.bias", "4.bias"]


def test_wrapped_and_compiled_networks() -> None:
    net = ResNet().eval()
    assert str(found(nn.DataParallel(net), IMAGE)) == "module.layer3.2 and module.fc"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(net)
    assert str(found(compiled, IMAGE)) == "_orig_mod.layer3.2 and _orig_mod.fc"
    net.layer3 = torch.compile(net.layer3)
    assert found(net, IMAGE).block == "layer3._orig_mod.2"


def test_training_mode_is_refused_and_the_network_is_left_as_it_was() -> None:
    net = ResNet()
    before = {n: b.clone() for n, b in net.named_buffers()}
    with pytest.raises(InputError, match="training mode"):
        last_block(net.train(), unpack_inputs(IMAGE))
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name])
    found(net, IMAGE)
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_laplace_on_the_last_block_equals_the_named_parameters() -> None:
    torch.manual_seed(0)
    net = ResNet(blocks=2).double().eval()
    data = [(torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 5)]
    named = find_last_block(net, Batch(data[0][0], None, None, 6))
    options: dict[str, Any] = {"structure": "subset", "rank": 4}
    word = Laplace(net, "classification", params="last_block", **options).fit(data)
    names = Laplace(net, "classification", params=named, **options).fit(data)
    assert word.factors.names == tuple(named)
    x = data[0][0][:2]
    torch.testing.assert_close(word.predict(x).latent_cov, names.predict(x).latent_cov)
    assert fit_curvature(net, data, "classification", params="last_block", progress=False).names == tuple(named)
    costs = estimate_costs(net, data, Categorical(), params="last_block")
    assert {c.n_params for c in costs} == {word.posterior.n_params}


def test_a_selection_without_data_says_what_to_do() -> None:
    with pytest.raises(InputError, match="it needs data"):
        select(nn.Linear(2, 1), "last_block")


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, num_labels=3
    )
    tokens = {"input_ids": torch.ones(2, 5, dtype=torch.int64)}
    block = found(transformers.BertForSequenceClassification(bert), tokens)
    assert str(block) == "bert.encoder.layer.1, bert.pooler and classifier"
    vit = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4
    )
    image = {"pixel_values": torch.zeros(2, 3, 8, 8)}
    words = str(found(transformers.ViTForImageClassification(vit), image))
    assert words.endswith(".1, vit.layernorm and classifier"), words
