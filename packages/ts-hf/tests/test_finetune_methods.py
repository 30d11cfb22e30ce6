"""`trainstream finetune` on pairs, conversations, packed records, GGUF; merging; epochs."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ts_core.errors import DataError, OptionError
from ts_hf.cli import model as model_module
from ts_hf.cli import preference
from ts_hf.cli.dataset import planned_steps
from ts_hf.cli.run import INTERRUPTED, run_finetune
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.testing.runs import lines_of, run

pytest.importorskip("peft", reason="the optional package peft is not installed")
pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture
def kernel() -> None:
    """Skips where ts-kernels, which has the DPO loss, is not installed."""
    from ts_core.registry import kernels

    if not kernels.has("dpo_loss"):
        pytest.skip("ts-kernels is not installed")


@pytest.fixture
def begin(tiny_llm: Path, tmp_path: Path) -> Callable[..., FinetuneConfig]:
    """begin(records, **changes): settings of four steps on a file of those records."""

    def make(records: list[Any], **changes: Any) -> FinetuneConfig:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        values: dict[str, Any] = {
            "model": str(tiny_llm),
            "data": (str(data),),
            "output": str(tmp_path / "out"),
            "quantize": "none",
            "seq_length": 48,
            "batch_size": 2,
            "steps": 4,
            "lr": 1e-2,
            "eval_rows": 4,
            "device": "cpu",
            "dtype": "float32",
            "samples": 1,
            "sample_tokens": 2,
        }
        return FinetuneConfig(**{**values, **changes})

    return make


def _run(config: FinetuneConfig) -> str:
    status, text = run(config)
    assert status == 0, text
    return text


PAIRS = [{"prompt": f"number {i}: ", "chosen": "good good", "rejected": "bad"} for i in range(40)]


def test_dpo(begin: Callable[..., FinetuneConfig], kernel: None) -> None:
    config = begin(PAIRS, method="dpo", accumulation=2, dpo_beta=0.5, block_limit="200KiB")
    printed = _run(config)
    assert re.search(r"log-probabilities of \d+ pairs under the model as it is", printed)
    before, after = lines_of(config, "eval")
    assert before["loss"] == pytest.approx(math.log(2)) and before["reward_margin"] == 0
    assert after["loss"] < before["loss"] - 0.05
    assert after["reward_accuracy"] == 1.0 and after["reward_margin"] > 0.1
    results = json.loads((Path(config.output) / "results.json").read_text())
    assert results["held_out_rewards"]["after"]["reward_margin"] == after["reward_margin"]
    assert "100% of pairs" in printed and "perplexity" not in printed
    steps = lines_of(config, "step")
    assert steps[0]["loss"] == pytest.approx(math.log(2))
    assert steps[-1]["reward_accuracy"] == 1.0
    # prompt, and "good good" or "bad" with the end: bytes, of the four pairs of a step
    assert steps[0]["tokens"] == pytest.approx(4 * (2 * 10.5 + 10 + 4), abs=8)


def test_dpo_loss_is_that_of_the_definition(
    begin: Callable[..., FinetuneConfig], kernel: None, tiny_llm: Path
) -> None:
    """The trained adapter in plain PEFT: the held-out loss by equation 7 of the paper."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = begin(PAIRS, method="dpo", dpo_beta=0.5, dpo_label_smoothing=0.1)
    _run(config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llm)
    base = AutoModelForCausalLM.from_pretrained(tiny_llm, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, Path(config.output) / "adapter").eval()

    def logprob(prompt: str, answer: str) -> torch.Tensor:
        first = tokenizer(prompt)["input_ids"]
        ids = torch.tensor([[*first, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]])
        found = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        each = found.gather(-1, ids[0, 1:, None])[:, 0]
        return each[len(first) - 1 :].sum()

    from ts_hf.cli.sources import in_order, read_documents, split_documents

    held = split_documents(in_order(read_documents(config.data, pairs=True)), 0.1)[1][:4]
    losses = []
    with torch.no_grad():
        for document in held:
            pair: Any = document.record
            ratio = [logprob(pair.prompt, answer) for answer in (pair.chosen, pair.rejected)]
            with model.disable_adapter():
                ratio[0] -= logprob(pair.prompt, pair.chosen)
                ratio[1] -= logprob(pair.prompt, pair.rejected)
            margin = 0.5 * (ratio[0] - ratio[1])
            good = torch.nn.functional.logsigmoid(margin)
            losses.append(-0.9 * good - 0.1 * torch.nn.functional.logsigmoid(-margin))
    after = lines_of(config, "eval")[-1]["loss"]
    assert after == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_dpo_goes_on_with_the_same_reference(
    begin: Callable[..., FinetuneConfig], kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = begin(PAIRS, method="dpo", save_every=2, lora_dropout=0.1)
    _run(whole)
    config = begin(PAIRS, method="dpo", save_every=2, lora_dropout=0.1, output=f"{whole.output}-2")
    saved: list[int] = []
    original = preference.PreferenceTrainer._save_checkpoint

    def dies(self: Any, *args: Any) -> None:
        original(self, *args)
        saved.append(self.state.global_step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preference.PreferenceTrainer, "_save_checkpoint", dies)
        assert run_finetune(config, Console(file=io.StringIO())) == INTERRUPTED
    assert saved == [2]

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reference was kept, and is not computed again")

    monkeypatch.setattr(preference, "reference_logprobs", never)
    _run(config)
    wanted, found = (
        load_file(Path(c.output) / "adapter" / "adapter_model.safetensors") for c in (whole, config)
    )
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert [line["loss"] for line in lines_of(whole, "step")] == [
        line["loss"] for line in lines_of(config, "step")
    ]


def test_dpo_refuses_what_it_cannot_do(begin: Callable[..., FinetuneConfig], kernel: None) -> None:
    with pytest.raises(OptionError, match="pairs \\(method=dpo\\) are not packed"):
        run_finetune(begin(PAIRS, method="dpo", packing=True), Console(file=io.StringIO()))
    with pytest.raises(DataError, match="are for method=dpo"):
        run_finetune(begin(PAIRS), Console(file=io.StringIO()))


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {word}"},
            {"role": "assistant", "content": f"{word}!"},
        ]
    }
    for word in ("one", "two", "three", "four", "five", "six", "seven", "eight") * 3
]


