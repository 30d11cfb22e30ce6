"""Every format."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["nf4", "int8", "fp8", "nvfp4", "mxfp4"])
def codec(request: pytest.FixtureRequest) -> str:
    """Every format."""
    name: str = request.param
    return name
