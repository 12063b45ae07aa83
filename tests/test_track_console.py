"""What the terminal shows."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from foveal.track import console
from foveal.track.lines import StepLines, duration, number

STEP = {
    "reward/overall": 0.53,
    "reward/accuracy": 0.61,
    "actor/kl_loss": 0.003,
    "response_length/mean": 87.25,
    "actor/grad_norm": 0.42,
    "perf/time_per_step": 12.3,
}


def test_a_step_is_one_line_with_the_few_numbers_that_matter() -> None:
    line = StepLines().training(12, 100, STEP | {"critic/score/max": 1.0})
    assert line == "step  12/100  reward 0.530  acc 0.610  kl 0.003  len 87.25  grad 0.420  12 s  left 18 min"


def test_a_step_shows_the_change_of_the_reward() -> None:
    lines = StepLines()
    lines.training(1, 10, {"reward/overall": 0.5})
    assert "reward 0.480 (-0.020)" in lines.training(2, 10, {"reward/overall": 0.48})


def test_time_left_counts_what_lies_between_steps() -> None:
    lines = StepLines()
    lines.training(1, 11, {"perf/time_per_step": 10.0}, now=0.0)
    assert lines.training(2, 11, {"perf/time_per_step": 10.0}, now=30.0).endswith("left 3 min")  # 9 × mean(10, 30) s


def test_the_last_step_has_no_time_left() -> None:
    assert "left" not in StepLines().training(10, 10, STEP)


def test_columns_stay_aligned() -> None:
    lines = StepLines()
    lines.training(1, 10, {"reward/overall": 0.5, "response_length/mean": 1234.0})
    second = lines.training(2, 10, {"reward/overall": 0.5, "response_length/mean": 8.0, "actor/grad_norm": 1.0})
    third = lines.training(3, 10, {"reward/overall": 0.5, "response_length/mean": 88.0, "actor/grad_norm": 1.0})
    assert second.index("grad") == third.index("grad")


def test_a_step_without_any_known_metric_is_still_a_line() -> None:
    assert StepLines().training(1, None, {"reward/准确率": 0.5}) == "step 1"


def test_a_validation_line() -> None:
    line = StepLines().validation(10, {"val/reward_score": 0.5, "val/accuracy_reward": float("nan")})
    assert line == "validation at step 10  score 0.500  acc nan"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.000"), (0.5, "0.500"), (12.345, "12.35"), (873.0, "873.0"), (1.2e-5, "1.2e-05")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (42, "42 s"), (1080, "18 min"), (11100, "3 h 05 min"), (190_000, "2 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_text_that_the_terminal_cannot_write_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.note("准确率 \ud800 0.5")
    assert raw.getvalue() == b"??? ? 0.5\n"


def test_a_closed_terminal_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    console.note("x")


def test_warnings_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    console.warn("x")
    assert capsys.readouterr() == ("", "warning: x\n")


def test_a_phase_prints_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with console.phase("validation", 3) as advance:
        advance(3)
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_phase_shows_a_bar_in_a_terminal_and_lets_notes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    with console.phase("validation", 3) as advance:
        with console.phase("inner") as inner:
            inner(1)
        advance(2)
        console.note("a note [of] brackets")
    shown = terminal.getvalue()
    assert "validation" in shown and "inner" not in shown and "a note [of] brackets" in shown


def test_the_console_loads_nothing_heavy() -> None:
    code = (
        "import sys, foveal.track.console; sys.exit(bool({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_reader_that_has_gone_leaves_no_error_behind() -> None:
    code = "from foveal.cli import main; import sys; sys.exit(main(['--help']))"
    command = f'set -o pipefail; {sys.executable} -c "{code}" | true'
    done = subprocess.run(["bash", "-c", f"{command}; echo $?"], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n" and done.stderr == ""


def test_errors_stand_apart_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    console.error("error: x")
    assert capsys.readouterr() == ("", "\nerror: x\n")


def test_what_steers_a_terminal_is_shown_and_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    console.note("row \x1b[2J\r\x9b31m\tred\n图")
    assert capsys.readouterr().out == "row \\x1b[2J\\x0d\\x9b31m\tred\n图\n"
