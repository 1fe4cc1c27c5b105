"""A run of jobs can be interrupted, goes on where it was, and says what it did not repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.framework import Job, Results, Verdict, _smaller, judged, mean_and_error, paired, result_of, run

NAME = "antoran2022"  # It judges one claim, L10.


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    size: float = 1.0


def experiment(done: list[str], **budget: Any) -> SimpleNamespace:
    """An experiment that notes which jobs it does."""

    def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
        def work(seed: int) -> dict[str, Any]:
            done.append(f"seed{seed}")
            return {"value": seed * settings.size, "curves": {"line": [1 / 3, float("nan")], "first": [0.5]}}

        for seed in range(settings.seeds):
            yield Job(f"part/seed{seed}", lambda s=seed: work(s))

    def verdicts(results: Results) -> list[Verdict]:
        def judge(r: Results) -> list[Verdict]:
            numbers = r.numbers("part/*", "value")
            return [Verdict.of("L10", sum(numbers) > 0, mean_and_error(numbers, 1), seeds=len(numbers))]

        return judged(results, {"part/*": results.settings.seeds}, ("L10",), judge)

    def figures(results: Results, folder: Path) -> dict[str, str]:
        drawn = f"{[v.get('curves') for v in results.values.values()]}"
        (folder / "figure.svg").write_text(f'<svg><path id="0.12345" d="M -1.23456 2.5"/>{drawn}</svg>')
        return {"figure.svg": "Nothing."}

    budgets = {"stated": Settings(), "small": Settings(**budget)}
    return SimpleNamespace(TITLE="A trial", BUDGETS=budgets, jobs=jobs, verdicts=verdicts, figures=figures)


def written(folder: Path) -> Any:
    return json.loads((folder / "output" / "results.json").read_text(encoding="utf-8"))


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--budget", "small", "--work", str(folder / "work"), "--output", str(folder / "output"), *more]


def test_jobs_are_done_once_and_a_part_can_be_written(tmp_path: Path) -> None:
    done: list[str] = []
    trial = experiment(done)
    assert run(trial, NAME, arguments(tmp_path, "--only", "*/seed1")) == 0
    assert done == ["seed1"]
    assert not (tmp_path / "output").exists()
    run(trial, NAME, arguments(tmp_path, "--only", "part/seed1", "--partial"))
    verdict = written(tmp_path)["verdicts"][0]
    assert (verdict["verdict"], verdict["reason"]) == ("not run yet", "2 of 3 jobs are missing")
    assert done == ["seed1"]
    run(trial, NAME, arguments(tmp_path))
    assert done == ["seed1", "seed0", "seed2"]
    content = written(tmp_path)
    assert content["verdicts"][0] == {"id": "L10", "verdict": "holds", "ours": "1.0 ± 0.6", "reason": "", "seeds": 3}
    assert content["budget"] == {"name": "small", "seeds": 3, "size": 1.0}
    assert content["values"]["part/seed1"]["curves"] == {"line": [0.3333, None], "first": [0.5]}
    assert content["values"]["part/seed1"]["commit"] == content["commit"]
    assert "| L10 |" in (tmp_path / "output" / "README.md").read_text(encoding="utf-8")


def test_results_that_were_written_can_be_gone_on_with_elsewhere(tmp_path: Path) -> None:
    done: list[str] = []
    run(experiment(done, seeds=2), NAME, arguments(tmp_path))
    before = written(tmp_path)["values"]
    figure = tmp_path / "output" / "figure.svg"
    drawn = figure.read_text(encoding="utf-8")
    assert '<path id="0.12345" d="M -1.23 2.5"/>' in drawn
    (tmp_path / "work").rename(tmp_path / "lost")
    run(experiment(done, seeds=2), NAME, arguments(tmp_path, "--resume"))
    assert figure.read_text(encoding="utf-8") == drawn  # from the digits that were written, not from more of them
    (tmp_path / "work").rename(tmp_path / "lost again")
    run(experiment(done, seeds=4), NAME, arguments(tmp_path, "--resume"))
    assert done == ["seed0", "seed1", "seed2", "seed3"]
    assert {k: v for k, v in written(tmp_path)["values"].items() if k in before} == before


def test_a_part_does_not_replace_jobs_that_are_only_in_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(experiment([], seeds=3), NAME, arguments(tmp_path))
    before = (tmp_path / "output" / "results.json").read_text(encoding="utf-8")
    elsewhere = ["--budget", "small", "--work", str(tmp_path / "other"), "--output", str(tmp_path / "output")]
    part = [*elsewhere, "--only", "part/seed1", "--partial"]
    assert run(experiment([], seeds=3), NAME, part) == 2
    assert "2 jobs that this run has not (part/seed0" in capsys.readouterr().err
    assert (tmp_path / "output" / "results.json").read_text(encoding="utf-8") == before
    assert run(experiment([], seeds=3), NAME, [*part, "--resume"]) == 0
    assert set(written(tmp_path)["values"]) == {"part/seed0", "part/seed1", "part/seed2"}


def test_a_job_builds_on_the_numbers_of_another(tmp_path: Path) -> None:
    trial = experiment([], seeds=1)
    seen: list[float] = []

    def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
        yield Job("part/seed0", lambda: {"value": 7.0})
        yield Job("late/seed0", lambda: {"value": seen.append(result_of("part/seed0")["value"])})

    trial.jobs, trial.figures = jobs, lambda results, folder: {}
    with pytest.raises(RuntimeError, match="needs the numbers of part/seed0"):
        run(trial, NAME, arguments(tmp_path, "--only", "late"))
    run(trial, NAME, arguments(tmp_path, "--only", "part", "--partial"))
    (tmp_path / "work").rename(tmp_path / "lost")
    run(trial, NAME, arguments(tmp_path, "--only", "late", "--resume"))
    assert seen == [7.0]


def test_hours_end_a_run_between_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    assert run(experiment(done), NAME, arguments(tmp_path, "--hours", "-1")) == 0
    assert done == []
    assert "3 jobs are left" in capsys.readouterr().out


def test_changed_settings_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    run(experiment(done), NAME, arguments(tmp_path))
    assert "settings changed" not in capsys.readouterr().out
    run(experiment(done, size=2.0), NAME, arguments(tmp_path))
    assert "settings changed (size: 1.0 to 2.0); jobs that are done are not repeated" in capsys.readouterr().out
    assert len(done) == 3
    elsewhere = ["--budget", "small", "--work", str(tmp_path / "other"), "--output", str(tmp_path / "output")]
    run(experiment(done, size=3.0), NAME, [*elsewhere, "--resume"])
    assert "settings changed (size: 2.0 to 3.0)" in capsys.readouterr().out
    assert len(done) == 3


def test_verdicts_and_register_must_agree(tmp_path: Path) -> None:
    trial = experiment([])
    trial.verdicts = lambda results: [Verdict.of("H1", True, "1")]
    with pytest.raises(ValueError, match="H1.*L10"):
        run(trial, NAME, arguments(tmp_path))


def test_paired_differences() -> None:
    difference = paired([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    assert difference.mean == pytest.approx(1.0)
    assert difference.error == pytest.approx(0.5 / 3**0.5)
    assert difference.higher
    assert not difference.lower
    assert not paired([1.0], [0.0]).higher  # One seed decides nothing.
    with pytest.raises(ValueError, match="3 and 2"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])


def test_drawings_are_smaller_and_look_the_same() -> None:
    mark = '   <use xlink:href="#m" x="1.23456" y="{}" style="fill: red; fill-opacity: 0.6"/>\n'
    faint = '   <use xlink:href="#m" x="1" y="2" style="opacity: 0.5"/>\n'
    other = '   <use xlink:href="#m" x="1" y="2" style="fill: blue"/>\n'
    drawing = "<svg>\n  <g>\n" + mark.format(1) + mark.format(2.71828) + other + 2 * faint + "  </g>\n</svg>\n"
    found = _smaller(drawing)
    group = '<g style="fill: red; fill-opacity: 0.6">\n<use xlink:href="#m" x="1.23" y="1"/>\n<use xlink:href="#m" x="1.23" y="2.72"/>\n</g>\n'
    assert found == "<svg>\n<g>\n" + group + (other + 2 * faint).replace("   ", "") + "</g>\n</svg>\n"
    assert _smaller(found) == found  # A figure that is written again has the same bytes.


def test_words_of_a_drawing_keep_their_font_and_their_turn() -> None:
    def word(font: str, turn: str) -> str:
        return f'<text style="font-size: 7px; font-family: {font}; fill: red"{turn}>a</text>\n'

    usual, turned = "'DejaVu Sans', sans-serif", ' transform="rotate(-90 1 2)"'
    words = word(usual, ' transform="rotate(-0 1.5 2.5)"') + word(usual, turned) + word("serif", "")
    found = _smaller(f'<svg>\n<style type="text/css">*{{a: b}}</style>\n{words}</svg>\n')
    assert f'<style type="text/css">text{{font-family: {usual};}} *{{a: b}}</style>' in found
    assert '<text style="font-size: 7px; fill: red">a</text>' in found
    assert f'<text style="font-size: 7px; fill: red"{turned}>a</text>' in found
    assert word("serif", "") in found
    assert _smaller(found) == found
