"""`trainstream plan`: a plan from a model's config alone. Importing this initializes nothing."""

from __future__ import annotations

import argparse

__all__ = ["PlanCommand", "command"]


class PlanCommand:
    """The `plan` sub-command."""

    API_VERSION = 1
    help = "say whether a training fits, where each block would live and how long a step takes"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        parser.add_argument(
            "model",
            metavar="MODEL",
            help="a folder with a model's config.json (as load_model takes), or that file itself; "
            "weights need not be there",
        )
        parser.add_argument("--vram", help="memory of the device, as 24GiB (default: this one's)")
        parser.add_argument("--ram", help="host memory for the run (default: what is free here)")
        parser.add_argument(
            "--quantize", default="auto", help="auto, none, or an installed codec (default: auto)"
        )
        parser.add_argument("--batch", type=int, default=1, help="sequences per step (1)")
        parser.add_argument("--seq", type=int, default=512, help="tokens per sequence (512)")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--lora", type=int, default=16, metavar="R", help="adapters' rank (16)")
        what.add_argument("--full", action="store_true", help="train every parameter")
        parser.add_argument(
            "--dtype",
            choices=["bfloat16", "float32", "float16"],
            help="of the weights (bfloat16; float32 with --full)",
        )
        parser.add_argument(
            "--moments",
            choices=["float32", "bfloat16", "int8"],
            default="float32",
            help="of the optimizer (float32)",
        )
        parser.add_argument(
            "--optimizer-mode",
            choices=["cpu", "gpu", "hybrid", "auto"],
            default="cpu",
            help="optimizer_mode: who updates, host threads alone, the GPU over the link, or as "
            "measured rates and room say (cpu)",
        )
        parser.add_argument("--headroom", type=float, default=0.10, help="vram_headroom (0.10)")
        for name in ("param-offload", "activation-offload", "recompute"):
            parser.add_argument(f"--{name}", default="auto", help="auto, true, false or a fraction")
        parser.add_argument(
            "--disk-offload", metavar="DIR", help="where weights go that RAM cannot hold"
        )
        parser.add_argument(
            "--trust-remote-code", action="store_true", help="run code that the folder ships"
        )
        parser.add_argument("--json", action="store_true", help="print the plan as JSON")
        parser.add_argument("--plot", metavar="FILE", help="draw it (.png, .svg or .pdf)")

    def run(self, args: argparse.Namespace) -> int:
        """Prints the plan; 0 when it fits, else 1."""
        from ts_core.planning.run_command import run

        return run(args)


command = PlanCommand()
