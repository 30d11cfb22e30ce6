"""wrap() and unwrap(): options, refusals, placement, state dicts, reports."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW, find_blocks, memory_report, unwrap, wrap
from ts_core.config import WrapOptions, parse_bytes
from ts_core.device import HostDevice
from ts_core.engine.blocks import shared_parameters
from ts_core.engine.wrap_checks import check_blocks
from ts_core.errors import (
    NotAvailableError,
    OptionError,
    OutOfBudgetError,
    StateError,
    UnknownPluginError,
)
from ts_core.optim.read_guard import Flight, ParameterInFlight, guard, release
from ts_core.testing import tiny_model, train

HOST: dict[str, Any] = {"device": "host", "quantize": "none"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offload", False),
        ("optimizer_mode", "fast"),
        ("activation_offload", 1.5),
        ("activation_offload", "yes"),
        ("param_offload", -0.1),
        ("param_offload", [0, -1]),
        ("param_offload", "half"),
        ("quantize", 4),
        ("quantize", True),
        ("quant_block_size", 3),
        ("quant_block_size", 64.0),
        ("prefer", "fast"),
        ("recompute", "always"),
        ("attention", "xformers"),
        ("outliers", 0.2),
        ("kernels", 1),
        ("keep_precise", 0.6),
        ("error_rank", True),
        ("double_quant", 1),
        ("disk_offload", 3),
        ("host_arena", True),
        ("peer", -1),
        ("moment_dtype", "float16"),
        ("distributed", "yes"),
        ("guard_params", None),
        ("max_grad_norm", 0),
        ("max_grad_norm", True),
        ("accumulation_steps", 0),
        ("accumulation_steps", 2.0),
        ("vram_headroom", 1),
        ("vram_limit", "12 apples"),
        ("vram_limit", 0),
        ("vram_limit", True),
        ("check_memory", 1),
        ("max_inflight_bytes", 0),
        ("prefetch_depth", 0),
        ("min_offload_bytes", -1),
        ("cuda_graphs", None),
        ("eager", 1),
        ("threads", 0),
        ("profile", "quick"),
        ("lr", -1.0),
        ("verbose", 1),
        ("device", 0),
        ("blocks", []),
    ],
)
def test_bad_option_values_name_option_value_and_what_is_accepted(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        wrap(tiny_model(), **{name: value})
    text = str(caught.value)
    assert name in text and repr(value) in text and "Use" in text
    assert not isinstance(caught.value, NotAvailableError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peer", 1 << 20),
        ("peer", True),
        ("peer", 1),
        ("peer", "8GiB"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name: str, value: Any) -> None:
    model = tiny_model()
    with pytest.raises(NotAvailableError, match=f"{name}=.*not available in this version"):
        wrap(model, **{name: value})
    assert not hasattr(model, "_trainstream_session")


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="Did you mean 'param_offload'"):
        wrap(tiny_model(), param_ofload=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mode", "Did you mean 'optimizer_mode'"),
        ("gradient_accumulation_steps", "Did you mean 'accumulation_steps'"),
        ("weight_decay", r"one \(torch.optim.AdamW or OffloadAdamW\)"),
        ("skip_nonfinite", r"one \(OffloadAdamW\) that was made with skip_nonfinite="),
    ],
)
def test_unknown_options_of_other_places_say_where_they_belong(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"no option '{name}'.*{said}"):
        wrap(tiny_model(), **{name: 1})


def test_defaults_are_those_of_the_interface() -> None:
    options = WrapOptions()
    assert (options.optimizer_mode, options.offload, options.vram_headroom) == ("cpu", "auto", 0.1)
    assert (options.quant_block_size, options.prefer, options.accumulation_steps) == (
        64,
        "exact",
        1,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (None, None),
        (1000, 1000),
        ("12GiB", 12 * 1024**3),
        ("1.5G", 3 * 1024**3 // 2),
        ("500MB", 500_000_000),
        ("24 mib", 24 * 1024**2),
        ("77B", 77),
        ("4194304", 4 << 20),
        ("2KB", 2000),
    ],
)
def test_sizes(text: Any, size: int | None) -> None:
    assert parse_bytes("vram_limit", text) == size


@pytest.mark.parametrize("value", ["12", "1.5", " 24 ", 8, 999])
def test_a_size_without_a_unit_is_taken_for_a_mistake(value: Any) -> None:
    with pytest.raises(OptionError, match=rf"bytes: did you mean {str(value).strip()}GiB"):
        WrapOptions(vram_limit=value)
    with pytest.raises(OptionError, match="a text like '8GiB'"):
        WrapOptions(host_arena=value)


def test_refusals_of_state() -> None:
    model = tiny_model()
    wrap(model, **HOST)
    with pytest.raises(StateError, match="already wrapped"):
        wrap(model, **HOST)
    with pytest.raises(StateError, match="already wrapped"):
        wrap(nn.Sequential(model), **HOST)
    frozen = tiny_model()
    frozen.requires_grad_(False)
    with pytest.raises(OptionError, match="nothing to train"):
        wrap(frozen, **HOST)
    with pytest.raises(OptionError, match="SGD"):
        wrap(tiny_model(), torch.optim.SGD(tiny_model().parameters(), lr=0.1), **HOST)
    with pytest.raises(OptionError, match=r"Pass a torch\.nn\.Module"):
        wrap([1, 2], **HOST)  # type: ignore[type-var]
    with pytest.raises(StateError, match="not wrapped"):
        unwrap(tiny_model())
    with pytest.raises(StateError, match="not wrapped"):
        memory_report(tiny_model())
    with pytest.raises(OptionError, match="not a module of the model"):
        wrap(tiny_model(), blocks=[nn.Linear(2, 2)], **HOST)
    with pytest.raises(OptionError, match=r"blocks \[7\]"):
        wrap(tiny_model(), param_offload=[0, 7], **HOST)
    with pytest.raises(OptionError, match="none was found"):
        wrap(nn.Linear(3, 3), param_offload=True, **HOST)
    with pytest.raises(OptionError, match="no matrix that can stream"):
        adapters = nn.Sequential(*(nn.LayerNorm(3) for _ in range(3)))
        wrap(adapters, param_offload=True, **HOST)
    with pytest.raises(OptionError, match="cuda:99"):
        wrap(tiny_model(), device="cuda:99", quantize="none")
    with pytest.raises(OptionError, match="'tpu'"):
        wrap(tiny_model(), device="tpu", quantize="none")


def block_bytes(model: nn.Module) -> int:
    wrapped, _ = wrap(copy.deepcopy(model), param_offload=[0], **HOST)
    return int(memory_report(wrapped)["params"]["slot_bytes"])


def test_byte_limit_decides_how_many_blocks_stay() -> None:
    size = block_bytes(tiny_model(depth=6))
    for resident in range(4):
        limit = int(size * (2 + resident + 0.5) / 0.9)
        model, optimizer = wrap(tiny_model(depth=6), vram_limit=limit, **HOST)
        report = memory_report(model)
        assert len(report["params"]["paged_blocks"]) == 6 - resident
        assert report["gpu"]["allocated"] <= limit
        train(model, optimizer, 2)
        assert memory_report(model)["gpu"]["peak_allocated"] <= limit
    model, _ = wrap(tiny_model(depth=6), vram_limit=int(size * 6.5 / 0.9), **HOST)
    assert memory_report(model)["params"]["paged_blocks"] == []


def test_limit_too_small_for_one_block_is_refused_and_changes_nothing() -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    size = block_bytes(model)
    with pytest.raises(OutOfBudgetError) as caught:
        wrap(model, vram_limit=size // 2, **HOST)
    text = str(caught.value)
    assert "short by" in text and "vram_limit" in text and "budget" in text
    assert not hasattr(model, "_trainstream_session")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    wrap(model, vram_limit=size * 3, **HOST)
    with pytest.raises(OutOfBudgetError):
        wrap(tiny_model(), vram_limit=size * 3, param_offload=False, **HOST)


def mixed() -> nn.Sequential:
    """Four frozen blocks and a trained head, side by side: no stack of one class."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()).requires_grad_(False) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 8))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("param_offload", True),
        ("param_offload", [0]),
        ("activation_offload", 0.5),
        ("recompute", True),
        ("recompute", [0]),
        ("disk_offload", "x"),
        ("vram_limit", "2MiB"),
    ],
)
def test_options_that_need_blocks_say_so_where_there_are_none(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model = mixed()
    with pytest.raises(OptionError) as caught:
        wrap(model, **{**HOST, name: value})
    text = str(caught.value)
    assert (
        text.startswith(f"{name}={value!r}")
        and "needs a stack of blocks and none was found" in text
    )
    assert "Pass blocks=[...]" in text
    assert not hasattr(model, "_trainstream_session") and not list(tmp_path.iterdir())
    wrap(model, blocks=list(model[:4]), **{**HOST, name: value})


def test_a_limit_of_a_gpu_needs_no_blocks() -> None:
    class Gpu(HostDevice):
        separate_memory = True

    config = WrapOptions(vram_limit="2MiB")
    check_blocks(mixed(), [], config, Gpu())
    with pytest.raises(OptionError, match="on the host device"):
        check_blocks(mixed(), [], config, HostDevice())


def test_an_event_says_that_there_are_no_blocks() -> None:
    def said(**options: Any) -> bool:
        events = memory_report(wrap(mixed(), **HOST, **options)[0])["events"]
        assert "cuda_graphs='auto': off, as no stack of blocks was found" in events
        return any("no stack of blocks was found" in line for line in events)

    assert said() and said(param_offload=[], recompute=[])
    found = mixed()
    model, _ = wrap(found, blocks=list(found[:4]), **HOST)
    assert not any("no stack" in line for line in memory_report(model)["events"])


def test_peer_names_only_what_works() -> None:
    for value in (True, -1, 1 << 20):
        with pytest.raises(OptionError) as caught:
            wrap(tiny_model(), peer=value)
        assert str(caught.value).endswith("Use 'auto', False or None.")


def test_optimizer_kinds() -> None:
    model = tiny_model()
    _, made = wrap(model, lr=0.5, **HOST)
    assert made.param_groups[0]["lr"] == 0.5
    model = tiny_model()
    own = OffloadAdamW([p for p in model.parameters() if p.requires_grad], lr=0.25)
    _, same = wrap(model, own, max_grad_norm=2.0, accumulation_steps=3, **HOST)
    assert same is own and own.max_grad_norm == 2.0 and own.accumulation_steps == 3
    model = tiny_model()
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.125)
    _, converted = wrap(model, adam, **HOST)
    assert converted.param_groups[0]["weight_decay"] == 0
    assert converted.param_groups[0]["lr"] == 0.125


