"""The example scripts run, and the one-line change changes none of the numbers."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core import registry

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def model_folder(tiny_model: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    folder = tmp_path / "model"
    byte_tokenizer.save_pretrained(folder)
    tiny_model("llama", vocab_size=len(byte_tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def load_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """load_example(name, text=None): the script as a module; `text` in place of its own."""

    def load(name: str, text: str | None = None) -> Any:
        path = EXAMPLES / f"{name}.py"
        if text is not None:
            path = tmp_path / f"{name}_changed.py"
            path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)  # where dataclasses look names up
        spec.loader.exec_module(module)
        return module

    return load


def _apply(diff: str, text: str) -> tuple[str, list[str]]:
    """`text` after a diff of one hunk, and the lines of the hunk that change it."""
    hunk = [line for line in diff.splitlines() if line[:3] not in ("---", "+++", "@@ ")]
    before = "\n".join(line[1:] for line in hunk if line[:1] != "+")
    after = "\n".join(line[1:] for line in hunk if line[:1] != "-")
    assert text.count(before) == 1
    return text.replace(before, after), [line for line in hunk if line[:1] in "+-"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:(datasets|multiprocess|dill)")
def test_run_clm_before_and_after_the_one_line(
    load_example: Callable[..., Any],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    for name, first in (("train", 0), ("held-out", 40)):
        lines = [f"line {n} of {name}: {n * n} and {n % 7}" for n in range(first, first + 60)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    source = (EXAMPLES / "run_clm.py").read_text(encoding="utf-8")
    diff = (EXAMPLES / "run_clm.diff").read_text(encoding="utf-8")
    changed, lines = _apply(diff, source)
    assert lines == ["+from ts_hf import TrainStreamTrainer as Trainer"]
    results = []
    for name, text in (("before", None), ("after", changed)):
        script = load_example("run_clm", text)
        output = tmp_path / name
        metrics = script.main(
            f"--model_name_or_path {model_folder} --train_file {tmp_path}/train.txt "
            f"--validation_file {tmp_path}/held-out.txt --block_size 32 --output_dir {output} "
            "--do_train --do_eval --max_steps 6 --per_device_train_batch_size 2 "
            "--gradient_accumulation_steps 2 --learning_rate 3e-3 --warmup_steps 2 "
            "--eval_strategy steps --eval_steps 3 --logging_steps 1 --save_steps 3 "
            "--adam_epsilon 1e-4 --use_cpu --report_to none --disable_tqdm true "
            "--log_level error".split()
        )
        state = json.loads((output / "trainer_state.json").read_text())
        assert (output / "model.safetensors").is_file()
        assert (output / "checkpoint-6").is_dir()
        results.append((script.Trainer.__name__, metrics, state["log_history"]))
    (stock, metrics, log), (ours, our_metrics, our_log) = results
    assert (stock, ours) == ("Trainer", "TrainStreamTrainer")
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        wanted = [line[key] for line in log if key in line]
        found = [line[key] for line in our_log if key in line]
        assert len(wanted) >= 2 and found == pytest.approx(wanted, rel=1e-5)
    assert our_metrics["perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-5)
    assert any("ts_host_state_gb" in line for line in our_log)


@pytest.fixture
def preference_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{n} is ", "chosen": "even" if n % 2 == 0 else "odd", "rejected": "a fruit"}
        for n in range(8)
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_dpo(
    load_example: Callable[..., Any], model_folder: Path, preference_file: Path, tmp_path: Path
) -> None:
    """It starts at log 2, learns the pairs, streams bit for bit, and saves an adapter."""
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    if not registry.kernels.has("dpo_loss"):
        pytest.skip("no dpo_loss is installed (ts-kernels)")
    from transformers import AutoModelForCausalLM

    script = load_example("dpo")
    runs = []
    for share in ("1.0", "0.0"):
        history = script.main(
            f"{model_folder} {preference_file} --output {tmp_path}/adapter-{share} --steps 12 "
            f"--batch-size 4 --lr 1e-2 --beta 0.5 --rank 4 --quantize none --dtype float32 "
            f"--device cpu --param-offload {share} --log-every 100".split()
        )
        runs.append(history)
    assert runs[0] == runs[1]
    first, last = runs[0][0], runs[0][-1]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5) and first["margin"] == 0
    assert last["loss"] < 0.1 and last["accuracy"] == 1 and last["margin"] > 2

    pairs = script.read_pairs(preference_file, _tokenizer(model_folder), 64)
    base = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    batch = script.collate(pairs)
    with torch.no_grad():
        before = _logprobs(base, batch)
        tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter-1.0").eval()
        gain = (_logprobs(tuned, batch) - before).reshape(2, -1)
    assert (gain[0] > gain[1]).all()  # what the saved adapter prefers, in plain PEFT


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _logprobs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (picked * (targets != -100)).sum(-1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "chosen": "b"}', r"pairs\.jsonl:3: no pair of texts \(KeyError"),
        ("not json", r"pairs\.jsonl:3: no pair of texts \(JSONDecodeError"),
        ("[1, 2]", r"pairs\.jsonl:3: no pair of texts \(TypeError"),
    ],
)
def test_dpo_names_the_line_of_a_bad_pair(
    line: str,
    words: str,
    load_example: Callable[..., Any],
    model_folder: Path,
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    good = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=words):
        load_example("dpo").read_pairs(path, _tokenizer(model_folder), 64)
