"""OffloadAdamW against torch.optim.AdamW: values, state dicts, groups, accumulation, clipping."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import zlib
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW
from ts_core.errors import DataError, OptionError, StateError
from ts_core.optim import convert_optimizer
from ts_core.testing import inject_delays

LIMIT = 3e-7


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 7), nn.LayerNorm(7))
    model.register_parameter("unused", nn.Parameter(torch.randn(5)))
    model.register_parameter("large", nn.Parameter(torch.randn(400, 701) * 0.01))
    return model.to(dtype)


def loss_of(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    """Linear in every used parameter, so that gradients do not depend on rounding before."""
    total = torch.zeros((), device=model.large.device)
    for name, parameter in model.named_parameters():
        if name != "unused":
            factor = factors(name, tuple(parameter.shape), step % 4, micro).to(parameter)
            total = total + (parameter * factor).sum().float() * 1e-2
    return total


@functools.cache
def factors(name: str, shape: tuple[int, ...], step: int, micro: int) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {step} {micro}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    first: int = 0,
) -> None:
    for step in range(first, first + steps):
        for micro in range(accumulation):
            (loss_of(model, step, micro) / accumulation).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def distance(a: nn.Module, b: nn.Module) -> float:
    return max(
        (p.float() - q.float()).abs().max().item()
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def groups_of(model: nn.Module, grouped: bool) -> list[dict[str, Any]]:
    params = list(model.parameters())
    if not grouped:
        return [{"params": params}]
    return [
        {"params": params[:3], "lr": 3e-3, "weight_decay": 0.0},
        {"params": params[3:], "betas": (0.8, 0.95), "eps": 1e-6},
    ]


@pytest.mark.parametrize(
    ("accumulation", "clip", "grouped", "eager"),
    [
        (a, c, g, e)
        for a, c, g, e in itertools.product((1, 3), (None, 0.05), (False, True), (None, False))
    ],
)
def test_matches_torch_over_twenty_steps(
    accumulation: int, clip: float | None, grouped: bool, eager: bool | None
) -> None:
    ours, theirs = mlp(), mlp()
    optimizer = OffloadAdamW(
        groups_of(ours, grouped),
        lr=2e-3,
        weight_decay=0.1,
        max_grad_norm=clip,
        accumulation_steps=accumulation,
        eager=eager,
    )
    reference = torch.optim.AdamW(groups_of(theirs, grouped), lr=2e-3, weight_decay=0.1)
    with inject_delays(5, max_ms=1.0):
        run(ours, optimizer, 20, accumulation=accumulation)
    run(theirs, reference, 20, accumulation=accumulation, clip=clip)
    assert distance(ours, theirs) <= LIMIT
    assert distance(ours, mlp()) > 1e-3
    assert torch.equal(ours.unused, mlp().unused)


def test_eager_and_deferred_are_bit_equal() -> None:
    results = []
    for eager in (True, False):
        model = mlp()
        run(model, OffloadAdamW(model.parameters(), lr=1e-2, eager=eager), 5)
        results.append(model)
    assert distance(*results) == 0.0


def test_norm_is_the_global_norm() -> None:
    ours, theirs = mlp(), mlp()
    optimizer = OffloadAdamW(ours.parameters(), compute_grad_norm=True)
    loss_of(ours, 0).backward()
    optimizer.step()
    loss_of(theirs, 0).backward()
    squares = [p.grad.double().pow(2).sum() for p in theirs.parameters() if p.grad is not None]
    expected = math.sqrt(sum(squares))
    assert optimizer.last_grad_norm == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_follow_an_fp32_master(dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    start = copy.deepcopy(model)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    masters = {p: p.detach().float().clone().requires_grad_() for p in model.parameters()}
    reference = torch.optim.AdamW(masters.values(), lr=1e-3, weight_decay=0.0)
    for step in range(20):
        kept: dict[Any, torch.Tensor] = {}
        handles = [
            p.register_hook(lambda g, p=p, kept=kept: kept.__setitem__(p, g.clone()))
            for p in model.parameters()
        ]
        loss_of(model, step).backward()
        for handle in handles:
            handle.remove()
        for p, grad in kept.items():
            masters[p].grad = grad.float()
        optimizer.step()
        reference.step()
        reference.zero_grad()
    state = optimizer.state_dict()["state"]
    for index, (p, master) in enumerate(masters.items()):
        if p is model.unused:
            continue
        assert (state[index]["master"] - master).abs().max() <= LIMIT
        assert torch.equal(p.detach(), state[index]["master"].to(dtype))
    assert torch.equal(model.unused, start.unused)
    assert distance(model, start) > 1e-3


def test_state_dicts_pass_both_ways() -> None:
    ours, theirs = mlp(), mlp()
    optimizer = OffloadAdamW(ours.parameters(), lr=2e-3)
    reference = torch.optim.AdamW(theirs.parameters(), lr=2e-3)
    run(ours, optimizer, 5)
    run(theirs, reference, 5)
    to_torch = torch.optim.AdamW(ours.parameters(), lr=9.0)
    to_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    to_ours = OffloadAdamW(theirs.parameters(), lr=9.0)
    to_ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert to_ours.param_groups[0]["lr"] == 2e-3
    optimizer.detach()
    run(ours, to_torch, 5, first=5)
    run(theirs, to_ours, 5, first=5)
    assert distance(ours, theirs) <= LIMIT


def test_resume_is_bit_exact() -> None:
    through, parts = mlp(), mlp()
    run(through, OffloadAdamW(through.parameters(), lr=1e-2), 8)
    first = OffloadAdamW(parts.parameters(), lr=1e-2)
    run(parts, first, 4)
    saved = copy.deepcopy(first.state_dict())
    first.detach()
    resumed = OffloadAdamW(parts.parameters(), lr=1e-2)
    resumed.load_state_dict(saved)
    run(parts, resumed, 4, first=4)
    assert distance(through, parts) == 0.0


def test_converted_optimizer_keeps_state_and_groups() -> None:
    ours, theirs = mlp(), mlp()
    before = torch.optim.AdamW(groups_of(ours, True), lr=2e-3)
    reference = torch.optim.AdamW(groups_of(theirs, True), lr=2e-3)
    run(ours, before, 3)
    run(theirs, reference, 3)
    converted = convert_optimizer(before)
    run(ours, converted, 3, first=3)
    run(theirs, reference, 3, first=3)
    assert distance(ours, theirs) <= LIMIT


def test_lr_scheduler_closure_and_added_group() -> None:
    ours, theirs = mlp(), mlp()
    results = []
    for model, kind in ((ours, OffloadAdamW), (theirs, torch.optim.AdamW)):
        params = list(model.parameters())
        optimizer = kind(params[:2], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": params[2:], "lr": 5e-3, "initial_lr": 5e-3})
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (4 + k))
                optimizer.zero_grad()

            def closure(model: nn.Module = model, step: int = step) -> torch.Tensor:
                for p in model.parameters():
                    p.grad = None
                loss = loss_of(model, step)
                loss.backward()
                return loss

            results.append(optimizer.step(closure).item())
            scheduler.step()
            optimizer.zero_grad()
    assert results[:6] == pytest.approx(results[6:], abs=1e-6)
    assert distance(ours, theirs) <= LIMIT


def test_values_written_by_the_user_are_taken_over() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = mlp(dtype=dtype), mlp(dtype=dtype)
        first, second = (
            OffloadAdamW(m.parameters(), lr=0.0, weight_decay=0.0) for m in (ours, theirs)
        )
        run(ours, first, 1)
        run(theirs, second, 1)
        with torch.no_grad():
            ours.large.fill_(0.25)
            ours[0].weight.data = torch.full_like(ours[0].weight, 0.5)
        run(ours, first, 1)
        assert torch.equal(ours.large.detach(), torch.full_like(ours.large, 0.25))
        assert torch.equal(ours[0].weight.detach(), torch.full_like(ours[0].weight, 0.5))


def test_zero_sized_and_non_contiguous_parameters() -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.turned = nn.Parameter(torch.randn(5, 7).t())
    model.scalar = nn.Parameter(torch.tensor(1.5))
    twin = copy.deepcopy(model)
    for each, optimizer in (
        (model, OffloadAdamW(model.parameters(), lr=1e-2)),
        (twin, torch.optim.AdamW(twin.parameters(), lr=1e-2)),
    ):
        for _ in range(5):
            (each.turned.pow(2).sum() * each.scalar + each.empty.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (model.turned - twin.turned).abs().max() <= LIMIT
    assert (model.scalar - twin.scalar).abs() <= LIMIT


def test_one_backward_too_many_is_refused_and_zero_grad_recovers() -> None:
    model = mlp()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, eager=False)
    loss_of(model, 0).backward()
    with pytest.raises(StateError, match="accumulation_steps=1"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    before = copy.deepcopy(model)
    optimizer.step()
    assert distance(model, before) == 0.0
    run(model, optimizer, 1)
    assert distance(model, before) > 0.0


def test_dropped_eager_step_is_reported() -> None:
    lines: list[str] = []
    model = mlp()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, on_event=lines.append)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    assert any("already been updated" in line for line in lines)


def test_torch_clipping_is_refused_with_the_remedy() -> None:
    model = mlp()
    optimizer = OffloadAdamW(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(StateError, match="max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_unattached_optimizer_takes_gradients_from_grad() -> None:
    ours, theirs = mlp(), mlp()
    optimizer = OffloadAdamW(ours.parameters(), lr=1e-2)
    optimizer.detach()
    loss_of(ours, 0).backward()
    assert ours.large.grad is not None
    optimizer.step()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    run(theirs, reference, 1)
    assert distance(ours, theirs) <= LIMIT


@pytest.mark.parametrize("clip", [None, 0.05])
def test_state_moved_to_the_device_goes_on_as_before(clip: float | None) -> None:
    ours, theirs = mlp(), mlp()
    optimizer = OffloadAdamW(groups_of(ours, True), lr=2e-3, max_grad_norm=clip)
    reference = torch.optim.AdamW(groups_of(theirs, True), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    other = torch.optim.lr_scheduler.LambdaLR(reference, lambda k: 1 / (1 + k))
    for step in range(8):
        if step == 3:
            optimizer.make_resident()
            assert optimizer.resident
            assert optimizer.stats()["host_state_bytes"] == 0
        run(ours, optimizer, 1, first=step)
        run(theirs, reference, 1, first=step, clip=clip)
        scheduler.step()
        other.step()
    assert distance(ours, theirs) <= LIMIT
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = OffloadAdamW(groups_of(ours, True), lr=2e-3, max_grad_norm=clip)
    resumed.load_state_dict(saved)
    assert resumed.updates == 8
    run(ours, resumed, 2, first=8)
    run(theirs, reference, 2, first=8, clip=clip)
    assert distance(ours, theirs) <= LIMIT


def test_state_cannot_move_in_the_middle_of_a_step() -> None:
    model = mlp()
    optimizer = OffloadAdamW(model.parameters(), accumulation_steps=2)
    loss_of(model, 0).backward()
    with pytest.raises(StateError, match="middle of a step"):
        optimizer.make_resident()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": -1.0}, OptionError),
        ({"betas": (0.9, 1.0)}, OptionError),
        ({"eps": -1e-8}, OptionError),
        ({"weight_decay": -0.1}, OptionError),
        ({"lr": "1e-3"}, OptionError),
        ({"eps": "1e-8"}, OptionError),
        ({"weight_decay": "0.1"}, OptionError),
        ({"weight_decay": None}, OptionError),
        ({"betas": ("0.9", 0.999)}, OptionError),
        ({"betas": 0.9}, OptionError),
        ({"max_grad_norm": "1.0"}, OptionError),
        ({"max_grad_norm": True}, OptionError),
        ({"skip_nonfinite": "no"}, OptionError),
        ({"compute_grad_norm": 1}, OptionError),
        ({"eager": "no"}, OptionError),
        ({"accumulation_steps": 0}, OptionError),
        ({"accumulation_steps": True}, OptionError),
        ({"max_grad_norm": 0.0}, OptionError),
        ({"mode": "fast"}, OptionError),
        ({"mode": "gpu", "moment_dtype": "int8"}, OptionError),
        ({"mode": "hybrid", "moment_dtype": "bf16"}, OptionError),
        ({"mode": "gpu", "pin_moments": False}, OptionError),
        ({"pin_moments": 1.5}, OptionError),
        ({"moment_dtype": "int4"}, OptionError),
        ({"moment_dtype": ["int8"]}, OptionError),
        ({"lr": float("inf")}, OptionError),
        ({"chunk_elems": 100}, OptionError),
        ({"chunk_elems": 1025}, OptionError),
        ({"threads": -1}, OptionError),
        ({"seed": -1}, OptionError),
        ({"eager": True, "max_grad_norm": 1.0}, OptionError),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="|".join(options)):
        OffloadAdamW(mlp().parameters(), **options)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("optimizer_mode", "mode"), ("max_norm", "max_grad_norm"), ("weight_decy", "weight_decay")],
)
def test_unknown_options_name_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"OffloadAdamW has no option '{name}'.*'{meant}'"):
        OffloadAdamW(mlp().parameters(), **{name: 1.0})
    with pytest.raises(OptionError, match=r"no option 'qqqq'\.$"):
        OffloadAdamW(mlp().parameters(), qqqq=1.0)


def test_unsupported_parameters_and_optimizers_are_refused() -> None:
    with pytest.raises(OptionError, match="complex64"):
        OffloadAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    adamw = OffloadAdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(OptionError, match="lr=-1"):
        adamw.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": -1})
    assert len(adamw.param_groups) == 1
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = OffloadAdamW(embedding.parameters())
    with pytest.raises(OptionError, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(OptionError, match="amsgrad"):
        convert_optimizer(torch.optim.AdamW(params, amsgrad=True))
    with pytest.raises(OptionError, match="weight_decay"):
        convert_optimizer(torch.optim.Adam(params, weight_decay=0.1))
    with pytest.raises(OptionError, match="SGD"):
        convert_optimizer(torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("mode", ["cpu", "gpu", "hybrid"])
@pytest.mark.parametrize("largest", [0.9, 2.0, 30.0])
def test_the_distance_to_torch_is_that_of_its_own_fused_update(mode: str, largest: float) -> None:
    """3e-7 holds below 1; the last places of larger values are wider."""

    def trained(make: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter((2 * torch.rand(20_001, generator=generator) - 1) * largest)
        optimizer = make([param])
        for _ in range(20):
            param.grad = torch.randn(20_001, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
        return param.detach().clone()

    default = trained(lambda params: torch.optim.AdamW(params, lr=2e-3))
    fused = trained(lambda params: torch.optim.AdamW(params, lr=2e-3, fused=True))
    ours = trained(lambda params: OffloadAdamW(params, lr=2e-3, mode=mode))
    distance = (ours - default).abs().max()
    assert 0 < distance <= 2 * (fused - default).abs().max()
    assert distance <= LIMIT or largest > 1


@pytest.mark.parametrize(
    "flag", ["amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"]
)
def test_keywords_of_torchs_adamw(flag: str) -> None:
    params = [nn.Parameter(torch.zeros(2))]
    group = OffloadAdamW(params, **{flag: False}).param_groups[0]
    assert (
        group
        == OffloadAdamW(params).param_groups[0]
        == OffloadAdamW(params, **{flag: None}).param_groups[0]
    )
    with pytest.raises(OptionError, match=f"{flag}=True is not supported.*Leave it off"):
        OffloadAdamW(params, **{flag: True})


def test_amsgrad_stands_where_torch_has_it() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    hyper = (1e-3, (0.9, 0.999), 1e-8, 0.01)
    OffloadAdamW(params, *hyper, False)
    with pytest.raises(OptionError, match="amsgrad=True"):
        OffloadAdamW(params, *hyper, True)


def test_foreign_state_dicts_are_refused_unchanged() -> None:
    model = mlp()
    optimizer = OffloadAdamW(model.parameters())
    run(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(before)
    other["state"][0]["exp_avg"] = torch.zeros(3)
    for bad in (
        {},
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [{"params": [0]}]},
        other,
    ):
        with pytest.raises(DataError):
            optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert all(
        torch.equal(before["state"][k]["exp_avg"], after["state"][k]["exp_avg"])
        for k in before["state"]
    )
    loss_of(model, 1).backward()
    with pytest.raises(StateError, match="accumulation"):
        optimizer.load_state_dict(before)
    optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_matches_torch_on_the_gpu(accumulation: int, clip: float | None) -> None:
    ours, theirs = mlp().cuda(), mlp().cuda()

    optimizer = OffloadAdamW(
        ours.parameters(), lr=2e-3, max_grad_norm=clip, accumulation_steps=accumulation
    )
    reference = torch.optim.AdamW(theirs.parameters(), lr=2e-3)
    with inject_delays(5, max_ms=1.0):
        for step in range(20):
            for micro in range(accumulation):
                (loss_of(ours, step, micro) / accumulation).backward()
                (loss_of(theirs, step, micro) / accumulation).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
    torch.cuda.synchronize()
    assert distance(ours, theirs) <= LIMIT
