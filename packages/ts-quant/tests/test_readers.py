"""Checkpoints of other libraries, read as they are stored.

bitsandbytes' tensors are written by that library here; those of compressed-tensors 0.20.1 and
nvidia-modelopt 0.47.0 come from files in data/, written by these libraries together with the values
they decode them to. The others are written by hand, from the formats' definitions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.readers import plan_reading
from ts_quant.readers.folder import iterate_checkpoint
from ts_quant.safetensors_file import read_header, read_tensor, write_file

DATA = Path(__file__).parent / "data"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _read(tensors: dict[str, Tensor], config: Any = None, **more: Any) -> dict[str, Any]:
    """Every quantized weight of a checkpoint, by name."""
    plan = plan_reading(tensors, config, lambda name: tensors[name], **more)
    assert plan is not None
    return {
        name: weight.build(
            {role: tensors[key] for role, key in weight.sources.items()}, torch.float32
        )
        for name, weight in plan.weights.items()
    }


def _unpack(codes: Tensor) -> Tensor:
    """e2m1 values of bytes, low nibble first; doubles the last dimension."""
    pairs = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], dim=-1)
    return pairs.flatten(-2)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _e4m3(*shape: int) -> Tensor:
    return (torch.rand(shape) * 4 + 0.1).to(torch.float8_e4m3fn)


# -- bitsandbytes ------------------------------------------------------------------------------


def _bnb(weight: Tensor, name: str, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that bitsandbytes stores for a weight, and what it decodes them to.

    Decoded as one long row: blocks run over the flattened weight, and bitsandbytes 0.50's AVX-512
    kernel takes the scales of other blocks where rows end within a block.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", **options)
    tensors = {name: codes, **{f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()}}
    state.shape = torch.Size((1, weight.numel()))
    return tensors, functional.dequantize_4bit(codes, state).view(weight.shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 48), (48, 1000)])
def test_bitsandbytes(nested: bool, storage: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    tensors, expected = _bnb(
        weight, "a.weight", compress_statistics=nested, quant_storage=storage, blocksize=64
    )
    found = _read(tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    q = found["a.weight"]
    assert q.shape == shape and q.codec == "nf4"
    assert q.codes.data_ptr() == tensors["a.weight"].data_ptr()  # as stored
    if nested:  # bitsandbytes adds the offset after a product of its own rounding
        torch.testing.assert_close(q.dequantize(), expected, rtol=1e-6, atol=1e-7)
        assert q.nbytes < weight.numel() * 0.52 + 1100
    else:
        assert torch.equal(q.dequantize(), expected)
        assert torch.equal(q.codes.flatten(), ts_quant.quantize(weight).codes.flatten())
    assert set(_read(tensors)) == {"a.weight"}  # found without a config too


def test_bitsandbytes_refusals() -> None:
    tensors, _ = _bnb(torch.randn(8, 64), "a.weight")
    config = {"quant_method": "bitsandbytes"}
    state = next(name for name in tensors if "quant_state" in name)

    def edited(**changes: Any) -> dict[str, Tensor]:
        fields = json.loads(bytes(tensors[state].tolist())) | changes
        return {
            **tensors,
            state: torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8),
        }

    with pytest.raises(ts_quant.NotAvailableError, match=r"LLM\.int8"):
        _read({"a.weight": torch.zeros(2, 2, dtype=torch.int8), "a.SCB": torch.ones(2)}, config)
    renamed = {name.replace("__nf4", "__fp4"): value for name, value in tensors.items()}
    with pytest.raises(ts_quant.NotAvailableError, match="'fp4'"):
        _read(renamed, config)
    for broken, words in (
        ({**tensors, state: tensors[state][:-3]}, "damaged"),
        ({**tensors, state: torch.zeros(1 << 17, dtype=torch.uint8)}, "not a description"),
        (edited(shape=[8, 65]), "4-bit codes"),
        (edited(shape=[-8, 64]), "which no weight has"),
        (edited(shape=[1e400, 64]), "damaged"),
        (edited(blocksize="x"), "damaged"),
        (edited(blocksize=128), "elements"),
        ({k: v for k, v in tensors.items() if not k.endswith("absmax")}, "absmax"),
        ({**tensors, "a.weight.quant_map": torch.zeros(16)}, "codebook"),
    ):
        with pytest.raises(ts_quant.CheckpointError, match=words):
            _read(broken, config)


# -- NVFP4 -------------------------------------------------------------------------------------


def _modelopt(name: str, rows: int, columns: int, scalar: bool) -> dict[str, Tensor]:
    number = torch.tensor(0.013) if scalar else torch.tensor([0.013])
    return {
        f"{name}.weight": _bytes(rows, columns // 2),
        f"{name}.weight_scale": _e4m3(rows, columns // 16),
        f"{name}.weight_scale_2": number,
        f"{name}.input_scale": torch.tensor(0.5),
    }


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
@pytest.mark.parametrize("where", ["config", "file"])
def test_modelopt_nvfp4(scalar: bool, algorithm: str, where: str) -> None:
    tensors = {**_modelopt("x", 6, 48, scalar), "head.weight": torch.randn(3, 3)}
    if where == "file":
        more = {"quantization": {"quant_algo": algorithm, "exclude_modules": ["head"]}}
        found = _read(tensors, None, modelopt=more)
    else:
        found = _read(tensors, {"quant_method": "modelopt", "quant_algo": algorithm})
    assert set(found) == {"x.weight"}
    scale = tensors["x.weight_scale"].float() * 0.013
    expected = _unpack(tensors["x.weight"]) * scale.repeat_interleave(16, dim=1)
    torch.testing.assert_close(found["x.weight"].dequantize(), expected, rtol=1e-6, atol=0)
    assert found["x.weight"].codes.data_ptr() == tensors["x.weight"].data_ptr()


def test_modelopt_golden_file() -> None:
    entries, _ = read_header(DATA / "modelopt.safetensors")
    golden = {name: read_tensor(entry) for name, entry in entries.items()}
    expected, original = golden.pop("x.expected"), golden.pop("x.original")
    q = _read(golden, {"quant_method": "modelopt", "quant_algo": "NVFP4"})["x.weight"]
    torch.testing.assert_close(q.dequantize(), expected, rtol=3e-7, atol=0)
    # And what this package encodes has ModelOpt's bytes.
    ours = ts_quant.quantize(original, "nvfp4")
    for one, other in zip(ours.buffers(), q.buffers(), strict=True):
        assert torch.equal(one.view(other.dtype).flatten(), other.flatten())


def test_modelopt_awq_golden_file() -> None:
    entries, _ = read_header(DATA / "modelopt_awq.safetensors")
    golden = {name: read_tensor(entry) for name, entry in entries.items()}
    x, y = golden.pop("x.inputs"), golden.pop("x.outputs")  # (x * pre_quant_scale) @ value.T
    config = {"quant_algo": "NVFP4_AWQ", "group_size": 16, "pre_quant_scale": True}
    found = _read(golden, None, modelopt={"quantization": config})
    q = found.pop("x.weight")
    assert not found and q.codec == "nvfp4" and q.spec.channel_scale
    factors = golden.pop("x.pre_quant_scale")
    alone = _read(golden, {"quant_method": "modelopt", "quant_algo": "NVFP4"})["x.weight"]
    assert torch.equal(q.dequantize(), alone.dequantize() * factors)
    assert float(factors.max() / factors.min()) > 10
    torch.testing.assert_close(torch.nn.functional.linear(x, q), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32,), (1, 32)])
def test_modelopt_scaled_inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Factors of any dtype, beside NVFP4 and FP8 weights; layers without them stay as they are."""
    factors = (torch.rand(shape) + 0.5).to(dtype)
    codes = torch.randn(5, 32).to(torch.float8_e4m3fn)
    tensors = {
        **_modelopt("a", 4, 32, True),
        **_modelopt("b", 4, 32, True),
        "a.pre_quant_scale": factors,
        "c.weight": codes,
        "c.weight_scale": torch.tensor(0.25),
        "c.pre_quant_scale": factors,
    }
    layers = {"a": "NVFP4_AWQ", "b": "NVFP4_AWQ", "c": "FP8"}
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = _read(tensors, None, modelopt={"quantization": inner})
    scale = tensors["a.weight_scale"].float() * 0.013
    expected = _unpack(tensors["a.weight"]) * scale.repeat_interleave(16, dim=1) * factors.float()
    torch.testing.assert_close(found["a.weight"].dequantize(), expected, rtol=1e-6, atol=0)
    assert not found["b.weight"].spec.channel_scale
    assert torch.equal(found["c.weight"].dequantize(), codes.float() * 0.25 * factors.float())


