"""The command line answers before PyTorch is loaded, and is quiet when it is interrupted while it starts."""

from __future__ import annotations

import inspect
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aftermap.cli import signals
from aftermap.cli.app import COMMANDS, load_command
from aftermap.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, *arguments: str, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*([str(first)] if first else []), str(ROOT / "src")])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--help"], 0, "Make a trained network Bayesian"),
        (["--version"], 0, "aftermap "),
        ([], 2, "Make a trained network Bayesian"),
        (["raport"], 2, "Did you mean 'report'"),
    ],
)
def test_torch_is_not_loaded_before_work_starts(arguments: list[str], code: int, said: str) -> None:
    done = run(
        "import atexit, sys\n"
        "atexit.register(lambda: print('LOADED', 'torch' in sys.modules, 'numpy' in sys.modules))\n"
        "from aftermap.cli.main import main\n"
        "main()",
        *arguments,
    )
    assert done.returncode == code, done.stderr
    assert said in " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.stdout.rstrip().endswith("LOADED False False")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_no_encoding_makes_a_command_fail(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal cannot show is written as an escape; the command `main` starts writes these words."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    monkeypatch.setattr("aftermap.cli.app.app", lambda prog_name: sys.stdout.write("±1 → 日本 \udcf6\n"))
    monkeypatch.setattr(signals, "_SIGNALS", ())
    main()
    plus_minus = "\\xb1" if encoding == "ascii" else "±"
    assert written.getvalue().decode(encoding) == f"{plus_minus}1 \\u2192 \\u65e5\\u672c \\udcf6\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_docstrings_say(name: str) -> None:
    command, entry = load_command(name), COMMANDS[name]
    first_paragraph = inspect.cleandoc(command.help).split("\n\n")[0]
    assert " ".join(first_paragraph.split()) == entry.summary
    assert command.name == name


# In the place of PyTorch: a module whose import is interrupted.
INTERRUPTED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(10)
except BaseException:
    pass  # an import that swallows what it does not expect
raise ImportError("half loaded")
"""


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_while_modules_are_imported_is_quiet(name: str, code: int, tmp_path: Path) -> None:
    if name == "SIGINT" and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("interrupts are ignored here, as nohup and & in scripts ask for, and so by every child")
    (tmp_path / "torch.py").write_text(INTERRUPTED.format(name=name))
    done = run("from aftermap.cli.main import main\nmain()", "doctor", "--help", first=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_command_that_works_is_interrupted_by_an_exception() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals.end_start_up()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # nothing had begun
        signals.begin_start_up()
        signals.end_start_up()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as `nohup` and `&` in scripts ask for
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
