"""Data: readers of the usual formats, data sets by name, toy problems, and parts that never overlap."""

from aftermap.data.augmentation import random_crops
from aftermap.data.download import fetch, sha256_of
from aftermap.data.examples import PARTS, TOYS, Examples, part_of, split, toy
from aftermap.data.named import (
    BUILTIN,
    NAMED,
    builtin,
    data_folder,
    download_named,
    is_named,
    named,
    photograph_patches,
)
from aftermap.data.readers import own_parts, read_idx, read_image_folder, read_npz
from aftermap.data.tables import csv_rows, read_csv

__all__ = [
    "BUILTIN",
    "NAMED",
    "PARTS",
    "TOYS",
    "Examples",
    "builtin",
    "csv_rows",
    "data_folder",
    "download_named",
    "fetch",
    "is_named",
    "named",
    "own_parts",
    "part_of",
    "photograph_patches",
    "random_crops",
    "read_csv",
    "read_idx",
    "read_image_folder",
    "read_npz",
    "sha256_of",
    "split",
    "toy",
]
