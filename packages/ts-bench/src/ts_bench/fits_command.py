"""The sub-command `fits` of `ts-bench`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options; loads neither torch nor what is measured."""
    add = parser.add_argument
    add("--rounds", type=int, default=12, help="turns of each (%(default)s)")
    add("--steps", type=int, default=6, help="timed steps of a turn (%(default)s)")
    add("--tiny", action="store_true", help="with toys, on the CPU, to see that it works")
    add("--threads", type=int, help="torch's CPU threads")
    add("--json", type=Path, help="write all figures to this file")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the lines, writes the file; returns 0."""
    import torch

    from ts_bench.cli import invoked
    from ts_bench.fits import as_json, measure, text_of
    from ts_core.errors import OptionError

    for option in ("rounds", "steps"):
        if getattr(args, option) < 1:
            raise OptionError(f"{option}={getattr(args, option)} is not accepted. Use 1 or more.")
    if not args.tiny and not torch.cuda.is_available():
        raise OptionError("fits: torch sees no CUDA GPU; --tiny tries it out on a CPU.")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cpu" if args.tiny else "cuda")
    found = measure(
        device,
        rounds=args.rounds,
        steps=args.steps,
        tiny=args.tiny,
        on_fit=lambda fit: print(text_of(fit), flush=True),
    )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(found, invoked(), device), indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0
