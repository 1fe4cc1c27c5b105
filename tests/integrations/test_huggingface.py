"""Transformers built from configurations: no download. Their curvature, their adapters, and the way to a folder and back."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap import Laplace
from aftermap.errors import DataError, InputError, NotFittedError, UnsupportedError
from aftermap.integrations import huggingface as hf
from aftermap.likelihoods import Categorical
from aftermap.testing.predictor import ModelSnapshot, check_unchanged

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

WORDS, CLASSES, PAD = 37, 3, 1
SIZES = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": PAD, "max_position_embeddings": 20}
untrained = pytest.mark.filterwarnings("ignore:the posterior that was found without held-out labels")
TARGETS = {"bert": ["query", "value"], "roberta": ["query", "value"], "llama": ["q_proj", "v_proj"]}


def make(kind: str, *, lora: bool = False, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny transformer in float64; adapters with random weights, as after training."""
    options = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    options |= {**SIZES, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "bert":
            model = transformers.BertForSequenceClassification(transformers.BertConfig(**options))
        elif kind == "roberta":
            model = transformers.RobertaForSequenceClassification(
                transformers.RobertaConfig(type_vocab_size=1, **options)
            )
        else:
            config = transformers.LlamaConfig(num_key_value_heads=1, bos_token_id=2, eos_token_id=3, **options)
            model = transformers.LlamaForSequenceClassification(config)
        for p in model.parameters():  # the small weights of a start hide mistakes behind tiny gradients
            nn.init.normal_(p, std=0.4)
        return (with_adapters(model, kind) if lora else model).double().eval()


def with_adapters(model: nn.Module, kind: str) -> nn.Module:
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=TARGETS[kind], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def tokens(count: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Padded sentences of different lengths, with their labels inside."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, WORDS, (count, length), generator=g)
    lengths = torch.randint(1, length + 1, (count, 1), generator=g)
    mask = (torch.arange(length) < lengths).long()
    labels = torch.randint(CLASSES, (count,), generator=g)
    return {"input_ids": ids.where(mask == 1, PAD), "attention_mask": mask, "labels": labels}


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k != "labels"}


def jacobian(model: nn.Module, batch: dict[str, Tensor], names: list[str]) -> Tensor:
    """[N, C, P] by autograd, one output at a time."""
    parameters = dict(model.named_parameters())
    chosen = [parameters[n] for n in names]
    logits = model(**inputs(batch)).logits
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(v, chosen, retain_graph=True)])
        for v in logits.reshape(-1)
    ]
    return torch.stack(rows).reshape(*logits.shape, -1).detach()


