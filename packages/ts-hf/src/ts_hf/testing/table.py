"""docs/models.md: what holds for which family, as the checks found it.

    python -m ts_hf.testing.table docs/models.md

runs every check and writes the page. The tests run the same checks and compare each cell.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from ts_hf.testing.checks import CHECKS, NOT_APPLICABLE, REFUSED
from ts_hf.testing.families import FAMILIES

Cells = dict[tuple[str, str], str]

_HEAD = """# Models

Written by `python -m ts_hf.testing.table docs/models.md`, which builds a small model of each family
from its config (3 layers, random weights) and runs every check on it, on the host device, with
delays injected into the copies. The test suite runs the same checks and fails where a cell is not
what it found. Families that follow the same layout work too; these are the ones that are tested.

Vision-language models train and generate with an image in every row, but for packing. Their
language model streams and takes the adapters; the vision tower stays on the device, frozen.
"""

_WORDS = f"""
"{REFUSED}": an error says so before anything starts, and what to use instead. "{NOT_APPLICABLE}":
the family has no stacked experts. "bit-equal": `torch.equal` on every loss and trained value.
"""


def run_all() -> Cells:
    """Every cell, by (family, check); prints as it goes."""
    cells: Cells = {}
    for family, row in FAMILIES.items():
        for name, check in CHECKS.items():
            cells[family, name] = check.run(row)
            print(f"{row.title}: {check.title}: {cells[family, name]}", file=sys.stderr)
    return cells


def render(cells: Cells) -> str:
    """The page."""
    lines = [_HEAD.rstrip(), ""]
    lines += [f"- {check.title}: {check.meaning}." for check in CHECKS.values()]
    lines += [_WORDS.rstrip(), ""]
    lines.append("| family | " + " | ".join(check.title for check in CHECKS.values()) + " |")
    lines.append("|---" * (len(CHECKS) + 1) + "|")
    for family, row in FAMILIES.items():
        values = " | ".join(cells[family, name] for name in CHECKS)
        lines.append(f"| {row.title} | {values} |")
    notes = [f"- {row.title}: {row.note}." for row in FAMILIES.values() if row.note]
    lines += ["", *notes, ""]
    lines.append(f"Last written with transformers {transformers.__version__}.")
    return "\n".join(lines) + "\n"


def read(page: str) -> Cells:
    """The cells of a page that `render` made.

    Raises:
        ValueError: its rows or columns are not those of this version.
    """
    table = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    titles = ["family", *(check.title for check in CHECKS.values())]
    families = [row.title for row in FAMILIES.values()]
    if rows[0] != titles or [row[0] for row in rows[1:]] != families:
        raise ValueError("the table's rows or columns are not those of this version: write it anew")
    return {
        (family, name): value
        for family, row in zip(FAMILIES, rows[1:], strict=True)
        for name, value in zip(CHECKS, row[1:], strict=True)
    }


def main() -> None:
    """Write the page to the file named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m ts_hf.testing.table FILE")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    Path(sys.argv[1]).write_text(render(run_all()), encoding="utf-8")


if __name__ == "__main__":
    main()
