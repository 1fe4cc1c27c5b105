"""A LoRA adapter with a posterior: train it, fit a Laplace approximation over the adapter alone, save both, load both.

The transformer is a small BERT-like one made from a configuration, and the task a made-up language (which of two words
comes first?), so nothing is downloaded. With a pretrained model only the first function changes.

python examples/huggingface_lora.py [--epochs 30] [--seed 0]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import aftermap as am
from aftermap.integrations import huggingface as hf

PAD, FIRST, SECOND, WORDS, LENGTH = 0, 1, 2, 40, 12


def base(seed: int) -> nn.Module:
    """Stands for ``AutoModelForSequenceClassification.from_pretrained(...)``."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
        pad_token_id=PAD,
    )
    return BertForSequenceClassification(config)


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Tokenised sentences of different lengths; the label says whether FIRST stands before SECOND."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, LENGTH + 1, (1,), generator=g))
        ids = torch.randint(3, WORDS, (length,), generator=g)
        places = torch.randperm(length, generator=g)[:2]
        ids[places] = torch.tensor([FIRST, SECOND])
        mask = (torch.arange(LENGTH) < length).long()
        padded = torch.cat([ids, torch.full((LENGTH - length,), PAD)])
        rows.append({"input_ids": padded, "attention_mask": mask, "labels": (places[0] < places[1]).long()})
    return rows


def train(model: nn.Module, loader: DataLoader[dict[str, Tensor]], epochs: int) -> None:
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    model.train()
    for _ in range(epochs):
        for batch in loader:
            optimiser.zero_grad()
            model(**batch).loss.backward()
            optimiser.step()
    model.eval()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value", "dense"])
    model = get_peft_model(base(options.seed), config)
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(sentences(600, options.seed), batch_size=50, shuffle=True, generator=order)
    train(model, loader, options.epochs)

    data = hf.batches(loader, model)
    la = am.Laplace(model, hf.likelihood(model), params=hf.adapters(model, head=True)).fit(data)
    la.tune(hf.batches(DataLoader(sentences(200, options.seed + 1), batch_size=200), model))
    test = next(iter(DataLoader(sentences(500, options.seed + 2), batch_size=500)))
    labels = test.pop("labels")
    plain, bayes = la.predictor.map_prediction(test), la.predict(test)
    print(f"{la.posterior.n_params:,} uncertain weights of {sum(p.numel() for p in model.parameters()):,}")
    results = {}
    for name, prediction in (("network", plain), ("Bayesian", bayes)):
        accuracy = float((prediction.labels == labels).float().mean())
        nll = -float(prediction.log_prob(labels).mean())
        print(f"{name:10} accuracy {accuracy:.3f}, negative log-likelihood {nll:.3f}")
        results |= {f"accuracy_{name}": accuracy, f"nll_{name}": nll}

    with tempfile.TemporaryDirectory() as folder:
        hf.save(la, folder)
        print("saved:", ", ".join(sorted(p.name for p in Path(folder).iterdir())))
        again = hf.load(folder, PeftModel.from_pretrained(base(options.seed), folder).eval())
        results["loaded_differs"] = float(
            (again.predict(test, link="probit").mean - la.predict(test, link="probit").mean).abs().max()
        )
    print(f"largest difference after loading: {results['loaded_differs']:g}")
    return results


if __name__ == "__main__":
    main()
