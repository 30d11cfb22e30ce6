"""Everything that needs a GPU, on a bare machine, inside a time limit.

    python3 tools/gpu_run.py tests soak --out DIR --budget 500 [--beside] [--tiny]

The machine needs python3 (>= 3.10) with torch, triton, transformers, peft, pytest, pybind11 and
ninja, and no network: the checkout is linked rather than installed, and what is missing comes from
wheels and archives in `--wheels`, put into the folder `--site` without their dependencies. Every
run begins with `build` (link, unpack, build the native core; quick when it has been done). Stages:

    tests     every test marked `gpu`, a missing GPU being a failure, by --jobs processes
    soak      packages/ts-core/benchmarks/soak.py: minutes of training with failures and delays
    quality   ts-bench quality, its cases by --jobs processes (--gguf: the demo model)
    optim     ts-bench suite optim: full fine-tunes, OffloadAdamW's modes, DeepSpeed, torch
    lora      ts-bench suite lora: LoRA on a 14B shape in NF4, and every rival
    stream    ts-bench suite stream: LoRA on an exact bf16 base that does not fit
    trainer   LoRA on a 14B shape in NF4 through TrainStreamTrainer, within 24 GB
    kernels, decode, sources, kv, moe, adam: the benchmarks of that kind; see STAGES
    machine   ts-bench machine: link, page-locking, host AdamW, what waits and imports cost
    fits      ts-bench fits: offload="auto" against torch alone where everything fits
    converge  ts-bench converge: kernels and block replay against neither, three seeds each (--gguf)
    demo      trainstream finetune --demo
    rivals    compile what the rivals compile: DeepSpeed's CPUAdam, trainstream 0.4.1

Stages run one after the other in the order given, each within its time limit (`STAGE=SECONDS`
gives another one), or all at once with --beside: for those whose times do not matter. Under --out
lie few files, written as results come: records.jsonl (of `ts-bench suite`), results.jsonl (tests,
and what every script printed), quality.jsonl, converge.jsonl, kernels.json, machine.json,
fits.json, log.txt, summary.json. `ts-bench page` makes a page of records.jsonl, results.jsonl and
kernels.json. A short table is printed last. With --tiny every stage runs small, on a CPU if need
be, to see that it works. The exit status is 0 only if every stage succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_stages import STAGES, Context, Stage, build
from gpu_work import Runner


@dataclass
class Result:
    """What one stage did."""

    stage: str
    status: str
    seconds: float
    note: str = ""


def main() -> int:
    """Run the chosen stages; returns the exit status."""
    args = _parse()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.budget
    results: list[Result] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="trainstream-gpu-") as scratch:
        args.site.mkdir(parents=True, exist_ok=True)
        runner = Runner(out, _environment(args.site.resolve()), deadline)
        context = Context(runner, args, out, Path(scratch), args.site.resolve())

        def one(name: str, stage: Stage, limit_s: float) -> None:
            begun = time.monotonic()
            status, note = stage.run(context, limit_s)
            with lock:
                results.append(Result(name, status, round(time.monotonic() - begun, 1), note))
                print(f"[{name}] {status}", flush=True)
                text = json.dumps([asdict(result) for result in results], indent=1)
                (out / "summary.json").write_text(text, encoding="utf-8")

        one("build", Stage(build), 150.0)
        if results[0].status == "ok":
            chosen = [(name, STAGES[name], limit_s) for name, limit_s in args.stages]
            if args.beside:
                threads = [threading.Thread(target=one, args=each) for each in chosen]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                for each in chosen:
                    one(*each)
    _print_summary(results)
    return 0 if all(result.status == "ok" for result in results) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    add = parser.add_argument
    add("stages", nargs="*", type=_stage, help="in order; NAME or NAME=SECONDS")
    add("--out", type=Path, required=True, help="folder for logs and figures")
    add("--budget", type=float, default=560.0, help="seconds for everything")
    add("--beside", action="store_true", help="run all stages at once, for those not timed")
    add("--tiny", action="store_true", help="small, to see that it works")
    add("--wheels", type=Path, action="append", default=[], help="folders of wheels and archives")
    add("--site", type=Path, default=Path("/tmp/trainstream-gpu-site"), help="where they are put")
    add("--jobs", type=int, default=12, help="processes of tests and of quality")
    add("--tests", default="packages tests", help="files, folders, FILE::TEST")
    add("--pytest-args", default="", help="more arguments for pytest: '-k WORD'")
    add("--suite-args", default="", help="more arguments for ts-bench suite")
    add("--gguf", type=Path, help="the demo model's file, for quality, converge and demo")
    return parser.parse_args()


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _stage(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in STAGES:
        raise argparse.ArgumentTypeError(f"unknown stage {name!r}; stages: {', '.join(STAGES)}")
    try:
        return name, float(seconds) if seconds else STAGES[name].limit_s
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {seconds!r} is no number of seconds") from None


def _environment(site: Path) -> dict[str, str]:
    path = [str(site / "link"), str(site / "packages"), str(Path(__file__).resolve().parent)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(site / "packages" / "bin"), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TRAINSTREAM_CACHE_DIR": str(site / "cache"),
        "TORCH_EXTENSIONS_DIR": str(site / "extensions"),
        "TS_BENCH_DEEPSPEED": str(site / "deepspeed"),
        "TS_BENCH_TRAINSTREAM_041": str(site / "trainstream-0.4.1"),
        "TS_BENCH_CHECKPOINTS": str(site / "checkpoints"),
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(site / "unsloth_compiled_cache"),
    }


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
