"""Input embeddings in host memory: which, when, and that nothing but their place changes."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, pinned_stats, unwrap, wrap
from ts_core.device import HostDevice
from ts_core.engine import tables
from ts_core.engine.placement import block_leaves, model_profile
from ts_core.engine.tables import lookup_tables
from ts_core.errors import OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions, make_plan
from ts_core.schedule.corrections import PeakCorrector
from ts_core.testing import TinyModel, TrainingRecord, tiny_model, train

DEPTH = 4
VOCAB = 37


@pytest.fixture(autouse=True)
def small_tables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LEAST_BYTES", 1 << 10)


def untied(width: int = 16) -> TinyModel:
    model = tiny_model(DEPTH, width, dropout=0.1)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
    return model


def found(model: nn.Module, blocks: Any = ()) -> list[nn.Parameter]:
    return lookup_tables(model, block_leaves(model, list(blocks)))


def test_only_frozen_embeddings_that_nobody_else_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untied()
    assert [id(p) for p in found(model, model.layers)] == [id(model.embed.weight)]
    assert found(tiny_model(DEPTH)) == []  # tied to the head
    model.embed.weight.requires_grad_(True)
    assert found(model) == []
    model.embed.weight.requires_grad_(False)
    model.embed.max_norm = 1.0
    assert found(model) == []
    model.embed.max_norm = None
    model.head.weight.data = model.embed.weight.data.view(VOCAB, 16)  # two parameters, one memory
    assert found(model) == []
    model = untied()
    model.layers[0].table = nn.Embedding(VOCAB, 16)
    model.layers[0].table.weight.requires_grad_(False)
    assert len(found(model)) == 2
    assert len(found(model, model.layers)) == 1  # what can be paged is paged
    monkeypatch.setattr(tables, "LEAST_BYTES", VOCAB * 16 * 4 + 1)
    assert found(model) == []


PROFILE = ModelProfile(pageable=(1000,) * 10, fixed_device=3000, tables=2000, host_state=500)
OPTIONS = PlanOptions(headroom=0.0, activation_share=0.0)


@pytest.mark.parametrize(
    ("room", "options", "host_tables", "paged"),
    [
        (13_000, {}, 0, 0),  # everything fits
        (12_999, {}, 2000, 0),  # a block would have to stream
        (8_000, {}, 2000, 5),
        (5_000, {"param_offload": True}, 0, 10),  # as asked, and it fits
        (3_999, {"param_offload": True}, 2000, 10),
        (13_000, {"param_offload": False}, 0, 0),
        (30_000, {"param_offload": (0,)}, 0, 1),
    ],
)
def test_tables_leave_before_blocks_do(
    room: int, options: dict[str, Any], host_tables: int, paged: int
) -> None:
    plan = make_plan(PROFILE, MachineProfile(room, 10**6), replace(OPTIONS, **options))
    assert plan.fits and (plan.host_tables, len(plan.paged)) == (host_tables, paged)
    assert plan.predicted["fixed"] == 3000 - host_tables
    assert plan.host.get("tables", 0) == host_tables
    assert any("input embeddings in host memory" in r for r in plan.reasons) == (host_tables > 0)


def test_tables_stay_where_they_cannot_leave() -> None:
    refused = make_plan(
        PROFILE, MachineProfile(12_999, 10**6), replace(OPTIONS, param_offload=False)
    )
    assert not refused.fits and refused.host_tables == 0
    same = make_plan(PROFILE, MachineProfile(5_000, 10**6, counts_fixed=False), OPTIONS)
    assert same.host_tables == 0
    # Host memory for three blocks and the state, not for the table.
    large = replace(PROFILE, fixed_device=5000, tables=4000)
    short = make_plan(large, MachineProfile(14_500, 3_600), OPTIONS)
    assert short.fits and short.host_tables == 0 and len(short.paged) == 3
    assert make_plan(large, MachineProfile(14_500, 4_500), OPTIONS).host_tables == 4000


def test_corrections_leave_tables_where_they_are() -> None:
    machine = MachineProfile(8_000, 10**6)
    plan = make_plan(PROFILE, machine, OPTIONS)
    moved = PROFILE.with_host_tables()
    corrector = PeakCorrector(moved, machine, OPTIONS, plan, range(10))
    changed = corrector.observe(1, 9_500)
    assert changed is not None and len(changed.paged) > len(plan.paged)
    assert changed.host_tables == 2000


class OtherMemory(HostDevice):
    """The host device as if it had memory of its own, of `limit` bytes."""

    separate_memory = True
    reads_host = True
    other = 0  # bytes of everything but blocks and slots

    def memory(self) -> dict[str, int]:
        used = self.pool.used + self.other
        return {"allocated": used, "reserved": used, "peak_allocated": used}

    def mapped(self, host: torch.Tensor) -> torch.Tensor | None:
        return super().mapped(host) if self.reads_host else None


def room_for(model: nn.Module, blocks: float) -> int:
    profile = model_profile(model, block_leaves(model, list(model.layers)), 8.0)
    assert profile.tables > 0
    return int(profile.fixed_device + profile.trained + blocks * profile.pageable[0])


def start(
    monkeypatch: pytest.MonkeyPatch,
    blocks: float,
    reads_host: bool = True,
    empty: bool = False,
    **options: Any,
) -> tuple[TinyModel, Any]:
    model = untied()
    device = OtherMemory()
    device.reads_host = reads_host
    other, limit = room_for(model, 0), room_for(model, blocks)
    if empty:
        values = {name: p.detach() for name, p in model.named_parameters()}
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        model = model.to("meta")
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        options["loader"] = values.__getitem__
    monkeypatch.setattr("ts_core.engine.wrapping._device_for", lambda *_: device)
    monkeypatch.setattr("ts_core.engine.codec_choice.plan_options", no_reserve)
    monkeypatch.setattr("ts_core.engine.wrapping.plan_options", no_reserve)
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        quantize="none",
        profile=False,
        host_arena=False,
        max_inflight_bytes=1 << 20,
        vram_headroom=0.0,
        vram_limit=limit,
        activation_offload=False,
        recompute=False,
        attention=None,
        **options,
    )
    device.other = other
    return wrapped


def no_reserve(config: Any) -> PlanOptions:
    return PlanOptions(param_offload=config.param_offload, headroom=0.0, activation_share=0.0)


@pytest.fixture(scope="module")
def plain() -> TrainingRecord:
    model = untied()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model, torch.optim.AdamW(trained, lr=1e-2), device="host", param_offload=False
    )
    return train(model, optimizer, 4)


@pytest.mark.parametrize("empty", [False, True])
def test_trained_with_the_embedding_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, plain: TrainingRecord, empty: bool
) -> None:
    before = pinned_stats().get("tables", 0)
    values = untied().embed.weight.detach().clone()
    model, optimizer = start(monkeypatch, 2.8, empty=empty)
    table = model.embed.weight
    size = table.numel() * 4
    assert pinned_stats()["tables"] == before + size
    report = memory_report(model)
    assert report["params"]["table_bytes"] == report["plan"]["predicted_host"]["tables"] == size
    assert any("input embeddings in host memory" in line for line in report["events"])
    assert plain.differences(train(model, optimizer, 4)) == []
    assert torch.equal(model.state_dict()["embed.weight"], values)
    model.load_state_dict({"embed.weight": values + 1}, strict=False)
    assert torch.equal(table, values + 1)

    model = unwrap(model)
    assert model.embed.weight is table and torch.equal(table, values + 1)
    gc.collect()
    assert pinned_stats().get("tables", 0) == before  # memory of the device again


def test_where_everything_fits_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pinned_stats().get("tables", 0)
    model, _ = start(monkeypatch, DEPTH + 1)
    assert memory_report(model)["params"]["table_bytes"] == 0
    assert pinned_stats().get("tables", 0) == before


@pytest.mark.parametrize("why", ["the device cannot read", "was refused", "no memory"])
def test_refused_memory_leaves_it_on_the_device(
    monkeypatch: pytest.MonkeyPatch, plain: TrainingRecord, why: str
) -> None:
    pinned = PinnedArena.try_pinned

    def refuse(arena: PinnedArena, size: int, *, tag: str) -> Any:
        if tag != "tables":
            return pinned(arena, size, tag=tag)
        if why == "no memory":
            raise OutOfBudgetError("no memory")
        return None

    if why != "the device cannot read":
        monkeypatch.setattr(PinnedArena, "try_pinned", refuse)
    model, optimizer = start(monkeypatch, 2.8, reads_host=why != "the device cannot read")
    session = model._trainstream_session
    assert session.plan.host_tables == 0 and session.plan.paged
    assert any("stay on the device, since" in e and why in e for e in session.events)
    assert plain.differences(train(model, optimizer, 4)) == []


def test_a_run_that_needs_it_is_refused_when_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfBudgetError, match="device budget"):
        start(monkeypatch, 0.8, reads_host=False)
    model, _ = start(monkeypatch, 0.8, reads_host=False, check_memory=False)
    assert len(model._trainstream_session.plan.paged) == DEPTH


@pytest.mark.gpu
def test_on_a_gpu_rows_come_from_host_memory() -> None:
    """Bit-equal to a table on the GPU, which holds none of its bytes; also read as a whole."""

    def run(room: int | None) -> tuple[TinyModel, TrainingRecord, int]:
        model = untied(1024)
        model.embed = nn.Embedding(40_000, 1024).requires_grad_(False)
        torch.manual_seed(1)
        nn.init.normal_(model.embed.weight)
        trained = [p for p in model.parameters() if p.requires_grad]
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        options: dict[str, Any] = {}
        if room is not None:  # beside what the process holds already
            limit = torch.cuda.memory_reserved() + room
            options = {"vram_limit": limit, "vram_headroom": 0.1 * room / limit}
        model, optimizer = wrap(
            model, torch.optim.AdamW(trained, lr=1e-3), device="cuda", quantize="none", **options
        )
        held = torch.cuda.memory_allocated() - held
        return model, train(model, optimizer, 4, device="cuda"), held

    kept, expected, all_of_it = run(None)
    assert memory_report(kept)["params"]["table_bytes"] == 0
    values = torch.randn(40_000, 1024)
    # Of rows, for which torch takes no memory; here, since it is more than the limit below allows.
    sums = values.cuda().sum(1).cpu()
    model, record, less = run(200 << 20)
    size = 40_000 * 1024 * 4
    table = model.embed.weight
    assert memory_report(model)["params"]["table_bytes"] == size and table.is_cuda
    assert all_of_it - less >= 0.99 * size  # torch's allocator rounds up
    assert expected.differences(record) == []
    assert torch.equal(table.cpu(), kept.embed.weight.cpu())
    model.load_state_dict({"embed.weight": values}, strict=False)
    assert torch.equal(table.cpu(), values)
    assert torch.equal(table.sum(1).cpu(), sums)
    unwrap(model)
    assert table.is_cuda and torch.equal(table.cpu(), values)
    unwrap(kept)
