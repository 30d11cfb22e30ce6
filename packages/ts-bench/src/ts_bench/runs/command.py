"""`trainstream report`: one page about one run, or about several side by side."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ts_core.errors import OptionError


class ReportCommand:
    """The command `report` of the group `trainstream.commands`.

    `trainstream finetune` calls `write` when a run is done.
    """

    API_VERSION = 1
    help = "one HTML page with plots of a fine-tune, also while it runs; several are compared"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("run", nargs="+", type=Path, metavar="RUN_DIR", help="output folder(s)")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="the page (default: report.html in the run's folder; for several runs "
            "comparison.html here)",
        )
        parser.add_argument(
            "--png", type=Path, metavar="DIR", help="also write every plot there, light and dark"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write the page; returns the exit status."""
        if args.output is not None and args.output.is_dir():
            raise OptionError(f"--output {args.output} is a folder. Give the name of a file.")
        print(self.write(args.run, args.output))
        if args.png is not None:
            for file in write_pictures(args.run, args.png):
                print(file)
        return 0

    def write(self, folders: Sequence[Path], output: Path | None = None) -> Path:
        """Write the page about `folders`, whole or not at all.

        Args:
            folders: run folders; several are compared.
            output: the file; None for report.html in the folder, or comparison.html.

        Returns:
            The file.

        Raises:
            DataError: a folder is no run.
            OptionError: the file cannot be written.
        """
        from ts_bench.runs.page import render
        from ts_bench.runs.reading import read_runs

        folders = [Path(folder) for folder in folders]
        if output is None:
            output = folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
        text = render(read_runs(folders))
        temporary = output.with_name(f".{output.name}.partial")
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, output)
        except OSError as error:
            raise OptionError(f"{output} cannot be written: {error.strerror}.") from error
        return output


def write_pictures(folders: Sequence[Path], target: Path) -> list[Path]:
    """Write each plot of a report as NAME.png and NAME-dark.png.

    Raises:
        DataError: a folder is no run.
    """
    from ts_bench.runs.figures import DARK, LIGHT, draw, draw_blocks
    from ts_bench.runs.reading import read_runs
    from ts_bench.runs.series import blocks, plots

    runs = read_runs([Path(folder) for folder in folders])
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, ending in ((LIGHT, ""), (DARK, "-dark")):
        drawn = [(plot.key, draw(plot, theme)) for plot in plots(runs)]
        rows, names = blocks(runs)
        if rows:
            drawn.append(("blocks", draw_blocks(rows, names, theme, legend=True)))
        for key, figure in drawn:
            figure.patch.set(facecolor=theme.paper, alpha=1)
            file = target / f"{key}{ending}.png"
            figure.savefig(file, dpi=130)
            written.append(file)
    return written


command = ReportCommand()
