"""Fixtures and collection rules of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes of this session, started by the first run: ``ranks.run(world_size, function, *args)``."""
    with RankPool() as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with rank processes go to one worker: two pools would import torch ten times and compete for the same cores."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
