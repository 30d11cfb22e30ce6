"""`trainstream bench` and `ts-bench`: compare, list, show."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from ts_bench import (
    adam_command,
    converge_command,
    fits_command,
    machine_command,
    page_command,
    quality_command,
    records,
    suite_command,
    timeline_command,
)
from ts_bench.records import Record
from ts_bench.scenarios import GB, SCENARIOS, Scenario, get_scenario
from ts_core.errors import OptionError, TrainStreamError

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": GB, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class BenchCommand:
    """The command `bench` of the group `trainstream.commands`."""

    API_VERSION = 1
    help = "compare trainstream with its rivals, side by side on this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the sub-commands and their options."""
        subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        _configure_compare(subparsers.add_parser("compare", help="run engines on scenarios"))
        listing = subparsers.add_parser("list", help="scenarios, and engines with what they lack")
        listing.set_defaults(_bench=_list)
        show = subparsers.add_parser("show", help="tables and a plot from recorded files")
        show.add_argument("file", nargs="+", type=Path, help="JSON lines written by compare")
        show.add_argument("--baseline", help="engine that ratios are relative to")
        show.add_argument("--plot", type=Path, help="also draw a picture (png, svg, pdf)")
        show.set_defaults(_bench=_show)
        suite_command.configure(
            subparsers.add_parser("suite", help="a list of runs, most telling first")
        )
        page_command.configure(
            subparsers.add_parser("page", help="a page for docs/benchmarks from recorded files")
        )
        timeline_command.configure(
            subparsers.add_parser("timeline", help="traces of profiled steps as a picture")
        )
        adam_command.configure(subparsers.add_parser("adam", help="host AdamW and its rivals"))
        converge_command.configure(
            subparsers.add_parser("converge", help="training with kernels and replay, and without")
        )
        fits_command.configure(
            subparsers.add_parser("fits", help="what wrapping costs where everything fits")
        )
        machine_command.configure(
            subparsers.add_parser("machine", help="rates of this machine, and what waits cost")
        )
        quality_command.configure(
            subparsers.add_parser("quality", help="perplexity of every quantized format")
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run the sub-command; returns the exit status."""
        return int(args._bench(args))


command = BenchCommand()


def main(argv: Sequence[str] | None = None) -> int:
    """The `ts-bench` command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ts-bench", description=command.help)
    command.configure(parser)
    args = parser.parse_args(argv)
    try:
        return command.run(args)
    except TrainStreamError as error:
        print(f"ts-bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ts-bench: interrupted", file=sys.stderr)
        return 130


def _configure_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scenario", action="append", required=True, metavar="NAME", help="see `list`; repeatable")
    add(
        "--engines",
        metavar="A,B",
        help="comma-separated, as name or name[option=value]; default: every engine installed",
    )
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--repeats", type=int, default=1, help="rounds, each in another order (%(default)s)")
    add("--warmup", type=int, default=3, help="steps before timing (%(default)s)")
    add("--steps", type=int, default=8, help="timed steps (%(default)s)")
    add(
        "--settling",
        type=int,
        default=36,
        help="warm-up steps at most, for engines that tell when they have settled (%(default)s)",
    )
    add("--variant", help="run only this variant of engines that have it (see `list`)")
    add("--limit", type=parse_size, default="", help="device memory cap, as 12GB or none")
    add("--batch", type=int, help="rows per step, instead of the scenario's")
    add("--tokens", type=int, help="tokens per row, instead of the scenario's")
    add("--threads", type=int, help="torch's CPU threads in each process")
    add("--run-limit", type=float, default=600, help="seconds for one process (%(default)s)")
    add("--time-limit", type=float, help="seconds for everything; the rest is noted as not run")
    add("--profiled", type=int, default=0, help="steps profiled on a GPU (%(default)s)")
    add("--traces", type=Path, help="folder for traces of the profiled steps (see Perfetto)")
    add("--link", action="store_true", help="measure the link in each process, too")
    add("--preload", action="store_true", help="share the common imports between the processes")
    add("--baseline", help="engine that ratios are relative to")
    add("--out", type=Path, help="append the records to this file of JSON lines")
    add("--plot", type=Path, help="draw a picture (png, svg, pdf)")
    parser.set_defaults(_bench=_compare)


def parse_size(text: str) -> int | str | None:
    """Bytes of "12GB", "12.5e9", "11GiB"; None of "none"; "" (as given) when not set."""
    if text == "":
        return ""
    if text.lower() == "none":
        return None
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)", text.lower())
    try:
        if found is None or found.group(2) not in UNITS:
            raise ValueError
        size = int(float(found.group(1)) * UNITS[found.group(2)])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; use bytes, a size such as 12GB or 11GiB, or none"
        ) from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    if size < 1 << 20 and not found.group(2):
        raise argparse.ArgumentTypeError(f"{text} is {size} bytes: did you mean {text}GiB?")
    return size


