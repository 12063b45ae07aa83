"""The watchdog: silence ends the process, with a warning before; progress does not. Real threads, short limits."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from foveal.rollout.watchdog import EXIT_STATUS, Watchdog


def test_silence_is_warned_of_and_then_ended(capfd: pytest.CaptureFixture[str]) -> None:
    given_up = threading.Event()
    with Watchdog("the engine", 0.2, give_up=given_up.set).watch():
        assert given_up.wait(5)
    error = capfd.readouterr().err
    assert "warning: the engine: no progress for" in error
    assert error.index("warning:") < error.index("so the process ends")
    assert "test_silence_is_warned_of_and_then_ended" in error, "where the threads stand is not told"


def test_a_sign_of_life_starts_the_time_anew(capfd: pytest.CaptureFixture[str]) -> None:
    given_up = threading.Event()
    watchdog = Watchdog("the engine", 1.6, give_up=given_up.set)
    with watchdog.watch():
        for _ in range(20):
            assert not given_up.wait(0.1)
            watchdog.beat()
    assert capfd.readouterr().err == ""


def test_each_silence_is_warned_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    given_up = threading.Event()
    watchdog = Watchdog("the engine", 1.6, give_up=given_up.set)
    told = ""
    with watchdog.watch():
        for count in (1, 2):
            watchdog.beat()
            while told.count("warning:") < count:
                assert not given_up.wait(0.05), told
                told += capfd.readouterr().err
            assert not given_up.wait(0.3)  # in which it would be told again
    assert (told + capfd.readouterr().err).count("warning:") == 2


def test_nothing_is_watched_outside_the_block() -> None:
    given_up = threading.Event()
    watchdog = Watchdog("the engine", 0.1, give_up=given_up.set)
    before = threading.active_count()
    with watchdog.watch():
        pass
    assert threading.active_count() == before
    assert not given_up.wait(0.3)


def test_the_time_before_a_block_does_not_count() -> None:
    given_up = threading.Event()
    watchdog = Watchdog("the engine", 0.3, give_up=given_up.set)
    for _ in range(2):
        time.sleep(0.4)
        with watchdog.watch():
            assert not given_up.wait(0.1)


def test_an_exception_ends_the_watch() -> None:
    given_up = threading.Event()
    with pytest.raises(KeyError), Watchdog("the engine", 0.1, give_up=given_up.set).watch():
        raise KeyError
    assert not given_up.wait(0.3)


def test_a_hanging_process_exits_by_itself() -> None:
    code = (
        "import time; from foveal.rollout.watchdog import Watchdog\n"
        "with Watchdog('the engine', 0.2).watch(): time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == EXIT_STATUS
    assert "start the same command again" in done.stderr and "time.sleep" not in done.stdout


def test_a_process_that_was_stopped_is_not_stuck() -> None:
    code = (
        "import time; from foveal.rollout.watchdog import Watchdog\n"
        "with Watchdog('the engine', 1.0).watch():\n"
        "    print(flush=True)\n"
        "    for _ in range(12): time.sleep(0.05)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        assert process.wait(10) == 0