def test_state_dict_while_wrapped_and_partial_load() -> None:
    plain = tiny_model()
    model, optimizer = wrap(tiny_model(), param_offload=True, **HOST)
    tokens = torch.randint(0, 37, (2, 7))
    model(tokens).backward()
    served = {name: value.clone() for name, value in model.state_dict().items()}
    assert set(served) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        if "lora" not in name:
            assert torch.equal(served[name], value), name
    optimizer.zero_grad()
    changed = {"layers.3.up.weight": torch.full_like(plain.layers[3].up.weight, 0.125)}
    result = model.load_state_dict(changed, strict=False)
    assert result.unexpected_keys == []
    plain.load_state_dict({k: v for k, v in served.items() if "lora" in k}, strict=False)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            plain.get_parameter(name).data.copy_(parameter.data)
    plain.load_state_dict(changed, strict=False)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))


def test_unwrap_gives_back_an_ordinary_model_and_wraps_again() -> None:
    plain, model = tiny_model(), tiny_model()
    model, optimizer = wrap(model, param_offload=True, lr=1e-2, **HOST)
    train(model, optimizer, 2)
    reference, ref_optimizer = wrap(plain, param_offload=False, lr=1e-2, **HOST)
    train(reference, ref_optimizer, 2)
    tokens = torch.randint(0, 37, (2, 7))
    assert unwrap(model) is model
    assert not hasattr(model, "_trainstream_session")
    with torch.no_grad():
        assert torch.equal(model(tokens), reference(tokens))
    model(tokens).backward()
    assert model.layers[0].lora_a.weight.grad is not None
    model.zero_grad()
    model, optimizer = wrap(model, param_offload=0.5, lr=1e-2, **HOST)
    record = train(model, optimizer, 1)
    assert torch.isfinite(record.losses[0])