def test_conversations_and_only_the_assistant(begin: Callable[..., FinetuneConfig]) -> None:
    everything = begin(CHATS)
    _run(everything)
    config = begin(CHATS, assistant_only=True, output=f"{everything.output}-2")
    _run(config)
    sample = lines_of(config, "sample")[0]
    assert sample["prompt"].startswith("user: say ") and sample["prompt"].endswith("assistant: ")
    # The first step's loss is over other tokens; the rows are the same.
    assert lines_of(config, "step")[0]["loss"] != lines_of(everything, "step")[0]["loss"]
    assert lines_of(config, "step")[0]["tokens"] == lines_of(everything, "step")[0]["tokens"]


def test_packing_trains_the_same_tokens_in_fewer_rows(
    begin: Callable[..., FinetuneConfig],
) -> None:
    """Everything in one step: the loss and the gradient are those of the records one by one."""
    records = CHATS[:8]
    common = {"held_out": begin(records).data[0], "steps": 1, "assistant_only": True}
    plain = begin(records, batch_size=8, seq_length=80, **common)
    packed = begin(
        records, batch_size=4, seq_length=80, packing=True, output=f"{plain.output}-2", **common
    )
    _run(plain)
    assert "packing: 8 records in 4 rows" in _run(packed)
    one, other = lines_of(plain, "step")[0], lines_of(packed, "step")[0]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert one["tokens"] == other["tokens"]
    assert [line["loss"] for line in lines_of(plain, "eval")] == pytest.approx(
        [line["loss"] for line in lines_of(packed, "eval")], rel=1e-5
    )


def test_epochs_decide_the_steps(begin: Callable[..., FinetuneConfig]) -> None:
    config = begin(CHATS[:10], held_out=begin(CHATS[:10]).data[0], epochs=1.5, batch_size=4)
    _run(config)
    assert [line["step"] for line in lines_of(config, "step")] == [1, 2, 3, 4]
    assert planned_steps(FinetuneConfig(epochs=1.0, batch_size=4), 8) == 2
    assert planned_steps(FinetuneConfig(epochs=0.01, batch_size=4), 8) == 1
    assert planned_steps(FinetuneConfig(steps=7), 8) == 7


def test_evaluation_on_the_way_and_given_prompts(begin: Callable[..., FinetuneConfig]) -> None:
    config = begin(CHATS, eval_every=2, prompts=("hello",))
    printed = _run(config)
    evals = lines_of(config, "eval")
    assert [line["step"] for line in evals] == [0, 2, 4]
    results = json.loads((Path(config.output) / "results.json").read_text())
    assert results["held_out_loss"] == {"before": evals[0]["loss"], "after": evals[2]["loss"]}
    assert [line["prompt"] for line in lines_of(config, "sample")] == [
        "user: hello<end>assistant: "
    ] * 2
    assert printed.count("sample before:") == printed.count("sample after:") == 1
    assert "sample before: [user: hello<end>assistant: ] goes on: " in printed
    shown = [line for line in printed.splitlines() if line.startswith("held-out loss at step")]
    assert shown == [
        f"held-out loss at step {line['step']}: {line['loss']:.4f}" for line in evals[1:]
    ]


