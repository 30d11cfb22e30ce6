"""Everything that needs a GPU, in one run on a bare machine, inside a time limit.

    python3 tools/gpu_run.py --out DIR [--wheels DIR] [--stages build,tests,micro,compare,demo]

The machine needs python3 (>= 3.11) with torch, triton, transformers, peft, pytest, pybind11 and
ninja, and no network: the checkout is linked rather than installed, and what is missing comes
from wheels in `--wheels` (put in a scratch folder, without their dependencies). Stages:

    build    link the checkout, build the native core in place
    tests    every test marked `gpu`, a missing GPU being a failure; files are split over --jobs
             processes, and those that hang are ended with the stage
    micro    packages/*/benchmarks/*.py, one after the other
    compare  ts-bench compare for each --scenario
    demo     trainstream finetune --demo (more arguments with --demo-args)

Each stage has a time limit and the whole ends before --budget seconds. Under --out lie few
files: log.txt (all output), tests.txt (failures), compare.jsonl, compare.png, summary.json. A
short table is printed last. The exit status is 0 only if every stage succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["build", "tests", "micro", "compare", "demo"]
LIMITS_S = {"build": 120.0, "tests": 270.0, "micro": 90.0, "compare": 420.0, "demo": 150.0}
TAIL_LINES = 25


@dataclass
class Result:
    """What one stage did."""

    stage: str
    status: str
    seconds: float
    note: str = ""


class Runner:
    """Runs commands one after the other under one deadline, all output in one log."""

    def __init__(self, log: Path, env: dict[str, str], deadline: float) -> None:
        self.log = log
        self.env = env
        self.deadline = deadline
        log.write_bytes(b"")

    def run(self, command: list[str], limit_s: float) -> tuple[str, str]:
        """Returns (status, output): status is "ok", "failed (exit N)" or "timed out (N s)"."""
        limit_s = min(limit_s, self.deadline - time.monotonic())
        if limit_s <= 1:
            return "no time left", ""
        with self.log.open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                status = "ok" if code == 0 else f"failed (exit {code})"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"timed out ({limit_s:.0f} s)"
        return status, self.log.read_bytes()[start:].decode(errors="replace")

    def run_together(self, commands: list[list[str]], limit_s: float) -> list[tuple[str, str]]:
        """`run` for several at once; their outputs go to the log one after the other."""
        end = min(time.monotonic() + limit_s, self.deadline)
        outputs = [tempfile.TemporaryFile() for _ in commands]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for command, output in zip(commands, outputs, strict=True)
        ]
        found = []
        for command, process, output in zip(commands, processes, outputs, strict=True):
            try:
                code = process.wait(max(end - time.monotonic(), 0.1))
                status = "ok" if code == 0 else f"failed (exit {code})"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"timed out ({limit_s:.0f} s)"
            with output, self.log.open("ab") as log:
                output.seek(0)
                text = output.read()
                log.write(f"\n$ {shlex.join(command)}\n".encode() + text)
            found.append((status, text.decode(errors="replace")))
        return found


def main() -> int:
    """Run the chosen stages; returns the exit status."""
    args = _parse()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="trainstream-gpu-"))
    results: list[Result] = []
    deadline = time.monotonic() + args.budget
    try:
        runner = Runner(out / "log.txt", _environment(scratch), deadline)
        for stage in args.stages:
            begun = time.monotonic()
            status, note = _stage(stage, runner, args, out, scratch)
            results.append(Result(stage, status, round(time.monotonic() - begun, 1), note))
            print(f"[{stage}] {status}", flush=True)
            if stage == "build" and status != "ok":
                break
        (out / "summary.json").write_text(
            json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8"
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print_summary(results)
    return 0 if results and all(result.status == "ok" for result in results) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    parser.add_argument("--stages", type=_stages, default=STAGES, help="comma-separated")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--tests", default="packages tests", help="files and folders of tests")
    parser.add_argument("--pytest-args", default="", help="more arguments for pytest")
    parser.add_argument("--jobs", type=int, default=6, help="processes that run tests")
    parser.add_argument("--micro", default="*.py", help="which micro-benchmarks (a file pattern)")
    parser.add_argument("--scenario", action="append", help="for compare; may be repeated")
    parser.add_argument("--engines", help="for compare: comma-separated; default all")
    parser.add_argument("--repeats", type=int, default=1, help="for compare")
    parser.add_argument("--steps", type=int, default=8, help="for compare: timed steps")
    parser.add_argument("--compare-args", default="", help="more arguments for compare")
    parser.add_argument("--demo-args", default="", help="more arguments for the demo")
    return parser.parse_args()


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _stages(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = sorted(set(chosen) - set(STAGES))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown stage {unknown}; stages: {', '.join(STAGES)}")
    # Every other stage needs the checkout linked.
    return [stage for stage in STAGES if stage in chosen or stage == "build"]


def _environment(scratch: Path) -> dict[str, str]:
    path = [str(scratch / "site"), str(scratch / "wheels")]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TRAINSTREAM_CACHE_DIR": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
    }


def _stage(
    stage: str, runner: Runner, args: argparse.Namespace, out: Path, scratch: Path
) -> tuple[str, str]:
    limit_s = LIMITS_S[stage]
    if stage == "build":
        return _build(runner, args.wheels, scratch, limit_s)
    if stage == "tests":
        return _tests(runner, args, out, scratch, limit_s)
    if stage == "micro":
        return _micro(runner, args.micro, limit_s)
    if stage == "compare":
        return _compare(runner, args, out, limit_s)
    command = [sys.executable, "-m", "trainstream", "finetune", "--demo"]
    status, output = runner.run([*command, *shlex.split(args.demo_args)], limit_s)
    return status, _tail(output)


def _build(runner: Runner, wheels: Path | None, scratch: Path, limit_s: float) -> tuple[str, str]:
    steps = [
        [sys.executable, "tools/link_checkout.py", str(scratch / "site")],
        [sys.executable, "-m", "ts_core._build"],
        [sys.executable, "-c", "import ts_core._native"],
    ]
    if wheels is not None:
        files = sorted(str(path) for path in wheels.glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        pip += ["--no-compile", "--target", str(scratch / "wheels"), *files]
        steps.insert(0, pip)
        if not files:
            return "failed", f"no wheel in {wheels}"
    for step in steps:
        status, output = runner.run(step, limit_s)
        if status != "ok":
            return status, _tail(output)
    return "ok", ""


def _tests(
    runner: Runner, args: argparse.Namespace, out: Path, scratch: Path, limit_s: float
) -> tuple[str, str]:
    groups = _split(_gpu_files(shlex.split(args.tests)), args.jobs)
    if not groups:
        return "failed", f"no test marked gpu in {args.tests}"
    base = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]
    # A test file that needs a package this machine lacks must not keep the others from running.
    base += ["--continue-on-collection-errors", *shlex.split(args.pytest_args)]
    reports = [scratch / f"tests-{number}.xml" for number in range(len(groups))]
    commands = [
        [*base, f"--junitxml={report}", *map(str, files)]
        for report, files in zip(reports, groups, strict=True)
    ]
    runner.env["TS_REQUIRE_GPU"] = "1"
    try:
        found = runner.run_together(commands, limit_s)
    finally:
        del runner.env["TS_REQUIRE_GPU"]
    notes, failures = [], []
    for (status, output), report, files in zip(found, reports, groups, strict=True):
        if status != "ok":
            failures.append(output)
        if report.exists():
            notes.append(_test_note(report))
        else:
            names = " ".join(path.name for path in files)
            notes.append(f"{status}: {names}\n{_tail(output, 6)}")
    (out / "tests.txt").write_text("\n".join(failures), encoding="utf-8")
    bad = [status for status, _ in found if status != "ok"]
    return (f"failed ({len(bad)} of {len(groups)} processes)" if bad else "ok"), "\n".join(notes)


def _gpu_files(places: list[str]) -> list[Path]:
    files = [Path(place) for place in places if Path(place).is_file()]
    for place in places:
        files += (ROOT / place).rglob("test_*.py")
    return sorted({path for path in files if _gpu_marks(path)})


def _gpu_marks(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("mark.gpu")


def _split(files: list[Path], jobs: int) -> list[list[Path]]:
    """Groups of about as many marks each, the fullest files first."""
    groups: list[list[Path]] = [[] for _ in range(jobs)]
    weights = [0] * jobs
    for path in sorted(files, key=_gpu_marks, reverse=True):
        lightest = weights.index(min(weights))
        groups[lightest].append(path)
        weights[lightest] += _gpu_marks(path)
    return [group for group in groups if group]


def _test_note(report: Path) -> str:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        return f"no test suite in {report.name}"
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    told = []
    for case in suite.iter("testcase"):
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                message = (found.get("message") or "").splitlines() or [""]
                place = f"{case.get('classname')}::{case.get('name')}"
                told.append(f"{kind}: {place}: {message[0][:160]}")
    told.sort(key=lambda line: line.startswith("skipped"))
    if len(told) > TAIL_LINES:
        told[TAIL_LINES:] = [f"... {len(told) - TAIL_LINES} more"]
    return "\n".join([", ".join(f"{value} {key}" for key, value in counts.items()), *told])


def _micro(runner: Runner, pattern: str, limit_s: float) -> tuple[str, str]:
    found = sorted(ROOT.glob(f"packages/*/benchmarks/{pattern}"))
    scripts = [path for path in found if not path.name.startswith("_")]
    if not scripts:
        return "ok", f"no micro-benchmark matches {pattern}"
    notes, failed = [], 0
    end = time.monotonic() + limit_s
    for script in scripts:
        status, output = runner.run([sys.executable, str(script)], end - time.monotonic())
        failed += status != "ok"
        notes += [f"{script.relative_to(ROOT)}: {status}", *_tail(output).splitlines()]
    return "ok" if not failed else f"failed ({failed} of {len(scripts)})", "\n".join(notes)


def _compare(
    runner: Runner, args: argparse.Namespace, out: Path, limit_s: float
) -> tuple[str, str]:
    command = [sys.executable, "-m", "ts_bench", "compare"]
    for scenario in args.scenario or ["lora-14b-nf4-1x512-24g"]:
        command += ["--scenario", scenario]
    if args.engines:
        command += ["--engines", args.engines]
    command += ["--repeats", str(args.repeats), "--steps", str(args.steps)]
    # Leave it time to write its report.
    seconds = max(1.0, min(limit_s, runner.deadline - time.monotonic()) - 15)
    command += ["--time-limit", f"{seconds:.0f}", "--out", str(out / "compare.jsonl")]
    command += ["--plot", str(out / "compare.png"), *shlex.split(args.compare_args)]
    status, output = runner.run(command, limit_s)
    return status, _tail(output, 60)


def _tail(output: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(output.rstrip().splitlines()[-lines:])


def _print_summary(results: list[Result]) -> None:
    for result in results:
        print(f"\n--- {result.stage}: {result.status}, {result.seconds:.0f} s")
        if result.note:
            print(result.note)
    print(f"\n{'stage':10}{'seconds':>9}  status")
    for result in results:
        print(f"{result.stage:10}{result.seconds:9.1f}  {result.status}")


if __name__ == "__main__":
    sys.exit(main())
