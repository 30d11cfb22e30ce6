"""State on the device: torch's fused AdamW, with nothing that makes the host wait."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena
from ts_core.optim.norm_reports import SLOTS, NormReports
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

LIMIT = 3e-7


class Adapters(nn.Module):
    """Small matrices as of adapters, a large one, and one that is never used."""

    def __init__(self, dtype: torch.dtype = torch.float32, count: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(3 + k % 2, 17) for k in range(count)]
        self.small = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)
        self.large = nn.Parameter(torch.randn(520, 1040, generator=generator) * 0.1)
        self.unused = nn.Parameter(torch.randn(5, generator=generator))
        self.to(dtype)

    def loss(self, step: int, skip: int = -1) -> torch.Tensor:
        """Linear in every parameter used, so that gradients do not depend on rounding before."""
        total = torch.zeros((), device=self.large.device)
        for position, parameter in enumerate([*self.small, self.large]):
            if position != skip:
                factor = factors(tuple(parameter.shape), step % 7 + position).to(parameter)
                total = total + (parameter * factor).sum().float() * 1e-2
        return total

    def groups(self) -> list[dict[str, Any]]:
        half = len(self.small) // 2
        first, second = list(self.small)[:half], [*list(self.small)[half:], self.large, self.unused]
        return [
            {"params": first, "lr": 2e-3, "weight_decay": 0.1},
            {"params": second, "betas": (0.8, 0.99)},
        ]


@functools.cache
def factors(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def resident(model: Adapters, **options: Any) -> OffloadAdamW:
    optimizer = OffloadAdamW(model.groups(), lr=1e-3, **options)
    optimizer.make_resident()
    return optimizer


def steps(model: Adapters, optimizer: torch.optim.Optimizer, which: range, **options: Any) -> None:
    accumulation, clip = options.pop("accumulation", 1), options.pop("clip", None)
    for step in which:
        for micro in range(accumulation):
            (model.loss(10 * step + micro, **options) / accumulation).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p.float() - q.float()).abs().max().item() for p, q in pairs)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_equals_torchs_fused_adamw(clip: float | None, accumulation: int) -> None:
    ours, theirs = Adapters(), Adapters()
    optimizer = resident(ours, max_grad_norm=clip, accumulation_steps=accumulation)
    stock = torch.optim.AdamW(theirs.groups(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    other = torch.optim.lr_scheduler.LambdaLR(stock, lambda k: 1 / (1 + k))
    for step in range(20):
        steps(ours, optimizer, range(step, step + 1), accumulation=accumulation)
        steps(theirs, stock, range(step, step + 1), accumulation=accumulation, clip=clip)
        schedule.step()
        other.step()
    assert 0 < distance(ours, Adapters()) and distance(ours, theirs) <= LIMIT
    assert torch.equal(ours.unused, Adapters().unused)
    stats = optimizer.stats()
    assert stats["host_state_bytes"] == 0 and stats["d2h_bytes"] == (0 if clip is None else 80)
    assert stats["values_by_place"]["fused"] >= ours.large.numel() and stats["parameters"] == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_low_precision_parameters_have_an_fp32_copy_there(
    dtype: torch.dtype, clip: float | None
) -> None:
    ours, theirs = Adapters(dtype), Adapters(dtype)
    optimizer = resident(ours, max_grad_norm=clip)
    on_host = OffloadAdamW(theirs.groups(), lr=1e-3, max_grad_norm=clip)
    steps(ours, optimizer, range(12))
    steps(theirs, on_host, range(12))
    mine, reference = optimizer.state_dict()["state"], on_host.state_dict()["state"]
    for key, entry in reference.items():
        assert (mine[key]["master"] - entry["master"]).abs().max() <= LIMIT
    for parameter, (key, _) in zip(on_host.param_groups[0]["params"], mine.items(), strict=False):
        assert mine[key]["master"].dtype is torch.float32 and parameter.dtype is dtype
    assert distance(ours, theirs) <= 1e-2 * torch.finfo(dtype).eps + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_resumed_run_goes_on_bit_for_bit(dtype: torch.dtype, clip: float | None) -> None:
    whole = Adapters(dtype)
    optimizer = resident(whole, max_grad_norm=clip)
    steps(whole, optimizer, range(7))

    first = Adapters(dtype)
    before = resident(first, max_grad_norm=clip)
    steps(first, before, range(2))
    steps(first, before, range(2, 3), skip=1)  # one parameter falls behind
    second = Adapters(dtype)
    second.load_state_dict(first.state_dict())
    after = OffloadAdamW(second.groups(), lr=1e-3, max_grad_norm=clip)
    after.load_state_dict(copy.deepcopy(before.state_dict()))  # first on the host
    assert after.updates == 3
    after.make_resident()
    third = Adapters(dtype)
    third.load_state_dict(first.state_dict())
    directly = resident(third, max_grad_norm=clip)
    directly.load_state_dict(copy.deepcopy(before.state_dict()))
    for model, opt in ((first, before), (second, after), (third, directly)):
        steps(model, opt, range(3, 7))
        assert opt.updates == 7
    assert equal(first, second) and equal(first, third)
    assert not equal(first, whole)
    for key, entry in before.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, after.state_dict()["state"][key][name]), (key, name)


def test_state_dicts_pass_to_torch_and_back() -> None:
    ours, theirs = Adapters(), Adapters()
    optimizer = resident(ours)
    steps(ours, optimizer, range(3))
    stock = torch.optim.AdamW(theirs.groups(), lr=1e-3, fused=True)
    theirs.load_state_dict(ours.state_dict())
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(theirs, stock, range(3, 6))
    steps(ours, optimizer, range(3, 6))
    assert distance(ours, theirs) <= LIMIT
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    steps(theirs, stock, range(6, 8))
    steps(ours, optimizer, range(6, 8))
    assert distance(ours, theirs) <= LIMIT and optimizer.updates == 8


def test_parameters_without_a_gradient_are_left_alone() -> None:
    ours, theirs = Adapters(), Adapters()
    optimizer = resident(ours, compute_grad_norm=True)
    stock = torch.optim.AdamW(theirs.groups(), lr=1e-3, fused=True)
    norms = []
    for step, skip in enumerate([-1, 2, 6, 2, -1, 0]):
        theirs.loss(10 * step, skip=skip).backward()
        norms.append(
            torch.nn.utils.get_total_norm(
                [p.grad for p in theirs.parameters() if p.grad is not None]
            )
        )
        stock.step()
        stock.zero_grad()
        steps(ours, optimizer, range(step, step + 1), skip=skip)
        assert optimizer.last_grad_norm == pytest.approx(norms[-1].item(), rel=1e-6)
    assert distance(ours, theirs) <= LIMIT
    mine, reference = optimizer.state_dict()["state"], stock.state_dict()["state"]
    for key, entry in reference.items():
        assert torch.equal(mine[key]["step"], entry["step"])
    assert optimizer.step() is None and optimizer.last_grad_norm == 0.0


class Watch(TorchDispatchMode):
    """Counts operations, and refuses those that make the host wait for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")
        self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "skip_nonfinite": True}]
)
def test_a_step_neither_waits_nor_grows_with_the_number_of_adapters(
    options: dict[str, Any],
) -> None:
    counts = []
    for number in (6, 60):
        model = Adapters(count=number)
        model.unused.requires_grad_(False)
        groups = [{"params": list(model.small)}, {"params": [model.large], "lr": 1e-2}]
        optimizer = OffloadAdamW(groups, **options)
        optimizer.make_resident()
        steps(model, optimizer, range(2))
        model.loss(0).backward()
        with Watch() as watch:
            optimizer.step()
        assert watch.seen["_fused_adamw_"] == 2  # one per group
        counts.append({k: n for k, n in watch.seen.items() if k not in ("detach", "view")})
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) < 40


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_not_finite_are_reported_later(dtype: torch.dtype, skip: bool) -> None:
    said: list[str] = []
    model = Adapters(dtype)
    optimizer = resident(model, max_grad_norm=1.0, skip_nonfinite=skip, on_event=said.append)
    with inject_delays(1, max_ms=2.0):
        steps(model, optimizer, range(2))
        before = copy.deepcopy(model)
        model.loss(20).backward()
        model.small[1].grad[0, 0] = float("nan")
        optimizer.step()
        assert equal(model, before) is skip
        if skip:
            steps(model, optimizer, range(3, 4))
    optimizer.state_dict()  # waits for reports
    what = "is skipped, as asked" if skip else "is applied, as torch would"
    assert said == [f"step 3: gradients NaN or infinite; the update {what}"]
    expected = 3.0
    assert optimizer.state[model.large]["step"].item() == expected
    assert bool(torch.isfinite(model.large).all()) is skip