def test_modelopt_scaled_inputs_refusals() -> None:
    tensors = _modelopt("x", 4, 32, True)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    for name, factors, words in (
        ("x", torch.ones(31), "one factor per column of 'x.weight'"),
        ("x", torch.ones(32, dtype=torch.int32), "expected a floating dtype"),
        ("x", torch.ones(32, 1), "one factor per column"),
        ("x", torch.zeros(32), "not positive"),
        ("x", torch.full((32,), float("nan")), "not positive"),
        ("x", torch.full((32,), float("inf")), "channel_scale"),
        ("y", torch.ones(32), "'y.pre_quant_scale' scales the inputs of a layer whose weight"),
    ):
        with pytest.raises(ts_quant.CheckpointError, match=words):
            _read({**tensors, f"{name}.pre_quant_scale": factors}, config)
    plain = {**tensors, "y.weight": torch.randn(4, 32), "y.pre_quant_scale": torch.ones(32)}
    with pytest.raises(ts_quant.CheckpointError, match=r"'y\.pre_quant_scale'"):
        _read(plain, config)


def test_modelopt_mixed_precision_with_exclusions() -> None:
    fp8 = (torch.randn(5, 32)).to(torch.float8_e4m3fn)
    tensors = {
        **_modelopt("l.0.up", 4, 32, True),
        "l.0.down.weight": fp8,
        "l.0.down.weight_scale": torch.tensor(0.25),
        "l.0.down.input_scale": torch.tensor(1.0),
        "l.0.k_proj.k_scale": torch.tensor(1.0),
        "head.weight": torch.randn(2, 4, dtype=torch.bfloat16),
    }
    layers = {
        "l.0.up": {"quant_algo": "NVFP4", "group_size": 16},
        "l.0.down": {"quant_algo": "FP8"},
    }
    config = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    found = _read(tensors, None, modelopt=config)
    assert {name: q.codec for name, q in found.items()} == {
        "l.0.up.weight": "nvfp4",
        "l.0.down.weight": "fp8",
    }
    assert torch.equal(found["l.0.down.weight"].dequantize(), fp8.float() * 0.25)
    layers["l.0.down"]["quant_algo"] = "INT4_AWQ"
    with pytest.raises(ts_quant.NotAvailableError, match=r"'l\.0\.down'.*'INT4_AWQ'"):
        _read(tensors, None, modelopt=config)


