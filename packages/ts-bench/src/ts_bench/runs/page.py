"""Runs as one HTML page that needs nothing else: no script, no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from statistics import median
from typing import Any

from ts_bench.runs.figures import DARK, LIGHT, PAGE, css_variables, draw, draw_blocks, svg
from ts_bench.runs.reading import FINISHED, RUNNING, Run
from ts_bench.runs.series import blocks, plots

_STYLE = """
:root { color-scheme: light dark; %(light)s --back: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { %(dark)s --back: #0e1318; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
.muted { color: var(--muted); }
.card { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px;
  padding: 12px 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px;
  margin-top: 18px; }
.tile b { display: block; font-size: 21px; font-weight: 650; }
.tile span { color: var(--muted); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%%), 1fr));
  gap: 14px; margin-top: 14px; }
svg { width: 100%%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%%; font-size: 14px; }
td, th { text-align: left; padding: 4px 14px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 600; }
tr:last-child td { border-bottom: 0; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.differs td { font-weight: 650; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.samples { display: grid; gap: 14px; }
.sample { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%%), 1fr));
  gap: 8px 22px; }
.sample > div:first-child { grid-column: 1 / -1; }
.label { color: var(--muted); font-size: 12.5px; margin-bottom: 2px; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 7px; vertical-align: -1px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13.5px; margin-top: 6px; }
.state { display: inline-block; padding: 1px 10px; border-radius: 20px; font-size: 13px;
  border: 1px solid currentColor; }
