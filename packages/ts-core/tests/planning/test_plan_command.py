"""`trainstream plan`: what it says, its exit status, JSON, drawing, and what it refuses."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ts_core.engine.placement import block_leaves, model_profile
from ts_core.errors import DataError, OptionError, UnknownPluginError
from ts_core.optim import hybrid
from ts_core.planning import command, updates
from ts_core.planning.adapters import add_adapters
from ts_core.planning.estimate import Training, describe
from ts_core.planning.outcome import Outcome, plan_training
from ts_core.planning.run_command import outcome_for
from ts_core.registry import models
from ts_core.schedule import MachineProfile
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.testing import TinyModel

GIB = 1 << 30
LORA = Training(2, 16, 4, torch.float32)
FULL = Training(2, 16, None, torch.float32)


def outcome_of(*words: str) -> Outcome:
    """What the command prints."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return outcome_for(parser.parse_args(list(words)))


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


def test_the_step_is_its_two_passes_and_no_format_is_called_faster(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a device multiplies in a format is known where one is, once weights are stored."""
    asked = ["large", "--vram", "2GiB", "--ram", "16GiB", "--param-offload", "1.0", "--quantize"]
    found = {name: outcome_of(*asked, name).plan.seconds for name in ("none", "fp8", "int8")}
    for name, seconds in found.items():
        assert seconds["compute"] == pytest.approx(found["none"]["compute"]), name
        assert seconds["step"] >= seconds["forward"] + seconds["backward"] > 0
        assert seconds["forward"] + seconds["backward"] > seconds["compute"]  # they load, too
    run(*asked, "none")
    text = capsys.readouterr().out
    assert "forward, with its loads" in text and "backward, with its loads" in text


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
    remedy = next(line for line in text.splitlines() if "of device memory (--vram)" in line)
    size = remedy.split("give it ")[1].split(" of device")[0].replace(" ", "")
    arguments[3] = size
    assert run(*arguments) == 0


def test_too_little_ram_to_load_is_said(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("large", "--vram", "40GiB", "--ram", "1GiB", "--quantize", "none") == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "loading needs" in text
    assert "What makes it fit" in text and "(--ram)" in text


def test_weights_on_a_disk_are_not_loaded_into_ram(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["large", "--vram", "2GiB", "--ram", "1GiB", "--quantize", "none"]
    assert run(*asked) == 1
    assert "(--disk-offload DIRECTORY)" in capsys.readouterr().out
    assert run(*asked, "--disk-offload", "DIRECTORY") == 0
    assert "loading needs" not in capsys.readouterr().out
    with pytest.raises(OptionError, match="--disk-offload=''"):
        run(*asked, "--disk-offload", "")


def test_auto_stores_weights_in_a_codec_where_loading_them_needs_it(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ts_quant", reason="plans with its codecs")
    plain = describe("large", LORA).total_bytes // 2  # in bfloat16
    machine = ("--vram", "40GiB", "--ram", f"{int(plain / 0.9)}")
    assert run("large", *machine, "--quantize", "none") == 1
    text = capsys.readouterr().out
    assert "(--quantize int8)" in text and "loading needs" in text
    assert run("large", *machine) == 0
    text = capsys.readouterr().out
    assert "blocks: int8" in text and "the weights are stored in int8" in text


def flags_of(remedy: str) -> list[str]:
    """The arguments that a remedy names, those in parentheses and its sizes."""
    words = " ".join(re.findall(r"\((--[^)]*)\)", remedy)).split()
    for name in ("--vram", "--ram"):
        if name in words:
            pattern = r"give it ([\d.]+ \w+)" if name == "--vram" else r"until ([\d.]+ \w+)"
            found = re.search(pattern, remedy)
            assert found is not None
            words.insert(words.index(name) + 1, found[1].replace(" ", ""))
    return words


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    vram=st.integers(60, 3000),
    ram=st.integers(100, 12000),
    batch=st.sampled_from([1, 4]),
    seq=st.sampled_from([16, 700]),
    what=st.sampled_from([["--full"], ["--full", "--dtype", "float32"], ["--lora", "4"]]),
    quantize=st.sampled_from(["auto", "none"]),
    paging=st.sampled_from([[], ["--param-offload", "false"], ["--recompute", "false"]]),
)
def test_every_remedy_makes_the_same_command_fit(
    tiny_reader: Any,
    vram: int,
    ram: int,
    batch: int,
    seq: int,
    what: list[str],
    quantize: str,
    paging: list[str],
) -> None:
    asked = ["--vram", f"{vram}MiB", "--ram", f"{ram}MiB", "--batch", str(batch)]
    asked += ["--seq", str(seq), "--quantize", quantize, *paging]
    outcome = outcome_of("large", *asked, *what)
    assert outcome.fits == (outcome.remedies == ())
    for remedy in outcome.remedies:
        flags = flags_of(remedy)
        assert flags, remedy
        kept = [] if "--lora" in flags and "--full" in what else what
        if "--dtype" in what and "--lora" in flags:
            assert "--dtype" in flags
        assert outcome_of("large", *asked, *kept, *flags).fits, remedy


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


FULL_RUN = ("large", "--full", "--ram", "64GiB", "--batch", "8", "--optimizer-mode")


@pytest.mark.parametrize("mode", ["cpu", "gpu", "auto"])
def test_state_that_fits_the_device_goes_there(tiny_reader: Any, mode: str) -> None:
    """A step waits for neither link nor host then; `offload="auto"` does it in every mode."""
    outcome = outcome_of(*FULL_RUN, mode, "--vram", "80GiB")
    plan, seconds = outcome.plan, outcome.plan.seconds
    model = outcome.described
    assert plan.predicted["optimizer_state"] >= 12 * model.parameters  # with gradients
    assert [seconds[name] for name in ("to_device", "to_host", "updates")] == [0, 0, 0]
    assert seconds["step"] == seconds["forward"] + seconds["backward"] > 0
    assert "offload='auto'" in outcome.notes[-1]
    least = plan.predicted["total"] / 0.9 + (2 << 20)
    tight = [outcome_of(*FULL_RUN, mode, "--vram", str(int(least * k))).notes for k in (1, 0.97)]
    assert ["offload='auto'" in notes[-1] for notes in tight] == [True, False]


def test_all_state_may_be_on_the_device_without_room_for_gradients(tiny_reader: Any) -> None:
    options = {"offload": True, "optimizer_mode": "auto"}  # which moves nothing by itself
    machine = MachineProfile(80 * GIB, 64 * GIB, rates=TYPICAL_GPU)
    plan = plan_training("large", FULL, machine, "none", options).plan
    assert plan.predicted["optimizer_state"] == 8 * describe("large", FULL).parameters
    assert plan.seconds["updates"] == plan.seconds["to_host"] == 0


def test_the_step_follows_the_optimizer_mode_and_the_room(tiny_reader: Any) -> None:
    steps = {}
    for vram in ("12GiB", "16GiB", "20GiB"):
        for mode in ("cpu", "gpu", "auto", "hybrid"):
            plan = outcome_of(*FULL_RUN, mode, "--vram", vram).plan
            assert plan.fits and plan.predicted["total"] <= plan.predicted["budget"], (mode, vram)
            steps[mode, vram] = plan.seconds["step"]
            if mode == "gpu":
                assert plan.seconds["updates"] == plan.predicted["optimizer_state"] == 0
        assert steps["hybrid", vram] == steps["auto", vram]
        assert steps["auto", vram] < min(steps["cpu", vram], steps["gpu", vram])
    assert steps["cpu", "20GiB"] == pytest.approx(steps["cpu", "16GiB"])  # of host threads
    assert steps["auto", "20GiB"] < steps["auto", "16GiB"] < steps["auto", "12GiB"]


def test_the_plan_shares_what_a_run_would_share(tiny_reader: Any) -> None:
    assert updates._LARGE == hybrid._LARGE
    asked = ["wordy", "--full", "--ram", "64GiB", "--seq", "64", "--optimizer-mode", "auto"]
    assert "by both together" in outcome_of(*asked, "--vram", "900MiB").notes[-1]


def test_activations_leave_their_room_to_state_where_the_step_is_shorter_so(
    tiny_reader: Any,
) -> None:
    machine = ("--vram", "16GiB", "--batch", "2")
    left, split = (outcome_of(*FULL_RUN, mode, *machine).plan for mode in ("gpu", "auto"))
    assert left.predicted["activations"] > split.predicted["activations"]
    assert left.paged == split.paged and split.predicted["optimizer_state"] > 0
    assert split.predicted["total"] <= split.predicted["budget"]


def test_a_step_that_waits_for_host_updates_says_what_would_shorten_it(tiny_reader: Any) -> None:
    notes = " ".join(outcome_of(*FULL_RUN, "cpu", "--vram", "20GiB").notes)
    step = outcome_of(*FULL_RUN, "auto", "--vram", "20GiB").plan.seconds["step"]
    assert "--optimizer-mode auto" in notes and f"about {step * 1000:.0f} ms" in notes
    adapters = outcome_of("large", "--ram", "64GiB", "--vram", "20GiB")
    assert not any("optimizer-mode" in note for note in adapters.notes)


def test_moments_that_host_threads_alone_keep(tiny_reader: Any) -> None:
    machine = ("--vram", "20GiB", "--moments", "bfloat16")
    with pytest.raises(OptionError, match="--optimizer-mode gpu keeps fp32 moments"):
        outcome_of(*FULL_RUN, "gpu", *machine)
    auto, cpu = (outcome_of(*FULL_RUN, mode, *machine) for mode in ("auto", "cpu"))
    assert auto.plan.seconds == cpu.plan.seconds and auto.notes == cpu.notes
    short = ("large", "--full", "--ram", "12GiB", "--vram", "20GiB", "--optimizer-mode")
    assert "--moments" in " ".join(outcome_of(*short, "cpu").remedies)
    assert "--moments" not in " ".join(outcome_of(*short, "gpu").remedies)


def test_fp32_weights_are_planned_under_autocast_and_said_so(
    tiny_reader: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, words in (("float32", "float32 weights under bf16"), ("bfloat16", "bfloat16 wei")):
        run("small", "--vram", "1GiB", "--ram", "8GiB", "--full", "--dtype", dtype)
        text = capsys.readouterr().out
        assert words in text and ("autocast" in text) == (dtype == "float32")


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
        (["--vram", "12"], "--vram='12' is 12 bytes: did you mean 12GiB"),
        (["--vram", "1GiB", "--ram", "64"], "--ram='64' is 64 bytes: did you mean 64GiB"),
        (["--vram", "1GiB", "--recompute", "2"], "--recompute=2.0"),
        (["--vram", "1GiB", "--headroom", "1.5"], "--headroom=1.5"),
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
