"""quantize_model's options and wrap()'s, with the codecs of ts-quant where they are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, quantize_model, unwrap, wrap
from ts_core.config import WrapOptions
from ts_core.engine.quantize import make_storer, quantizable_weights
from ts_core.engine.quantize_options import bytes_per_weight, quantize_options
from ts_core.engine.served import init_lora_from_error
from ts_core.errors import OptionError
from ts_core.registry import codecs
from ts_core.store.leaves import is_wrapper, stored_bytes
from ts_core.testing import tiny_model

needs_codecs = pytest.mark.skipif(not codecs.has("nf4"), reason="ts-quant is not installed")
WIDTH = 64


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _stored(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if is_wrapper(p)}


@needs_codecs
@pytest.mark.parametrize("double_quant", [False, True])
def test_bytes_and_counts_are_those_of_the_weights(double_quant: bool) -> None:
    model = tiny_model(3, WIDTH)
    plain = sum(stored_bytes(m.weight) for block in model.layers for m in (block.up, block.down))
    found = quantize_model(model, "nf4", double_quant=double_quant)
    stored = _stored(model)
    assert found["tensors"] == len(stored) == 6 and found["kept_precise"] == 0
    assert found["bytes_before"] == plain
    assert found["bytes_after"] == sum(stored_bytes(p) for p in stored.values())
    per_weight = found["bytes_after"] / (plain / 4)
    expected = codecs.get("nf4").bytes_per_weight(64, double_quant)
    assert per_weight == pytest.approx(expected, rel=0.01)


@needs_codecs
def test_keep_precise_stores_what_loses_most_in_the_next_format() -> None:
    model = tiny_model(3, WIDTH)
    with torch.no_grad():  # a heavy tail: blockwise formats lose most there
        model.layers[1].up.weight[::7, ::5] *= 50
    plain = tiny_model(3, WIDTH)
    base = quantize_model(plain, "nf4")["bytes_after"]
    found = quantize_model(model, "nf4", keep_precise=0.2)
    assert found["kept_precise"] == 1
    assert _stored(model)["layers.1.up.weight"].codec == "int8"
    assert base < found["bytes_after"] <= base * 1.2
    rows = found["report"].rows
    assert set(rows) == set(_stored(model))
    assert "int8 leaves" in rows["layers.1.up.weight"].reason


@needs_codecs
def test_a_joint_budget_is_spent_on_precision_and_rank() -> None:
    base = quantize_model(tiny_model(3, WIDTH), "nf4")["bytes_after"]
    model = tiny_model(3, WIDTH)
    with torch.no_grad():
        model.layers[0].up.weight *= 1 + 14 * (torch.rand(2 * WIDTH, WIDTH) < 0.02)
        left, right = torch.randn(WIDTH, 2), torch.randn(2, 2 * WIDTH)
        model.layers[1].down.weight.copy_(0.01 * torch.randn(WIDTH, 2 * WIDTH) + left @ right)
    found = quantize_model(model, "nf4", joint_budget=0.3)
    rows = found["report"].rows
    factors = sum(
        2 * sum(p.numel() for p in (m.error_start.a, m.error_start.b))
        for m in model.modules()
        if hasattr(m, "error_start")
    )
    assert found["bytes_after"] + factors <= 1.3 * base + 8
    assert found["kept_precise"] or found["report"].rank_pattern()
    assert found["kept_precise"] == sum(row.codec == "int8" for row in rows.values())
    assert {row.reason for row in rows.values()} != {"as asked"}


@needs_codecs
def test_a_share_of_the_channels_is_kept_in_bf16() -> None:
    plain = quantize_model(tiny_model(3, WIDTH), "fp8")
    assert plain["report"] is None
    model = tiny_model(3, WIDTH)
    loud = {"layers.0.up": torch.ones(WIDTH).index_fill(0, torch.tensor([5]), 1e4)}
    moments = {
        name.removesuffix(".weight"): torch.ones(p.shape[1])
        for name, p in model.named_parameters()
        if p.dim() == 2
    }
    found = quantize_model(
        model, "fp8", outlier_channels=1 / WIDTH, second_moments={**moments, **loud}
    )
    stored = _stored(model)
    assert {p.spec.outliers for name, p in stored.items() if "up" in name} == {1}
    assert stored["layers.0.up.weight"].buffers()[-1].tolist() == [5]
    columns = sum(2 * p.shape[0] * p.spec.outliers + 8 * p.spec.outliers for p in stored.values())
    assert found["bytes_after"] == plain["bytes_after"] + columns
    with pytest.raises(OptionError, match="outlier_channels="):
        quantize_model(tiny_model(3, WIDTH), "fp8", outlier_channels=0.5)


@needs_codecs
def test_options_under_auto_that_the_chosen_codec_lacks_are_left_out_and_said() -> None:
    options = WrapOptions(quantize="auto", keep_precise=0.05, double_quant=True)
    said: list[str] = []
    found = quantize_options(options, "int8", said.append)
    assert found["keep_precise"] == 0 and found["double_quant"] is True
    assert len(said) == 1 and "keep_precise=0.05 left out" in said[0]
    found = quantize_options(options, "nvfp4", said.append)
    assert found["keep_precise"] == 0.05 and found["double_quant"] is False
    assert "double_quant=True left out" in said[1]
    plain = codecs.get("nf4").bytes_per_weight(64, True)
    assert bytes_per_weight("nf4", options) == pytest.approx(1.05 * plain)
    assert quantize_options(options, None, said.append) == {}
    with pytest.raises(OptionError, match="double_quant"):
        bytes_per_weight("fp8", WrapOptions(quantize="fp8", double_quant=True))


@needs_codecs
def test_calibration_lowers_the_output_error_of_the_start() -> None:
    tokens = [torch.randint(0, 37, (4, 9)) for _ in range(3)]
    errors = {}
    for name, calibration in (("plain", None), ("data", tokens)):
        model = tiny_model(2, WIDTH)
        with torch.no_grad():  # inputs whose channels differ in size
            for block in model.layers:
                block.norm.weight.copy_(torch.logspace(-1.5, 1, WIDTH))
        x: list[torch.Tensor] = []
        model.layers[0].up.register_forward_pre_hook(lambda m, args, x=x: x.append(args[0]))
        exact = model.layers[0].up.weight.detach().clone()
        for batch in tokens:
            model(batch)
        x[:] = [part.detach() for part in x]
        quantize_model(model, "nf4", error_rank=8, calibration=calibration)
        start = model.layers[0].up.error_start
        near = model.layers[0].up.weight.dequantize() + start.b @ start.a
        inputs = torch.cat(x[:3]).flatten(0, 1)
        errors[name] = float((inputs @ (exact - near).t()).norm())
    assert errors["data"] < 0.9 * errors["plain"]


def test_calibration_needs_a_codec_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        API_VERSION = 1
        name = "bare"

    monkeypatch.setattr(codecs, "get", lambda name: Bare())
    with pytest.raises(OptionError, match="'bare' makes no use of calibration"):
        quantize_model(tiny_model(2, 8), "bare", calibration=[torch.zeros(1, 3, dtype=torch.long)])


@needs_codecs
def test_state_dict_holds_ordinary_tensors_and_loads_back() -> None:
    model = tiny_model(2, WIDTH)
    quantize_model(model, "int8")
    state = model.state_dict()
    stored = _stored(model)
    for name, parameter in stored.items():
        assert type(state[name]) is torch.Tensor
        assert torch.equal(state[name], parameter.dequantize())
    # A partial load encodes what it contains and leaves the rest.
    name = "layers.0.up.weight"
    fresh = torch.randn_like(state[name])
    others = {key: value.codes.clone() for key, value in stored.items() if key != name}
    missing = model.load_state_dict({name: fresh}, strict=False)
    assert name not in missing.missing_keys
    expected = codecs.get("int8").encode(fresh).dequantize()
    assert torch.equal(_stored(model)[name].dequantize(), expected)
    assert all(torch.equal(_stored(model)[key].codes, codes) for key, codes in others.items())


@needs_codecs
def test_wrap_takes_the_options_and_plans_with_their_bytes() -> None:
    model = tiny_model(3, WIDTH)
    wrap(
        model,
        device="host",
        quantize="nf4",
        keep_precise="auto",
        double_quant=True,
        param_offload=False,
    )
    report = memory_report(model)
    assert report["params"]["quantize"] == "nf4"
    names = [name for name, _ in model.named_parameters() if is_wrapper(_)]
    assert len(names) == 6
    state = model.state_dict()
    assert all(type(state[name]) is torch.Tensor for name in names)
    unwrap(model)


@needs_codecs
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("before", "asked", "reported", "event"),
    [
        ("fp8_row", "none", "fp8", "6 weights of the blocks are stored as fp8"),
        ("fp8_row", "nf4", "fp8", "6 {} fp8 already and stay so (0 others stored as nf4)"),
        ("nf4", "nf4", "nf4", "6 {} nf4 already and stay so (0 others stored as nf4)"),
        (None, "fp8_row", "fp8", "6 weights stored as fp8_row"),
        (None, "none", None, None),
    ],
)
def test_the_report_names_the_codec_of_the_weights_and_an_event_what_stays(
    before: str | None, asked: str, reported: str | None, event: str | None, offload: bool
) -> None:
    model = tiny_model(3, WIDTH)
    if before is not None:
        quantize_model(model, before)
    wrap(model, device="host", quantize=asked, param_offload=offload)
    report = memory_report(model)
    assert report["params"]["quantize"] == reported
    said = [line for line in report["events"] if line.startswith("quantize: ")]
    words = "weights of the blocks are stored as"
    assert said == ([] if event is None else ["quantize: " + event.replace("{}", words)])


@needs_codecs
def test_of_several_codecs_all_are_named_and_only_plain_weights_are_stored() -> None:
    model = tiny_model(3, WIDTH)
    quantize_model(model, "int8", blocks=[model.layers[0]])
    wrap(model, device="host", quantize="nf4", param_offload=False)
    report = memory_report(model)
    assert report["params"]["quantize"] == "int8+nf4"
    assert (
        "quantize: 2 weights of the blocks are stored as int8 already and stay so "
        "(4 others stored as nf4)"
    ) in report["events"]


@needs_codecs
def test_wrap_streams_weights_stored_before() -> None:
    """Pre-quantized weights through wrap(): same loss and gradients as resident."""
    tokens = torch.randint(0, 37, (2, 6))
    losses = []
    for offload in (False, True):
        model = tiny_model(3, WIDTH)
        quantize_model(model, "nf4", double_quant=True)
        wrap(model, device="host", quantize="none", param_offload=offload, eager=False)
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        state = model.state_dict()
        assert all(type(value) is torch.Tensor for value in state.values())
        partial = {"layers.1.down.weight": torch.zeros_like(state["layers.1.down.weight"])}
        model.load_state_dict(partial, strict=False)
        again = model.state_dict()
        assert not again["layers.1.down.weight"].any()
        assert torch.equal(again["layers.0.down.weight"], state["layers.0.down.weight"])
        unwrap(model)
    assert losses[0] == losses[1]


@needs_codecs
def test_what_a_codec_does_not_take_is_refused_or_left_out() -> None:
    model = tiny_model(2, WIDTH)
    before = _weights(model)
    for options in (
        {"keep_precise": 0.05, "quantize": "int8"},
        {"double_quant": True, "quantize": "fp8"},
    ):
        with pytest.raises(OptionError):
            wrap(model, device="host", **options)
        assert not hasattr(model, "_trainstream_session")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    wrap(model, device="host", quantize="none", keep_precise=0.05, error_rank=4)
    events = memory_report(model)["events"]
    assert any("keep_precise=0.05: nothing to do" in event for event in events)
    assert any("error_rank=4: nothing to do" in event for event in events)


def test_a_codec_without_a_storer_says_so() -> None:
    class Bare:
        name = "bare"

    with pytest.raises(OptionError, match="'bare' offers neither keep_precise nor error_rank"):
        make_storer(Bare(), {"error_rank": 4}, 64, False, None)
    assert make_storer(Bare(), {"error_rank": 0}, 64, False, None) is None


def _adapted(error_rank: int, **changes: Any) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    model = tiny_model(2, WIDTH)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["up", "down"], **changes)
    adapted = peft.get_peft_model(model, config)
    exact = tiny_model(2, WIDTH)
    blocks = adapted.base_model.model.layers
    if error_rank:
        quantize_model(adapted, "nf4", blocks=list(blocks), error_rank=error_rank)
    return adapted, exact


@needs_codecs
def test_adapters_start_at_the_error_with_the_right_scale() -> None:
    adapted, exact = _adapted(8)
    assert init_lora_from_error(adapted) == 4
    for layer, plain in zip(adapted.base_model.model.layers, exact.layers, strict=True):
        weight = plain.up.weight.detach()
        stored = layer.up.base_layer.weight.dequantize()
        delta = layer.up.get_delta_weight("default").detach()
        lost = float((weight - stored).norm())
        assert float((weight - stored - delta).norm()) < 0.9 * lost
        best = float(torch.linalg.svdvals(weight - stored)[8:].square().sum()) ** 0.5
        assert float((weight - stored - delta).norm()) == pytest.approx(best, rel=1e-3)


@needs_codecs
def test_wrap_starts_fresh_adapters_and_leaves_trained_ones() -> None:
    adapted, _ = _adapted(0)
    trained = adapted.base_model.model.layers[1].down
    with torch.no_grad():
        trained.lora_B["default"].weight.fill_(0.5)
    blocks = list(adapted.base_model.model.layers)
    wrap(adapted, device="host", quantize="nf4", error_rank=8, blocks=blocks)
    events = memory_report(adapted)["events"]
    assert any("error_rank: 3 adapters start" in event for event in events)
    assert bool((trained.lora_B["default"].weight == 0.5).all())


@needs_codecs
def test_what_adapters_hold_is_not_stored() -> None:
    """Nor that of one that is not active, which is frozen, nor its copies of whole modules."""
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    model = tiny_model(3, WIDTH)
    config = peft.LoraConfig(r=8, target_modules=["up"], modules_to_save=["down"])
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", peft.LoraConfig(r=4, target_modules=["up"]))
    adapted.set_adapter("other")
    before = _weights(adapted)
    blocks = list(model.layers)
    planned = quantizable_weights(blocks)
    found = quantize_model(adapted, "nf4", blocks=blocks)
    assert found["bytes_before"] == sum(size for _, size in planned)
    layers = [f"base_model.model.layers.{index}." for index in range(3)]
    stored = ("up.base_layer", "down.original_module", "lora_a", "lora_b")  # the last are its own
    assert set(_stored(adapted)) == {f"{at}{name}.weight" for at in layers for name in stored}
    adapters = [
        n for n, _ in adapted.named_parameters() if ".up.lora_" in n or "modules_to_save" in n
    ]
    assert len(adapters) >= 3 * 5
    for name in adapters:
        assert torch.equal(adapted.get_parameter(name), before[name])


def test_a_model_without_factors_counts_zero() -> None:
    assert init_lora_from_error(tiny_model(2, 8)) == 0


@pytest.mark.gpu
@needs_codecs
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "nf4", "keep_precise": 0.2, "double_quant": True},
        {"quantize": "nvfp4", "keep_precise": 0.2},
        {"quantize": "int8", "double_quant": True},
    ],
)
def test_streamed_equals_resident_on_a_gpu(options: dict[str, Any]) -> None:
    tokens = torch.randint(0, 37, (2, 6), device="cuda")
    runs = []
    for offload in (False, True):
        model = tiny_model(4, WIDTH, dtype=torch.bfloat16)
        model, optimizer = wrap(model, device="cuda", lr=1e-2, param_offload=offload, **options)
        losses = []
        for _ in range(4):
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        codecs_used = sorted(p.codec for p in _stored(model).values())
        unwrap(model)
        runs.append((losses, codecs_used))
    assert runs[0] == runs[1]


@pytest.mark.gpu
@needs_codecs
def test_adapters_start_on_a_gpu_as_on_a_cpu() -> None:
    adapted, exact = _adapted(0)
    blocks = list(adapted.base_model.model.layers)
    wrap(adapted.cuda(), device="cuda", quantize="nf4", error_rank=8, blocks=blocks)
    unwrap(adapted)
    layer = adapted.base_model.model.layers[0].up
    weight = exact.layers[0].up.weight.detach()
    lost = weight - layer.base_layer.weight.dequantize().cpu()
    delta = layer.get_delta_weight("default").detach().cpu()
    best = float(torch.linalg.svdvals(lost)[8:].square().sum()) ** 0.5
    assert float((lost - delta).norm()) == pytest.approx(best, rel=1e-2)


@needs_codecs
def test_only_layers_with_an_adapter_are_stored_for_one() -> None:
    models = []
    for options in ({"error_rank": 4, "error_iters": 4}, {}):
        model, _ = _adapted(0)
        blocks = list(model.base_model.model.layers)
        models.append((model, quantize_model(model, "nf4", blocks=blocks, **options)["report"]))
    (model, report), (plain, _) = models
    adapted = [name for name in report.rows if name.endswith("base_layer.weight")]
    assert 0 < len(adapted) < len(report.rows)
    for name, row in report.rows.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert hasattr(layer, "error_start") == (name in adapted), name
        if name not in adapted:
            assert "has no adapter" in row.reason
            other = plain.get_submodule(name.removesuffix(".weight"))
            assert torch.equal(layer.weight.dequantize(), other.weight.dequantize())


@needs_codecs
def test_a_model_without_blocks_is_refused_for_that() -> None:
    frozen = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()).requires_grad_(False) for _ in range(4)]
    model = nn.Sequential(*frozen, nn.Linear(64, 8))
    words = r"^quantize='int8' needs a stack of blocks and none was found.*Pass blocks=\[...\]"
    with pytest.raises(OptionError, match=words):
        wrap(model, device="host", quantize="int8")
    with pytest.raises(OptionError, match=words):
        quantize_model(model, "int8")
    trained = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(OptionError, match="no frozen linear weight in 2 blocks"):
        wrap(trained, device="host", quantize="int8")
    wrap(model, device="host", quantize="int8", blocks=list(model[:4]))
    assert all(is_wrapper(block[0].weight) for block in model[:4])
