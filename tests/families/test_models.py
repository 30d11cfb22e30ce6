"""Every family: what docs/models.md says of it is what a run finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts_hf.testing import FAMILIES
from ts_hf.testing.checks import CHECKS
from ts_hf.testing.table import read, render

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
REMEDY = "run: python -m ts_hf.testing.table docs/models.md"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("check", CHECKS)
def test_the_table_says_what_holds(family: str, check: str) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    found = CHECKS[check].run(FAMILIES[family])
    written = read(PAGE.read_text(encoding="utf-8"))[family, check]
    assert found == written, f"docs/models.md is stale ({REMEDY})"


def test_the_page_is_as_the_program_writes_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    again = render(read(page))
    assert page.splitlines()[:-1] == again.splitlines()[:-1], REMEDY  # the last names a version