def test_reports_of_many_steps_all_come() -> None:
    said: list[str] = []
    model = Adapters()
    optimizer = resident(model, compute_grad_norm=True, skip_nonfinite=True, on_event=said.append)
    with inject_delays(2, max_ms=0.2):
        for _ in range(SLOTS + 5):
            model.small[0].grad = torch.full_like(model.small[0], float("inf"))
            optimizer.step()
    assert optimizer.last_grad_norm == float("inf")
    assert [line.split(":")[0] for line in said] == [f"step {k + 1}" for k in range(SLOTS + 5)]
    assert equal(model, Adapters())


@pytest.mark.parametrize("on_device", [False, True])
def test_pending_norms_keep_their_values_after_later_steps(on_device: bool) -> None:
    """Also those that the next hundred norms have come by after."""

    def run(read: str) -> list[Any]:
        model = Adapters()
        optimizer = OffloadAdamW(model.groups(), lr=1e-3, max_grad_norm=0.05)
        if on_device:
            optimizer.make_resident()
        assert optimizer.pending_grad_norm is None
        found = []
        for step in range(SLOTS + 5):
            steps(model, optimizer, range(step, step + 1))
            found.append(getattr(optimizer, read))
        return found

    with inject_delays(3, max_ms=0.2):
        later = run("pending_grad_norm")
        assert [norm() for norm in reversed(later)][::-1] == run("last_grad_norm")


