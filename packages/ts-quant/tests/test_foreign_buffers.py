"""Weights whose buffers have a checkpoint's shapes: written whole or not at all; shared memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ts_quant
from ts_quant import QuantTensor
from ts_quant.errors import CheckpointError, FrozenWeightError, NotAvailableError
from ts_quant.readers.compressed_tensors import plan
from ts_quant.readers.folder import iterate_checkpoint


def reshaped(weight: torch.Tensor, codec: str, **options: object) -> QuantTensor:
    """Quantized, its buffers in other shapes with the same bytes, as readers keep them."""
    made = ts_quant.quantize(weight, codec, **options)
    return made.with_buffers([buffer.reshape(-1, 1) for buffer in made.buffers()])


@pytest.mark.parametrize(
    ("codec", "options"),
    [("nf4", {}), ("int8", {}), ("nvfp4", {}), ("fp8", {}), ("fp8", {"layout": "tile"})],
    ids=str,
)
def test_new_values_are_written_whole(codec: str, options: dict[str, object]) -> None:
    old, new = torch.randn(128, 256), torch.randn(128, 256)
    target = reshaped(old, codec, **options)
    shapes = [buffer.shape for buffer in target.buffers()]
    target.copy_(new)
    expected = ts_quant.quantize(new, codec, **options).dequantize()
    assert torch.equal(target.dequantize(), expected)
    assert [buffer.shape for buffer in target.buffers()] == shapes


def test_what_does_not_fit_leaves_the_old_weight() -> None:
    old = torch.randn(128, 256)
    target = ts_quant.quantize(old, "fp8", layout="tile")
    codes, scale = target.buffers()
    target = target.with_buffers([codes, scale.repeat(3, *([1] * (scale.dim() - 1)))])
    before = [buffer.clone() for buffer in target.buffers()]
    with pytest.raises(FrozenWeightError, match="Nothing was written"):
        target.copy_(torch.randn(128, 256))
    assert all(torch.equal(a, b) for a, b in zip(before, target.buffers(), strict=True))


def test_shared_memory() -> None:
    layer = torch.nn.Linear(64, 32)
    layer.weight = torch.nn.Parameter(ts_quant.quantize(layer.weight, "nf4"), requires_grad=False)
    before = layer.weight.dequantize()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert torch.equal(layer.weight.dequantize(), before)


def test_an_index_is_followed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"stray": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert [name for name, _ in iterate_checkpoint(tmp_path)] == ["a"]
    for weight_map, words in (
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "model-2"),
        ({"a": "../model-1.safetensors"}, "outside"),
        ({"a": 3}, "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=words):
            list(iterate_checkpoint(tmp_path))


@pytest.mark.parametrize("key", ["transform_config", "sparsity_config"])
def test_transforms_and_sparsity_are_refused_by_name(key: str) -> None:
    config = {"format": "nvfp4-pack-quantized", key: {"config_groups": {"u": {"type": "hadamard"}}}}
    with pytest.raises(NotAvailableError, match=key):
        plan({}, config, lambda name: torch.empty(0))
