"""`trainstream finetune` in two processes: the losses of one with the same rows per step."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ts_core.errors import OptionError
from ts_core.registry import kernels
from ts_core.testing.processes import run_ranks
from ts_hf.cli import run as run_module
from ts_hf.cli.run import run_finetune
from ts_hf.cli.settings import FinetuneConfig

pytest.importorskip("peft", reason="the optional package peft is not installed")

WORKER = Path(__file__).with_name("finetune_ranks_worker.py")


def settings(folder: Path, model: Path, method: str) -> FinetuneConfig:
    """Six steps of four rows in two processes; of three held-out rows one process repeats one."""
    data = folder / f"{method}.jsonl"
    records: list[dict[str, Any]] = []
    for n in range(40):
        if method == "dpo":
            records.append({"prompt": f"{n}: ", "chosen": "good " * (1 + n % 3), "rejected": "bad"})
        else:
            records.append({"prompt": f"{n}: ", "completion": "some words " * (1 + n % 3)})
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    return FinetuneConfig(
        model=str(model),
        data=(str(data),),
        output=str(folder / method),
        method=method,
        quantize="none",
        options=("param_offload=true",),
        seq_length=48,
        batch_size=1,
        accumulation=2,
        steps=6,
        lr=1e-2,
        eval_rows=3,
        save_every=2,
        device="cpu",
        dtype="float32",
        samples=1,
        sample_tokens=2,
    )


def lines(output: str, kind: str) -> list[dict[str, Any]]:
    text = (Path(output) / "history.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def numbers(output: str, kind: str, name: str) -> list[float]:
    return [line[name] for line in lines(output, kind)]


def alone(config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same rows per step in this process; its folder."""
    monkeypatch.setattr(run_module, "write_page", lambda *args: None)
    monkeypatch.setattr(run_module, "plot_run", lambda *args: None)
    output = f"{config.output}-alone"
    one = dataclasses.replace(config, batch_size=2, output=output)
    assert run_finetune(one, Console(file=io.StringIO())) == 0
    return output


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_as_one_and_go_on_when_stopped(
    tmp_path: Path, tiny_llm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = settings(tmp_path, tiny_llm, "lora")
    dpo = settings(tmp_path, tiny_llm, "dpo") if kernels.has("dpo_loss") else None
    given = [None if config is None else dataclasses.asdict(config) for config in (lora, dpo)]
    printed = run_ranks(WORKER, json.dumps(given), rounds=5)
    whole = f"{lora.output}-whole"
    assert printed.count("held-out loss before") == 2 + (dpo is not None)  # by the first process
    assert "in 2 processes" in printed

    # Stopped by Ctrl-C after step 2, killed in step 6, gone on from step 4. Within rounding: with
    # rows of unequal lengths a gradient after going on may differ in its last digit.
    name = "adapter/adapter_model.safetensors"
    wanted, found = load_file(Path(whole, name)), load_file(Path(lora.output, name))
    assert wanted.keys() == found.keys() and len(wanted) > 0
    for key, value in wanted.items():
        assert (found[key] - value).abs().mean() <= 2e-3, key
    for kind in ("step", "eval"):
        wanted_values = numbers(whole, kind, "loss")
        assert numbers(lora.output, kind, "loss") == pytest.approx(wanted_values, rel=1e-3)
    assert numbers(lora.output, "step", "step") == [1, 2, 3, 4, 5, 6]
    assert [line["when"] for line in lines(lora.output, "sample")] == ["before", "after"]

    one = alone(lora, monkeypatch)
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        wanted_values = numbers(one, kind, name)
        assert numbers(whole, kind, name) == pytest.approx(wanted_values, rel=2e-3), (kind, name)
    assert numbers(whole, "step", "tokens") == numbers(one, "step", "tokens")

    config = dataclasses.replace(lora, output=whole)
    (Path(whole) / "results.json").unlink()
    with pytest.raises(OptionError, match=r"of 2 processes, and these are 1\. Start 2"):
        run_finetune(config, Console(file=io.StringIO()))

    if dpo is not None:
        one = alone(dpo, monkeypatch)
        for kind in ("step", "eval"):
            for name in ("loss", "reward_accuracy", "reward_margin"):
                found_values = numbers(dpo.output, kind, name)
                wanted_values = numbers(one, kind, name)
                assert found_values == pytest.approx(wanted_values, rel=2e-3, abs=1e-4), name
