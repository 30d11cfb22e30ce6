"""load_model's quantization options: what is stored, where adapters start, what is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ts_hf
from ts_core import init_lora_from_error
from ts_core.errors import OptionError
from ts_core.registry import codecs


@pytest.fixture(autouse=True)
def _codecs() -> None:
    if not codecs.has("nf4"):
        pytest.skip("no codec is installed (ts-quant)")


def _stored(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if hasattr(p, "__tensor_flatten__")}


@pytest.fixture
def heavy_tailed(checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint in which one matrix is far worse to store in few bits than the others."""
    folder = checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.2.self_attn.q_proj.weight"]
    weight *= 1 + 14 * (torch.rand(weight.shape) < 0.02)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_keep_precise(heavy_tailed: Path) -> None:
    plain = ts_hf.load_model(heavy_tailed, quantize="nf4")
    model = ts_hf.load_model(heavy_tailed, quantize="nf4", keep_precise=0.05)
    base, report = plain.trainstream_load, model.trainstream_load
    kept = [name for name, p in _stored(model).items() if p.codec == "int8"]
    assert "model.layers.2.self_attn.q_proj.weight" in kept
    assert report.kept_precise == len(kept) <= 3 and base.kept_precise == 0
    assert base.quantized_bytes < report.quantized_bytes <= base.quantized_bytes * 1.05
    assert set(report.storage.rows) == set(_stored(model)) == set(_stored(plain))
    weight = load_file(heavy_tailed / "model.safetensors")[kept[0]].bfloat16()
    assert torch.equal(
        _stored(model)[kept[0]].dequantize(), codecs.get("int8").encode(weight).dequantize()
    )
    same = next(name for name in _stored(model) if name not in kept)
    assert torch.equal(_stored(model)[same].codes, _stored(plain)[same].codes)


def test_keep_precise_of_random_weights_keeps_the_same_draw(
    tiny_config: Callable[..., Any],
) -> None:
    torch.manual_seed(3)
    plain = ts_hf.load_model(tiny_config("llama"), quantize="nf4", random_weights=True)
    torch.manual_seed(3)
    model = ts_hf.load_model(
        tiny_config("llama"), quantize="nf4", random_weights=True, keep_precise=0.3
    )
    kept = {name for name, p in _stored(model).items() if p.codec == "int8"}
    assert kept and len(kept) == model.trainstream_load.kept_precise
    for name, stored in _stored(model).items():
        other = _stored(plain)[name]
        if name in kept:  # the same weight, stored better
            difference = (stored.dequantize() - other.dequantize()).float().norm()
            assert float(difference / other.dequantize().float().norm()) < 0.2
        else:
            assert torch.equal(stored.codes, other.codes)


def test_double_quant_and_its_bytes(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    plain = ts_hf.load_model(folder, quantize="nf4").trainstream_load
    model = ts_hf.load_model(folder, quantize="nf4", double_quant=True)
    values = sum(p.numel() for p in _stored(model).values())
    # 4 bytes per 64 values become one, and 4 more per 256 of those.
    saved = plain.quantized_bytes - model.trainstream_load.quantized_bytes
    assert saved / values == pytest.approx(3 / 64 - 4 / (64 * 256), rel=0.1)


@pytest.mark.parametrize("alpha", [4, 32])
def test_adapters_start_at_what_loading_lost(alpha: int, checkpoint: Callable[..., Path]) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    folder = checkpoint("llama")
    exact = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    model = ts_hf.load_model(
        folder, quantize="nf4", dtype=torch.float32, error_rank=8, error_iters=2
    )
    assert model.trainstream_load.storage.rank_pattern()
    ids = torch.randint(0, 256, (2, 12))
    with torch.no_grad():
        wanted = exact(ids).logits
        before = float((model(ids).logits - wanted).norm())
        config = peft.LoraConfig(r=8, lora_alpha=alpha, target_modules="all-linear")
        model = peft.get_peft_model(model, config)
        assert init_lora_from_error(model) == len(_stored(model)) == 28
        after = float((model(ids).logits - wanted).norm())
        assert after < 0.95 * before
        with model.disable_adapter():
            assert float((model(ids).logits - wanted).norm()) > after
    module = model.base_model.model.model.layers[0].mlp.up_proj
    weight = exact.model.layers[0].mlp.up_proj.weight
    near = module.base_layer.weight.dequantize() + module.get_delta_weight("default")
    row = model.get_base_model().trainstream_load.storage.rows["model.layers.0.mlp.up_proj.weight"]
    assert float(((near - weight).norm() / weight.norm()).detach()) == pytest.approx(
        row.error_with_start, rel=1e-3
    )


def test_wrap_starts_them_too(checkpoint: Callable[..., Path]) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    model = ts_hf.load_model(checkpoint("llama"), quantize="nf4", error_rank=4)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model, _ = ts_hf.wrap_hf(peft.get_peft_model(model, config), device="host", quantize="none")
    events = model._trainstream_session.events
    assert any("8 adapters start at what quantization lost" in event for event in events)


def test_factors_that_no_adapter_starts_at_are_warned_of(checkpoint: Callable[..., Path]) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    model = ts_hf.load_model(
        checkpoint("llama"), quantize="nf4", dtype=torch.float32, error_rank=4, error_iters=3
    )
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with pytest.warns(UserWarning, match="further from the original than plain quantization"):
        ts_hf.wrap_hf(peft.get_peft_model(model, config), device="host", quantize="none")


def test_state_dict_is_decoded_and_loads_back(checkpoint: Callable[..., Path]) -> None:
    model = ts_hf.load_model(checkpoint("llama"), quantize="int8")
    stored, state = _stored(model), model.state_dict()
    assert stored and all(type(value) is torch.Tensor for value in state.values())
    name = next(iter(stored))
    assert torch.equal(state[name], stored[name].dequantize())
    new = torch.ones_like(state[name])
    model.load_state_dict({name: new}, strict=False)
    assert torch.equal(_stored(model)[name].dequantize(), new)  # 1 is exact in int8


def test_options_that_do_nothing_are_said_and_bad_ones_refused(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("llama")
    report = ts_hf.load_model(folder, quantize=None, keep_precise=0.05).trainstream_load
    assert any("keep_precise=0.05: nothing to do" in event for event in report.events)
    for options, words in (
        ({"quantize": "int8", "keep_precise": 0.05}, "no format one step more precise"),
        ({"quantize": "fp8", "double_quant": True}, "double_quant"),
        ({"quantize": "nf4", "keep_precise": 0.7}, "keep_precise=0.7"),
        ({"quantize": "nf4", "error_rank": -1}, "error_rank=-1"),
        ({"quantize": "nf4", "error_iters": 0}, "error_iters=0"),
    ):
        with pytest.raises(OptionError, match=words):
            ts_hf.load_model(folder, **options)


@pytest.mark.gpu
def test_on_a_gpu_the_choice_and_the_bytes_are_those_of_the_cpu(
    heavy_tailed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding runs on the GPU when there is one; nothing about the result may depend on it."""
    options: dict[str, Any] = {"quantize": "nf4", "keep_precise": 0.05, "double_quant": True}
    on_gpu = ts_hf.load_model(heavy_tailed, **options)
    monkeypatch.setattr("ts_hf.fill._work_device", lambda: torch.device("cpu"))
    on_cpu = ts_hf.load_model(heavy_tailed, **options)
    assert set(_stored(on_gpu)) == set(_stored(on_cpu))
    for name, stored in _stored(on_gpu).items():
        other = _stored(on_cpu)[name]
        assert stored.codec == other.codec and stored.device.type == "cpu"
        for one, two in zip(stored.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, two), name
