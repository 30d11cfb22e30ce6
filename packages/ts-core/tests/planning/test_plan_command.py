"""`trainstream plan`: what it says, its exit status, JSON, drawing, and what it refuses."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ts_core.engine.placement import block_leaves, model_profile
from ts_core.errors import DataError, OptionError, UnknownPluginError
from ts_core.planning import command
from ts_core.planning.adapters import add_adapters
from ts_core.planning.estimate import Training, describe, plan_training
from ts_core.registry import models
from ts_core.schedule import MachineProfile
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.testing import TinyModel

GIB = 1 << 30
LORA = Training(2, 16, 4, torch.float32)
FULL = Training(2, 16, None, torch.float32)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(list(words)))


@pytest.mark.parametrize("training", [LORA, FULL])
def test_a_described_model_is_what_wrap_would_see(tiny_reader: Any, training: Training) -> None:
    model = TinyModel(6, 64)
    if training.rank is not None:
        model.requires_grad_(False)
        add_adapters(list(model.layers), training.rank)
    blocks: list[nn.Module] = list(model.layers)
    real = model_profile(model, block_leaves(model, blocks), 8.0, 2 << 30, True)
    found = describe("small", training)
    for name in ("pageable", "fixed_device", "trained", "host_state", "trained_values"):
        assert getattr(found.profile, name) == getattr(real, name), name
    assert found.parameters == sum(p.numel() for p in TinyModel(6, 64).parameters())
    assert found.total_bytes == 4 * found.parameters
    assert len(found.profile.activations) == 6 and min(found.profile.activations) > 0
    assert found.profile.work is not None and found.notes == ()
    assert found.profile.work.backward == (1.0 if training.rank else 2.0)


def test_more_tokens_need_more_and_take_longer(tiny_reader: Any) -> None:
    short = describe("small", LORA).profile
    long = describe("small", Training(4, 16, 4, torch.float32)).profile
    assert long.activations[1] > 1.3 * short.activations[1]
    assert long.pageable == short.pageable
    assert long.work is not None and short.work is not None
    assert long.work.block_flops[0] == pytest.approx(2 * short.work.block_flops[0])


def test_fits_and_says_where_blocks_live(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("large", "--vram", "2GiB", "--ram", "16GiB", "--quantize", "none") == 0
    text = capsys.readouterr().out
    for words in ("large", "adapters of rank 16", "FITS", "██", "░", "device memory", "streamed"):
        assert words in text
    for words in ("host memory", "while loading", "tokens/s", "assumed rates", "paged through"):
        assert words in text
    assert "DOES NOT FIT" not in text


def test_with_everything_trained_no_format_of_frozen_weights_is_named(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ("--vram", "2GiB", "--ram", "16GiB")
    assert run("small", *machine) == 0
    assert "frozen weights of the blocks: full precision" in capsys.readouterr().out
    assert run("small", *machine, "--full") == 0
    assert "frozen weights" not in capsys.readouterr().out
    assert run("small", *machine, "--full", "--quantize", "int8") == 0
    text = capsys.readouterr().out
    assert "frozen weights" not in text and "--quantize int8 changes nothing" in text
    assert run("small", *machine, "--full", "--quantize", "int8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["quantize"] is None


class GoneReader(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    flush = write  # type: ignore[assignment]


def test_a_reader_that_goes_away_is_told_to_the_command(
    tiny_reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich, too, would end the program with status 1 (`trainstream plan MODEL | head`)."""
    monkeypatch.setattr(sys, "stdout", GoneReader())
    with pytest.raises(BrokenPipeError):
        run("small", "--vram", "2GiB", "--ram", "16GiB")


