"""All programs of faults as one run, which `make test-faults` starts: what each cost is written down, and the page of reliability is made from their counts.

`python -m tests.faults` starts two programs at a time, the longest first. A program that finds something wrong does not keep the others from running; the exit code tells.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.page import RUN, write_page

__all__ = ["PROGRAMS", "main"]

ROOT = Path(__file__).resolve().parents[2]
# Those that take longest come first, so that none of them runs alone at the end.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "kills": ("--again",), "processes": (), "folders": (), "data_files": (), "checkpoints": (), "soak": (), "digits": (),
}  # fmt: skip


def run_program(name: str) -> dict[str, Any]:
    """Runs one program to its end: its exit code, and the minutes that it took by the clock and of processors."""
    sys.stderr.write(f"{name} begins\n")
    begun = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", f"tests.faults.{name}", *PROGRAMS[name]], cwd=ROOT)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    minutes = (time.monotonic() - begun) / 60
    sys.stderr.write(f"{name} ends after {minutes:.1f} minutes with exit code {child.returncode}\n")
    processors = (used.ru_utime + used.ru_stime) / 60
    return {"exit_code": child.returncode, "minutes": round(minutes, 1), "processor_minutes": round(processors, 1)}


def main(arguments: list[str] | None = None) -> int:
    """Runs every program and writes the page; the exit code is 1 if one found something wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=int, default=2, help="how many programs run at a time")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    with ThreadPoolExecutor(options.at_once) as pool:
        found = dict(zip(PROGRAMS, pool.map(run_program, PROGRAMS), strict=True))
    minutes = round((time.monotonic() - begun) / 60, 1)
    told = {"minutes": minutes, "at_once": options.at_once, "processors": os.cpu_count(), "programs": found}
    RUN.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    write_page()
    sys.stderr.write(json.dumps(told, indent=1) + "\n")
    return int(any(entry["exit_code"] for entry in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
