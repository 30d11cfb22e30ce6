"""What a finished run shows: a table, a plot, results.json."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from ts_core.schedule.plan import in_slots
from ts_hf.cli.history import History
from ts_hf.sizes import format_bytes


class PlainConsole(Console):
    """Prints texts as they are: names of files may hold what looks like markup, and are not cut."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """The error goes on to the command, where rich would end the program."""
        raise


def memory_by_tier(model: Any, block_limit: int | None) -> dict[str, Any]:
    """Bytes by tier of a wrapped model, from memory_report and the process."""
    from ts_core import memory_report

    report = memory_report(model)
    params = report["params"]
    return {
        "device": report["gpu"],
        "device_pool_by_tag": report["resident"],
        "block_limit": block_limit,
        "block_bytes": params["block_bytes"],
        "paged_blocks": params["paged_blocks"],
        "slots": params["slots"],
        "slot_bytes": params["slot_bytes"],
        "streamed_bytes": report["transfers"]["h2d"]["bytes"],
        "pinned": report["pinned"],
        "pinned_by_tag": report["pinned_by_tag"],
        "host_state": report["optimizer"].get("host_state_bytes", 0),
        "rss": psutil.Process().memory_info().rss,
    }


def print_report(console: Console, results: dict[str, Any], block_count: int) -> None:
    """Loss before and after, speed, memory by tier."""
    loss, rewards = results["held_out_loss"], results["held_out_rewards"]
    table = Table(title="Held-out loss", title_justify="left")
    second = "chosen answer ahead" if rewards else "perplexity"
    for column in ("", "loss", second):
        table.add_column(column, justify="left" if column == "" else "right")
    for when in ("before", "after"):
        if rewards:
            told = f"{rewards[when]['reward_accuracy']:.0%} of pairs"
        else:
            told = f"{math.exp(min(loss[when], 700)):.2f}"
        table.add_row(when, f"{loss[when]:.4f}", told)
    console.print(table)
    console.print(_memory_table(results["memory"], block_count))
    console.print(
        f"{results['steps']} steps, {results['tokens_per_second']:,.0f} tokens/s, "
        f"computed in {results['dtype']} on {results['device']}{_processes(results)}"
    )


def _processes(results: dict[str, Any]) -> str:
    count = results["processes"]
    return f" in {count} processes (memory: of the first)" if count > 1 else ""


def _memory_table(memory: dict[str, Any], block_count: int) -> Table:
    table = Table(title="Memory by tier", title_justify="left")
    table.add_column("tier")
    table.add_column("bytes", justify="right")
    table.add_column("what")
    paged = len(memory["paged_blocks"])
    limit = memory["block_limit"]
    within = f" of a limit of {format_bytes(limit)}" if limit else ""
    pool = memory["device_pool_by_tag"]
    placed, slots = "all stay on the device", ""
    if paged:
        placed = f"{block_count - paged} stay on the device, {paged} stream"
        slots = f" and {in_slots(memory['slots'])} of {format_bytes(memory['slot_bytes'])}"
    table.add_row(
        "decoder layers",
        format_bytes(memory["block_bytes"]),
        f"{block_count} layers as stored: {placed}",
    )
    table.add_row(
        "device pool",
        format_bytes(sum(pool.values())),
        f"resident layers{slots}{within}",
    )
    table.add_row("device peak", format_bytes(memory["device"]["peak_allocated"]), "most in use")
    table.add_row("pinned", format_bytes(memory["pinned"]), "host memory that crosses the link")
    table.add_row("host state", format_bytes(memory["host_state"]), "moments, gradients")
    table.add_row("process", format_bytes(memory["rss"]), "resident set, all of the above on a CPU")
    table.add_row("streamed", format_bytes(memory["streamed_bytes"]), "host to device, whole run")
    return table


def plot_run(history: History, file: Path) -> None:
    """Loss and memory over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(*history.series("loss"), color="tab:blue", marker=".", label="training")
    steps, values = history.series("loss", kind="eval")
    if steps:
        top.plot(steps, values, "--o", color="tab:red", label="held out")
        for index in {0, len(steps) - 1}:
            first = index == 0
            top.annotate(
                f"{values[index]:.3f}",
                (steps[index] if first else 1, values[index]),
                xycoords="data" if first else ("axes fraction", "data"),
                textcoords="offset points",
                xytext=(0, 9) if first else (5, 0),  # the last one outside, where no line goes
                ha="center" if first else "left",
                va="bottom" if first else "center",
                annotation_clip=False,
                color="tab:red",
                bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
            )
    top.margins(x=0.025, y=0.16)  # room for the numbers beside the points
    top.set_ylabel("loss (nats per token)")
    top.legend()
    top.grid(alpha=0.3)
    for name, label in (
        ("rss_gb", "process (RSS)"),
        ("ts_vram_peak_gb", "device, peak"),
        ("ts_vram_alloc_gb", "device"),
        ("ts_pinned_gb", "pinned"),
        ("ts_host_state_gb", "host state"),
    ):
        step_values, values = history.series(name)
        if any(values):
            # What is in use is often equal to its peak, which is a pale band behind it.
            look = {"linewidth": 5, "alpha": 0.35} if name == "ts_vram_peak_gb" else {}
            mebibytes = [value * 1e9 / 2**20 for value in values]
            bottom.plot(step_values, mebibytes, label=label, **look)
    bottom.set_yscale("log")
    bottom.set_ylabel("memory (MiB, log scale)")
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    bottom.grid(alpha=0.3, which="both")
    temporary = file.with_name(f".{file.name}.partial")
    figure.savefig(temporary, dpi=130, format="png")
    os.replace(temporary, file)
