"""`trainstream finetune` end to end on a tiny model: results, ways to train, refusals."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from safetensors.torch import load_file

from ts_core.errors import (
    DataError,
    OptionError,
    OutOfBudgetError,
    StateError,
)
from ts_hf.cli.machine import pick_device, pick_dtype
from ts_hf.cli.run import run_finetune
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.testing.runs import adapter_of, lines_of, results_of, run

pytest.importorskip("peft", reason="the optional package peft is not installed")
pytestmark = pytest.mark.usefixtures("no_page")


def test_a_whole_run(settings: Callable[..., FinetuneConfig]) -> None:
    config = settings()
    status, printed = run(config)
    assert status == 0, printed
    results = results_of(config)
    loss = results["held_out_loss"]
    assert loss["after"] < loss["before"] - 0.3
    memory = results["memory"]
    assert memory["block_limit"] == 60 << 10 < memory["block_bytes"]
    assert 0 < len(memory["paged_blocks"]) < 6
    assert memory["device"]["peak_allocated"] <= 60 << 10
    assert memory["streamed_bytes"] > 0 and memory["rss"] > 1 << 20
    assert results["steps"] == 6 and results["tokens_per_second"] > 0
    output = Path(config.output)
    assert (output / "loss_and_memory.png").read_bytes()[:4] == b"\x89PNG"
    lines = lines_of(config)
    history = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] > 0 and line["rss_gb"] > 0 for line in history)
    assert all(line["grad_norm"] > 0 and line["step_s"] > 0 for line in history)
    assert all(line["tokens"] == 4 * 32 for line in history)
    evals = [(line["step"], line["loss"]) for line in lines if line["kind"] == "eval"]
    assert evals == [(0, loss["before"]), (6, loss["after"])]
    (where,) = [line for line in lines if line["kind"] == "placement"]
    places = [block["place"] for block in where["blocks"]]
    assert [i for i, place in enumerate(places) if place == "streams"] == memory["paged_blocks"]
    assert sum(block["bytes"] for block in where["blocks"]) == memory["block_bytes"]
    assert {block["format"] for block in where["blocks"]} == {config.quantize}
    samples = [line for line in lines if line["kind"] == "sample"]
    assert [line["when"] for line in samples] == ["before"] * 2 + ["after"] * 2
    assert samples[0]["prompt"] == samples[2]["prompt"] and samples[0]["text"]
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [2, 4, 6]
    assert [line["text"] for line in lines if line["kind"] == "event"] == results["events"]
    assert (lines[0]["kind"], lines[-1]["kind"], lines[-1]["status"]) == (
        "session",
        "end",
        "finished",
    )
    assert lines[0]["pid"] == os.getpid()
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert f"{6 - len(memory['paged_blocks'])} stay on the device" in printed
    for words in ("held-out loss before", "Memory by tier", "device pool", "perplexity", "saved:"):
        assert words in printed
    assert not [p for p in output.iterdir() if p.name.startswith(".")]
    # Run again: it is finished, and says so without training.
    status, printed = run(config)
    assert status == 0 and "holds a finished run" in printed
    assert results_of(config) == results


def test_saved_adapter_gives_the_reported_loss_in_plain_peft(
    settings: Callable[..., FinetuneConfig], tiny_llm: Path
) -> None:
    """transformers + PEFT, unquantized base as stored: within what quantization costs."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ts_hf.cli.rows import prepare_rows, split_sources

    config = settings(quantize="none", block_limit=None)
    assert run(config)[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_llm)
    documents = split_sources(config.data, None, 0.1)[1]
    held_out = prepare_rows(documents, tokenizer, seq_length=32, wanted=4, share=32)
    base = AutoModelForCausalLM.from_pretrained(tiny_llm, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, Path(config.output) / "adapter").eval()
    ids = torch.stack([row["input_ids"] for row in held_out.items])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(results_of(config)["held_out_loss"]["after"], rel=1e-5)
    card = (Path(config.output) / "adapter" / "README.md").read_text(encoding="utf-8")
    assert f"# Adapter of {tiny_llm.name}" in card and f"rank {config.lora_rank}" in card
    assert str(tiny_llm.parent) not in card and "More Information Needed" not in card


def test_full_fine_tune(settings: Callable[..., FinetuneConfig]) -> None:
    config = settings(method="full", block_limit=None, lr=1e-3)
    status, printed = run(config)
    assert status == 0, printed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(config.output) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<end>"
    before = load_file(Path(config.model) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.state_dict()[name], before[name])