def test_prompts_are_put_as_the_rows_are(begin: Callable[..., FinetuneConfig]) -> None:
    """Learning from plain prompts and completions, without the chat template."""
    rows = [{"prompt": f"question {k}: ", "completion": "answer"} for k in range(24)]
    config = begin(rows, prompts=("hello",))
    _run(config)
    assert [line["prompt"] for line in lines_of(config, "sample")] == ["hello"] * 2


@pytest.mark.parametrize("into", ["original", "dequantized"])
def test_merged_at_the_end(into: str, begin: Callable[..., FinetuneConfig], codec: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = begin(CHATS, quantize=codec, merge=into)
    assert f"merged into the {into} weights" in _run(config)
    folder = Path(config.output)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    AutoTokenizer.from_pretrained(folder / "merged")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = merged(input_ids=ids).logits
        if into == "original":
            base = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
            adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
            torch.testing.assert_close(logits, adapted(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
        else:
            base = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
            assert not torch.allclose(logits, base(input_ids=ids).logits, atol=1e-3)
    for file in (folder / "merged").iterdir():
        file.unlink()
    (folder / "merged").rmdir()
    assert f"merged into the {into} weights" in _run(config)  # of a run that is finished


def test_options_reach_loading_and_wrap(begin: Callable[..., FinetuneConfig], codec: str) -> None:
    options = ("double_quant=true", "error_rank=4", "optimizer_mode=gpu", "param_offload=[1, 2]")
    config = begin(CHATS, quantize=codec, options=options, merge="original", steps=2)
    _run(config)
    results = json.loads((Path(config.output) / "results.json").read_text())
    assert results["memory"]["paged_blocks"] == [1, 2]
    plain = begin(CHATS, quantize=codec, output=f"{config.output}-2", steps=2)
    _run(plain)
    other = json.loads((Path(plain.output) / "results.json").read_text())
    assert results["memory"]["block_bytes"] != other["memory"]["block_bytes"]
    # Adapters that start at what quantization lost begin nearer to the full model.
    assert results["held_out_loss"]["before"] != other["held_out_loss"]["before"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lora", "full", "dpo"])
def test_on_a_gpu(method: str, begin: Callable[..., FinetuneConfig], kernel: None) -> None:
    records = PAIRS if method == "dpo" else CHATS
    config = begin(
        records,
        method=method,
        device="auto",
        dtype="auto",
        lr=1e-3,
        packing=method == "lora",
        assistant_only=method == "lora",
        gradient_checkpointing=method == "full",
        options=() if method == "full" else ("param_offload=true",),
        merge="none" if method == "full" else "dequantized",
    )
    _run(config)
    results = json.loads((Path(config.output) / "results.json").read_text())
    assert results["device"] == "cuda"
    assert results["held_out_loss"]["after"] < results["held_out_loss"]["before"]
    assert len(lines_of(config, "sample")) == 2
    assert all(line["ts_vram_peak_gb"] > 0 for line in lines_of(config, "step"))


def test_merges_that_cannot_be(begin: Callable[..., FinetuneConfig]) -> None:
    for changes, words in (
        ({"method": "full", "merge": "original"}, "nothing to merge"),
        ({"random_weights": True, "merge": "original"}, "no stored weights"),
    ):
        with pytest.raises(OptionError, match=words):
            run_finetune(begin(CHATS, **changes), Console(file=io.StringIO()))


def test_random_weights_and_a_tokenizer_from_elsewhere(
    begin: Callable[..., FinetuneConfig], tiny_llm: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_llm / "config.json").read_text())
    config = begin(
        CHATS, model=str(bare / "config.json"), random_weights=True, tokenizer=str(tiny_llm)
    )
    _run(config)
    losses = json.loads((Path(config.output) / "results.json").read_text())["held_out_loss"]
    assert losses["before"] == pytest.approx(math.log(257), rel=0.1)
    with pytest.raises(DataError, match="no tokenizer that transformers can load"):
        run_finetune(
            begin(CHATS, model=str(bare), random_weights=True, output=f"{config.output}-2"),
            Console(file=io.StringIO()),
        )


def test_gguf_files_are_converted_once(
    begin: Callable[..., FinetuneConfig],
    tiny_llm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shutil

    import ts_hf.gguf

    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    converted: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file)
        shutil.copytree(tiny_llm, folder)

    monkeypatch.setattr(ts_hf.gguf, "convert_gguf", convert)
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    config = begin(CHATS, model=str(file))
    first = model_module.model_folder(config)
    assert model_module.model_folder(config) == first and converted == [file]
    file.write_bytes(b"GGUF, changed")
    assert model_module.model_folder(config) != first and len(converted) == 2
    with pytest.raises(DataError, match="there is no file"):
        model_module.model_folder(begin(CHATS, model=str(tmp_path / "none.gguf")))
