"""The process that runs the user's reward function. It imports the user's file and little else: no torch, no numpy."""

from __future__ import annotations

import copy
import fcntl
import os
import select
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from foveal.errors import RewardError
from foveal.reward.calling import Caller
from foveal.reward.contract import Answer, FunctionSpec, Outcome
from foveal.reward.loading import load
from foveal.reward.pictures import PictureLink


def main() -> None:
    """Loads the function named in the first message, then scores what comes in until the run closes the pipe."""
    pipe, life_line = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (pipe, life_line):
        os.set_inheritable(descriptor, False)
    _die_with(life_line)
    connection = Connection(pipe)
    spec: FunctionSpec = connection.recv()
    own_pid = os.getpid()
    try:
        loaded = load(spec)
    except RewardError as error:
        _flush()
        _end_if_forked(own_pid)
        connection.send(error)
        return
    _flush()
    _end_if_forked(own_pid)
    connection.send(loaded.info)
    caller, link = Caller(loaded), PictureLink(connection)

    def trade(outcomes: dict[int, Outcome]) -> dict[int, Answer]:
        if outcomes:
            _flush()
        _end_if_forked(own_pid)
        return link.trade(outcomes)

    with suppress(EOFError):  # the run is over
        if loaded.info.flows:
            caller.flow(link.receive(), spec.concurrency, trade)
        while True:
            # Answers to one prompt share its row; a function that changes what it was given changes only its own.
            inputs = [copy.deepcopy(one) for one in connection.recv()]
            for sample, one in enumerate(inputs):
                link.attach(sample, one)
            outcomes = caller.score(inputs)
            _flush()
            _end_if_forked(own_pid)
            link.answer(outcomes)


def _end_if_forked(own_pid: int) -> None:
    """Ends a process that the user's code forked and let run on: its reply would be taken for that of a later call."""
    if os.getpid() != own_pid:
        os._exit(0)


def _die_with(life_line: int) -> None:
    """Has the kernel kill this process group when the other end of the pipe `life_line` closes.

    The run holds that end and never writes to it, so it closes when the run ends, however that happens. No Python code
    of ours takes part: a function that is stuck inside C holds the interpreter's lock for ever.
    """
    fcntl.fcntl(life_line, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere the signal is SIGIO, which ends a process too
        fcntl.fcntl(life_line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_line, fcntl.F_SETFL, fcntl.fcntl(life_line, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life_line], [], [], 0)[0]:  # closed before the kernel was asked
        os._exit(1)


def _flush() -> None:
    """What the user's code printed appears now, not when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by whoever reads our output, or by the user's code
            stream.flush()