def test_report_says_where_the_bytes_are() -> None:
    model, optimizer = wrap(tiny_model(), param_offload=[1, 3], max_grad_norm=1.0, **HOST)
    train(model, optimizer, 2)
    report = memory_report(model)
    assert {
        "gpu",
        "pinned",
        "pinned_by_tag",
        "events",
        "transfers",
        "optimizer",
        "resident",
        "params",
        "plan",
    } <= set(report)
    assert report["experts"] is report["replay"] is report["plan"]["recordings"] is None
    assert report["activations"]["policy"] and report["attention"] is not None
    assert memory_report(wrap(nn.Linear(2, 2), **HOST)[0])["activations"] is None
    assert report["params"]["paged_blocks"] == [1, 3]
    assert report["transfers"]["h2d"]["bytes"] >= report["params"]["load_bytes"] > 0
    assert report["optimizer"]["grad_norm"] > 0
    assert report["optimizer"]["host_state_bytes"] > 0
    assert report["resident"]["slots"] == 2 * report["params"]["slot_bytes"]
    assert any("plan:" in line for line in report["events"])
    assert model._trainstream_session.steps == 2
    assert set(memory_report()) == {"gpu", "pinned", "pinned_by_tag"}


def test_a_parameter_in_flight_does_not_count_as_quantized() -> None:
    model, _ = wrap(tiny_model(), param_offload=True, **HOST)
    update: Future[None] = Future()
    trained = [param for param in model.layers.parameters() if param.requires_grad]
    guard(trained, Flight(update, model._trainstream_session.copies))
    try:
        assert {type(param) for param in trained} == {ParameterInFlight}
        assert memory_report(model)["params"]["quantized_blocks"] == 0  # and it waits for nothing
    finally:
        update.set_result(None)
        release(trained)


