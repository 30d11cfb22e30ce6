"""merge_adapter: the merged model computes what the adapted one did; the report says how near."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ts_hf
from ts_core import init_lora_from_error
from ts_core.errors import DataError, NotAvailableError, StateError, UnknownPluginError
from ts_core.registry import codecs


@pytest.fixture(autouse=True)
def _codecs() -> None:
    if not codecs.has("nf4"):
        pytest.skip("no codec is installed (ts-quant)")


IDS = torch.arange(24).view(2, 12)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_into_dequantized_computes_the_same(
    quantize: str | None, checkpoint: Callable[..., Path], lora: Callable[..., Any]
) -> None:
    model = lora(ts_hf.load_model(checkpoint("llama"), quantize=quantize, dtype=torch.float32))
    wanted = _logits(model)
    merged, report = ts_hf.merge_adapter(model, into="dequantized")
    torch.testing.assert_close(_logits(merged), wanted, atol=1e-5, rtol=1e-4)
    assert not any(hasattr(p, "__tensor_flatten__") for p in merged.parameters())
    assert not any("lora" in name or "base_layer" in name for name in merged.state_dict())
    assert len(report.rows) == 28 and report.error < 1e-6
    assert report.survived == pytest.approx(1, abs=1e-4)


def test_into_original_reads_the_checkpoint_again(
    checkpoint: Callable[..., Path], lora: Callable[..., Any]
) -> None:
    folder = checkpoint("llama")
    model = ts_hf.load_model(folder, quantize="nf4", dtype=torch.float32)
    model = lora(model, target_modules=["q_proj", "down_proj"])
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    delta = layer.get_delta_weight("default").detach()
    merged, report = ts_hf.merge_adapter(model)
    tensors = load_file(folder / "model.safetensors")
    for name, value in merged.state_dict().items():
        if name == "model.layers.1.mlp.down_proj.weight":
            torch.testing.assert_close(value, tensors[name] + delta, atol=1e-6, rtol=1e-5)
        elif "q_proj" not in name and "down_proj" not in name and name in tensors:
            assert torch.equal(value, tensors[name]), name  # unadapted ones too
    assert len(report.rows) == 8 and report.survived == pytest.approx(1, abs=1e-3)
    assert 0.05 < report.error < 0.15  # NF4's loss: not the base the adapter was trained on


def test_a_start_at_the_error_is_not_merged_into_the_original(
    checkpoint: Callable[..., Path], lora: Callable[..., Any]
) -> None:
    folder = checkpoint("llama")
    model = ts_hf.load_model(folder, quantize="nf4", dtype=torch.float32, error_rank=4)
    model = lora(model)
    assert init_lora_from_error(model) == 28
    merged, _ = ts_hf.merge_adapter(model)  # untrained: nothing but the start
    tensors = load_file(folder / "model.safetensors")
    for name, value in merged.state_dict().items():
        if name in tensors:
            torch.testing.assert_close(value, tensors[name], atol=1e-5, rtol=1e-4)


def test_an_adapter_from_a_file_must_say_how_it_started(
    checkpoint: Callable[..., Path], lora: Callable[..., Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    folder = checkpoint("llama")

    def load() -> Any:
        return ts_hf.load_model(folder, quantize="nf4", dtype=torch.float32, error_rank=4)

    model = lora(load())
    init_lora_from_error(model)
    ts_hf.save_adapter(model, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    with pytest.raises(StateError, match="started=True"):
        ts_hf.merge_adapter(again)
    assert any("lora" in name for name in again.state_dict())  # refused, and unchanged
    merged, _ = ts_hf.merge_adapter(again, started=True)
    tensors = load_file(folder / "model.safetensors")
    for name, value in merged.state_dict().items():
        if name in tensors:
            torch.testing.assert_close(value, tensors[name], atol=1e-5, rtol=1e-4)
    bare = ts_hf.load_model(folder, quantize="nf4", dtype=torch.float32)
    bare = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter")
    with pytest.raises(StateError, match="holds no factors"):
        ts_hf.merge_adapter(bare, started=True)


@pytest.mark.parametrize("into", ["nf4", "int8"])
def test_requantized(into: str, checkpoint: Callable[..., Path], lora: Callable[..., Any]) -> None:
    model = lora(ts_hf.load_model(checkpoint("llama"), quantize="nf4", dtype=torch.float32))
    wanted = _logits(model)
    merged, report = ts_hf.merge_adapter(model, into=into, double_quant=into == "int8")
    stored = [p for p in merged.parameters() if hasattr(p, "__tensor_flatten__")]
    assert len(stored) == 28 and {p.codec for p in stored} == {into}  # type: ignore[attr-defined]
    assert "28 matrices" in report.table()
    if into == "int8":
        assert float((_logits(merged) - wanted).norm() / wanted.norm()) < 0.05
        assert report.survived > 0.9
    else:
        assert report.error > 0.01


def test_saved_and_reloaded(
    checkpoint: Callable[..., Path], lora: Callable[..., Any], tmp_path: Path
) -> None:
    model = lora(ts_hf.load_model(checkpoint("llama"), quantize="nf4"))
    merged, _ = ts_hf.merge_adapter(model)
    wanted = _logits(merged)
    merged.save_pretrained(tmp_path / "out")
    again = ts_hf.load_model(tmp_path / "out", quantize=None)
    assert torch.equal(_logits(again), wanted)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_tied_head_trained_on_its_own_is_not_tied_in_the_saved_config(
    checkpoint: Callable[..., Path], lora: Callable[..., Any]
) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True)
    model = lora(
        ts_hf.load_model(folder, quantize=None, dtype=torch.float32),
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    wanted = _logits(model)
    merged, report = ts_hf.merge_adapter(model, into="dequantized")
    torch.testing.assert_close(_logits(merged), wanted, atol=1e-5, rtol=1e-4)
    assert "two weights now" in report.table() and not merged.config.tie_word_embeddings


# PEFT warns of exactly what is tested here.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_tied_embeddings_survive(
    checkpoint: Callable[..., Path], lora: Callable[..., Any], tmp_path: Path
) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True)
    model = lora(ts_hf.load_model(folder, quantize=None, dtype=torch.float32))
    merged, _ = ts_hf.merge_adapter(model, into="dequantized")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    model = lora(
        ts_hf.load_model(folder, quantize=None, dtype=torch.float32), target_modules=["lm_head"]
    )
    wanted = _logits(model)
    before = model.get_base_model().model.embed_tokens.weight.clone()
    merged, report = ts_hf.merge_adapter(model, into="dequantized")
    torch.testing.assert_close(_logits(merged), wanted, atol=1e-5, rtol=1e-4)
    assert torch.equal(merged.model.embed_tokens.weight, before)
    assert "two weights now" in report.table() and not merged.config.tie_word_embeddings
    merged.save_pretrained(tmp_path / "out")
    again = ts_hf.load_model(tmp_path / "out", quantize=None, dtype=torch.float32)
    torch.testing.assert_close(_logits(again), wanted, atol=1e-5, rtol=1e-4)


def test_refused(checkpoint: Callable[..., Path], lora: Callable[..., Any]) -> None:
    folder = checkpoint("llama")
    model = ts_hf.load_model(folder, quantize="nf4", dtype=torch.float32)
    with pytest.raises(StateError, match="no adapters"):
        ts_hf.merge_adapter(model)
    adapted = lora(model)
    with pytest.raises(UnknownPluginError, match="nf5"):
        ts_hf.merge_adapter(adapted, into="nf5")
    with pytest.raises(DataError, match="no folder"):
        ts_hf.merge_adapter(adapted, original=folder / "nowhere")
    wrapped, _ = ts_hf.wrap_hf(adapted, device="host", quantize="none")
    with pytest.raises(StateError, match="unwrap"):
        ts_hf.merge_adapter(wrapped)
    other = lora(ts_hf.load_model(folder, quantize=None))
    other.merge_adapter()
    with pytest.raises(StateError, match="merged already"):
        ts_hf.merge_adapter(other)


def test_methods_that_are_not_merged(checkpoint: Callable[..., Path]) -> None:
    peft = pytest.importorskip("peft")
    model = ts_hf.load_model(checkpoint("llama"), quantize=None)
    model = peft.get_peft_model(model, peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(NotAvailableError, match="merges LoRA"):
        ts_hf.merge_adapter(model)
