"""The engines that what is promised of every engine is tested on."""

from __future__ import annotations

import pytest

from tests.helpers.engines import ENGINES, EngineKind


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.name, scope="module")
def kind(request: pytest.FixtureRequest) -> EngineKind:
    """One of ``tests.helpers.engines.ENGINES``; a test runs on each."""
    return request.param