def test_modelopt_refusals() -> None:
    tensors = _modelopt("x", 4, 32, True)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(ts_quant.NotAvailableError, match="'W4A8_AWQ'"):
        _read(tensors, {**config, "quant_algo": "W4A8_AWQ"})
    with pytest.raises(ts_quant.NotAvailableError, match="'NVFP4_SVD'"):
        _read(tensors, {**config, "quant_algo": "NVFP4_SVD"})
    with pytest.raises(ts_quant.NotAvailableError, match="svdquant_lora_a"):
        _read({**tensors, "x.svdquant_lora_a": torch.ones(4, 32)}, config)
    for change, words in (
        ({"x.weight_scale": _e4m3(4, 3)}, r"expected \[4, 2\]"),
        ({"x.weight_scale_2": torch.ones(2)}, "one number"),
        ({"x.weight_scale_2": torch.tensor(float("nan"))}, "global scale nan"),
        ({"x.weight": _bytes(4, 17)}, "multiple of 16"),
        ({"x.weight_scale": torch.ones(4, 2)}, "expected e4m3"),
    ):
        with pytest.raises(ts_quant.CheckpointError, match=words):
            _read({**tensors, **change}, config)
    del tensors["x.weight_scale_2"]
    with pytest.raises(ts_quant.CheckpointError, match="weight_scale_2"):
        _read(tensors, config)


