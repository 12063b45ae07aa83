"""The command line answers fast, and mistakes in it say what is allowed."""

import os
import subprocess
import sys

import pytest

from foveal.cli import _COMMANDS, main


@pytest.mark.parametrize("command", [[], *([name] for name in _COMMANDS)], ids="-".join)
def test_help_is_fast_and_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom foveal.cli import main\n"
        f"try: main({[*command, '--help']})\n"
        "except SystemExit: pass  # as argparse ends\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pydantic') if m in sys.modules])"
    )
    before = os.times().children_user
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert os.times().children_user - before < 1.0  # of the processor, which other processes may hold
    assert "usage: foveal" in output and output.strip().endswith("[]")


def test_unknown_command_lists_the_commands(capsys) -> None:
    assert main(["trian"]) == 2
    assert "train, eval, check, plan, merge, view, quickstart" in capsys.readouterr().err


def test_an_error_of_the_user_is_one_message_without_traceback(capsys) -> None:
    assert main(["train", "trainer.max_step=3"]) == 1
    error = capsys.readouterr().err
    assert "trainer.max_steps" in error and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--help"], ["merge", "--help"], ["eval", "--help"], ["trian"]])
def test_a_terminal_that_knows_ascii_only_gets_everything(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "foveal", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in done.stderr and done.stdout + done.stderr
