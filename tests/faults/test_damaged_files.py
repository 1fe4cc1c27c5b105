"""A part of the programs of faults on every run, and that they would notice; the whole of them with `make test-faults`."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from aftermap.posteriors import io
from tests.faults.checkpoints import SUBJECTS, CheckpointTrial
from tests.faults.data_files import FORMATS, DataTrial
from tests.faults.folders import STRUCTURES, FolderTrial
from tests.faults.harness import GOOD, RESULTS, Outcome, Trial, run, run_in_processes, summary
from tests.faults.page import PAGE, page_of, results

# The networks of the folders are not trained, and their posteriors say so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the Hessian is indefinite"),
    pytest.mark.filterwarnings("ignore:Noise .* come from leave-one-out residuals"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FolderTrial:
    return FolderTrial(1, tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataTrial:
    return DataTrial(1, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTrial:
    return CheckpointTrial(1, tmp_path_factory.mktemp("checkpoints"))


def wrong(outcomes: list[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.result not in GOOD]


def test_damaged_folders_load_as_they_were_or_are_refused(folders: FolderTrial) -> None:
    found = run(folders, range(13 * 12))
    assert wrong(found) == []
    assert {o.subject for o in found} == set(STRUCTURES)
    assert not any(o.result == "as written" for o in found if o.group == "damaged")
    assert Counter(o.result for o in found)["clear error"] > 100


def test_damaged_data_are_read_or_refused(data: DataTrial) -> None:
    found = run(data, range(7 * 20))
    assert wrong(found) == []
    assert {o.subject for o in found} == set(FORMATS)
    assert Counter(o.result for o in found)["clear error"] > 80


def test_work_goes_on_to_the_same_bits_or_is_refused(checkpoints: CheckpointTrial) -> None:
    found = run(checkpoints, range(9 * 20))
    assert wrong(found) == []
    assert {o.subject for o in found} == set(SUBJECTS)
    assert Counter(o.result for o in found)["clear error"] > 80
    assert any(o.result == "identical content" for o in found if o.group == "damaged")


def test_the_program_notices_what_pytorch_does_not_compare(
    checkpoints: CheckpointTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checksums of an archive, other weights come through, and training goes on from them."""
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: None)
    weights, training = SUBJECTS.index("weights (.pt)"), SUBJECTS.index("train (adam)")
    for subject in (weights, training):
        found = run(checkpoints, range(subject, 40 * len(SUBJECTS), len(SUBJECTS)))
        assert any(o.result == "other content" for o in found), SUBJECTS[subject]


def test_the_program_notices_what_a_checksum_prevents(folders: FolderTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksum of config.json, numbers that were changed come through."""
    monkeypatch.setattr(io, "unsealed", lambda config, file: {k: v for k, v in config.items() if k != "checksum"})
    assert any(run(folders, [number])[0].result == "other content" for number in range(1000))


def test_a_case_is_the_same_each_time(folders: FolderTrial, data: DataTrial, checkpoints: CheckpointTrial) -> None:
    trials: list[Trial] = [folders, data, checkpoints]
    for trial in trials:
        assert run(trial, [3, 17]) == run(trial, [3, 17])


def test_what_is_counted() -> None:
    outcomes = [Outcome(i, "damaged", "kron", "truncated", r) for i, r in enumerate([*RESULTS, "clear error"])]
    found = summary(outcomes, 5)
    assert json.loads(json.dumps(found)) == found
    assert found["results"] == {**dict.fromkeys(RESULTS, 1), "clear error": 2}
    assert found["by_subject"]["kron"] == found["results"]
    assert [o["result"] for o in found["wrong"]] == ["unclear error", "other content", "other exception", "killed"]


def test_the_page_says_what_was_counted() -> None:
    folders, data, checkpoints, kills, processes, *others = results()
    expected = page_of(folders, data, checkpoints, kills, processes, *others)
    assert PAGE.read_text(encoding="utf-8") == expected, "write it with: python -m tests.faults.page"
    assert processes is None or all(row["equal"] == row["compared"] for row in processes["compared"].values())
    assert kills is None or kills["whole"] == kills["looked"] > 0
    for found in (folders, data, checkpoints):
        assert found["wrong"] == []
        assert sum(found["results"].values()) == found["cases"]
    assert folders["by_group"]["damaged"]["as written"] == 0


class Deadly(Trial):
    """Its third case kills the process."""

    def attempt(self, number: int) -> Outcome:
        if number == 2:
            import os

            os.kill(os.getpid(), 9)
        return Outcome(number, "damaged", "kron", "truncated", "clear error")


TRIAL = Deadly


@pytest.mark.slow
def test_a_process_that_is_killed_is_one_case() -> None:
    found = run_in_processes("tests.faults.test_damaged_files", 0, 4)
    assert [o.result for o in found] == ["clear error", "clear error", "killed", "clear error"]


@pytest.mark.slow
@pytest.mark.parametrize("make, cases", [(FolderTrial, 1000), (DataTrial, 1000), (CheckpointTrial, 1000)])
def test_many_cases_of_another_seed(make: Callable[[int, Path], Trial], cases: int, tmp_path: Path) -> None:
    assert wrong(run(make(2, tmp_path), range(cases))) == []