def test_compressed_tensors_golden_file() -> None:
    entries, _ = read_header(DATA / "compressed_tensors.safetensors")
    golden = {name: read_tensor(entry) for name, entry in entries.items()}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "a": {"format": "nvfp4-pack-quantized", "weights": {"strategy": "tensor_group"}},
            "b": {"format": "float-quantized", "weights": {"strategy": "channel"}},
        },
        "quantization_status": "compressed",
    }
    expected = {name: golden.pop(f"{name}.expected") for name in ("nvfp4", "fp8")}
    found = _read(golden, config)
    assert {name: q.codec for name, q in found.items()} == {
        "nvfp4.weight": "nvfp4",
        "fp8.weight": "fp8",
    }
    assert torch.equal(found["fp8.weight"].dequantize(), expected["fp8"])
    torch.testing.assert_close(
        found["nvfp4.weight"].dequantize(), expected["nvfp4"], rtol=3e-7, atol=0
    )


def test_compressed_tensors_refusals_and_blocks() -> None:
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    with pytest.raises(ts_quant.NotAvailableError, match="'pack-quantized'"):
        _read({}, config)
    with pytest.raises(ts_quant.NotAvailableError, match="frozen"):
        _read({}, {**config, "format": "float-quantized", "quantization_status": "frozen"})
    weight = torch.randn(6, 10).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3).bfloat16()
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": {"strategy": "block", "block_structure": [4, 4]}}},
    }
    q = _read({"x.weight": weight, "x.weight_scale": scale}, config)["x.weight"]
    spread = scale.float().repeat_interleave(4, 0)[:6].repeat_interleave(4, 1)[:, :10]
    assert torch.equal(q.dequantize(), weight.float() * spread)


# -- FP8 and MXFP4 -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(200, 130), (3, 140, 256)])
def test_block_fp8(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fused = len(shape) == 3
    name = "experts.gate_up_proj" if fused else "x.weight"
    suffix = "_scales_inv" if fused else "_scale_inv"
    tiles = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = (2.0 ** torch.randint(-4, 4, tiles)).to(dtype)
    tensors = {name: codes, name + suffix: scale, "x.activation_scale": torch.ones(())}
    q = _read(tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})[name]
    spread = scale.float().repeat_interleave(128, -2)[..., : shape[-2], :]
    spread = spread.repeat_interleave(128, -1)[..., : shape[-1]]
    assert torch.equal(q.dequantize(), codes.float() * spread)
    assert q.nbytes == codes.numel() + 4 * scale.numel()


def test_block_fp8_refusals() -> None:
    codes = torch.randn(4, 4).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    with pytest.raises(ts_quant.NotAvailableError, match="e5m2"):
        _read({}, {**config, "fmt": "e5m2"})
    for tensors, words in (
        ({"x.weight": codes}, "no x.weight_scale_inv"),
        ({"x.weight": codes, "x.weight_scale_inv": torch.ones(2, 3)}, r"expected \[2, 2\]"),
        ({"x.weight": codes, "x.weight_scale_inv": torch.ones(2, 2).int()}, "fp32 scales"),
    ):
        with pytest.raises(ts_quant.CheckpointError, match=words):
            _read(tensors, config)
    for block in ([0, 2], "128", [1]):
        with pytest.raises(ts_quant.CheckpointError, match="weight_block_size"):
            _read({}, {**config, "weight_block_size": block})


