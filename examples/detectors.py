"""Detectors of unusual inputs beside a network's own scores: a pretrained ResNet-20, CIFAR-10 against SVHN, and its errors.

    AFTERMAP_DATA=path/to/data python examples/detectors.py [--train 2000] [--test 1000]

Fits every detector on training images and judges all of them on the same test images and house numbers. Needs Pillow, and a few
minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

import aftermap as am
from aftermap import metrics
from aftermap.baselines import GEN, KNN, Detector, Deterministic, Energy, Mahalanobis, RelativeMahalanobis, ViM

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.resnet20_cifar10 import DATA, ResNet20, batches, images


def main(arguments: list[str] | None = None) -> am.evaluation.Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--train", type=int, default=2000, help="training images that detectors are fitted on, up to 10,000"
    )
    parser.add_argument("--test", type=int, default=1000, help="test images, and house numbers, up to 10,000")
    options = parser.parse_args(arguments)
    if not (DATA / "models" / "cifar10_resnet20.npz").exists():
        sys.exit(f"no data in {DATA}: set AFTERMAP_DATA to the folder with cifar10/, svhn/ and models/")
    weights = np.load(DATA / "models" / "cifar10_resnet20.npz")
    model = ResNet20()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    model.eval()
    labels = np.load(DATA / "cifar10" / "labels.npz")
    train_y, test_y = (torch.from_numpy(labels[k]).long() for k in ("train_labels_all", "test_labels"))
    train = batches(images(DATA / "cifar10" / "train_00000_09999.webp", options.train), train_y[: options.train])
    test = batches(images(DATA / "cifar10" / "test_10k.webp", options.test), test_y[: options.test])
    foreign = images(DATA / "svhn" / "test_10k.webp", options.test)

    detectors: dict[str, Detector] = {
        "energy": Energy(model),
        "gen": GEN(model),
        "knn_10": KNN(model, k=10),
        "knn_50": KNN(model, k=50),
        "mahalanobis": Mahalanobis(model),
        "relative_mahalanobis": RelativeMahalanobis(model),
        "vim": ViM(model),
    }
    for detector in detectors.values():
        detector.fit(train)
    outside = {"svhn": batches(foreign, torch.zeros(len(foreign)))}
    found = am.evaluate(Deterministic(model), test, ood=outside, detectors=detectors, name="network")

    wrong = [not right for right in found.table["correct"][: options.test]]
    print(f"accuracy {found['accuracy']:.4f}\n{'score':22}{'AUROC SVHN':>26}{'FPR95':>8}{'AUROC errors':>14}")
    for score, numbers in found.ood["svhn"].items():
        if score in ("mutual_information", "variance"):  # of a single network they are zero
            continue
        errors = metrics.auroc(found.table[score][: options.test], wrong)
        print(f"{score:22}{numbers['auroc']!s:>26}{numbers['fpr95'].value:8.3f}{errors:14.4f}")
    return found


if __name__ == "__main__":
    main()
