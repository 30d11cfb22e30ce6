"""`trainstream finetune` where names, files and disks are not as one would wish."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ts_core.errors import DataError, NonFiniteError, OptionError
from ts_hf.cli import model as model_module
from ts_hf.cli import run as run_module
from ts_hf.cli.dry_run import dry_run
from ts_hf.cli.folder import RunFolder
from ts_hf.cli.history import History, read_lines
from ts_hf.cli.progress import Interruption, ProgressCallback
from ts_hf.cli.report import PlainConsole
from ts_hf.cli.run import run_finetune
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.team import Team

pytest.importorskip("peft", reason="the optional package peft is not installed")


@pytest.fixture
def settings(
    tiny_llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., FinetuneConfig]:
    """settings(**changes): a run of two steps on one text."""
    monkeypatch.setattr(run_module, "write_page", lambda *args: None)
    monkeypatch.setattr(run_module, "plot_run", lambda *args: None)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over it. " * 40)

    def make(**changes: Any) -> FinetuneConfig:
        values: dict[str, Any] = {
            "model": str(tiny_llm),
            "data": (str(tmp_path / "text.txt"),),
            "output": str(tmp_path / "out"),
            "quantize": "none",
            "seq_length": 16,
            "steps": 2,
            "eval_rows": 2,
            "save_every": 1,
            "device": "cpu",
            "dtype": "float32",
            "samples": 0,
        }
        return FinetuneConfig(**{**values, **changes})

    return make


def test_names_that_look_like_markup(
    settings: Callable[..., FinetuneConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a run [/b] [bold] :smile:"
    assert run_finetune(settings(output=str(output))) == 0
    assert f"saved: {output}/adapter" in capsys.readouterr().out


def test_a_full_disk_does_not_hide_behind_the_history(
    settings: Callable[..., FinetuneConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add = History.add

    def full(self: History, kind: str, step: int, **values: Any) -> None:
        if kind in ("step", "end"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{kind}.jsonl")
        add(self, kind, step, **values)

    monkeypatch.setattr(History, "add", full)
    with pytest.raises(OSError, match=r"step\.jsonl"):
        run_finetune(settings())
    assert "history.jsonl cannot be written: No space left" in capsys.readouterr().out
    monkeypatch.setattr(History, "add", add)
    assert run_finetune(settings()) == 0  # with room again it goes on


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(
    settings: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    assert run_finetune(settings()) == 0
    output = tmp_path / "out"
    (output / "results.json").unlink()
    last = output / "checkpoints" / "checkpoint-2"
    names = ("optimizer.pt", "trainer_state.json", "adapter_model.safetensors")
    # What goes on is a run whose last step is not done: the checkpoint of step 1.
    first = output / "checkpoints" / "checkpoint-1"
    whole = {name: (first / name).read_bytes() for name in names}
    shutil.rmtree(last)
    for name in names:
        (first / name).write_bytes(whole[name][: len(whole[name]) // 2])
        with pytest.raises(DataError, match=f"checkpoint-1 is damaged: {name} cannot be read"):
            run_finetune(settings())
        (first / name).write_bytes(whole[name])
    assert run_finetune(settings()) == 0


def test_a_last_update_that_breaks_the_weights_is_no_finished_run(
    settings: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError, match=r"held-out loss after training is nan.*lr=1e\+30"):
        run_finetune(settings(steps=1, lr=1e30, warmup=0.0))
    assert not (tmp_path / "out" / "results.json").exists()
    assert not (tmp_path / "out" / "adapter").exists()


def test_an_output_that_is_a_file(settings: Callable[..., FinetuneConfig], tmp_path: Path) -> None:
    config = settings(output=str(tmp_path / "text.txt"))
    with pytest.raises(OptionError, match="is a file"):
        dry_run(config)
    with pytest.raises(OptionError, match="cannot be made"):
        run_finetune(config)


def test_files_that_the_run_would_replace(
    settings: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    mine = tmp_path / "out" / "adapter" / "mine.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_text("hours of work")
    (tmp_path / "out" / "history.jsonl").write_text("{}\n")
    for start in (run_finetune, dry_run):
        with pytest.raises(OptionError, match=r"out holds history.jsonl, adapter/, but no run"):
            start(settings(), PlainConsole())
    assert mine.read_text() == "hours of work" and (tmp_path / "out" / "history.jsonl").exists()


def test_other_files_in_the_output_are_named_and_kept(
    settings: Callable[..., FinetuneConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "adapter").mkdir(parents=True)  # empty: nothing is lost
    (tmp_path / "out" / "notes.md").write_text("mine")
    remark = "out also holds notes.md, which this run leaves as it is"
    dry_run(settings(), PlainConsole())
    assert remark in " ".join(capsys.readouterr().out.split())
    assert run_finetune(settings(), PlainConsole()) == 0
    assert remark in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"
    assert run_finetune(settings(), PlainConsole()) == 0  # finished, and known as such
    assert remark not in " ".join(capsys.readouterr().out.split())


def test_a_run_stopped_while_it_prepared_is_begun_again(
    settings: Callable[..., FinetuneConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "make_trainer", _stopped)
        with pytest.raises(RuntimeError, match="stopped here"):
            run_finetune(settings(), PlainConsole())
    assert (tmp_path / "out" / "history.jsonl").exists()
    assert run_finetune(settings(), PlainConsole()) == 0


def _stopped(*arguments: object) -> None:
    raise RuntimeError("stopped here")


def test_an_output_that_is_the_folder_of_the_data(
    settings: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (tmp_path / "text.txt").rename(texts / "text.txt")
    with pytest.raises(OptionError, match="is a folder of data as well"):
        dry_run(settings(data=(str(texts),), output=str(texts)), PlainConsole())


def test_a_file_that_is_data_twice_is_told_and_noted(
    settings: Callable[..., FinetuneConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(data=(str(tmp_path / "text.txt"),) * 2)
    dry_run(config, PlainConsole())
    assert "given more than once" in " ".join(capsys.readouterr().out.split())
    assert run_finetune(config, PlainConsole()) == 0
    assert "given more than once" in " ".join(capsys.readouterr().out.split())
    notes = json.loads((tmp_path / "out" / "run.json").read_text())["rows"]["notes"]
    assert any("text.txt is given more than once" in note for note in notes)


def test_merging_without_the_adapter(
    settings: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    assert run_finetune(settings(steps=1)) == 0
    shutil.rmtree(tmp_path / "out" / "adapter")
    with pytest.raises(DataError, match="holds no adapter to merge"):
        run_finetune(settings(steps=1, merge="dequantized"))


def test_lines_that_are_no_history_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    whole = json.dumps({"kind": "step", "step": 1, "loss": 2.0})
    file.write_bytes(
        b'{"kind": "step"}\n\xff\xfe\n[1]\n{"step": "x"}\n' + whole.encode() + b'\n{"k'
    )
    assert list(read_lines(file)) == [json.loads(whole)]
    assert [line["step"] for line in History(file, upto_step=1).lines] == [1]


@pytest.mark.parametrize("turned", [False, True])
def test_ctrl_c_before_the_first_step_stops_at_once(
    turned: bool,
    settings: Callable[..., FinetuneConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While the model is loaded; transformers may make another error of it in an import."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

    def load(*args: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if turned:
                raise ModuleNotFoundError("Could not import module") from None
            raise

    monkeypatch.setattr(run_module, "load_for_training", load)
    assert run_finetune(settings()) == run_module.INTERRUPTED
    printed = capsys.readouterr().out
    assert "nothing is kept" in printed and "finishing this step" not in printed
    assert not (tmp_path / "out" / "run.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_samples_before_training(
    settings: Callable[..., FinetuneConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def generate(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_module, "generate", generate)
    assert run_finetune(settings(samples=1)) == run_module.INTERRUPTED
    lines = list(read_lines(tmp_path / "out" / "history.jsonl"))
    assert not [line for line in lines if line["kind"] == "step"]
    assert (lines[-1]["kind"], lines[-1]["status"]) == ("end", "interrupted")


def test_a_signal_that_python_dropped_stops_before_the_next_step() -> None:
    interruption = Interruption(PlainConsole())
    with interruption.watch(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    callback = ProgressCallback(
        PlainConsole(), History(Path("unused")), interruption, lambda: 0, Team("cpu")
    )
    with pytest.raises(KeyboardInterrupt):
        callback.on_step_begin(None, None, None)


@pytest.mark.parametrize("content", ["", '{"held_out_l', "[]"])
def test_results_that_are_empty_or_cut_off(
    content: str, settings: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    run = RunFolder(settings())
    assert not run.finished()
    run.path.mkdir()
    run.results.write_text(content)
    assert not run.finished()
    (told,) = run.tidy()
    assert "results.json was damaged and is removed" in told and not run.results.exists()
    run.results.write_text('{"held_out_loss": {}}')
    assert run.finished() and run.tidy() == []


@pytest.mark.parametrize("start", [dry_run, run_finetune])
def test_ranks_that_are_too_large(
    start: Any, settings: Callable[..., FinetuneConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = r"lora_rank=1000000000 is not accepted.*expected 1 to 64\..*values \(.*of free RAM"
    with pytest.raises(OptionError, match=wanted):
        start(settings(lora_rank=10**9))
    monkeypatch.setattr(model_module, "ram_available_bytes", lambda: 2 << 20)
    with pytest.raises(OptionError, match=r"lora_rank=40 is not .*expected 1 to \d\d\..*2\.0 MiB"):
        start(settings(lora_rank=40))
    monkeypatch.setattr(model_module, "ram_available_bytes", lambda: 20 << 20)
    if start is dry_run:
        assert start(settings(lora_rank=40)) == 0


@pytest.mark.parametrize(("family", "tower"), [("llava", "vision_tower"), ("gemma3_vl", "vision")])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_texts_for_a_vision_language_model(
    family: str,
    tower: str,
    targets: tuple[str, ...],
    settings: Callable[..., FinetuneConfig],
    tiny_llm: Path,
    tmp_path: Path,
) -> None:
    """Adapters in its language model only, whose layers stream; merged into the whole model."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForImageTextToText

    from ts_hf.testing import FAMILIES

    row = FAMILIES[family]
    beyond = {  # its special tokens lie behind those of the tokenizer
        name: value + 200 for name, value in row.fields.items() if name.endswith("_token_index")
    }
    text = {**row.fields["text_config"], "vocab_size": 300}
    model = dataclasses.replace(row, fields={**row.fields, **beyond, "text_config": text}).build()
    model.save_pretrained(tmp_path / family)
    for file in tiny_llm.glob("tokenizer*"):
        shutil.copy(file, tmp_path / family)
    config = settings(
        model=str(tmp_path / family),
        lora_targets=targets,
        lora_rank=32,
        packing=True,
        merge="original",
        options=("param_offload=true",),
    )
    assert run_finetune(config) == 0
    with safe_open(tmp_path / "out/adapter/adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    each = 2 if targets == ("q_proj", "v_proj") else 7
    assert len(names) == 2 * 3 * each and all("language_model" in name for name in names)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "out/merged")
    before, after = model.state_dict(), merged.state_dict()
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name].float())]
    assert len(changed) == 3 * each and not any(tower in name for name in changed)