def test_mxfp4_stacked_experts() -> None:
    blocks, scales = _bytes(2, 6, 3, 16), torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8)
    tensors = {
        "experts.gate_up_proj_blocks": blocks,
        "experts.gate_up_proj_scales": scales,
        "experts.gate_up_proj_bias": torch.randn(2, 6),
    }
    q = _read(tensors, {"quant_method": "mxfp4"})["experts.gate_up_proj"]
    assert q.shape == (2, 6, 96) and q.codec == "mxfp4"
    expected = _unpack(blocks) * (2.0 ** (scales.float() - 127))[..., None]
    assert torch.equal(q.dequantize(), expected.flatten(-2))
    assert q.nbytes == blocks.numel() + scales.numel()
    tensors["experts.gate_up_proj_scales"] = scales[:, :, :2]
    with pytest.raises(ts_quant.CheckpointError, match=r"experts\.gate_up_proj_scales"):
        _read(tensors, {"quant_method": "mxfp4"})


# -- what belongs to no format -----------------------------------------------------------------


def test_plain_checkpoints_have_no_plan() -> None:
    assert plan_reading({"x.weight": torch.ones(2, 2)}, None, lambda name: torch.ones(1)) is None


@pytest.mark.parametrize("method", ["gptq", "awq", "torchao", "quanto", 3])
def test_unknown_methods_are_refused_by_name(method: Any) -> None:
    with pytest.raises(ts_quant.NotAvailableError, match=repr(method)):
        _read({}, {"quant_method": method})


def test_codes_without_their_scales_are_not_taken_for_weights() -> None:
    config = {"quant_method": "mxfp4"}
    with pytest.raises(ts_quant.CheckpointError, match=r"y\.weight"):
        _read({"y.weight": _bytes(4, 4)}, config)