def test_does_not_fit_and_says_what_would(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["large", "--full", "--vram", "300MiB", "--ram", "64GiB", "--batch", "8"]
    assert run(*arguments) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "device budget" in text and "What makes it fit" in text
    remedy = next(line for line in text.splitlines() if "of device memory (vram_limit)" in line)
    size = remedy.split("give it ")[1].split(" of device")[0].replace(" ", "")
    arguments[3] = size
    assert run(*arguments) == 0


def test_too_little_ram_to_load_is_said(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("large", "--vram", "40GiB", "--ram", "1GiB", "--quantize", "none") == 1
    assert "loading needs" in capsys.readouterr().out


def test_json(tiny_reader: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("small", "--vram", "1GiB", "--ram", "8GiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["blocks"] == 6 and found["quantize"] is None
    assert found["plan"]["paged"] == [] and found["training"]["dtype"] == "bfloat16"
    assert found["plan"]["seconds"]["step"] > 0


def test_state_on_the_device_costs_neither_host_threads_nor_the_link(tiny_reader: Any) -> None:
    machine = MachineProfile(8 * GIB, 16 * GIB, rates=TYPICAL_GPU)
    found = plan_training("small", LORA, machine, "none").plan
    assert found.host["optimizer_and_gradients"] == 0 and found.paged == ()
    assert [found.seconds[name] for name in ("to_device", "to_host", "updates")] == [0, 0, 0]
    on_host = plan_training("small", LORA, machine, "none", {"offload": True}).plan
    assert on_host.host["optimizer_and_gradients"] > 0
    assert min(on_host.seconds[name] for name in ("to_device", "to_host", "updates")) > 0


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_drawing(tiny_reader: Any, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    target = tmp_path / f"plan{suffix}"
    status = run(
        "large", "--vram", "2GiB", "--ram", "16GiB", "--quantize", "none", "--plot", str(target)
    )
    assert status == 0 and target.stat().st_size > 5000


def test_drawing_without_matplotlib_or_into_nowhere_is_refused(
    tiny_reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ("--vram", "2GiB", "--ram", "16GiB")
    with pytest.raises(OptionError, match="ends in"):
        run("small", *machine, "--plot", str(tmp_path / "plan.txt"))
    if "matplotlib" in sys.modules or __import__("importlib.util").util.find_spec("matplotlib"):
        with pytest.raises(DataError, match="cannot be written"):
            run("small", *machine, "--plot", str(tmp_path / "no" / "plan.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        run("small", *machine, "--plot", str(tmp_path / "plan.png"))


def test_without_rich_it_is_plain_text(
    tiny_reader: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run("small", "--vram", "1GiB", "--ram", "8GiB") == 0
    assert "FITS" in capsys.readouterr().out


def test_a_model_that_looks_at_values_is_planned_with_a_reserve(tiny_reader: Any) -> None:
    machine = MachineProfile(GIB, 8 * GIB)
    outcome = plan_training("branches", LORA, machine)
    assert outcome.fits and "activations are unknown" in outcome.notes[0]
    assert outcome.plan.predicted["activations_reserve"] == int(0.3 * GIB)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--vram", "lots"], "--vram='lots'"),
        (["--vram", "1GiB", "--batch", "0"], "--batch 0"),
        (["--vram", "1GiB", "--lora", "-2"], "--lora -2"),
        (["--vram", "1GiB", "--recompute", "some"], "--recompute some"),
        (["--vram", "1GiB", "--recompute", "2"], "recompute=2.0"),
        (["--vram", "1GiB", "--headroom", "1.5"], "vram_headroom=1.5"),
    ],
)
def test_bad_values_are_refused(tiny_reader: Any, words: list[str], error: str) -> None:
    with pytest.raises(OptionError, match=error.replace("(", r"\(")):
        run("small", *words)


def test_without_a_gpu_its_memory_must_be_said(
    tiny_reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="--vram 24GiB"):
        run("small")


def test_without_a_reader_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_find", lambda group: [])
    monkeypatch.setattr(models, "_loaded", {})
    with pytest.raises(UnknownPluginError, match="pip install 'ts-hf"):
        run("anything", "--vram", "1GiB")


def test_importing_it_initializes_nothing(run_python: Any) -> None:
    run_python("import sys, ts_core.planning\nassert 'torch' not in sys.modules")
