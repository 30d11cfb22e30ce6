"""The engines that come with ts-bench, on toys."""

from __future__ import annotations

import dataclasses
import itertools
import math
from importlib.util import find_spec

import pytest
import torch

from ts_bench import records
from ts_bench.engines import UnsupportedError
from ts_bench.engines.bnb import ENGINE as BNB
from ts_bench.engines.bnb import ENGINE_LIGER
from ts_bench.engines.stock import ENGINE as STOCK
from ts_bench.rounds import Settings, compare
from ts_bench.scenarios import GB, SCENARIOS, ModelShape
from ts_bench.workload import build_model, expected_first_loss, token_batches, trainable
from ts_core.registry import bench_engines, codecs

CPU = torch.device("cpu")
TINY, TINY_FULL = SCENARIOS["tiny"], SCENARIOS["tiny-full"]
OURS = ["torch", "bitsandbytes", "bitsandbytes-liger", "trainstream"]
needs_bnb = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


def test_entry_points() -> None:
    assert set(OURS) <= set(bench_engines.names())
    for name in OURS:
        engine = bench_engines.get(name)
        assert engine.name == name
        assert engine.description
        assert engine.variants


def _expected_status(engine: str, scenario: str) -> str:
    if engine == "torch":
        return records.OK
    if engine == "trainstream":
        fine = scenario == "tiny-full" or codecs.has("nf4")
        return records.OK if fine else records.UNSUPPORTED
    if engine == "bitsandbytes-liger" and not find_spec("liger_kernel"):
        return records.NOT_INSTALLED
    if not find_spec("bitsandbytes"):
        return records.NOT_INSTALLED
    fine = engine == "bitsandbytes" and scenario == "tiny"
    return records.OK if fine else records.UNSUPPORTED


def test_all_engines_through_the_whole_path() -> None:
    """Both toys, four engines, a process each: a start near ln(vocabulary), finite losses."""
    settings = Settings(device="cpu", warmup=1, steps=2, threads=1)
    scenarios = [TINY, TINY_FULL]
    found = compare(scenarios, OURS, settings, on_record=lambda record: None)
    told = {(record.scenario["name"], record.engine): record for record in found}
    assert len(told) == len(found) == 8
    for scenario, engine in itertools.product(scenarios, OURS):
        record = told[scenario.name, engine]
        assert record.status == _expected_status(engine, scenario.name), record.reason
        if record.measurement is not None:
            losses = record.measurement.losses
            assert len(losses) == 3
            assert all(abs(loss - expected_first_loss(scenario)) < 0.2 for loss in losses)
        else:
            assert record.reason


