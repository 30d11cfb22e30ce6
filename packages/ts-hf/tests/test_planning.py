"""`trainstream plan` on transformers configs, and its figures against what really happens."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ts_core.engine.placement import block_leaves, model_profile
from ts_core.errors import DataError
from ts_core.planning import command
from ts_core.planning.estimate import Training, describe
from ts_core.planning.meter import measure_step
from ts_core.planning.outcome import plan_training
from ts_core.schedule import MachineProfile
from ts_core.schedule.rates import HardwareProfile
from ts_hf.families import find_decoder_layers
from ts_hf.planning import reader

GIB = 1 << 30
H200 = HardwareProfile("H200", 55e9, 55e9, 90e9, 40e9, 4e9, 750e12, 50e12)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "14B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """`folder("14B")`: a folder with nothing but the config.json of that shape."""

    def write(name: str, **changes: Any) -> str:
        fields = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "torch_dtype": "bfloat16",
            **SHAPES[name],
            **changes,
        }
        target = tmp_path / name
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        return str(target)

    return write


def machine(vram_gb: float, ram_gib: float = 126) -> MachineProfile:
    return MachineProfile(
        int(vram_gb * 1e9),
        int(ram_gib * GIB),
        host_floor=2 * GIB,
        page_lock_bytes=int(0.4 * ram_gib * GIB),
        rates=H200,
    )


def adapters(model: nn.Module, rank: int) -> nn.Module:
    peft = pytest.importorskip("peft", reason="compares with PEFT's adapters")
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear"
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def test_the_exact_14b_base_at_24_gb(folder: Any) -> None:
    """27 of 48 blocks streamed in an earlier version took 0.69 s; the aim is 0.36 s or less."""
    training = Training(1, 512, 16, torch.bfloat16)
    outcome = plan_training(folder("14B"), training, machine(24), "none")
    assert outcome.fits, outcome.plan.reasons
    assert outcome.described.parameters == pytest.approx(14.77e9, rel=0.001)
    assert 13 <= len(outcome.plan.paged) <= 21
    assert outcome.plan.activations.count("recompute") > 40
    assert 0.2 < outcome.plan.seconds["step"] < 0.45
    assert outcome.plan.seconds["step"] == outcome.plan.seconds["to_device"]
    assert outcome.loading_bytes == pytest.approx(29.5e9, rel=0.01)


def test_nf4_14b_is_within_a_tenth_of_what_was_measured(folder: Any) -> None:
    """17.7 GB at the peak, everything on the device, on an H200 (docs/benchmarks)."""
    pytest.importorskip("ts_quant", reason="plans with one of its codecs")
    training = Training(1, 512, 16, torch.bfloat16)
    outcome = plan_training(
        folder("14B"),
        training,
        machine(24),
        "nf4",
        {"recompute": False, "activation_offload": False, "cuda_graphs": False},
    )
    assert outcome.fits and outcome.codec == "nf4" and outcome.plan.paged == ()
    assert outcome.plan.predicted["total"] == pytest.approx(17.7e9, rel=0.10)


def test_full_1_5b_is_within_a_tenth_of_what_was_measured(folder: Any) -> None:
    """18.5 GB at the peak with host updates on an H200 (docs/benchmarks)."""
    training = Training(4, 512, None, torch.float32)
    outcome = plan_training(
        folder("1.5B"),
        training,
        machine(24),
        "none",
        {"recompute": False, "activation_offload": False, "cuda_graphs": False},
    )
    assert outcome.fits and outcome.plan.paged == ()
    assert outcome.plan.predicted["total"] == pytest.approx(18.5e9, rel=0.10)
    assert outcome.plan.host["optimizer_and_gradients"] == pytest.approx(16 * 1.54e9, rel=0.01)
    assert outcome.plan.seconds["updates"] == pytest.approx(0.385, rel=0.02)


def test_full_1_5b_at_8_gb_streams_its_weights(folder: Any) -> None:
    training = Training(4, 512, None, torch.float32)
    outcome = plan_training(folder("1.5B"), training, machine(8), "none")
    assert outcome.plan.fits, outcome.plan.reasons
    assert len(outcome.plan.paged) > 10


def test_the_command_and_its_exit_status(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)

    def run(*words: str) -> int:
        return command.run(parser.parse_args(list(words)))

    where = folder("1.5B")
    config = str(Path(where) / "config.json")
    assert run(config, "--vram", "24GiB", "--ram", "64GiB", "--quantize", "none") == 0
    assert "FITS" in capsys.readouterr().out
    assert run(where, "--full", "--vram", "2.2GiB", "--ram", "64GiB", "--batch", "4") == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "What makes it fit" in text
    assert run(where, "--full", "--vram", "24GiB", "--ram", "12GiB") == 1
    assert "host memory budget" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [4, None])
def test_a_config_says_what_the_loaded_model_has(folder: Any, rank: int | None) -> None:
    """Bytes, by kind, and activations, of a real model with real adapters."""
    training = Training(2, 24, rank, torch.float32)
    found = describe(folder("tiny", tie_word_embeddings=True), training)
    model = reader.build(folder("tiny", tie_word_embeddings=True), torch.float32)
    blocks = find_decoder_layers(model)
    if rank is not None:
        model = adapters(model, rank)
    real = model_profile(model, block_leaves(model, blocks), 8.0, 2 << 30, True)
    for name in ("pageable", "fixed_device", "trained", "host_state", "trained_values"):
        assert getattr(found.profile, name) == getattr(real, name), name

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return reader.loss(model, training.batch, training.length)

    step = measure_step(model, blocks, loss)
    # The real attention kernel takes a little less than its fake says.
    assert found.profile.activations == pytest.approx(step.activations, rel=0.05)
    assert found.profile.inputs == step.inputs
    assert found.profile.head == pytest.approx(step.head, rel=0.02)
    assert found.profile.transient == pytest.approx(step.transient, rel=0.1)


def test_experts_are_counted_and_what_cannot_be_known_is_said(folder: Any) -> None:
    where = folder(
        "tiny",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=16,
    )
    found = describe(where, Training(1, 16, 4, torch.bfloat16))
    experts = 4 * 8 * 3 * 32 * 64 * 2  # layers, experts, matrices
    assert sum(found.profile.pageable) > experts
    assert found.profile.work is not None
    every = 2.0 * 16 * sum(found.profile.pageable) / 2 / 4
    assert found.profile.work.block_flops[0] < every  # two of eight experts are used
    assert bool(found.notes) == (found.profile.activations == ())


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (None, "neither a folder nor a config.json.* Nothing is fetched from the hub"),
        ("{", "not valid JSON"),
        ("[1]", "holds list where the fields of a config"),
        ("{}", "has None as its model_type"),
        ('{"model_type": ["llama"]}', "Is it the config of a model"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        ('{"model_type": "t5"}', "no causal language model"),
        ('{"model_type": "llama", "hidden_size": "64"}', "values that do not fit: .*hidden_size"),
        ('{"model_type": "llama", "hidden_size": 6, "num_attention_heads": 4}', "do not fit"),
        (
            '{"model_type": "llama", "hidden_size": -64, "head_dim": 16}',
            "no causal language model .*RuntimeError",
        ),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, write: str | None, words: str) -> None:
    source = tmp_path / "model"
    if write is not None:
        source.mkdir()
        (source / "config.json").write_text(write, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        describe(str(source), Training(1, 8, 2, torch.bfloat16))


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "weights.json"
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"not a config\.json"):
        describe(str(other), Training(1, 8, 2, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, None])
def test_predicted_peak_on_a_gpu(folder: Any, rank: int | None) -> None:
    """Within a tenth of the peak of settled steps, beside what the process holds already.

    Everything is on the device, and blocks are replayed, as planned.
    """
    from ts_core import memory_report, unwrap, wrap
    from ts_core.device import resolve_device

    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
    where = folder("tiny", **shape)
    dtype = torch.float32 if rank is None else torch.bfloat16
    training = Training(4, 512, rank, dtype)
    options = {"recompute": False, "activation_offload": False, "param_offload": False}
    outcome = plan_training(where, training, machine(60), "none", dict(options))
    gc.collect()
    resolve_device("cuda").take_workspaces()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = reader.build(where, dtype)
    if rank is not None:
        model = adapters(model, rank)
    model, optimizer = wrap(model, device="cuda", offload=True, quantize="none", **options)
    ids = torch.randint(0, 32000, (4, 512), device="cuda")
    replayed = 0
    for step in range(16):
        if step == 14:
            replayed = memory_report(model)["replay"]["replayed_forwards"]
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = memory_report(model)
    # torch counts what recordings hold for their temporary tensors as free; nobody else gets it.
    peak = torch.cuda.max_memory_allocated() - held + report["replay"]["pool_bytes"]
    assert report["replay"]["replayed_forwards"] == replayed + 2 * 8, report["events"]
    unwrap(model)
    found = {"predicted": outcome.plan.predicted, "measured": peak, "replay": report["replay"]}
    assert outcome.plan.predicted["total"] == pytest.approx(peak, rel=0.10), found
