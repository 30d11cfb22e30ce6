"""`trainstream doctor`: what is installed, what works, and the line that fixes what does not.

`facts` finds out, `report` puts it into words; the facts of a machine that one does not run on can
be handed in. Importing this package initializes nothing.
"""

from __future__ import annotations

import argparse

from ts_core.doctor.facts import GpuReport, Machine
from ts_core.doctor.report import Diagnosis, diagnose

__all__ = ["Diagnosis", "DoctorCommand", "GpuReport", "Machine", "command", "diagnose"]


class DoctorCommand:
    """The `doctor` sub-command."""

    API_VERSION = 1
    help = "show what is installed and works, and the line that fixes what does not"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        parser.add_argument(
            "--measure",
            action="store_true",
            help="also measure link, host copies, host AdamW and matrix products (seconds)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Prints the report; 0 when nothing is to be fixed, else 1."""
        found = diagnose(measure=args.measure)
        print(found.text())
        return 1 if found.to_fix else 0


command = DoctorCommand()
