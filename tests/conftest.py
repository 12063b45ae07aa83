"""Which tests share a process, where `make test` runs them in two."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests do, for their fixtures; and so do all that start Ray, which expects to have the machine alone."""
    for item in items:
        name = item.path.stem
        starts_ray = name.startswith("test_cluster_") or name == "test_recipes"
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else name))
