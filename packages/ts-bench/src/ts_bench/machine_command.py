"""The sub-command `machine` of `ts-bench`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options; loads neither torch nor what is measured."""
    add = parser.add_argument
    add("--device", help="cuda, cuda:N or host; default: the GPU, else the host")
    add("--tiny", action="store_true", help="small, to see that it works")
    add("--json", type=Path, help="write all figures to this file")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints a line for each kind of figure, writes the file; returns 0."""
    from ts_bench.cli import invoked
    from ts_bench.machine import measure, sizes_for
    from ts_bench.machine_rows import text_of
    from ts_core.device import resolve_device

    device = resolve_device(args.device)
    print(f"{device.torch_device} ({device.kind})", flush=True)
    measured = measure(
        device,
        sizes_for(tiny=args.tiny),
        command=invoked(),
        on_row=lambda row: print(text_of(row), flush=True),
    )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured.as_json(), indent=1) + "\n", encoding="utf-8")
    return 0