def _compare(args: argparse.Namespace) -> int:
    from ts_bench.report import show
    from ts_bench.rounds import Settings, compare
    from ts_bench.summary import summarize

    scenarios = [_with_changes(get_scenario(name), args) for name in args.scenario]
    engines = _engines(args.engines)
    settings = Settings(
        device=_device(args.device, scenarios),
        warmup=args.warmup,
        settling=args.settling,
        steps=args.steps,
        repeats=args.repeats,
        variant=args.variant,
        threads=args.threads,
        run_limit_s=args.run_limit,
        time_limit_s=args.time_limit,
        profiled=args.profiled,
        traces=args.traces,
        link=args.link,
        preload=args.preload,
    )

    def on_record(record: Record) -> None:
        if args.out is not None:
            records.append(args.out, record)
        print(progress(record), file=sys.stderr, flush=True)

    found = compare(scenarios, engines, settings, on_record=on_record, command=invoked())
    show(summarize(found, args.baseline))
    if args.plot is not None:
        _draw(found, args.plot, args.baseline)
    broken = [r for r in found if r.status in (records.CRASHED, records.TIMED_OUT, records.NOT_RUN)]
    succeeded = any(record.status == records.OK for record in found)
    return 0 if succeeded and not broken else 1


def invoked() -> str:
    """The command line, as one would type it."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", program.parent.name, *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def _with_changes(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """The scenario with the sizes of the command line, and a name that tells."""
    changes = {name: getattr(args, name) for name in ("batch", "tokens") if getattr(args, name)}
    if args.limit != "":
        changes["limit_bytes"] = args.limit
    changed = dataclasses.replace(scenario, **changes)
    if changed == scenario:
        return scenario
    cap = "none" if changed.limit_bytes is None else f"{changed.limit_bytes / GB:g}GB"
    name = f"{scenario.name} [{changed.batch}x{changed.tokens}, cap {cap}]"
    return dataclasses.replace(changed, name=name)


def _engines(text: str | None) -> list[str]:
    from ts_bench.engines import get_engine, parse_spec, split_specs
    from ts_core.registry import bench_engines

    if text is None:
        return bench_engines.names()
    specs = split_specs(text)
    for spec in specs:
        name, options = parse_spec(spec)
        if options or not bench_engines.has(name):
            get_engine(spec)  # raises, listing those that are installed
    if len(set(specs)) != len(specs):
        raise OptionError(f"engines: {text!r} names one twice; name each once.")
    return specs


def _device(choice: str, scenarios: list[Scenario]) -> str:
    import torch

    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    elif choice == "cuda" and not torch.cuda.is_available():
        raise OptionError("device: 'cuda' is not accepted here: torch sees no CUDA GPU.")
    if choice == "cpu":
        large = [scenario.name for scenario in scenarios if scenario.needs_gpu]
        if large:
            raise OptionError(
                f"scenario: {', '.join(large)} is made for a GPU, and torch sees none to use. "
                f"On a CPU use {', '.join(s.name for s in SCENARIOS.values() if not s.needs_gpu)}."
            )
    return choice


def progress(record: Record) -> str:
    """One line about a record that has just been made."""
    place = f"[{record.scenario['name']}, round {record.repeat + 1}] {record.engine}"
    if record.variant:
        place += f" ({record.variant})"
    if record.measurement is None:
        return f"{place}: {record.status}: {record.reason}"
    return f"{place}: {1000 * median(record.measurement.step_s):.1f} ms per step"


def _list(args: argparse.Namespace) -> int:
    from ts_core.errors import RegistryError
    from ts_core.registry import bench_engines

    print("scenarios:")
    width = max(map(len, SCENARIOS)) + 2
    for scenario in SCENARIOS.values():
        print(f"  {scenario.name:{width}}{scenario.note}")
    print("engines:")
    for name in bench_engines.names():
        try:
            engine = bench_engines.get(name)
            told = engine.available() or engine.description
            told += f" [variants: {', '.join(engine.variants)}]"
        except RegistryError as error:
            told = f"(broken) {error}"
        print(f"  {name:28}{told}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from ts_bench.report import show
    from ts_bench.summary import summarize

    found = records.read(args.file)
    if not found:
        raise OptionError(f"no record in {', '.join(map(str, args.file))}")
    show(summarize(found, args.baseline))
    if args.plot is not None:
        _draw(found, args.plot, args.baseline)
    return 0


def _draw(found: list[Record], path: Path, baseline: str | None) -> None:
    from ts_bench.plot import plot
    from ts_bench.summary import summarize

    limits = {
        record.scenario["name"]: record.scenario["limit_bytes"] / GB
        if record.scenario["limit_bytes"]
        else None
        for record in found
    }
    ran = next((record for record in reversed(found) if record.measurement), found[-1])
    device = ran.environment["device"]
    day = datetime.fromisoformat(ran.date).date().isoformat()
    versions = ran.environment["versions"]
    caption = (
        f"{device.get('name', device['type'])}, torch {versions['torch']}, {day}; "
        f"random weights and tokens; medians of {ran.settings['steps']} steps"
    )
    if not plot(summarize(found, baseline), path, limits, caption):
        print(f"{path} was not drawn: no engine succeeded", file=sys.stderr)