@pytest.mark.parametrize("on_device", [False, True])
def test_no_pending_norm_where_none_is_needed(on_device: bool) -> None:
    model = Adapters()
    optimizer = OffloadAdamW(model.groups(), lr=1e-3)
    if on_device:
        optimizer.make_resident()
    steps(model, optimizer, range(1))
    assert optimizer.pending_grad_norm is None


def test_the_learning_rate_may_be_a_tensor() -> None:
    ours, theirs = Adapters(), Adapters()
    rate = torch.tensor(1e-3)
    optimizer = OffloadAdamW(ours.small, lr=rate)
    optimizer.make_resident()
    stock = torch.optim.AdamW(theirs.small, lr=1e-3, fused=True)
    for step in range(4):
        for model, opt in ((ours, optimizer), (theirs, stock)):
            steps(model, opt, range(step, step + 1))
        assert optimizer.param_groups[0]["lr"] is rate
        rate.mul_(0.5)
        stock.param_groups[0]["lr"] *= 0.5
    assert distance(ours, theirs) <= LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_user_writes_counts(dtype: torch.dtype) -> None:
    ours, theirs = Adapters(dtype), Adapters(dtype)
    optimizer, on_host = resident(ours), OffloadAdamW(theirs.groups(), lr=1e-3)
    for step in range(6):
        for model, opt in ((ours, optimizer), (theirs, on_host)):
            steps(model, opt, range(step, step + 1))
            with torch.no_grad():
                if step == 1:
                    model.small[0].mul_(2.0)
                    model.large.zero_()
                if step == 2:
                    model.small[1].data = model.small[1].data * 3.0
                    model.large.data = model.large.data.clone() + 1.0
    assert distance(ours, theirs) <= (LIMIT if dtype is torch.float32 else 2 * 2**-8)
    assert ours.large.min() > 0.5


def test_groups_may_change() -> None:
    ours, theirs = Adapters(), Adapters()
    optimizer = OffloadAdamW(list(ours.small)[:3], lr=1e-3)
    optimizer.make_resident()
    stock = torch.optim.AdamW(list(theirs.small)[:3], lr=1e-3, fused=True)
    for step in range(4):
        for model, opt in ((ours, optimizer), (theirs, stock)):
            if step == 1:
                opt.add_param_group({"params": [model.large], "lr": 3e-3})
            if step == 2:
                del opt.param_groups[0]["params"][1]
            steps(model, opt, range(step, step + 1))
            model.zero_grad()
    assert distance(ours, theirs) <= LIMIT
    assert not torch.equal(ours.large, Adapters().large)
    group = optimizer.param_groups
    group[1]["params"].append(group[0]["params"].pop())
    with pytest.raises(StateError, match="moved between param groups"):
        optimizer.step()


def test_gradients_are_taken_so_that_none_counts_twice() -> None:
    ours, theirs = Adapters(), Adapters()
    optimizer, stock = resident(ours), torch.optim.AdamW(theirs.groups(), lr=1e-3, fused=True)
    for step in range(3):
        ours.loss(step).backward()
        optimizer.step()  # and no zero_grad()
        assert all(parameter.grad is None for parameter in ours.parameters())
        theirs.loss(step).backward()
        stock.step()
        stock.zero_grad()
    assert distance(ours, theirs) <= LIMIT


