"""A real engine takes long to start: the files that need one share it."""

from collections.abc import Iterator

import pytest

from tests.rollout.served import Served, serving


@pytest.fixture(scope="session", params=["dense", "moe"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as served:
        yield served