def test_every_auto_that_stays_off_says_so() -> None:
    model, _ = wrap(tiny_model(), **HOST)
    events = " ".join(model._trainstream_session.events)
    for name in (
        "activation_offload",
        "recompute",
        "attention",
        "kernels",
        "fused_lora",
        "cuda_graphs",
    ):
        assert f"{name}='auto'" in events
    assert "recompute='auto': activations stay" in events

    model, _ = wrap(tiny_model(), recompute=[0], **HOST)
    events = " ".join(model._trainstream_session.events)
    assert "activation_offload='auto': other activations stay" in events


@pytest.mark.parametrize("mode", ["gpu", "hybrid", "auto", "cpu"])
@pytest.mark.parametrize("made_before", [False, True])
def test_an_update_by_a_gpu_that_is_not_there_says_so(mode: str, made_before: bool) -> None:
    model = tiny_model()
    if made_before:
        trained = [param for param in model.parameters() if param.requires_grad]
        model, optimizer = wrap(model, OffloadAdamW(trained, mode=mode), **HOST)
    else:
        model, optimizer = wrap(model, optimizer_mode=mode, **HOST)
    train(model, optimizer, 4)  # more than come before a split
    said = [line for line in memory_report(model)["events"] if line.startswith("optimizer")]
    expected = (
        f"optimizer_mode={mode!r}: there is no GPU, so host threads compute the same updates; "
        f"nothing is faster by it"
    )
    assert said == ([] if mode == "cpu" else [expected])


def test_find_blocks() -> None:
    model = tiny_model(depth=3)
    assert find_blocks(model) == list(model.layers)
    assert find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    small = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    large = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    assert find_blocks(nn.ModuleDict({"a": small, "b": large})) == list(large)


def test_shared_weights_are_not_paged() -> None:
    model = tiny_model(depth=4)
    model.layers[2].up.weight = model.layers[0].up.weight
    shared = shared_parameters(model, list(model.layers))
    assert shared == {id(model.layers[0].up.weight)}
    twin = copy.deepcopy(model)
    results = []
    for each, offload in ((model, True), (twin, False)):
        each, optimizer = wrap(each, param_offload=offload, lr=1e-2, **HOST)
        results.append(train(each, optimizer, 3))
    assert results[0].differences(results[1]) == []
    assert model.layers[2].up.weight is model.layers[0].up.weight


def test_broadcast_weights_are_not_paged() -> None:
    model = tiny_model(depth=3)
    with torch.no_grad():
        model.layers[1].mix.data = torch.ones(1, 1).expand(16, 16)
    model, optimizer = wrap(model, param_offload=True, **HOST)
    assert model.layers[1].mix.stride() == (0, 0)
    train(model, optimizer, 1)


def test_unknown_codec_lists_the_installed_ones() -> None:
    with pytest.raises(UnknownPluginError, match="pip install"):
        wrap(tiny_model(), quantize="nf5", device="host")


def test_the_cpu_of_a_local_rank_is_a_host_device() -> None:
    model, _ = wrap(tiny_model(), device=torch.device("cpu", 1))
    assert model._trainstream_session.device.kind == "host"


def test_what_several_processes_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="torchrun"):
        wrap(tiny_model(), distributed=True, **HOST)
    with pytest.raises(StateError, match="torchrun"):
        OffloadAdamW(tiny_model(full=True).parameters(), distributed=True)
    alone = tiny_model()
    optimizer = OffloadAdamW([p for p in alone.parameters() if p.requires_grad])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(NotAvailableError, match="hybrid"):
        wrap(tiny_model(), optimizer_mode="hybrid", **HOST)
    with pytest.raises(OptionError, match="eager=True"):
        wrap(tiny_model(), eager=True, **HOST)
    with pytest.raises(OptionError, match="trains alone"):
        wrap(alone, optimizer, **HOST)
    wrap(tiny_model(), distributed=False, **HOST)
