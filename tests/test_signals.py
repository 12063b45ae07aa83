"""When a stop signal takes effect."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from foveal.signals import Stopped, StopSignals


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that came through to the handler that was there before."""
    found: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda signum, _: found.append(signum))
    yield found
    signal.signal(signal.SIGTERM, previous)


def test_an_interruptible_stretch_is_left_at_once(heard: list[int]) -> None:
    with StopSignals() as signals, pytest.raises(Stopped) as stop, signals.interruptible():
        signal.raise_signal(signal.SIGTERM) or pytest.fail("went on after the signal")
    assert stop.value.signum == signal.SIGTERM and not heard


def test_elsewhere_the_signal_waits_for_the_next_check(heard: list[int]) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signals.check()
        with pytest.raises(Stopped), signals.interruptible():
            pytest.fail("began a stretch after the signal")
    assert not heard


def test_a_second_signal_acts_as_it_did_before(heard: list[int]) -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]


def test_a_signal_at_the_very_start_of_a_stretch_is_not_put_off(heard: list[int]) -> None:
    class Late(StopSignals):
        def check(self) -> None:
            super().check()
            signal.raise_signal(signal.SIGTERM)

    with Late() as signals, pytest.raises(Stopped), signals.interruptible():
        pytest.fail("went on after the signal")


def test_the_former_handlers_come_back(heard: list[int]) -> None:
    with StopSignals():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def stopped_in_compiled_code() -> None:
    """As Ray's waits end where a handler has raised."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except Stopped:
        raise SystemExit(1) from None


def test_what_compiled_code_makes_of_a_stop_is_a_stop() -> None:
    with StopSignals() as signals, pytest.raises(Stopped), signals.interruptible():
        stopped_in_compiled_code()


def test_an_exit_that_nobody_asked_for_stays_one() -> None:
    with StopSignals() as signals, pytest.raises(SystemExit), signals.interruptible():
        raise SystemExit(1)