def test_full_fine_tune_under_a_limit_gives_the_same(
    settings: Callable[..., FinetuneConfig],
) -> None:
    plain = settings(method="full", block_limit=None, lr=1e-3, steps=3)
    less = settings(
        method="full", block_limit="400KiB", lr=1e-3, steps=3, output=f"{plain.output}-2"
    )
    assert run(plain)[0] == run(less)[0] == 0
    memory = results_of(less)["memory"]
    assert 0 < len(memory["paged_blocks"]) < 6
    assert memory["device"]["peak_allocated"] <= 400 << 10 < memory["block_bytes"]
    wanted, found = (
        load_file(Path(c.output) / "model" / "model.safetensors") for c in (plain, less)
    )
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_gradient_checkpointing_gives_the_same(settings: Callable[..., FinetuneConfig]) -> None:
    plain = settings(lora_dropout=0.0)
    less = settings(lora_dropout=0.0, gradient_checkpointing=True, output=plain.output + "-2")
    assert run(plain)[0] == run(less)[0] == 0
    wanted, found = adapter_of(plain), adapter_of(less)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_limit_too_small_for_a_layer(settings: Callable[..., FinetuneConfig]) -> None:
    with pytest.raises(OutOfBudgetError, match=r"block_limit=8.0 KiB is too small.*at least"):
        run(settings(block_limit="8KiB"))


def test_no_limit_streams_nothing(settings: Callable[..., FinetuneConfig]) -> None:
    config = settings(block_limit=None, steps=2)
    status, printed = run(config)
    assert status == 0 and "6 layers as stored: all stay on the device" in printed
    assert "resident layers" in printed and "slots" not in printed
    assert results_of(config)["memory"]["paged_blocks"] == []


def test_progress_in_a_terminal(settings: Callable[..., FinetuneConfig]) -> None:
    config = settings(steps=2, samples=0)
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True, color_system=None)
    assert run_finetune(config, console) == 0
    shown = text.getvalue()
    assert "2/2" in shown and "tokens/s" in shown and "gradient" in shown
    assert shown.index("held-out loss before") < shown.index("2/2") < shown.index("Memory by tier")


def test_several_processes_that_torchrun_did_not_start(
    settings: Callable[..., FinetuneConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(OptionError, match=r"WORLD_SIZE=2 is set, but .*MASTER_PORT is not.*torchr"):
        run(settings())


def test_second_run_in_the_same_folder_is_refused(
    settings: Callable[..., FinetuneConfig],
) -> None:
    config = settings()
    Path(config.output).mkdir()
    with (
        FileLock(Path(config.output) / "run.lock"),
        pytest.raises(StateError, match="another process"),
    ):
        run(config)


def test_bad_input(settings: Callable[..., FinetuneConfig], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"lora_targets=.*no_such_module"):
        run(settings(lora_targets=("no_such_module",)))
    with pytest.raises(DataError, match="no folder"):
        run(settings(model="/no/such/model"))
    with pytest.raises(DataError, match="no file or folder '/no/such/data'"):
        run(settings(model="/no/such/model", data=("/no/such/data",)))  # before any loading
    with pytest.raises(OptionError, match="more than the model's 2048 positions"):
        run(settings(seq_length=4096))
    tokenizer = Path(settings().model) / "tokenizer.json"
    content = tokenizer.read_text()
    tokenizer.write_text(content.replace('"q":', '"unused":').replace('"b":', '"q":'))
    grown = json.loads(tokenizer.read_text())
    grown["model"]["vocab"]["b"] = 999
    tokenizer.write_text(json.dumps(grown))
    with pytest.raises(DataError, match="token 999, but the model knows"):
        run(settings())
    tokenizer.unlink()
    with pytest.raises(DataError, match="no tokenizer that transformers can load"):
        run(settings())
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        run(settings())


def test_a_page_where_it_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ts_core import registry
    from ts_hf.cli.finish import write_page

    class Command:
        def write(self, folders: list[Path]) -> Path:
            if folders[0].name == "bad":
                raise DataError("it is no run")
            return folders[0] / "page.html"

    class Commands:
        def __init__(self, installed: bool) -> None:
            self.installed = installed

        def has(self, name: str) -> bool:
            return self.installed

        def get(self, name: str) -> Command:
            return Command()

    said = io.StringIO()
    for installed, name in ((True, "a [b]"), (True, "bad"), (False, "a")):
        monkeypatch.setattr(registry, "commands", Commands(installed))
        write_page(tmp_path / name, Console(file=said, width=20))
    lines = said.getvalue()
    assert f"report: {tmp_path}/a [b]/page.html\n" in lines
    words = " ".join(lines.split())
    assert "no report: it is no run" in words and "pip install 'ts-bench>=0.8,<0.9'" in words


def test_device_and_dtype() -> None:
    assert pick_device("cpu") == "cpu" and pick_dtype("bfloat16", "cpu") == "bfloat16"
    assert pick_dtype("auto", "cpu") in ("bfloat16", "float32")
    if not torch.cuda.is_available():
        assert pick_device("auto") == "cpu"
        with pytest.raises(OptionError, match="no CUDA GPU"):
            pick_device("cuda")


@pytest.mark.gpu
def test_a_whole_run_on_a_gpu(settings: Callable[..., FinetuneConfig]) -> None:
    config = settings(device="auto", dtype="auto")
    status, printed = run(config)
    assert status == 0, printed
    results = results_of(config)
    assert (results["device"], results["dtype"]) == ("cuda", "bfloat16")
    assert results["held_out_loss"]["after"] < results["held_out_loss"]["before"] - 0.3
    assert 0 < len(results["memory"]["paged_blocks"]) < 6
    assert sum(results["memory"]["device_pool_by_tag"].values()) <= 60 << 10
