"""Stacked experts stored in a codec's format: resident, paged with their block, paged by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ts_hf
import ts_quant
from ts_core import memory_report, quantize_model, unwrap
from ts_core.testing import inject_delays
from ts_hf.testing import FAMILIES, token_batch

Train = Callable[..., tuple[list[torch.Tensor], dict[str, torch.Tensor]]]
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
WAYS: list[dict[str, Any]] = [
    {"moe_paging": True},
    {"moe_paging": True, "param_offload": True},
    {"param_offload": True},
    {"param_offload": False},
]


def decoded_twin(model: Any) -> Any:
    """Plain torch: every stored weight decoded once."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if (
                parameter is not None
                and hasattr(parameter, "dequantize")
                and type(parameter) is not nn.Parameter
            ):
                dense = nn.Parameter(parameter.dequantize(), requires_grad=False)
                module._parameters[name] = dense
    return model


@pytest.mark.parametrize("codec", ["nf4", "int8", "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_equal_to_plain_torch_on_the_decoded_weights(
    codec: str, way: int, adapted: Callable[..., Any], train_steps: Train
) -> None:
    family = ["mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe"][way]
    implementation = ["eager", "grouped_mm"][len(codec) % 2]
    found = []
    for streamed in (False, True):
        model = adapted(family, lora=ATTENTION, experts_implementation=implementation)
        quantize_model(model, codec, blocks=ts_hf.find_decoder_layers(model))
        stored = model.get_base_model().model.layers[0].mlp.experts.down_proj
        assert isinstance(stored, ts_quant.QuantTensor) and stored.codec == codec
        if streamed:
            model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, **WAYS[way])
        else:
            model = decoded_twin(model)
            model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, quantize="none")
        with inject_delays(6, max_ms=0.5):
            found.append(train_steps(model, optimizer, 2))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("paging", [False, True])
def test_autograd_keeps_no_decoded_expert(
    implementation: str, paging: bool, adapted: Callable[..., Any]
) -> None:
    model = adapted("mixtral", lora=ATTENTION, experts_implementation=implementation)
    model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="nf4", moe_paging=paging)
    one = 2 * 96 * 64  # values of the smallest expert matrix, doubled
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().nbytes() // 4)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**token_batch(0, 1, 4)).loss
    assert kept and max(kept) < one
    loss.backward()
    session = model._trainstream_session
    decoded = session.experts.calls.decoded if paging else session.stored_experts._decoded
    assert not decoded._values  # nor does anything stay after backward


def test_gpt_oss_as_stored(adapted: Callable[..., Any], train_steps: Train) -> None:
    """MXFP4 codes of a checkpoint, held transposed: only the codes of picked experts are copied."""
    from ts_quant.transposed import TransposedQuantTensor

    found = []
    for paging in (None, False, True):
        model = adapted("gpt_oss", lora=ATTENTION, experts_implementation="eager")
        for module in model.modules():
            for name in ("gate_up_proj", "down_proj"):
                weight = module._parameters.get(name)
                if weight is not None and weight.dim() == 3:
                    codes = ts_quant.quantize(weight.data.transpose(1, 2).contiguous(), "mxfp4")
                    stored = TransposedQuantTensor(codes)
                    module._parameters[name] = nn.Parameter(stored, requires_grad=False)
        options: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "quantize": "none"}
        if paging is None:
            model, optimizer = ts_hf.wrap_hf(decoded_like_select(model), **options)
        else:
            model, optimizer = ts_hf.wrap_hf(model, moe_paging=paging, **options)
        found.append(train_steps(model, optimizer, 2))
    for losses, trained in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(losses, found[0][0], strict=True))
        assert all(torch.equal(trained[name], found[0][1][name]) for name in trained)
    report = memory_report(model)["experts"]
    experts = model.get_base_model().model.layers[0].mlp.experts
    assert report["host_bytes"] >= 3 * (experts.gate_up_proj.nbytes + experts.down_proj.nbytes)
    assert report["host_bytes"] < 1.01 * report["whole_bytes"] / (report["loads"] / 3)


@pytest.mark.parametrize("paging", [False, True])
def test_experts_with_scaled_inputs(
    paging: bool, adapted: Callable[..., Any], train_steps: Train
) -> None:
    """As an NVFP4_AWQ checkpoint holds them: factors that all experts of a stack share."""
    found = []
    for streamed in (False, True):
        model = adapted("mixtral", lora=ATTENTION, experts_implementation="eager")
        for module in model.modules():
            for name in ("gate_up_proj", "down_proj"):
                weight = module._parameters.get(name)
                if weight is not None and weight.dim() == 3:
                    module._parameters[name] = nn.Parameter(scaled(weight), requires_grad=False)
        if streamed:
            options: dict[str, Any] = {"moe_paging": paging, "param_offload": True}
        else:
            model, options = decoded_twin(model), {}
        model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, quantize="none", **options)
        found.append(train_steps(model, optimizer, 2))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


def scaled(weight: torch.Tensor) -> ts_quant.QuantTensor:
    factors = torch.linspace(0.25, 3.0, weight.shape[-1])
    plain = ts_quant.quantize(weight.data / factors, "nvfp4")
    names = plain.__tensor_flatten__()[0]
    return ts_quant.QuantTensor.from_buffers(
        "nvfp4",
        {**dict(zip(names, plain.buffers(), strict=True)), "channel_scale": factors},
        shape=plain.shape,
        dtype=plain.dtype,
        layout={"channel_scale": True},
    )


def decoded_like_select(model: Any) -> Any:
    """As `decoded_twin`, with the strides that one expert of a transposed stack has."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and hasattr(parameter, "stored"):
                dense = parameter.stored.dequantize().transpose(-1, -2)
                module._parameters[name] = nn.Parameter(dense, requires_grad=False)
    return model


def test_state_dict_and_unwrap_serve_decoded_values(adapted: Callable[..., Any]) -> None:
    model = adapted("qwen3_moe", lora=ATTENTION)
    model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="nf4", moe_paging=True)
    name = "base_model.model.model.layers.1.mlp.experts.gate_up_proj"
    stored = dict(model.named_parameters())[name]
    assert torch.equal(model.state_dict()[name], stored.dequantize())
    with torch.no_grad():
        before = model(**token_batch(1)).logits
        new = model.state_dict()[name] * 2
        model.load_state_dict({name: new}, strict=False)
        assert not torch.equal(model(**token_batch(1)).logits, before)
        after = model(**token_batch(1)).logits
        unwrap(model)
        assert torch.equal(model(**token_batch(1)).logits, after)


def test_codes_that_cannot_be_split_are_refused(adapted: Callable[..., Any]) -> None:
    from ts_core.errors import NotAvailableError

    model = adapted("mixtral", lora=ATTENTION)
    blocks = ts_hf.find_decoder_layers(model)
    quantize_model(model, "nf4", blocks=blocks, block_size=12288 * 4)
    with pytest.raises(NotAvailableError, match="cannot be split by expert"):
        ts_hf.wrap_hf(model, device="cpu", moe_paging=True)


def test_what_quantize_model_says(adapted: Callable[..., Any]) -> None:
    model = adapted("qwen3_moe", lora=ATTENTION)
    blocks = ts_hf.find_decoder_layers(model)
    said = quantize_model(model, "nf4", blocks=blocks)
    assert said["tensors"] == 3 * (4 + 2)
    assert said["bytes_after"] < 0.2 * said["bytes_before"]
    assert FAMILIES["qwen3_moe"].experts
