"""`trainstream finetune`: the command's flags and its entry. The run itself is in `run`."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from ts_core.errors import OptionError
from ts_hf.cli.config import add_flags, make_config, name_unknown_flags, read_yaml
from ts_hf.cli.settings import DEMO


class FinetuneCommand:
    """The plug-in that the `trainstream` command finds by its entry point."""

    API_VERSION = 1
    help = "fine-tune a model (LoRA or full) on text or JSON lines; --demo for a first real run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.description = (
            "Fine-tune a causal language model. Settings come from CONFIG.yaml, from flags, or "
            "both (flags win). An interrupted run continues when the same line is run again."
        )
        parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="settings, as YAML")
        parser.add_argument(
            "--demo",
            action="store_true",
            help="SmolLM2-135M-Instruct in NF4 with LoRA on the Python standard library, layers "
            "streaming under 24 MiB",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="check settings and data, print both and the plan, and stop before any weight "
            "is read",
        )
        add_flags(parser)
        name_unknown_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Run it; 0 when done, 130 when interrupted."""
        # PEFT imports bitsandbytes where it is installed. A run uses nothing of it, so its warning
        # that a CPU kernel of its own is missing would only puzzle.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        given = {
            name: value
            for name, value in vars(args).items()
            if name in make_config().__dataclass_fields__
        }
        layers: list[tuple[str, dict[str, Any]]] = []
        if args.demo:
            layers.append(("--demo", DEMO))
        if args.config is not None:
            layers.append((args.config, read_yaml(Path(args.config))))
        if not args.demo and args.config is None and not given:
            raise OptionError(
                "nothing to do: give a CONFIG.yaml, or flags such as --model and --data, or --demo."
            )
        config = make_config(*layers, ("command line", given))
        if args.dry_run:
            if int(os.environ.get("RANK", "0")) > 0:
                return 0  # the first of several processes says it all
            from ts_hf.cli.dry_run import dry_run

            return dry_run(config)
        from ts_hf.cli.run import run_finetune  # imports transformers

        return run_finetune(config)


command = FinetuneCommand()
