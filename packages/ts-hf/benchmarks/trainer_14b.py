"""LoRA on a 14B model through TrainStreamTrainer, within 24 GB of device memory.

    python packages/ts-hf/benchmarks/trainer_14b.py [--steps 40] [--limit 24e9] [--tiny]

Qwen2.5-14B's shape with random weights in NF4, adapters of rank 16 on all seven projections, rows
of 512 random tokens, one at a time, bf16 autocast. Nothing of the loop is written here: the Trainer
loads batches, steps, clips, logs. A callback only takes the time at the end of each step, and waits
for the device after the tenth and the last one. Steps up to the tenth measure and place; those
after it count. Prints a line per figure, and all of them as JSON. --tiny runs a toy on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import peft
import torch
from transformers import PrinterCallback, Qwen2Config, TrainerCallback, TrainingArguments

import ts_hf

GB = 1e9
SETTLING = 10
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FULL: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    **FULL,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended on the host, and the counted ones on the device as well."""

    def __init__(self, last: int) -> None:
        self.ends: list[float] = []
        self.begun = self.ended = 0.0
        self._last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the time."""
        if state.global_step in (SETTLING, self._last):
            _synchronize()
        self.ends.append(time.perf_counter())
        if state.global_step == SETTLING:
            self.begun = self.ends[-1]
        if state.global_step == self._last:
            self.ended = self.ends[-1]


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Load, train, and return the figures by name."""
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    started = time.perf_counter()
    config = Qwen2Config(**(TINY if asked.tiny else FULL))
    model = ts_hf.load_model(config, random_weights=True, quantize="nf4")
    _synchronize()
    load_s = time.perf_counter() - started
    load_rss = _peak_rss_bytes()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    adapters = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, adapters)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (64, asked.tokens), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    options: dict[str, Any] = {name: True for name in asked.on}
    if cuda and asked.limit:
        options["vram_limit"] = int(asked.limit)
    clock = Clock(asked.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=asked.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-4,
            bf16=cuda,
            use_cpu=not cuda,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            callbacks=[clock],
            trainstream=options,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    report = _session_report(trainer.model)
    counted = asked.steps - SETTLING
    ends = clock.ends[SETTLING - 1 :]
    between = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "options": options,
        "load_s": round(load_s, 2),
        "first_steps_s": round(clock.begun - clock.ends[0], 2),
        "step_s": round((clock.ended - clock.begun) / counted, 4),
        "host_step_s_median": round(statistics.median(between), 4),
        "counted_steps": counted,
        "peak_allocated_gb": torch.cuda.max_memory_allocated() / GB if cuda else None,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / GB if cuda else None,
        "load_peak_ram_gb": load_rss / GB,
        "peak_ram_gb": _peak_rss_bytes() / GB,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "grad_norms": [
            line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line
        ],
        "device": torch.cuda.get_device_name() if cuda else "host",
        **report,
    }


def _session_report(model: Any) -> dict[str, Any]:
    """Where the blocks live, and what was decided."""
    from ts_core import memory_report

    report = memory_report(model)
    return {
        "paged_blocks": len(report.get("params", {}).get("paged_blocks", ())),
        "loaded_gb": report["transfers"]["h2d"]["bytes"] / GB,
        "events": [str(event) for event in report["events"]],
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="more than ten")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--limit", type=float, default=24e9, help="bytes of device memory; 0: none")
    parser.add_argument("--on", nargs="*", default=[], help="options of wrap() to set to True")
    parser.add_argument("--tiny", action="store_true", help="a toy model")
    asked = parser.parse_args()
    if asked.steps <= SETTLING:
        parser.error(f"--steps {asked.steps}: more than {SETTLING} are needed")
    figures = measure(asked)
    for name, value in figures.items():
        if name != "events":
            print(f"{name:20}{value:.3f}" if isinstance(value, float) else f"{name:20}{value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