def dense_ggn(model: nn.Module, batch: dict[str, Tensor], names: list[str]) -> Tensor:
    J = jacobian(model, batch, names)
    with torch.no_grad():
        curvature = Categorical().hessian(model(**inputs(batch)).logits)
    return torch.einsum("ncp,ncd,ndq->pq", J, curvature, J)


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_adapters_have_the_curvature_of_autograd(kind: str) -> None:
    model = make(kind, lora=True)
    names = hf.adapters(model, head=True)
    assert names == [n for n, p in model.named_parameters() if p.requires_grad]
    data = [tokens(4, 7), tokens(3, 5, seed=1)]
    before = ModelSnapshot.of(model)
    la = Laplace(model, hf.likelihood(model), structure="full", params=names, prior_precision=2.0).fit(data)
    expected = sum(dense_ggn(model, batch, names) for batch in data)
    precision = la.posterior.to_dense()
    # LLaMA's normalisation computes in float32 whatever the dtype: its rounding is all that differs.
    close = {"rtol": 1e-3, "atol": 1e-6} if kind == "llama" else {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(precision - 2.0 * torch.eye(len(precision)), expected, **close)
    x = inputs(tokens(5, 6, seed=2))
    J = jacobian(model, x, names)
    mean, covariance = la.joint(x)
    torch.testing.assert_close(mean, model(**x).logits.detach())
    wanted = torch.einsum("ncp,pq,mdq->ncmd", J, torch.linalg.inv(precision), J)
    torch.testing.assert_close(covariance, wanted, **close)
    check_unchanged(model, before)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_kronecker_factors_are_exact_for_one_datum_of_one_token(kind: str) -> None:
    model = make(kind, lora=True)
    batch = tokens(1, 1)
    names = hf.adapters(model)
    assert names
    assert all("lora_" in n for n in names)
    la = Laplace(model, "classification", params=names, prior_precision=2.0).fit([batch])
    assert {t.block for t in la.factors.treatment.values()} == {"kron"}
    sizes = [dict(model.named_parameters())[n].numel() for n in names]
    blocks = torch.block_diag(*(torch.ones(s, s) for s in sizes)).double()
    expected = dense_ggn(model, batch, names) * blocks
    precision = la.posterior.to_dense()
    torch.testing.assert_close(precision - 2.0 * torch.eye(len(precision)), expected, rtol=1e-6, atol=1e-8)


@untrained
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_whole_transformers_go_through_attention_and_normalisation(kind: str) -> None:
    model = make(kind)
    data = [tokens(4, 7), UserDict(tokens(3, 5, seed=1))]  # a BatchEncoding is a UserDict, too
    la = Laplace(model, hf.likelihood(model), structure="diagonal").fit(data)
    names = list(la.posterior.names)
    assert names == [n for n, _ in model.named_parameters()]
    found = torch.cat([1 / la.posterior.marginal_variance()[n].reshape(-1) for n in names]) - 1
    expected = sum(_diagonal(model, batch, names) for batch in (data[0], dict(data[1])))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    kron = Laplace(model, hf.likelihood(model)).fit(data).tune()
    prediction = kron.predict(inputs(tokens(5, 6, seed=2)))
    torch.testing.assert_close(prediction.mean.sum(-1), torch.ones(5, dtype=torch.float64))
    assert float(prediction.epistemic.min()) > 0


def _diagonal(model: nn.Module, batch: dict[str, Tensor], names: list[str]) -> Tensor:
    J = jacobian(model, batch, names)
    with torch.no_grad():
        root = Categorical().hessian_root(model(**inputs(batch)).logits)
    return torch.einsum("ncp,nck->nkp", J, root).square().sum((0, 1))


@untrained
def test_save_and_load_a_model(tmp_path: Path) -> None:
    model = make("bert")
    la = Laplace(model, "classification").fit([tokens(6, 5)]).tune()
    place = hf.save(la, tmp_path / "run")
    assert place == tmp_path / "run" / "posterior"
    assert {"config.json", "model.safetensors", "posterior"} <= {p.name for p in (tmp_path / "run").iterdir()}
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "run", dtype=torch.float64).eval()
    loaded = hf.load(tmp_path / "run", again)
    x = inputs(tokens(4, 6, seed=3))
    torch.testing.assert_close(loaded.predict(x, link="pairwise").mean, la.predict(x, link="pairwise").mean)
    with pytest.raises(InputError, match="posterior exists already"):
        hf.save(la, tmp_path / "run")
    hf.save(la, tmp_path / "run", overwrite=True)
    other = make("bert", num_labels=CLASSES + 1)
    with pytest.raises(InputError, match=r"classifier.weight is \(4, 8\) in the model, \(3, 8\) in the file"):
        hf.load(tmp_path / "run", other)
    with pytest.raises(InputError, match="holds no folder 'posterior'"):
        hf.load(tmp_path, again)


