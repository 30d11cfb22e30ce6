"""The answer of `trainstream plan` as text: pieces with a style, coloured where rich is there."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from ts_core.planning.outcome import Outcome
from ts_core.schedule.plan import KEEP, OFFLOAD, human

Piece = tuple[str, str]  # text, style of rich ("" for none)

RESIDENT, PAGED = "green", "yellow"
_ACTIVATIONS = {KEEP: ("k", "green"), OFFLOAD: ("p", "yellow"), "recompute": ("r", "cyan")}
_BAR = 28
_NAMES = {
    "resident_blocks": "blocks that stay",
    "slots": "slots for streamed blocks",
    "fixed": "outside the blocks, norms, adapters",
    "taken_by_others": "taken by other tensors and torch",
    "optimizer_state": "optimizer state",
    "gradients": "gradients at once",
    "activations": "activations",
    "recordings": "recordings of blocks (cuda_graphs)",
    "activations_reserve": "set aside for activations",
    "workspace": "logits, temporary tensors, gradients",
    "weights": "weights of streamed blocks",
    "tables": "input embeddings",
    "optimizer_and_gradients": "optimizer state and gradients",
    "measured": "everything else",
}


def render(outcome: Outcome) -> list[list[Piece]]:
    """The answer, line by line."""
    plan = outcome.plan
    verdict: Piece = ("FITS", "bold green") if outcome.fits else ("DOES NOT FIT", "bold red")
    size = f"{outcome.described.parameters / 1e9:.2f} G parameters"
    lines: list[list[Piece]] = [
        [(f"{outcome.model}  ", "bold"), (size, "")],
        [(f"{outcome.training.in_words()}  ", ""), verdict],
    ]
    if outcome.training.rank is not None:
        stored = outcome.codec or "full precision"
        lines.append([(f"frozen weights of the blocks: {stored}", "")])
    lines += [[], *_blocks(outcome), []]
    lines += _memory("device memory", plan.predicted)
    lines += [[], *_memory("host memory", plan.host)]
    lines.append([(f"  {'while loading':39}{human(outcome.loading_bytes):>11}", "")])
    lines += [[], *_time(outcome)]
    for text in [*(plan.reasons if plan.fits else ()), *outcome.notes]:
        lines.append([(f"- {text}", "")])
    if not plan.fits:
        lines.append([(plan.reasons[0], "red")])
    if not outcome.fits and not outcome.remedies:
        lines.append([("Nothing that was tried makes it fit.", "bold")])
    elif not outcome.fits:
        lines.append([("What makes it fit (each was tried):", "bold")])
        lines += [[(f"- {remedy}", "")] for remedy in outcome.remedies]
    return lines


def _blocks(outcome: Outcome) -> list[list[Piece]]:
    plan = outcome.plan
    sizes = outcome.described.profile.pageable
    width = max(10, min(64, shutil.get_terminal_size((80, 24)).columns - 16))
    paged = set(plan.paged)
    lines: list[list[Piece]] = []
    for start in range(0, len(sizes), width):
        row: list[Piece] = [(f"  {'blocks' if start == 0 else '':12}", "")]
        indices = range(start, min(start + width, len(sizes)))
        row += [("░", PAGED) if index in paged else ("█", RESIDENT) for index in indices]
        lines.append(row)
        if plan.activations:
            acts: list[Piece] = [(f"  {'activations' if start == 0 else '':12}", "")]
            acts += [_ACTIVATIONS[plan.activations[index]] for index in indices]
            lines.append(acts)
    legend: list[Piece] = [("  █", RESIDENT), (" on the device  ", ""), ("░", PAGED)]
    legend.append((" streamed", ""))
    if plan.activations:
        for name, words in ((KEEP, "kept"), (OFFLOAD, "paged"), ("recompute", "recomputed")):
            letter, style = _ACTIVATIONS[name]
            legend += [(f"   {letter}", style), (f" {words}", "")]
    return [*lines, legend]


def _memory(title: str, sizes: dict[str, int]) -> list[list[Piece]]:
    total, budget = sizes["total"], sizes.get("budget")
    of = f" of {human(budget)}" if budget is not None else ""
    full = max(total, budget or 0, 1)
    over = budget is not None and total > budget
    filled = min(_BAR, round(_BAR * total / full))
    bar = "█" * filled + "·" * (_BAR - filled)
    lines: list[list[Piece]] = [
        [(f"{title:16}", "bold"), (bar, "red" if over else "green"), (f" {human(total)}{of}", "")]
    ]
    for name, size in sizes.items():
        if name not in ("total", "budget") and size:
            lines.append([(f"  {_NAMES.get(name, name):39}{human(size):>11}", "")])
    return lines


def _time(outcome: Outcome) -> list[list[Piece]]:
    seconds = outcome.plan.seconds
    rates = outcome.machine.rates
    if not seconds or rates is None:
        return []
    tokens = outcome.training.batch * outcome.training.length
    origin = rates.device if rates.measured else f"{rates.device}: assumed rates, not measured"
    step = seconds["step"]
    lines: list[list[Piece]] = [
        [
            ("step             ", "bold"),
            (f"about {step * 1000:.0f} ms, {tokens / step:,.0f} tokens/s ({origin})", ""),
        ]
    ]
    names = {
        "forward": "forward, with its loads",
        "backward": "backward, with its loads",
        "compute": "compute",
        "to_device": "link to the device",
        "to_host": "link to the host",
        "updates": "host updates",
    }
    for name, words in names.items():
        lines.append([(f"  {words:39}{seconds[name] * 1000:>8.0f} ms", "")])
    return lines


def show(lines: list[list[Piece]], file: Any = None) -> None:
    """Print lines, in colour when rich is installed and the output is a terminal."""
    file = file or sys.stdout
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        for line in lines:
            print("".join(text for text, _ in line), file=file)
        return

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # to the command; rich would end the program with status 1

    console = Output(file=file, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*line) if line else "")
