"""Host time of a LoRA step, per layer, with arithmetic too small to matter.

    python packages/ts-core/benchmarks/host_overhead.py [--layers 48] [--rounds 9] [--before PATH]
    python packages/ts-core/benchmarks/host_overhead.py --profile nf4-fused

A Llama of tiny matrices with LoRA adapters (PEFT, rank 16, all linear layers) takes a step on the
CPU under bf16 autocast, so that nearly all of the time is what Python and torch's dispatcher need
to get the work going: what bounds a small-batch step on a fast GPU. Compared are plain PEFT on bf16
weights under torch's fused AdamW, and wrap_hf with an NF4 base: with the optimizer on the host
("nf4-offload"), on the device ("nf4"), and with `kernels` and `fused_lora` too ("nf4-fused").

Times are CPU time of the thread that runs the step, the least of the rounds, in which all ways take
turns: neighbours on a busy machine only add. The Python functions called per layer hardly vary (not
at all but for "nf4-offload", where reads of parameters may or may not find an update in flight).
`--before` is a folder that another version of the packages is imported from: it runs in a process
of its own, in turns with this version's.

Decoding an NF4 weight, a dozen torch operations on the CPU and one kernel on a GPU, is replaced by
one operation that writes zeros. The fused functions still take several operations here for one
kernel there, so ratios to "peft-bf16" say little of a GPU; before against now, and calls, say what
Python costs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import torch

WAYS = ("peft-bf16", "nf4-offload", "nf4", "nf4-fused")
PARTS = ("forward", "backward", "step")
TOKENS = 4


def llama(layers: int) -> Any:
    """A tiny Llama in bf16 with adapters on all linear layers of its blocks."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.requires_grad_(False)
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(model, adapters)


class Way:
    """One way to take the step.

    Args:
        name: one of WAYS.
        layers: of the model.
    """

    def __init__(self, name: str, layers: int) -> None:
        self.model = model = llama(layers)
        self.layers = layers
        self.tokens = torch.arange(TOKENS)[None]
        if name == "peft-bf16":
            trained = [p for p in model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
            return
        from ts_hf import wrap_hf

        fused = {"kernels": True, "fused_lora": True} if name == "nf4-fused" else {}
        options = {"quantize": "nf4", "device": "host", "attention": None, "threads": 1}
        _, self.optimizer = wrap_hf(model, None, lr=1e-3, **options, **fused)
        if name != "nf4-offload":
            self.optimizer.make_resident()

    def step(self) -> dict[str, float]:
        """Microseconds of each part, per layer."""
        marks = [time.thread_time()]
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.thread_time())
        spans = {part: marks[k + 1] - marks[k] for k, part in enumerate(PARTS)}
        return {part: seconds * 1e6 / self.layers for part, seconds in spans.items()}

    def calls(self) -> dict[str, float]:
        """Python functions called in a step, per layer: all, and those of this project."""
        seen: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                name = frame.f_globals.get("__name__", "")
                seen["ours" if name.startswith("ts_") else "others"] += 1

        sys.setprofile(note)
        try:
            self.step()
        finally:
            sys.setprofile(None)
        return {
            "calls": sum(seen.values()) / self.layers,
            "our calls": seen["ours"] / self.layers,
        }


def decode_at_once() -> None:
    """Let a weight be decoded by one operation (to zeros)."""
    from ts_quant.codecs.stored import StoredCodec

    def run_decode(self: Any, buffers: Any, spec: Any, out: torch.Tensor) -> None:
        out.zero_()

    StoredCodec.run_decode = run_decode


def serve(layers: int) -> None:
    """Take steps as lines on stdin name them; a line of figures each."""
    ways = {name: Way(name, layers) for name in WAYS}
    for way in ways.values():
        for _ in range(3):
            way.step()
    print("ready", flush=True)
    for line in sys.stdin:
        what, name = line.split()
        way = ways[name]
        print(json.dumps(way.calls() if what == "calls" else way.step()), flush=True)


class Version:
    """One version of the packages, in a process of its own."""

    def __init__(self, label: str, path: str | None, layers: int) -> None:
        self.label = label
        env = dict(os.environ, OMP_NUM_THREADS="1")
        if path is not None:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, env.get("PYTHONPATH")]))
        command = [sys.executable, __file__, "--serve", "--layers", str(layers)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._read("ready")

    def ask(self, what: str, name: str) -> dict[str, float]:
        """Figures of one step."""
        assert self._process.stdin is not None
        print(what, name, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._read("{"))
        return found

    def _read(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit(f"the process of version {self.label!r} ended")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(layers: int, rounds: int, before: str | None) -> None:
    """Print the table."""
    versions = [Version("now", None, layers)]
    if before is not None:
        versions.insert(0, Version("before", before, layers))
    kinds = [(version, name) for name in WAYS for version in versions]
    taken: dict[Any, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for version, name in kinds if number % 2 else reversed(kinds):
            taken[version, name].append(version.ask("time", name))
    columns = [*PARTS, "total", "calls", "our calls"]
    print(f"us of CPU time per layer and step ({layers} layers, least of {rounds} rounds)")
    print(f"{'':24}" + "".join(f"{column:>11}" for column in columns) + "   total / peft-bf16")
    base = {}
    for version, name in kinds:
        for times in taken[version, name]:
            times["total"] = sum(times[part] for part in PARTS)
        found = {
            column: min(times[column] for times in taken[version, name]) for column in columns[:4]
        }
        found |= version.ask("calls", name)
        base.setdefault(version.label, found["total"])
        ratio = found["total"] / base[version.label]
        row = "".join(f"{found[column]:11.0f}" for column in columns)
        print(f"{name:12}{version.label:>12}{row}{ratio:12.2f}")
    for version in versions:
        version.close()


def profile(name: str, layers: int) -> None:
    """Where one step's time goes, by function."""
    way = Way(name, layers)
    for _ in range(3):
        way.step()
    profiler = cProfile.Profile()
    profiler.enable()
    way.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", help="folder of another version of the packages")
    parser.add_argument("--profile", choices=WAYS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decode_at_once()
    if arguments.serve:
        serve(arguments.layers)
    elif arguments.profile:
        profile(arguments.profile, arguments.layers)
    else:
        compare(arguments.layers, arguments.rounds, arguments.before)


if __name__ == "__main__":
    main()