@pytest.mark.parametrize("scenario", [TINY, TINY_FULL], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("variant", STOCK.variants)
def test_stock_engine_trains(scenario, variant) -> None:
    """On one repeated batch the loss falls, recomputed activations or not, to the same values."""
    scenario = dataclasses.replace(scenario, lora_rank=16)
    losses = {}
    for name in ("plain", variant):
        torch.manual_seed(0)
        step = STOCK.prepare(scenario, CPU, name)
        step.optimizer.param_groups[0]["lr"] = 1e-2
        step._batches = itertools.repeat(next(step._batches))
        losses[name] = [step().item() for _ in range(12)]
    assert losses[variant] == losses["plain"]
    assert losses[variant][-1] < losses[variant][0] - 0.3
    assert all(parameter.grad is None for parameter in trainable(step.model))


def test_lora_trains_all_seven_projections_and_nothing_else() -> None:
    step = STOCK.prepare(TINY, CPU, "plain")
    trained = [name for name, p in step.model.named_parameters() if p.requires_grad]
    assert len(trained) == TINY.shape.num_layers * 7 * 2
    assert all("lora_" in name for name in trained)


@needs_bnb
@pytest.mark.parametrize("variant", BNB.variants)
def test_bitsandbytes_engine_trains_on_nf4(variant) -> None:
    import bitsandbytes

    step = BNB.prepare(dataclasses.replace(TINY, lora_rank=16), CPU, variant)
    assert step.details()["lora_layers"] == {"peft.tuners.lora.bnb.Linear4bit": 21}
    weights = [
        module.weight
        for module in step.model.modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    ]
    assert len(weights) == 21
    assert {weight.quant_state.quant_type for weight in weights} == {"nf4"}
    assert {weight.quant_state.blocksize for weight in weights} == {64}
    assert not any(weight.quant_state.nested for weight in weights)
    step.optimizer.param_groups[0]["lr"] = 1e-2
    step._batches = itertools.repeat(next(step._batches))
    losses = [step().item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1


@needs_bnb
def test_bitsandbytes_refuses_what_it_is_not_compared_on() -> None:
    with pytest.raises(UnsupportedError, match="full on fp32"):
        BNB.prepare(TINY_FULL, CPU, "plain")
    with pytest.raises(UnsupportedError, match="CUDA GPU"):
        ENGINE_LIGER.prepare(TINY, CPU, "plain")


def test_missing_rivals_are_named(monkeypatch) -> None:
    monkeypatch.setattr("ts_bench.engines.bnb.find_spec", lambda name: None)
    assert BNB.available() == "needs bitsandbytes: pip install bitsandbytes"
    expected = "needs bitsandbytes and liger-kernel: pip install bitsandbytes liger-kernel"
    assert ENGINE_LIGER.available() == expected


def test_random_model_is_whole_and_repeats() -> None:
    """Values everywhere, norms at one, tied weights tied, and the same for the same seed."""
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(build_model(TINY, CPU, torch.float32))
    one, two = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    assert torch.equal(one["model.norm.weight"], torch.ones(64))
    assert torch.equal(one["model.layers.0.self_attn.q_proj.bias"], torch.zeros(64))
    spread = one["model.layers.2.mlp.down_proj.weight"].std().item()
    assert spread == pytest.approx(0.02, rel=0.1)
    reference = type(models[0])(models[0].config)
    assert torch.equal(models[0].model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)


def test_tokens_are_the_same_for_every_engine() -> None:
    first, second = token_batches(TINY, CPU), token_batches(TINY, CPU)
    rows = [next(first) for _ in range(9)]
    assert all(torch.equal(row, next(second)) for row in rows)
    assert rows[0].shape == (TINY.batch, TINY.tokens)
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[8])
    assert max(row.max().item() for row in rows) < TINY.shape.vocab_size
    assert expected_first_loss(TINY) == math.log(256)


MIDDLE = ModelShape(1024, 4, 8, 4, 4096, 32000, tied=False)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["torch", "trainstream", "bitsandbytes"])
def test_gpu_run_reports_device_memory_within_the_cap(engine) -> None:
    scenario = dataclasses.replace(
        SCENARIOS["tiny"], name="middle", shape=MIDDLE, tokens=256, limit_bytes=3 * GB
    )
    settings = Settings(device="cuda", warmup=2, steps=2)
    (record,) = compare([scenario], [engine], settings, on_record=lambda record: None)
    if engine == "bitsandbytes" and find_spec("bitsandbytes") is None:
        assert record.status == records.NOT_INSTALLED
        return
    assert record.status == records.OK, record.reason
    figures = record.measurement
    assert figures is not None
    assert 0 < figures.peak_allocated_bytes <= figures.peak_reserved_bytes <= scenario.limit_bytes
    assert record.environment["device"]["type"] == "cuda"
    assert abs(figures.losses[0] - expected_first_loss(scenario)) < 1.0


@pytest.mark.gpu
def test_gpu_cap_is_enforced_and_reported() -> None:
    scenario = dataclasses.replace(
        TINY_FULL, name="capped", shape=MIDDLE, tokens=256, limit_bytes=100_000_000
    )
    settings = Settings(device="cuda", warmup=1, steps=1)
    found = compare([scenario], ["torch"], settings, on_record=lambda record: None)
    told = [(record.variant, record.status) for record in found]
    assert told == [("plain", "out of memory"), ("checkpointing", "out of memory")]


def test_ours_passes_on_how_products_of_a_quantized_base_are_made() -> None:
    from ts_quant import QuantTensor

    engine = bench_engines.get("trainstream").with_options({"fp8_backward": True})
    step = engine.prepare(dataclasses.replace(TINY, base="fp8_row"), CPU, "default")
    stored = [p for p in step.model.parameters() if isinstance(p, QuantTensor)]
    assert stored and all(weight._matmul.fp8_backward for weight in stored)
    assert math.isfinite(step().item())
    with pytest.raises(UnsupportedError, match="not quantized"):
        engine.prepare(dataclasses.replace(TINY, base="bf16"), CPU, "default")
