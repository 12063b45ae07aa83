"""`foveal view`: the command line."""

from __future__ import annotations

import argparse
import importlib.util
import socket
from pathlib import Path

from foveal.errors import ConfigError
from foveal.track.console import note, warn

PORT = 7007


def view_command(args: list[str]) -> int:
    """Serves the pages of some runs until Ctrl-C, or writes one page.

    Args:
        args: `RUN… [--host HOST] [--port PORT] [--export FILE]`.

    Returns:
        the exit status.

    Raises:
        ConfigError: there is no run, the port is taken, or packages are missing.
    """
    parser = argparse.ArgumentParser(
        prog="foveal view",
        description="Show runs in the browser: curves, times, settings, and the answers with their pictures and "
        "tokens. It only reads, and goes on reading while a run goes on.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or a folder of runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the default is this machine alone")
    parser.add_argument("--port", type=int, help=f"default {PORT}, or else a free one")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one self-contained HTML file, and end")
    options = parser.parse_args(args)
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"foveal view needs {package}, which is missing. Install it: pip install 'foveal[view]'")
    from foveal.view.export import export
    from foveal.view.runs import open_runs

    runs = open_runs(options.runs)
    if options.export:
        export(runs, options.export)
        note(f"written: {options.export}")
        return 0
    import uvicorn

    from foveal.view.app import make_app
    from foveal.view.guard import LOOPBACK

    listening = _listen(options.host, options.port)
    port = listening.getsockname()[1]
    shown = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
    shown = f"[{shown}]" if ":" in shown else shown
    if options.host not in LOOPBACK:
        warn(f"--host {options.host}: whoever reaches this machine can read these runs; there is no password.")
    for run in runs:
        run.read_on()
        note(f"{run.name}: {run.folder}")
    note(f"open http://{shown}:{port} in a browser; Ctrl-C ends it")
    config = uvicorn.Config(make_app(runs, options.host), log_level="warning", access_log=False, server_header=False)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
    return 0


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket on `port`, or on the usual one, or else any that is free."""
    for wanted in [PORT, 0] if port is None else [port]:
        try:
            family = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, wanted), family=family)
        except (OSError, OverflowError) as error:
            problem = error
    raise ConfigError(
        f"foveal view: cannot listen on {host}, port {PORT if port is None else port} ({problem}). Give another --port."
    ) from problem