.finished { color: var(--s2); } .running { color: var(--s0); } .stopped { color: var(--s1); }
.scroll { overflow-x: auto; }
details summary { cursor: pointer; color: var(--muted); }
"""

_POLICIES = {
    "keep": "kept on the device",
    "offload": "paged to host memory",
    "recompute": "recomputed in backward",
}
_DONE = {
    "checkpoint": lambda line: f"checkpoint saved: {line.get('path')}",
    "event": lambda line: str(line.get("text")),
    "end": lambda line: _ended(line),
}


def render(runs: Sequence[Run]) -> str:
    """The page.

    Args:
        runs: one, or several to compare.
    """
    title = runs[0].name if len(runs) == 1 else "Comparison of " + ", ".join(r.name for r in runs)
    parts = [
        _head(title, runs),
        _tiles(runs[0]) if len(runs) == 1 else _comparison(runs),
        _plots(runs),
        _blocks(runs),
        *(_samples(run, many=len(runs) > 1) for run in runs),
        *(_events(run, many=len(runs) > 1) for run in runs),
        _settings(runs),
        _machines(runs),
    ]
    style = _STYLE % {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main>\n{''.join(parts)}</main></body></html>\n"
    )


def _head(title: str, runs: Sequence[Run]) -> str:
    now = datetime.now(tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"<h1>{escape(title)}</h1>"]
    if len(runs) == 1:
        run = runs[0]
        what = (
            f"{run.config.get('method', '?')} fine-tune of {run.config.get('model', '?')} on "
            f"{', '.join(map(str, run.config.get('data') or ['?']))}"
        )
        lines.append(f'<div class="muted">{escape(what)}</div>')
        lines.append(
            f'<p><span class="state {run.state}">{run.state}</span> {escape(run.status())}</p>'
        )
        if run.unreadable and run.state == FINISHED:
            lines.append(f"<p>{run.unreadable} lines of its history could not be read.</p>")
    note = "page written " + now
    if any(run.state == RUNNING for run in runs):
        note += "; run trainstream report again for what has happened since"
    lines.append(f'<div class="muted">{note}</div>\n')
    return "".join(lines)


# -- figures in words ------------------------------------------------------------------------


def _facts(run: Run) -> list[tuple[str, str]]:
    """(what, value) of one run; what is not known is left out."""
    facts: list[tuple[str, str]] = []
    losses = run.series("loss", kind="eval")[1]
    if losses:
        shown = f"{losses[0]:.3f}"
        if len(losses) > 1:
            shown += f" → {losses[-1]:.3f}"
        facts.append(("held-out loss", shown))
        if run.config.get("method") != "dpo":
            ends = [f"{math.exp(min(value, 700)):.4g}" for value in (losses[0], losses[-1])]
            facts.append(("perplexity", " → ".join(ends[: len(losses)])))
    accuracy = run.series("reward_accuracy", kind="eval")[1]
    if accuracy:
        facts.append(("held-out pairs with the chosen answer ahead", f"{accuracy[-1]:.0%}"))
    seconds = run.series("step_s")[1]
    if seconds:
        facts.append(("step time, median", _seconds(median(seconds))))
    tokens = run.series("tokens")[1]
    if tokens and sum(seconds) > 0:
        facts.append(("tokens per second", f"{sum(tokens) / sum(seconds):,.0f}"))
        facts.append(("tokens trained on", f"{sum(tokens):,.0f}"))
    for name, label in (("ts_vram_peak_gb", "device memory, most"), ("rss_gb", "process, most")):
        values = run.series(name)[1]
        if any(values):
            facts.append((label, _bytes(max(values) * 1e9)))
    model = run.notes.get("model") or {}
    if model.get("parameters"):
        facts.append(("parameters", f"{model['parameters']:,}"))
        facts.append(("of them trained", f"{model.get('trained', 0):,}"))
    return facts


def _tiles(run: Run) -> str:
    tiles = [
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in _facts(run)
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>\n'


def _comparison(runs: Sequence[Run]) -> str:
    facts = [dict(_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    head = "".join(f"<th>{_swatch(index)}{escape(run.name)}</th>" for index, run in enumerate(runs))
    rows = [_row("state", [run.status() for run in runs])]
    rows += [_row(name, [fact.get(name, "") for fact in facts]) for name in names]
    return (
        f'<h2>Figures</h2><div class="card scroll"><table><tr><th></th>{head}</tr>'
        f"{''.join(rows)}</table></div>\n"
    )


def _row(name: str, values: Sequence[str], *, differs: bool = False) -> str:
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    kind = ' class="differs"' if differs else ""
    return f"<tr{kind}><th>{escape(name)}</th>{cells}</tr>"


# -- pictures --------------------------------------------------------------------------------


def _plots(runs: Sequence[Run]) -> str:
    cards = [f'<div class="card">{svg(draw(plot, PAGE), plot.key)}</div>' for plot in plots(runs)]
    if not cards:
        return '<p class="muted">No step has been taken yet, so there is nothing to plot.</p>\n'
    return f'<h2>Over the run</h2><div class="plots">{"".join(cards)}</div>\n'


def _blocks(runs: Sequence[Run]) -> str:
    rows, names = blocks(runs)
    if not rows:
        return ""
    used = sorted({place for _, found in rows for _, place in found})
    legend = "".join(f"<span>{_swatch(place)}{escape(names[place])}</span>" for place in used)
    notes = [f"<p>{escape(_block_note(run, len(runs) > 1))}</p>" for run in runs if _last(run)]
    return (
        f'<h2>Where each block lives</h2><div class="card"><div class="legend">{legend}</div>'
        f"{svg(draw_blocks(rows, names, PAGE), 'blocks')}{''.join(notes)}</div>\n"
    )


def _last(run: Run) -> dict[str, Any]:
    found = run.of("placement")
    return found[-1] if found else {}


def _block_note(run: Run, many: bool) -> str:
    placement = _last(run)
    found = placement.get("blocks") or []
    total = sum(block.get("bytes", 0) for block in found)
    moving = [block for block in found if block.get("place") != "device"]
    formats = sorted({str(block.get("format")) for block in found if block.get("format")})
    said = f"{len(found)} blocks, {_bytes(total)} as stored ({', '.join(formats) or 'unknown'}). "
    if moving:
        size = _bytes(placement.get("slot_bytes") or 0)
        count = placement.get("slots")
        slots = "1 slot" if count == 1 else f"{count} slots"
        said += (
            f"{len(found) - len(moving)} stay on the device; {len(moving)} are copied in when "
            f"their turn comes, through {slots} of {size}."
        )
    else:
        said += "All of them stay on the device."
    policies = [block.get("activations") for block in found if block.get("activations")]
    if policies:
        counts = {policy: policies.count(policy) for policy in dict.fromkeys(policies)}
        told = ", ".join(
            f"{_POLICIES.get(policy, policy)} in {count} blocks" for policy, count in counts.items()
        )
        said += f" Activations are {told}."
    return f"{run.name}: {said}" if many else said


# -- texts -----------------------------------------------------------------------------------


def _samples(run: Run, *, many: bool) -> str:
    by_prompt: dict[str, dict[str, str]] = {}
    for line in run.of("sample"):
        texts = by_prompt.setdefault(str(line.get("prompt")), {})
        texts[str(line.get("when"))] = str(line.get("text"))
    if not by_prompt:
        return ""
    cards = []
    for prompt, texts in by_prompt.items():
        columns = "".join(
            f'<div><div class="label">{when}</div><pre>{escape(text)}</pre></div>'
            for when, text in texts.items()
        )
        cards.append(
            f'<div class="card sample"><div><div class="label">given</div>'
            f"<pre>{escape(prompt)}</pre></div>{columns}</div>"
        )
    title = f"Samples: {run.name}" if many else "Samples"
    return f'<h2>{escape(title)}</h2><div class="samples">{"".join(cards)}</div>\n'


def _events(run: Run, *, many: bool) -> str:
    rows = []
    begin = next((line["time"] for line in run.lines if "time" in line), None)
    sessions = 0
    for line in run.lines:
        kind = line.get("kind")
        if kind == "session":
            sessions += 1
            text = "the run began" if sessions == 1 else "a new process went on with the run"
        elif kind in _DONE:
            text = _DONE[kind](line)
        else:
            continue
        rows.append(
            f'<tr><td class="number">{line["step"]}</td>'
            f'<td class="number">{escape(_after(line.get("time"), begin))}</td>'
            f"<td>{escape(text)}</td></tr>"
        )
    if not rows:
        return ""
    title = f"What happened: {run.name}" if many else "What happened"
    return (
        f'<h2>{escape(title)}</h2><div class="card"><table><tr><th>step</th><th>after</th>'
        f"<th></th></tr>{''.join(rows)}</table></div>\n"
    )


def _ended(line: dict[str, Any]) -> str:
    reason = line.get("reason")
    return f"the run {line.get('status')}" + (f": {reason}" if reason else "")


def _settings(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    if not names:
        return ""
    many = len(runs) > 1
    rows: list[tuple[bool, str]] = []
    for name in names:
        values = [_value(run.config.get(name)) for run in runs]
        differs = many and len(set(values)) > 1
        rows.append((differs, _row(name, values, differs=differs)))
    rows.sort(key=lambda item: not item[0])
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs) if many else "<th></th>"
    table = f"<table><tr><th></th>{head}</tr>{''.join(row for _, row in rows)}</table>"
    title = "Configuration" + (" (what differs comes first)" if many else "")
    return f'<h2>{title}</h2><div class="card scroll">{table}</div>\n'


def _machines(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        sessions = run.of("session")
        if not sessions:
            continue
        last = sessions[-1]
        device = last.get("gpu") or "no GPU"
        said = f"{device}; {last.get('cpus')} CPU cores"
        if isinstance(last.get("ram_gb"), (int, float)):
            said += f", {_bytes(last['ram_gb'] * 1e9)} of RAM"
        used = ", ".join(f"{k} {v}" for k, v in (last.get("versions") or {}).items())
        computed = f"computed in {run.notes.get('dtype', '?')} on {run.notes.get('device', '?')}"
        rows.append(_row(run.name, [f"{said}; {computed}", used]))
    if not rows:
        return ""
    return f'<h2>Machine</h2><div class="card scroll"><table>{"".join(rows)}</table></div>\n'


def _swatch(index: int) -> str:
    color = f"var(--s{index % len(PAGE.series)})"
    return f'<span class="swatch" style="background: {color}"></span>'


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _after(moment: Any, begin: Any) -> str:
    if not isinstance(moment, (int, float)) or not isinstance(begin, (int, float)):
        return ""
    seconds = max(0, int(moment - begin))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def _bytes(count: float) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