def test_autograd_knows_of_the_update() -> None:
    model = Adapters()
    optimizer = resident(model)
    loss = (model.small[0] ** 2).sum()
    model.loss(0).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_is_refused() -> None:
    model = Adapters()
    optimizer = OffloadAdamW(model.parameters(), accumulation_steps=2)
    model.loss(0).backward()
    with pytest.raises(StateError, match="middle of a step"):
        optimizer.make_resident()
    optimizer.zero_grad()
    model.loss(0).backward()
    model.loss(1).backward()
    optimizer.step()
    optimizer.make_resident()
    optimizer.attach()  # nothing is to leave the device again
    model.loss(0).backward()
    assert model.large.grad is not None
    before = copy.deepcopy(model)
    model.large.grad = torch.zeros(520, 1040).to_sparse()
    with pytest.raises(OptionError, match="sparse"):
        optimizer.step()
    assert equal(model, before)


@pytest.mark.gpu
def test_a_step_can_be_captured() -> None:
    ours, theirs = Adapters().cuda(), Adapters().cuda()
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = OffloadAdamW(ours.groups(), lr=rate, max_grad_norm=0.05)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.make_resident()
    reference = theirs.groups()
    for group in reference:
        group["lr"] = 1e-3
    stock = torch.optim.AdamW(reference, fused=True)
    steps(ours, optimizer, range(2))
    gradients = [torch.zeros_like(p) for p in [*ours.small, ours.large]]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for parameter, gradient in zip([*ours.small, ours.large], gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for step in range(2, 5):
        fresh = copy.deepcopy(ours)
        fresh.loss(10 * step).backward()
        for source, gradient in zip([*fresh.small, fresh.large], gradients, strict=True):
            gradient.copy_(source.grad)
        graph.replay()
        rate.mul_(0.5)
    steps(theirs, stock, range(2), clip=0.05)
    for step in range(2, 5):
        steps(theirs, stock, range(step, step + 1), clip=0.05)
        for group in stock.param_groups:
            group["lr"] *= 0.5
    torch.cuda.synchronize()
    assert distance(ours, theirs) <= LIMIT


def test_values_written_before_the_state_moves_count() -> None:
    models = [Adapters(torch.bfloat16) for _ in range(2)]
    for model, early in zip(models, (True, False), strict=True):
        optimizer = OffloadAdamW(model.groups(), lr=1e-3)
        steps(model, optimizer, range(2))
        if not early:
            optimizer.make_resident()
        with torch.no_grad():
            model.large.mul_(1.5)
            model.small[1].fill_(0.25)
        if early:
            optimizer.make_resident()
        steps(model, optimizer, range(2, 4))
    assert distance(*models) == 0.0


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_the_norm_of_the_step_that_moved_the_state_is_still_told(factor: float) -> None:
    """`offload="auto"` moves it inside step(), before anybody has asked for that step's norm."""
    model = Adapters()
    optimizer = OffloadAdamW(model.groups(), lr=1e-3, max_grad_norm=1.0)
    (model.loss(0) * factor).backward()
    grads = [factors(tuple(p.shape), k) * 1e-2 * factor for k, p in enumerate([*model.small])]
    grads.append(factors(tuple(model.large.shape), len(grads)) * 1e-2 * factor)
    expected = float(torch.cat([grad.flatten() for grad in grads]).double().norm())
    optimizer.after_step = optimizer.make_resident
    optimizer.step()
    assert optimizer.resident
    pending = optimizer.pending_grad_norm
    assert pending is not None and pending() == optimizer.last_grad_norm
    assert pending() == pytest.approx(expected)
    optimizer.zero_grad()
    (model.loss(1) * 0.5).backward()
    optimizer.step()
    later = optimizer.pending_grad_norm
    assert later is not None and later() == pytest.approx(optimizer.last_grad_norm)
    assert later() != pending() and pending() == pytest.approx(expected)


def test_a_norm_is_not_lost_where_the_wait_for_it_ends_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ctrl-C, say."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    device = HostDevice()
    reports = NormReports(CopyEngine(device), PinnedArena(), lambda line: None)
    queued = [reports.queue(torch.tensor(float(k)), k, False) for k in range(2)]
    monkeypatch.setattr(device, "host_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reports.wait(queued[1])
    monkeypatch.undo()
    assert [reports.wait(report) for report in queued] == [0.0, 1.0]
