"""A page for docs/benchmarks from what benchmarks left behind: tables, pictures, how to repeat."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ts_bench.plot import plot
from ts_bench.plot_kernels import plot_kernels
from ts_bench.records import Record
from ts_bench.report import RIGHT, table_of
from ts_bench.scenarios import GB, SCENARIOS
from ts_bench.summary import summarize
from ts_core.errors import DataError

OUTPUT_LINES = 80
LEGEND = (
    "*queued*: until the host has queued a step; *kernels*, *idle*: the GPU runs one, or nothing, "
    "per step (from profiled steps after the timed ones); *to GPU*: copied per step; *of link*: of "
    "the rate of one large page-locked copy in the same process; *planned*: the peak that was "
    "expected once the first step had been measured; *ratio*: to trainstream (the form with "
    "1.00x), within a round."
)

KERNELS = (
    "Bytes that must be read and written, per second, by CUDA-graph replays over inputs that do "
    "not fit in the cache; the line is a kernel that reads and writes once."
)


@dataclass
class Found:
    """Lines of all files, by kind.

    Attributes:
        records: of `ts-bench compare` and `suite`.
        scripts: {stage, command, date, status, seconds, output}.
        tests: {id, outcome, seconds, text}; the last of each id.
        cut: ids of tests that began and have no end.
        kernels: what `all_kernels.py --json` wrote; the last of several.
        lines: every line as it was read, by the name of its file.
    """

    records: list[Record] = field(default_factory=list)
    scripts: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    kernels: dict[str, Any] | None = None
    lines: dict[str, list[str]] = field(default_factory=dict)


def read(paths: Iterable[Path]) -> Found:
    """Read files of JSON lines, and kernels.json (or another whole file, *.json, only kept).

    Raises:
        DataError: a file cannot be read, or has lines of another kind.
    """
    found = Found()
    begun: dict[str, None] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if path.suffix == ".json":
            found.lines.setdefault(path.name, []).extend(lines)
            _take_file("\n".join(lines), path, found)
            continue
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.lines.setdefault(path.name, []).append(line)
                _take(line, f"{path}, line {number}", found, begun)
    found.cut = [name for name in begun if name not in found.tests]
    return found


def _take_file(text: str, path: Path, found: Found) -> None:
    try:
        data = json.loads(text)
        if "copy_gb_s" in data and "rows" in data:
            found.kernels = data
        elif "kind" not in data:
            raise DataError(f"{path}: not what a benchmark wrote")
    except (json.JSONDecodeError, TypeError) as error:
        raise DataError(f"{path}: no JSON object ({error})") from error


def _take(line: str, place: str, found: Found, begun: dict[str, None]) -> None:
    try:
        data = json.loads(line)
        kind = data.get("kind")
    except (json.JSONDecodeError, AttributeError) as error:
        raise DataError(f"{place}: no JSON object ({error})") from error
    if kind == "script":
        found.scripts.append(data)
    elif kind == "test":
        found.tests[data["id"]] = data
    elif kind == "test-start":
        begun[data["id"]] = None
    elif "schema" in data:
        found.records.append(Record.from_json(line))
    elif kind != "converge":  # whose table is in the output of its script; the file is kept
        raise DataError(f"{place}: neither a record of ts-bench nor a line of gpu_run")


def write(found: Found, folder: Path, name: str) -> Path:
    """Write `name`.md, its pictures, and what it was made of (`name`-FILE) into a folder.

    Args:
        found: from `read`.
        folder: such as docs/benchmarks.
        name: of the page, such as 2026-12-01-h200.

    Returns:
        The page.

    Raises:
        DataError: there is nothing to write about.
    """
    if not (found.records or found.scripts or found.tests or found.kernels):
        raise DataError("nothing to make a page of: no record, script, test or kernel")
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in found.lines.items():
        (folder / f"{name}-{file}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    links = ", ".join(f"[{file}]({name}-{file})" for file in found.lines)
    parts = [f"# {_day(found)}, {_device(found)}", _machine(found), f"All figures: {links}."]
    if found.records:
        parts += _record_parts(found.records, folder, name)
    if found.kernels is not None and plot_kernels(found.kernels, folder / f"{name}-kernels.png"):
        parts += ["## Bandwidth of kernels", KERNELS]
        parts.append(f"![kernels: bytes per second]({name}-kernels.png)")
    for stage in dict.fromkeys(script["stage"] for script in found.scripts):
        parts.append(f"## {stage}")
        parts += [_script(script) for script in found.scripts if script["stage"] == stage]
    if found.tests or found.cut:
        parts += ["## Tests marked gpu", _tests(found)]
    page = folder / f"{name}.md"
    page.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return page


def _day(found: Found) -> str:
    dates = [record.date for record in found.records] + [s["date"] for s in found.scripts]
    return datetime.fromisoformat(max(dates)).date().isoformat() if dates else "undated"


def _environment(found: Found) -> dict[str, Any]:
    """That of a record that ran, else of any."""
    ran = [record for record in found.records if record.measurement is not None]
    some = ran or found.records
    return some[-1].environment if some else {}


def _device(found: Found) -> str:
    about = _environment(found).get("device", {})
    told = about.get("name") or about.get("type") or (found.kernels or {}).get("device")
    return str(told or "unknown device")


def _machine(found: Found) -> str:
    environment = _environment(found)
    machine, device = environment.get("machine", {}), environment.get("device", {})
    told = []
    if "memory_bytes" in device:
        told.append(f"{device['memory_bytes'] / 2**30:.0f} GiB of device memory")
    if "cpu" in machine:
        ram = machine["ram_bytes"] / 2**30
        told.append(f"{machine['cores']} cores of {machine['cpu']}, {ram:.0f} GiB RAM")
        told.append(f"Python {machine['python']}")
    seen: dict[str, str] = {}
    for record in found.records:
        for package, version in record.environment.get("versions", {}).items():
            if version:
                seen[package] = version
    told += [f"{package} {version}" for package, version in seen.items()]
    return f"{', '.join(told)}." if told else ""


def _record_parts(found: Sequence[Record], folder: Path, name: str) -> list[str]:
    parts, pictures = ["## Step times", LEGEND], []
    parts += [f"    {c}" for c in dict.fromkeys(record.command for record in found) if c]
    rows = summarize(found)
    for scenario in dict.fromkeys(record.scenario["name"] for record in found):
        known = SCENARIOS.get(scenario)
        parts += [f"### {scenario}", f"{known.note}." if known else ""]
        parts.append(_markdown(table_of([row for row in rows if row.scenario == scenario])))
    for kind in dict.fromkeys(_kind(record) for record in found):
        some = [record for record in found if _kind(record) == kind]
        limits = {
            record.scenario["name"]: (record.scenario["limit_bytes"] or 0) / GB or None
            for record in some
        }
        ran = next((record for record in reversed(some) if record.measurement), some[-1])
        about = ran.environment["device"]
        day = datetime.fromisoformat(ran.date).date()
        caption = (
            f"{about.get('name', about['type'])}, torch {ran.environment['versions']['torch']}"
        )
        picture = folder / f"{name}-{kind}.png"
        caption += f", {day}; random weights and tokens; thin lines: range of medians of ten steps"
        if plot(summarize(some), picture, limits, caption):
            pictures.append(f"![{kind}: step times and memory]({picture.name})")
    return [parts[0], *pictures, *parts[1:]]


def _kind(record: Record) -> str:
    return f"{record.scenario['mode']}-{record.scenario['base']}"


def _markdown(table: Sequence[Sequence[str]]) -> str:
    headings, *body = table
    lines = [
        "| " + " | ".join(headings) + " |",
        "|" + "|".join(" ---: " if heading in RIGHT else " --- " for heading in headings) + "|",
    ]
    lines += ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in body]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]


def _script(script: dict[str, Any]) -> str:
    ended = "" if script["status"] == "ok" else f" {script['status']}."
    lines = script["output"].rstrip().splitlines()[-OUTPUT_LINES:]
    shown = "\n".join(f"    {line}" for line in lines)
    told = f"{script['date']}, {script['seconds']:.0f} s.{ended}"
    return f"    {script['command']}\n\n{told}\n\n{shown}"


def _tests(found: Found) -> str:
    tests = found.tests.values()
    counts = Counter(test["outcome"] for test in tests)
    told = [", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + "."]
    by_place: dict[str, Counter[str]] = {}
    for test in tests:
        place = "/".join(test["id"].split("::")[0].split("/")[:2])
        by_place.setdefault(place, Counter())[test["outcome"]] += 1
    outcomes = ["passed", "failed", "error", "skipped"]
    table = [["where", *outcomes]]
    for place, some in sorted(by_place.items()):
        table.append([place, *(str(some[outcome]) for outcome in outcomes)])
    told.append(_markdown(table))
    bad = []
    for test in tests:
        if test["outcome"] in ("failed", "error"):
            last = (test["text"].strip().splitlines() or [""])[-1]
            bad.append(f"- {test['outcome']}: `{test['id']}`: {_cell(last)}")
    bad += [f"- did not end in time: `{name}`" for name in found.cut]
    told.append("\n".join(bad))
    return "\n\n".join(told)
