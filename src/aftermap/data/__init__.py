"""Data: readers of the usual formats, data sets by name, toy problems, and parts that never overlap."""

from aftermap.data.builtin import BUILTIN, builtin, photograph_patches
from aftermap.data.csv import csv_rows, read_csv
from aftermap.data.download import fetch, sha256_of
from aftermap.data.examples import Examples
from aftermap.data.idx import read_idx
from aftermap.data.image_folder import read_image_folder
from aftermap.data.named import NAMED, data_folder, download_named, is_named, named
from aftermap.data.npz import read_npz
from aftermap.data.splits import PARTS, part_of, split
from aftermap.data.toy import TOYS, toy

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
    "part_of",
    "photograph_patches",
    "read_csv",
    "read_idx",
    "read_image_folder",
    "read_npz",
    "sha256_of",
    "split",
    "toy",
]
