"""Checkpoints that store weights quantized, through load_model: kept as stored, or decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ts_hf
from ts_core.errors import DataError, NotAvailableError, OptionError
from ts_core.registry import codecs


@pytest.fixture(autouse=True)
def _codecs() -> None:
    if not codecs.has("nf4"):
        pytest.skip("no codec is installed (ts-quant)")


def _stored(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if hasattr(p, "__tensor_flatten__")}


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def _rewrite(
    folder: Path, config: dict[str, Any] | None, change: Callable[[str, Tensor], dict[str, Tensor]]
) -> None:
    """Replace each linear weight of a saved model by the tensors `change` makes of it."""
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors.update(change(name, value) if _is_linear(name) else {name: value})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    if config is not None:
        fields["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(fields))


def _bnb(name: str, value: Tensor, nested: bool) -> dict[str, Tensor]:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        value, quant_type="nf4", compress_statistics=nested, blocksize=64
    )
    return {name: codes, **{f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()}}


def _fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    q = codecs.get("fp8").encode(value, layout="tile")
    codes, scale = q.buffers()
    tiles = (-(-value.shape[0] // 128), -(-value.shape[1] // 128))
    return {
        name: codes.view(value.shape).view(torch.float8_e4m3fn),
        f"{name}_scale_inv": scale.view(tiles),
    }


def _nvfp4(name: str, value: Tensor, number: float | None = None) -> dict[str, Tensor]:
    q = codecs.get("nvfp4").encode(value)
    codes, scale, global_scale = q.buffers()
    rows, columns = value.shape
    return {
        name: codes.view(rows, columns // 2),
        f"{name}_scale": scale.view(rows, columns // 16).view(torch.float8_e4m3fn),
        f"{name}_scale_2": global_scale.view(()) if number is None else torch.tensor(number),
        f"{name.removesuffix('.weight')}.input_scale": torch.tensor(1.0),
    }


def _awq(name: str, value: Tensor, number: float | None = None) -> dict[str, Tensor]:
    """NVFP4 codes of the weight over a factor per column, and the factors."""
    factors = torch.linspace(0.25, 3.0, value.shape[1], dtype=value.dtype)
    stem = name.removesuffix(".weight")
    return {**_nvfp4(name, value / factors, number), f"{stem}.pre_quant_scale": factors}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]], str]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda name, value: _bnb(name, value, False),
        "nf4",
    ),
    "bitsandbytes nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda name, value: _bnb(name, value, True),
        "nf4",
    ),
    "block fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8, "fp8"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4, "nvfp4"),
    "modelopt awq": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, _awq, "nvfp4"),
}


@pytest.fixture(params=list(FORMATS))
def stored_folder(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path]
) -> tuple[Path, dict[str, Tensor], str]:
    """(folder, what its linear weights decode to in bf16, codec)."""
    config, change, codec = FORMATS[request.param]
    folder = checkpoint("llama")
    _rewrite(folder, config, change)
    from ts_quant import iterate_checkpoint

    decoded = {
        name: value.dequantize()  # type: ignore[operator]
        for name, value in iterate_checkpoint(folder, torch.bfloat16)
        if hasattr(value, "__tensor_flatten__")
    }
    return folder, decoded, codec


def test_kept_as_stored(stored_folder: tuple[Path, dict[str, Tensor], str]) -> None:
    folder, decoded, codec = stored_folder
    model = ts_hf.load_model(folder)
    stored, report = _stored(model), model.trainstream_load
    assert set(stored) == set(decoded) and len(stored) == 28
    assert {p.codec for p in stored.values()} == {codec} and report.quantize is None
    assert report.stored_as and report.quantized_tensors == 28
    for name, parameter in stored.items():
        assert torch.equal(parameter.dequantize(), decoded[name])
    # No more bytes than the checkpoint has (nested scales keep their map per weight).
    files = sum(
        t.numel() * t.element_size() for t in load_file(folder / "model.safetensors").values()
    )
    assert report.total_bytes <= files
    assert not any(p.requires_grad for p in model.parameters())
    assert not hasattr(model.config, "quantization_config")


def test_the_model_computes_what_the_decoded_one_does(
    stored_folder: tuple[Path, dict[str, Tensor], str],
) -> None:
    folder, decoded, codec = stored_folder
    model = ts_hf.load_model(folder, quantize=codec)  # its own codec's name means as stored
    plain = ts_hf.load_model(folder, quantize=None)
    assert not _stored(plain)
    assert any("decoded to full precision" in event for event in plain.trainstream_load.events)
    for name, value in decoded.items():
        assert torch.equal(plain.get_parameter(name), value)
    ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_a_second_format_is_refused(stored_folder: tuple[Path, dict[str, Tensor], str]) -> None:
    folder, _, codec = stored_folder
    other = "int8" if codec != "int8" else "nf4"
    with pytest.raises(OptionError, match="already"):
        ts_hf.load_model(folder, quantize=other)
    events = ts_hf.load_model(folder, keep_precise=0.05, error_rank=2).trainstream_load.events
    assert sum("nothing to do, the weights are stored already" in event for event in events) == 2


def test_it_trains_under_wrap_with_paged_blocks(
    stored_folder: tuple[Path, dict[str, Tensor], str], lora: Callable[..., Any]
) -> None:
    folder, _, _ = stored_folder
    losses = []
    for offload in (False, True):
        model = lora(ts_hf.load_model(folder, dtype=torch.float32))
        model, optimizer = ts_hf.wrap_hf(
            model, lr=1e-2, device="host", quantize="none", param_offload=offload
        )
        ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
        run = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


def test_modelopts_own_config_file(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    excluded = "model.layers.3.mlp.down_proj.weight"
    _rewrite(folder, None, lambda n, v: {n: v} if n == excluded else _nvfp4(n, v))
    algorithms = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "NVFP4"}},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithms}))
    model = ts_hf.load_model(folder)
    assert len(_stored(model)) == 27 and excluded not in _stored(model)


# -- experts -----------------------------------------------------------------------------------


def _expert_name(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


@pytest.fixture
def experts(checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """experts(change): a Mixtral whose per-expert weights `change` stores."""

    def make(change: Callable[[str, Tensor], dict[str, Tensor]], **sizes: Any) -> Path:
        folder = checkpoint("mixtral", num_local_experts=3, **sizes)
        tensors: dict[str, Tensor] = {}
        for name, value in load_file(folder / "model.safetensors").items():
            tensors.update(change(name, value) if _expert_name(name) else {name: value})
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def _set_config(folder: Path, config: dict[str, Any]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))


def test_fp8_experts_are_joined_without_decoding(experts: Callable[..., Path]) -> None:
    folder = experts(_fp8, intermediate_size=128)
    _set_config(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    model = ts_hf.load_model(folder)
    plain = ts_hf.load_model(folder, quantize=None)
    stored = _stored(model)
    assert len(stored) == 4 and all(p.dim() == 3 and p.codec == "fp8" for p in stored.values())
    for name, parameter in stored.items():
        assert torch.equal(parameter.dequantize(), plain.get_parameter(name))
    ids = torch.randint(0, 256, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_experts_with_scaled_inputs_are_joined(experts: Callable[..., Path]) -> None:
    """ModelOpt gives all experts of a layer the same factors."""
    folder = experts(lambda name, value: _awq(name, value, 1e-4))
    _set_config(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    model = ts_hf.load_model(folder)
    plain = ts_hf.load_model(folder, quantize=None)
    stored = _stored(model)
    assert len(stored) == 4 and all(p.spec.channel_scale for p in stored.values())
    for name, parameter in stored.items():
        assert torch.equal(parameter.dequantize(), plain.get_parameter(name))
        assert torch.equal(parameter[1], plain.get_parameter(name)[1])


def test_experts_that_cannot_be_joined_are_decoded_and_said(
    experts: Callable[..., Path],
) -> None:
    # 96 rows: a tile of 128 would reach over the seam between gate and up.
    folder = experts(_fp8)
    _set_config(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    model = ts_hf.load_model(folder)
    plain = ts_hf.load_model(folder, quantize=None)
    ids = torch.randint(0, 256, (1, 7))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    events = " ".join(model.trainstream_load.events)
    assert "decoded to full precision" in events


def test_gpt_oss_experts(tiny_config: Callable[..., Any], tmp_path: Path) -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder = tmp_path / "oss"
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = value.transpose(1, 2).contiguous()  # [experts, rows, inputs], as it is stored
            codes, scale = codecs.get("mxfp4").encode(rows).buffers()
            groups = rows.shape[2] // 32
            tensors[f"{name}_blocks"] = codes.view(*rows.shape[:2], groups, 16)
            tensors[f"{name}_scales"] = scale.view(*rows.shape[:2], groups)
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _set_config(folder, {"quant_method": "mxfp4"})
    loaded = ts_hf.load_model(folder)
    assert len(_stored(loaded)) == 4  # as stored, although the model holds them transposed
    plain = ts_hf.load_model(folder, quantize=None)
    ids = torch.randint(0, 256, (1, 7))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, plain(ids).logits)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name, parameter in _stored(loaded).items():
        theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert torch.equal(parameter.dequantize(), theirs), name
    original = model.state_dict()
    for name, parameter in loaded.named_parameters():
        if "experts" in name and "bias" not in name:
            wanted = original[name].transpose(1, 2).contiguous()
            decoded = codecs.get("mxfp4").encode(wanted).dequantize().transpose(1, 2)
            given = (
                parameter.dequantize() if hasattr(parameter, "__tensor_flatten__") else parameter
            )
            assert torch.equal(given, decoded), name


# -- damage ------------------------------------------------------------------------------------


def test_damage_is_named(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    _rewrite(folder, {"quant_method": "fp8"}, _fp8)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    lost = {key: value for key, value in tensors.items() if key != f"{name}_scale_inv"}
    save_file(lost, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="up_proj"):
        ts_hf.load_model(folder)
    _set_config(folder, {"quant_method": "fp8", "fmt": "e5m2"})
    with pytest.raises(NotAvailableError, match="e5m2"):
        ts_hf.load_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated"):
        ts_hf.load_model(folder)