@untrained
def test_save_and_load_adapters(tmp_path: Path) -> None:
    model = make("llama", lora=True)
    names = hf.adapters(model)
    la = Laplace(model, "classification", params=names).fit([tokens(6, 5)]).tune()
    hf.save(la, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()
    fresh = peft.PeftModel.from_pretrained(make("llama"), tmp_path).double().eval()
    assert not any(p.requires_grad for p in fresh.parameters())  # loaded for inference
    assert hf.adapters(fresh) == names
    loaded = hf.load(tmp_path, fresh)
    x = inputs(tokens(4, 6, seed=3))
    torch.testing.assert_close(loaded.predict(x, link="pairwise").mean, la.predict(x, link="pairwise").mean)
    with pytest.raises(InputError, match="lora_A.default.weight .* is missing in the model"):
        hf.load(tmp_path, fresh.merge_and_unload())
    foreign = peft.PeftModel.from_pretrained(make("llama", seed=1), tmp_path).double().eval()
    with pytest.raises(InputError, match="other values outside the posterior's parameters"):
        hf.load(tmp_path, foreign)


def test_batches_keep_what_the_model_takes_and_can_be_repeated() -> None:
    model = make("bert", lora=True)
    raw = {**tokens(4, 5), "text": ["a", "b", "c", "d"], "idx": torch.arange(4)}
    raw["label"] = raw.pop("labels")
    data = hf.batches([raw], model)
    assert len(data) == 1
    for _ in range(2):
        assert [sorted(b) for b in data] == [["attention_mask", "input_ids", "labels"]]
    la = Laplace(model, "classification", params=hf.adapters(model)).fit(data)
    assert la.n_data == 4
    with pytest.raises(DataError, match="batch 0 is a tuple"):
        list(hf.batches([(1, 2)], model))
    with pytest.raises(DataError, match=r"batch 0 has the keys \['input_ids'\], but no 'labels'"):
        list(hf.batches([{"input_ids": torch.zeros(2, 3)}], model))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "classification"),
        ({"num_labels": 1}, "regression"),
        ({"problem_type": "multi_label_classification"}, "binary"),
        ({"problem_type": "regression"}, "regression"),
    ],
)
def test_likelihood_follows_the_configuration(changes: dict[str, Any], expected: str) -> None:
    assert hf.likelihood(make("bert", **changes)) == expected


@untrained
def test_a_regression_head_and_many_labels() -> None:
    for changes, targets in (
        ({"num_labels": 1}, torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)),
        ({"problem_type": "multi_label_classification"}, torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 0]]).double()),
    ):
        model = make("bert", lora=True, **changes)
        batch = {**tokens(3, 5), "labels": targets}
        la = Laplace(model, hf.likelihood(model), params=hf.adapters(model)).fit([batch])
        la.tune(method="evidence")  # three examples are too few for the default
        assert la.predict(inputs(batch)).mean.shape == (3, changes.get("num_labels", CLASSES))


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear has no config with problem_type or num_labels"):
        hf.likelihood(nn.Linear(2, 3))
    with pytest.raises(InputError, match="has no adapter of peft"):
        hf.adapters(make("bert"))
    net = nn.Linear(2, 3)
    with pytest.raises(InputError, match="Linear has no save_pretrained"):
        hf.save(Laplace(net, "classification").fit([(torch.zeros(2, 2), torch.tensor([0, 1]))]), tmp_path)
    with pytest.raises(NotFittedError):
        hf.save(Laplace(make("bert"), "classification"), tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    odd = nn.Linear(2, 3)
    odd.config = transformers.BertConfig(num_labels=2)
    odd.config.problem_type = "ranking"
    with pytest.raises(InputError, match="config.problem_type='ranking' is not known"):
        hf.likelihood(odd)


@pytest.mark.parametrize("lora", [False, True])
def test_causal_language_models_are_refused(lora: bool) -> None:
    """Their outputs are of the next token; labels position by position would be those of the present one."""
    options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.LlamaConfig(num_key_value_heads=1, bos_token_id=2, eos_token_id=3, **options, **SIZES)
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    message = r"LlamaForCausalLM is a causal language model.*logits\[:, :-1\].*labels\[:, 1:\]"
    with pytest.raises(UnsupportedError, match=message):
        Laplace(model, "classification")
    with pytest.raises(UnsupportedError, match=message):
        hf.likelihood(model)
