"""Which tests share a process, where `make test` runs two."""

from pathlib import PurePosixPath
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests do, for their fixtures; and so do all that start Ray, which expects to have the machine alone."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = PurePosixPath(nodeid.split("::")[0]).stem
            return "ray" if name.startswith("test_cluster_") or name == "test_recipes" else name

    return Files(config, log)
