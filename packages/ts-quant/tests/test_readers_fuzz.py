"""Damaged configs and headers of other libraries' checkpoints: clear errors, nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ts_quant
from ts_quant.readers import plan_reading
from ts_quant.readers.folder import iterate_checkpoint
from ts_quant.safetensors_file import write_file

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 300), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _bytes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _e4m3(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def _state() -> Tensor:
    fields = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [4, 32],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.5,
    }
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def _cases() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    groups = {"g": {"format": None, "weights": {"strategy": "block", "block_structure": [2, 2]}}}
    codebook = torch.tensor(ts_quant.codecs.nf4.CODEBOOK)
    return {
        "bitsandbytes": (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {
                "x.weight": _bytes(64, 1),
                "x.weight.absmax": _bytes(2),
                "x.weight.quant_map": codebook,
                "x.weight.nested_absmax": torch.ones(1),
                "x.weight.nested_quant_map": torch.ones(256),
                "x.weight.quant_state.bitsandbytes__nf4": _state(),
            },
        ),
        "modelopt": (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"x": {"quant_algo": "NVFP4"}},
            },
            {
                "x.weight": _bytes(4, 16),
                "x.weight_scale": _e4m3(4, 2),
                "x.weight_scale_2": torch.tensor(0.5),
                "x.pre_quant_scale": torch.ones(32),
                "y.weight": _e4m3(4, 8),
                "y.weight_scale": torch.ones(4, 1),
            },
        ),
        "compressed-tensors": (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": groups,
                "quantization_status": "compressed",
            },
            {"x.weight": _e4m3(4, 8), "x.weight_scale": torch.ones(2, 4)},
        ),
        "fp8": (
            {"quant_method": "fp8", "weight_block_size": [2, 4], "fmt": "e4m3"},
            {"x.weight": _e4m3(4, 8), "x.weight_scale_inv": torch.ones(2, 2)},
        ),
        "mxfp4": (
            {"quant_method": "mxfp4"},
            {"x_blocks": _bytes(2, 4, 1, 16), "x_scales": _bytes(2, 4, 1)},
        ),
    }


def _change(data: Any, target: Any) -> None:
    """Replace or remove one entry somewhere in nested dicts."""
    owner, key = None, None
    while isinstance(target, dict) and target and (owner is None or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(sorted(target)))
        owner, target = target, target[key]
    if owner is None:
        return
    if data.draw(st.booleans()):
        owner[key] = data.draw(JUNK)
    else:
        del owner[key]


def _read_all(config: Any, tensors: dict[str, Tensor]) -> None:
    plan = plan_reading(tensors, config, lambda name: tensors[name])
    if plan is not None:
        for weight in plan.weights.values():
            built = weight.build(
                {role: tensors[key] for role, key in weight.sources.items()}, torch.float32
            )
            assert built.dequantize().shape == weight.shape


@pytest.mark.parametrize("name", list(_cases()))
def test_undamaged_ones_are_read(name: str) -> None:
    _read_all(*_cases()[name])


@settings(max_examples=250, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(_cases())))
def test_configs(data: Any, name: str) -> None:
    config, tensors = copy.deepcopy(_cases()[name])
    for _ in range(data.draw(st.integers(1, 2))):
        _change(data, config)
    try:
        _read_all(config, tensors)
    except ts_quant.QuantError as error:
        assert str(error)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32]), max_size=4)
KINDS = st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16])


@settings(max_examples=250, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(_cases())))
def test_tensors(data: Any, name: str) -> None:
    config, tensors = copy.deepcopy(_cases()[name])
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(tensors)))
        what = data.draw(st.sampled_from(["drop", "replace", "rename"]))
        old = tensors.pop(key)
        if what == "replace":
            tensors[key] = torch.zeros(data.draw(SHAPES)).to(data.draw(KINDS))
        elif what == "rename":
            tensors[key + data.draw(st.sampled_from(["_", ".weight", ".input_scale"]))] = old
        if not tensors:
            return
    try:
        _read_all(config, tensors)
    except ts_quant.QuantError as error:
        assert str(error)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 5000))
def test_truncated_folders(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    config, tensors = _cases()["modelopt"]
    folder = tmp_path_factory.mktemp("cut")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    write_file(folder / "model.safetensors", tensors)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: cut % len(whole)])
    with pytest.raises(ts_quant.CheckpointError):
        list(iterate_checkpoint(folder))