# -- a folder ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder(config, shard, shard, ...): a checkpoint folder."""

    def make(config: Any, *shards: dict[str, Tensor]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        for index, tensors in enumerate(shards):
            write_file(tmp_path / f"model-{index}.safetensors", tensors)
        return tmp_path

    return make


def test_a_folder_of_shards(folder: Callable[..., Path]) -> None:
    one, two = _modelopt("a", 4, 32, False), _modelopt("b", 2, 16, True)
    moved = {"b.weight_scale": two.pop("b.weight_scale")}  # a weight's tensors in two shards
    path = folder({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {**one, **moved}, two)
    found = dict(iterate_checkpoint(path, torch.float32))
    assert set(found) == {"a.weight", "b.weight"}
    expected = _read({**one, **two, **moved}, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    for name, q in expected.items():
        assert torch.equal(found[name].dequantize(), q.dequantize())


def test_a_folder_of_experts_gives_them_as_models_hold_them(folder: Callable[..., Path]) -> None:
    """Square ones too, whose shape does not tell; the model's names and shapes are loaded."""
    codes, scales = _bytes(2, 32, 1, 16), torch.randint(110, 140, (2, 32, 1), dtype=torch.uint8)
    stored = (_unpack(codes) * (2.0 ** (scales.float() - 127))[..., None]).flatten(-2)
    path = folder({"quant_method": "mxfp4"}, {"down_blocks": codes, "down_scales": scales})
    model = torch.nn.Module()
    model.down = torch.nn.Parameter(torch.empty(2, 32, 32, device="meta"), requires_grad=False)
    model.load_state_dict(dict(iterate_checkpoint(path, torch.float32)), assign=True)
    assert isinstance(model.down, ts_quant.TransposedQuantTensor)
    assert torch.equal(model.down.dequantize(), stored.transpose(1, 2))


def test_damaged_folders(folder: Callable[..., Path]) -> None:
    path = folder(None, {"a": torch.ones(3)}, {"a": torch.ones(2)})
    with pytest.raises(ts_quant.CheckpointError, match="both hold 'a'"):
        list(iterate_checkpoint(path))
    (path / "model-1.safetensors").unlink()
    assert torch.equal(dict(iterate_checkpoint(path))["a"], torch.ones(3))
    file = path / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ts_quant.CheckpointError, match="truncated"):
        list(iterate_checkpoint(path))
    (path / "config.json").write_text("[1]")
    with pytest.raises(ts_quant.CheckpointError, match=r"no JSON object|truncated"):
        list(iterate_checkpoint(path))
    with pytest.raises(ts_quant.CheckpointError, match=r"no \.safetensors"):
        list(iterate_checkpoint(path / "nowhere"))


# -- contradictions ----------------------------------------------------------------------------


def _block_fp8(**changes: Any) -> dict[str, Tensor]:
    tensors = {"a.weight": _e4m3(256, 128), "a.weight_scale_inv": torch.rand(2, 1) + 0.5}
    return {**tensors, **changes}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    broken = _block_fp8(**{"a.weight_scale_inv": torch.tensor([[bad], [1.0]])})
    with pytest.raises(
        ts_quant.CheckpointError, match=r"'a.weight' has 1 scales that are NaN .*\(scale\)"
    ):
        _read(broken, {"quant_method": "fp8"})
    tensors, _ = _bnb(torch.randn(8, 64), "a.weight")
    tensors["a.weight.absmax"][3] = bad
    with pytest.raises(
        ts_quant.CheckpointError, match=r"'a.weight' has 1 scales that are NaN .*absmax"
    ):
        _read(tensors)


def test_bytes_that_mean_nan_are_refused_as_scales() -> None:
    blocks, scales = _bytes(2, 4, 2, 16), torch.full((2, 4, 2), 120, dtype=torch.uint8)
    tensors = {"e_blocks": blocks, "e_scales": scales}
    assert _read(tensors, {"quant_method": "mxfp4"})
    scales[0, 0, 0] = 255
    with pytest.raises(ts_quant.CheckpointError, match=r"'e' has 1 scales that are NaN"):
        _read(tensors, {"quant_method": "mxfp4"})
    codes, e4m3 = _bytes(4, 16), _e4m3(4, 2)
    tensors = {
        "a.weight": codes,
        "a.weight_scale": e4m3,
        "a.weight_scale_2": torch.tensor(0.5),
    }
    assert _read(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    e4m3.view(torch.uint8)[1, 0] = 0xFF
    with pytest.raises(ts_quant.CheckpointError, match=r"'a.weight' has 1 scales that are NaN"):
        _read(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


def test_nested_scales_need_their_offset() -> None:
    tensors, wanted = _bnb(torch.randn(64, 64), "a.weight", compress_statistics=True)
    name = "a.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    assert torch.equal(_read(tensors)["a.weight"].dequantize(), wanted)
    del state["nested_offset"]
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ts_quant.CheckpointError, match=r"no nested_offset"):
        _read(tensors)


def test_a_weight_stored_twice_is_refused() -> None:
    tensors = {
        "a.weight_packed": _bytes(4, 16),
        "a.weight_scale": _e4m3(4, 2),
        "a.weight_global_scale": torch.tensor([2.0]),
    }
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    assert _read(tensors, config)
    tensors["a.weight"] = torch.randn(4, 32)
    with pytest.raises(ts_quant.CheckpointError, match=r"stores 'a.weight' twice"):
        _read(tensors, config)


def test_codes_without_a_config_are_not_taken_for_weights() -> None:
    with pytest.raises(ts_quant.CheckpointError, match=r"no quantization_config"):
        _read(_block_fp8())
    with pytest.raises(ts_quant.CheckpointError, match=r"beside 'a.weight_scale' holds codes"):
        _read({"a.weight": _bytes(4, 16), "a.weight_scale": torch.rand(4, 2)})
    mask = {"h.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), "h.weight": torch.rand(8, 8)}
    assert plan_reading(mask, None, lambda name: mask[name]) is None


def test_other_eight_bit_floats_are_not_taken_for_e4m3() -> None:
    with pytest.raises(ts_quant.OptionError, match=r"float8_e5m2; expected torch.uint8"):
        ts_quant.QuantTensor.from_buffers(
            "fp8",
            {"codes": torch.rand(4, 32).to(torch.float8_e5m2), "scale": torch.ones(4, 1)},
            shape=(4, 32),
            dtype=torch.float32,
            layout={"scales": "tile", "rows": 1, "block_size": 32},
        )
