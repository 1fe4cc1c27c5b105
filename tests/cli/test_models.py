"""`--model` and `--weights`: what is built, and every mistake named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from aftermap.cli.builtin import NETWORKS, Network, ResNet20, Standardise, build_network
from aftermap.cli.models import check_device, import_object, load_weights, make_model, read_weights
from aftermap.errors import DataError, InputError
from tests.cli.common import Files

REAL = Path(__file__).resolve().parents[2] / "../shared/data/models/cifar10_resnet20.npz"


def spec(files: Files, name: str) -> str:
    return files.model.replace(":build", f":{name}")


def test_a_factory_and_its_weights(files: Files) -> None:
    model = make_model(files.model, weights=files.weights)
    assert not model.training
    torch.testing.assert_close(model.state_dict(), torch.load(files.weights, weights_only=True))
    assert isinstance(make_model(spec(files, "ready")), nn.Linear)
    state = torch.random.get_rng_state()
    one, two = make_model(files.model, seed=3), make_model(files.model, seed=3)
    torch.testing.assert_close(one.state_dict(), two.state_dict())
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "needs",
            r"failed: TypeError: needs\(\) missing 1 required positional argument: 'width'. The factory is called without",
        ),
        ("broken", r"failed in .*somebodys_nets.py, line \d+: ValueError: no width is known"),
        ("other", "returned an object of type dict, but must return a torch.nn.Module"),
        ("number", "is of type int; it must be a function"),
        ("bild", "has no 'bild'. Did you mean build"),
    ],
)
def test_a_factory_that_is_none(files: Files, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_model(spec(files, name))


def test_modules_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="there is no module 'nowhere_at_all'"):
        import_object("nowhere_at_all.nets:build", "--model")
    with pytest.raises(InputError, match="must be written pkg.module:name"):
        import_object("nets", "--model")
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    with pytest.raises(InputError, match="needs_more imports 'not_installed_here', which is not installed"):
        import_object("needs_more:build", "--model")
    (tmp_path / "bad_line.py").write_text("x = 1 / 0\n")
    with pytest.raises(InputError, match=r"importing bad_line failed in .*bad_line.py, line 1: ZeroDivisionError"):
        import_object("bad_line:build", "--model")
    with pytest.raises(InputError, match="there is no file none.py"):
        import_object("none.py:build", "--model")


def test_forms_of_weights(files: Files, tmp_path: Path) -> None:
    state = torch.load(files.weights, weights_only=True)
    save_file(state, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", **{n: v.numpy() for n, v in state.items()})
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": v for n, v in state.items()}}, tmp_path / "nested.pt")
    for name in ("a.safetensors", "a.npz", "nested.pt"):
        torch.testing.assert_close(make_model(files.model, weights=tmp_path / name).state_dict(), state)


def test_weights_that_do_not_fit_are_listed(files: Files, tmp_path: Path) -> None:
    state = torch.load(files.weights, weights_only=True)
    wrong = {
        "0.weight": state["0.weight"][:, :1],
        "0.bias": state["0.bias"],
        "2.weight": state["2.weight"],
        "9.bias": state["2.bias"],
    }
    torch.save(wrong, tmp_path / "wrong.pt")
    model = make_model(files.model)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_weights(model, tmp_path / "wrong.pt")
    for part in (
        "2.bias [3] is missing in the file",
        "9.bias [3] is not in the model",
        "0.weight is [8, 1] in the file, [8, 2] in the model",
    ):
        assert part in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before)


def test_files_without_weights(files: Files, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(InputError, match="it is a folder"):
        read_weights(tmp_path)
    torch.save(nn.Linear(2, 3), tmp_path / "pickled.pt")
    with pytest.raises(
        InputError, match=r"pickled Python object \(torch.nn.modules.linear.Linear\), which could run any code"
    ):
        read_weights(tmp_path / "pickled.pt")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(InputError, match="is not a safetensors file"):
        read_weights(tmp_path / "text.safetensors")
    torch.save({"epoch": 3, "loss": 0.5}, tmp_path / "numbers.pt")
    with pytest.raises(InputError, match="holds a mapping with epoch, loss, no state dict"):
        read_weights(tmp_path / "numbers.pt")


def unreadable(folder: Path) -> dict[str, str]:
    """Files that hold no weights, each with what is said about it."""
    good = folder / "good.pt"
    torch.save(nn.Linear(2, 3).state_dict(), good)
    (folder / "cut.pt").write_bytes(good.read_bytes()[:400])
    (folder / "garbage.pt").write_bytes(bytes(range(233, 255)) * 20)
    flipped, weight = bytearray(good.read_bytes()), torch.load(good, weights_only=True)["weight"].numpy().tobytes()
    flipped[flipped.index(weight)] ^= 1  # PyTorch reads this as another weight.
    (folder / "flipped.pt").write_bytes(bytes(flipped))
    (folder / "text.pt").write_text("hello\n" * 10)
    (folder / "empty.pt").touch()
    torch.save(nn.Linear(2, 3), folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": nn.Linear(2, 3).state_dict(), "args": Path("x")}, folder / "beside.pt")
    (folder / "protocol.pt").write_bytes(b"\x80\x04\x95" + bytes(20))
    np.savez(folder / "objects.npz", a=np.array([{}], dtype=object))
    (folder / "garbage.npz").write_bytes(b"no archive")
    return {
        "cut.pt": "is damaged, cut short",
        "flipped.pt": "is damaged, cut short",
        "garbage.pt": "is not a file of weights",
        "text.pt": "is not a file of weights",
        "empty.pt": "is empty",
        "old.pt": "(torch.nn.modules.linear.Linear)",
        "beside.pt": "a pickled Python object (pathlib.",
        "protocol.pt": "is not a file of weights",
        "objects.npz": "something else than arrays of numbers",
        "garbage.npz": "is not a file of weights",
    }


def test_a_file_of_weights_that_cannot_fit_into_memory_is_refused_by_its_size(tmp_path: Path) -> None:
    for name in ("giant.pt", "giant.npz", "giant.safetensors"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(1 << 43)
        with pytest.raises(DataError, match=f"{name} needs 8,796,093,022,208 bytes"):
            read_weights(tmp_path / name)


def test_unreadable_weights_are_explained_without_dangerous_advice(tmp_path: Path) -> None:
    for name, message in unreadable(tmp_path).items():
        with pytest.raises(InputError) as caught:
            read_weights(tmp_path / name)
        said = str(caught.value)
        assert said.startswith(f"--weights: {tmp_path / name} ")
        assert message in said
        assert "\x1b" not in said
        for advice in ("weights_only", "add_safe_globals", "allow_pickle", "file an issue"):
            assert advice not in said, said


def test_devices() -> None:
    assert check_device("cpu") == torch.device("cpu")
    assert check_device("auto").type in ("cpu", "cuda")
    with pytest.raises(InputError, match="--device toaster"):
        check_device("toaster")


@pytest.mark.parametrize(
    "name, shape", [("mlp", [5]), ("cnn", [2, 9, 8]), ("lenet", [1, 28, 28]), ("resnet20", [3, 16, 16])]
)
def test_builtin_networks(name: str, shape: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, *shape, generator=generator)
    network = build_network(name, shape, 4, rescale=True)
    network.eval()
    network.standardise.set_from(x)
    ready = network.standardise(x).transpose(0, 1).flatten(1)
    torch.testing.assert_close(ready.mean(1), torch.zeros(shape[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(ready.std(1), torch.ones(shape[0]))
    targets = 3 + 7 * torch.rand(20, 4, generator=generator)
    assert isinstance(network.scale, Standardise)
    network.scale.set_from(targets)
    torch.testing.assert_close(network(x), targets.mean(0) + targets.std(0) * network.body(network.standardise(x)))
    assert set(NETWORKS) == {"mlp", "cnn", "lenet", "resnet20"}


def test_builtin_networks_say_what_they_take() -> None:
    with pytest.raises(InputError, match="no network builtin:vgg; there are builtin:mlp"):
        build_network("vgg", [1, 28, 28], 10)
    with pytest.raises(InputError, match="for tables use builtin:mlp"):
        build_network("lenet", [4], 10)
    with pytest.raises(InputError, match="up to 32×32, but they are 64×64"):
        build_network("lenet", [1, 64, 64], 10)
    with pytest.raises(InputError, match="give them with --train or --data"):
        make_model("builtin:mlp")


def test_a_constant_column_stays() -> None:
    layer = Standardise(2)
    layer.set_from(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert torch.isfinite(layer(torch.ones(2, 2))).all()


def test_the_public_checkpoint_of_resnet20_fits() -> None:
    if not REAL.is_file():
        pytest.skip("the pretrained ResNet-20 is not beside the project")
    model = make_model("builtin:resnet20", options={"shape": [3, 32, 32], "outputs": 10}, weights=REAL)
    assert isinstance(model, ResNet20)
    assert isinstance(model, Network)
    torch.testing.assert_close(model.standardise.mean, torch.tensor([0.4914, 0.4822, 0.4465]))
    with np.load(REAL) as arrays:
        torch.testing.assert_close(model.fc.weight.detach(), torch.from_numpy(arrays["fc.weight"]))
