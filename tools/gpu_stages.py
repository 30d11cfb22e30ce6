"""The stages of gpu_run: which commands they are, large and tiny, and what is told of them."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shlex
import sys
import tarfile
import threading
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_tests import BROKEN
from gpu_work import ROOT, Runner, tail

MOST_TOLD = 22
OLD = "trainstream-0.4.1"
# For every engine, as Unsloth does for itself: else pieces of freed memory lie idle under a cap.
GROWING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass
class Context:
    """What stages work with."""

    runner: Runner
    args: argparse.Namespace
    out: Path
    scratch: Path
    site: Path


@dataclass(frozen=True)
class Stage:
    """A stage: returns (status, note) within a number of seconds."""

    run: Callable[[Context, float], tuple[str, str]]
    limit_s: float = 120.0


def build(context: Context, limit_s: float) -> tuple[str, str]:
    """Link the checkout, unpack what was brought, build the native core."""
    site = context.site
    for folder in context.args.wheels:
        brought = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
        if not brought:
            return "failed", f"no wheel in {folder}"
        for path in brought:
            _unpack(path, site)
    # Its strings warn when they are compiled, which tests would take for errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compileall.compile_dir(site / "packages" / "torchao", quiet=2)
    for command in (
        [sys.executable, "tools/link_checkout.py", str(site / "link")],
        [sys.executable, "-m", "ts_core._build"],
        [sys.executable, "-c", "import ts_core._native"],
    ):
        status, output = context.runner.run(command, limit_s)
        if status != "ok":
            return status, tail(output)
    return "ok", ""


def _unpack(path: Path, site: Path) -> None:
    done = site / "unpacked" / path.name
    if done.exists():
        return
    if path.suffix == ".whl":
        target = site / (OLD if path.name.startswith(OLD) else "packages")
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(target)
    else:
        with tarfile.open(path) as archive:
            archive.extractall(site, filter="data")
        name = path.name.removesuffix(".tar.gz")
        if name.startswith("deepspeed") and not (site / "deepspeed").exists():
            (site / "deepspeed").symlink_to(site / name)
    done.parent.mkdir(exist_ok=True)
    done.touch()


def gpu_tests(context: Context, limit_s: float) -> tuple[str, str]:
    """Tests marked gpu, by several processes that share one list."""
    args, runner = context.args, context.runner
    chosen = gpu_tests_in(shlex.split(args.tests))
    if not chosen:
        return "failed", f"no test marked gpu in {args.tests}"
    counter, lines = context.scratch / "next-test", runner.results
    counter.write_text("0")
    before = lines.stat().st_size if lines.exists() else 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "gpu_tests"]
    command += ["-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors"]
    command += [*shlex.split(args.pytest_args), *chosen]
    env = {"GPU_TESTS_NEXT": str(counter), "GPU_TESTS_LINES": str(lines)}
    if not args.tiny:
        env["TS_REQUIRE_GPU"] = "1"
    end = time.monotonic() + limit_s
    ended: list[str] = []

    def share() -> None:
        status = f"failed (exit {BROKEN})"
        while status == f"failed (exit {BROKEN})":
            status, output = runner.run(command, end - time.monotonic(), env)
        # 5: nothing was left to take, 1: a test failed, which its own line tells
        usual = status in ("ok", "failed (exit 1)", "failed (exit 5)")
        ended.append("ok" if usual else f"{status}\n{tail(output, 6)}")

    threads = [threading.Thread(target=share) for _ in range(2 if args.tiny else args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with lines.open(encoding="utf-8") if lines.exists() else open(os.devnull) as file:
        file.seek(before)
        found = [json.loads(line) for line in file if line.strip()]
    return _told_tests(found, [text for text in ended if text != "ok"])


def _told_tests(found: Sequence[dict[str, Any]], ended: Sequence[str]) -> tuple[str, str]:
    """(status, note) of lines of tests, and of processes that did not end as usual."""
    done = {line["id"]: line for line in found if line["kind"] == "test"}
    begun = {line["id"] for line in found if line["kind"] == "test-start"}
    cut = sorted(begun - set(done))
    counts = Counter(line["outcome"] for line in done.values())
    bad = [line for line in done.values() if line["outcome"] in ("failed", "error")]
    told = [", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "no test ran"]
    for line in bad:
        reason = (line["text"].strip().splitlines() or [""])[-1]
        told.append(f"{line['outcome']}: {line['id'].rpartition('/')[2]}: {reason[:140]}")
    told += [f"did not end: {name}" for name in cut]
    told += ended
    if len(told) > MOST_TOLD:
        told[MOST_TOLD:] = [f"... {len(told) - MOST_TOLD} more, in results.jsonl"]
    slow = sorted(done.values(), key=lambda line: line["seconds"], reverse=True)[:5]
    told.append("slowest: " + ", ".join(f"{x['id'].split('::')[-1]} {x['seconds']}" for x in slow))
    fine = done and not bad and not cut and not ended
    return "ok" if fine else f"failed ({len(bad)} tests, {len(cut)} cut)", "\n".join(told)


def gpu_tests_in(places: Sequence[str]) -> list[str]:
    """What to give pytest: test files in these places that have tests marked gpu, and node ids
    (`FILE::TEST`) of these places that lie in such files."""
    found = []
    for place in places:
        name, separator, test = place.partition("::")
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
            if "mark.gpu" in file.read_text(encoding="utf-8"):
                found.append(f"{file}{separator}{test}")
    return list(dict.fromkeys(found))


def suite(name: str) -> Callable[[Context, float], tuple[str, str]]:
    """ts-bench suite NAME."""

    def run(context: Context, limit_s: float) -> tuple[str, str]:
        # It leaves itself time to write its tables.
        seconds = max(1.0, context.runner.left_s(limit_s) - 12)
        command = [sys.executable, "-m", "ts_bench", "suite", name]
        command += ["--out", str(context.out / "records.jsonl"), "--time-limit", f"{seconds:.0f}"]
        command += ["--tiny", "--threads", "1"] if context.args.tiny else []
        command += shlex.split(context.args.suite_args)
        status, output = context.runner.run(command, limit_s, GROWING)
        begin = output.find("\n## ")
        return status, tail(output[begin + 1 :] if begin >= 0 else output, 45, 170)

    return run


def scripts(
    name: str, full: Sequence[str], tiny: Sequence[str]
) -> Callable[[Context, float], tuple[str, str]]:
    """Scripts one after the other; {out}, {scratch} in their arguments are folders."""

    def run(context: Context, limit_s: float) -> tuple[str, str]:
        end = time.monotonic() + limit_s
        notes, failed = [], 0
        lines = tiny if context.args.tiny else full
        for line in lines:
            text = line.format(out=context.out, scratch=context.scratch)
            command = [sys.executable, *shlex.split(text)]
            status, output = context.runner.script(name, command, end - time.monotonic())
            failed += status != "ok"
            first, *others = line.split()
            shown = " ".join(others[:2]) if first == "-m" else first.rpartition("/")[2]
            notes += [f"{shown}: {status}", tail(output, 24, 170)]
        return "ok" if not failed else f"failed ({failed} of {len(lines)})", "\n".join(notes)

    return run


def found_scripts(name: str) -> Callable[[Context, float], tuple[str, str]]:
    """The benchmark scripts of this name in any package, without arguments."""

    def run(context: Context, limit_s: float) -> tuple[str, str]:
        places = [
            str(path.relative_to(ROOT)) for path in ROOT.glob(f"packages/*/benchmarks/{name}")
        ]
        if not places:
            return "nothing to run", f"no package has benchmarks/{name}"
        return scripts(name.removesuffix(".py"), places, places)(context, limit_s)

    return run


def quality(context: Context, limit_s: float) -> tuple[str, str]:
    """The baseline, then the other cases by several processes, then the table."""
    args, runner = context.args, context.runner
    end = time.monotonic() + limit_s
    out = context.out / "quality.jsonl"
    base = [sys.executable, "-m", "ts_bench", "quality", "--out", str(out)]
    base += ["--gguf", str(args.gguf.resolve())] if args.gguf else []
    if args.tiny:
        base += ["--steps", "1", "--seeds", "1", "--eval-rows", "1", "--seq-length", "32"]
        base += ["--batch", "1", "--threads", "1"]
    status, output = runner.run([*base, "--cases", "bf16"], limit_s)
    if status != "ok":
        return status, tail(output)
    # Asked for in a process of its own: this one has no path to the packages.
    code = "from ts_bench.quality_cases import CASES; print(*CASES, sep='\\n')"
    cases = runner.run([sys.executable, "-c", code], 60)[1].split("\n")
    cases = [case for case in cases if case.strip() and case != "bf16"][: 2 if args.tiny else None]
    jobs = min(args.jobs, len(cases))
    notes: list[str] = []

    def some(mine: Sequence[str]) -> None:
        status, output = runner.run([*base, "--cases", ",".join(mine)], end - time.monotonic())
        if status != "ok":
            notes.append(f"{', '.join(mine)}: {status}\n{tail(output, 4)}")

    threads = [threading.Thread(target=some, args=(cases[i::jobs],)) for i in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not notes:
        table = [*base, "--cases", ",".join(cases), "--markdown", str(context.out / "quality.md")]
        status, output = runner.script("quality", table, end - time.monotonic())
        return status, tail(output, 30)
    return f"failed ({len(notes)} of {jobs} processes)", "\n".join(notes)


def demo(context: Context, limit_s: float) -> tuple[str, str]:
    """trainstream finetune --demo."""
    command = [sys.executable, "-m", "trainstream", "finetune", "--demo"]
    command += ["--output", str(context.scratch / "demo")]
    command += ["--gguf", str(context.args.gguf.resolve())] if context.args.gguf else []
    status, output = context.runner.script("demo", command, limit_s)
    return status, tail(output, 12)


def converge(context: Context, limit_s: float) -> tuple[str, str]:
    """ts-bench converge, which ends by itself a little before its time is up."""
    args = context.args
    seconds = max(1.0, context.runner.left_s(limit_s) - 5)
    command = [sys.executable, "-m", "ts_bench", "converge", "--time-limit", f"{seconds:.0f}"]
    command += ["--out", str(context.out / "converge.jsonl")]
    command += ["--gguf", str(args.gguf.resolve())] if args.gguf else []
    if args.tiny:
        command += ["--tiny", "--seeds", "1", "--jobs", "1", "--threads", "1"]
    status, output = context.runner.script("converge", command, limit_s)
    return status, tail(output, 12)


def rivals(context: Context, limit_s: float) -> tuple[str, str]:
    """What rivals compile on first use, all at once and out of the way (nice)."""
    jobs: list[tuple[str, str, dict[str, str]]] = []
    if (context.site / "deepspeed").exists():
        without = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "MAX_JOBS": "4"}
        jobs.append(("deepspeed", "import ts_bench.engines.deepspeed as d; d.build()", without))
    if (context.site / OLD).exists():
        path = f"import os, sys; sys.path.insert(0, {str(context.site / OLD)!r}); os.nice(10)"
        jobs.append((OLD, f"{path}; import trainstream as t; print(t.__version__)", {}))
    if (context.site / "packages" / "unsloth").exists() and not context.args.tiny:
        write = "import runpy; runpy.run_module('ts_bench.engines.unsloth', run_name='__main__')"
        jobs.append(("checkpoint for unsloth", write, {}))
    notes: list[str] = []

    def one(name: str, code: str, env: dict[str, str]) -> None:
        status, output = context.runner.run([sys.executable, "-c", code], limit_s, env)
        notes.append(f"{name}: {status}: {tail(output, 2)}")

    threads = [threading.Thread(target=one, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = [note for note in notes if ": ok: " not in note]
    return f"failed ({len(bad)})" if bad else "ok", "\n".join(notes)


def _benchmark(package: str, line: str) -> str:
    return f"packages/{package}/benchmarks/{line}"


KERNELS, QUANT = "ts-kernels", "ts-quant"
STAGES: dict[str, Stage] = {
    "tests": Stage(gpu_tests, 440.0),
    "soak": Stage(
        scripts(
            "soak",
            [_benchmark("ts-core", "soak.py --minutes 3")],
            [_benchmark("ts-core", "soak.py --device host --steps 60")],
        ),
        300.0,
    ),
    "quality": Stage(quality, 200.0),
    "optim": Stage(suite("optim"), 420.0),
    "lora": Stage(suite("lora"), 500.0),
    "stream": Stage(suite("stream"), 240.0),
    "kernels": Stage(
        scripts(
            "kernels",
            [
                _benchmark(KERNELS, "all_kernels.py --json {out}/kernels.json"),
                _benchmark(KERNELS, "cross_entropy.py ts_kernels eager liger"),
                _benchmark(KERNELS, "patched_model.py"),
            ],
            [],  # they measure by CUDA graphs
        ),
        190.0,
    ),
    "decode": Stage(
        scripts(
            "decode",
            [
                _benchmark(QUANT, "decode.py --quick"),
                _benchmark(QUANT, "matmul.py --tokens 512 2048"),
            ],
            [_benchmark(QUANT, "decode.py --device cpu --rows 64 --columns 128 --quick")],
        ),
        75.0,
    ),
    "sources": Stage(
        scripts(
            "sources",
            [_benchmark("ts-core", "sources.py"), _benchmark("ts-core", "streamed_model.py")],
            [
                _benchmark("ts-core", "sources.py --device host --block-mib 1 --blocks 2"),
                _benchmark("ts-core", "streamed_model.py --blocks 2 --tokens 16"),
            ],
        ),
        90.0,
    ),
    "kv": Stage(
        scripts(
            "kv",
            [_benchmark("ts-hf", "kv_cache.py")],
            [_benchmark("ts-hf", "kv_cache.py --context 64 --layers 2 --tokens 5")],
        ),
        60.0,
    ),
    "trainer": Stage(
        scripts(
            "trainer",
            [
                _benchmark("ts-hf", "trainer_14b.py"),
                _benchmark("ts-hf", "trainer_14b.py --on kernels fused_lora cuda_graphs"),
            ],
            [_benchmark("ts-hf", "trainer_14b.py --tiny --steps 12 --tokens 32")],
        ),
        200.0,
    ),
    "moe": Stage(
        scripts(
            "moe",
            [_benchmark("ts-hf", "moe_paging.py --layers 12 --codec nf4")],
            [
                _benchmark(
                    "ts-hf",
                    "moe_paging.py --layers 2 --experts 8 --width 64 --tokens 16 --steps 1 "
                    "--decode 1",
                )
            ],
        ),
        90.0,
    ),
    "adam": Stage(
        scripts(
            "adam",
            ["-m ts_bench adam --rounds 9 --json {out}/adam.json"],
            ["-m ts_bench adam --rounds 2 --millions 1 --json {out}/adam.json"],
        ),
        60.0,
    ),
    "machine": Stage(
        scripts(
            "machine",
            ["-m ts_bench machine --json {out}/machine.json"],
            ["-m ts_bench machine --tiny --json {out}/machine.json"],
        ),
        60.0,
    ),
    "fits": Stage(
        scripts(
            "fits",
            ["-m ts_bench fits --json {out}/fits.json"],
            ["-m ts_bench fits --tiny --threads 1 --rounds 2 --steps 1 --json {out}/fits.json"],
        ),
        75.0,
    ),
    "converge": Stage(converge, 110.0),
    "demo": Stage(demo, 120.0),
    "rivals": Stage(rivals, 300.0),
}
