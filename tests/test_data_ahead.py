from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from foveal.data.ahead import start_ahead


def test_results_and_errors_belong_to_their_items() -> None:
    futures = start_ahead(lambda item: 12 // item, [4, 0, 3], threads=2)
    assert (futures[4].result(10), futures[3].result(10)) == (3, 4)
    with pytest.raises(ZeroDivisionError):
        futures[0].result(10)


def test_an_item_taken_back_is_not_worked_on() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work(item: str) -> None:
        begun.set()
        assert go_on.wait(10)
        done.append(item)

    futures = start_ahead(work, ["a", "b", "c"], threads=1)
    assert begun.wait(10)
    assert futures["b"].cancel() and not futures["a"].cancel()
    go_on.set()
    futures["c"].result(10)
    assert done == ["a", "c"]


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise KeyboardInterrupt", -2), ("raise SystemExit(3)", 3)])
def test_what_nobody_will_ask_for_does_not_hold_up_the_end(end: str, status: int) -> None:
    program = f"""
import time
from foveal.data.ahead import start_ahead
start_ahead(lambda item: (time.sleep(0.05), print(item)), range(2000), threads=2)[0].result()
{end}
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert 0 < len(ended.stdout.splitlines()) < 1000
