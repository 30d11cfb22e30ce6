"""Updates by link and host threads together: errors, the end of a program, no memory left."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.errors import OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.optim import hybrid, storage
from ts_core.optim.device_places import DevicePlace
from ts_core.optim.hybrid import HybridSplit
from ts_core.optim.newest_first import NewestFirst
from ts_core.optim.pieces import Bytes, Piece
from ts_core.optim.places import HostPlace
from ts_core.optim.rates import Rates
from ts_core.optim.split import split
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

SIZE = 600_000


class SeparateHost(HostDevice):
    separate_memory = True


def optimizer_of(params: list[torch.nn.Parameter], **options: Any) -> OffloadAdamW:
    device = SeparateHost()
    return OffloadAdamW(params, device=device, copies=CopyEngine(device), **options)


def shared(**options: Any) -> tuple[torch.nn.Parameter, OffloadAdamW]:
    param = torch.nn.Parameter(torch.ones(SIZE))
    optimizer = optimizer_of([param], lr=0.1, **options)
    optimizer.build()
    optimizer.place_state(["shared"])
    return param, optimizer


@pytest.mark.parametrize(("failing", "ends"), [("host", False), ("link", False), ("host", True)])
def test_an_error_is_told_once_both_parts_are_over(
    failing: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other part still reads the gradients, and writes state and values.

    `ends`: the program does, and no thread takes the host's part.
    """
    param, optimizer = shared()
    if ends:

        def refuse(*_: Any) -> None:
            raise RuntimeError("cannot schedule new futures after shutdown")

        monkeypatch.setattr(NewestFirst, "submit", refuse)
    update, running = HostPlace.update, threading.Event()

    def host(self: Any, *args: Any) -> Any:
        if failing == "host":
            raise MemoryError("part of the host")
        running.set()
        time.sleep(0.3)
        result = update(self, *args)
        running.clear()
        return result

    def link(self: Any, *args: Any) -> Any:
        assert running.wait(10)
        raise MemoryError("part of the link")

    if failing == "link":
        monkeypatch.setattr(DevicePlace, "update", link)
    monkeypatch.setattr(HostPlace, "update", host)
    stream = optimizer._updates.storage.device_work().stream(over_link=True)
    stream.submit(lambda: time.sleep(0.3))  # type: ignore[attr-defined]
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(MemoryError, match=f"part of the {failing}"):
        optimizer.synchronize()
    assert not running.is_set()
    if failing == "host":
        assert _peek(param) < 1.0  # the device's part has been written


def test_an_error_is_told_once_the_pieces_on_their_way_have_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else keeps the gradient that they are copied from."""
    param, optimizer = shared(chunk_elems=1024)
    copy, arrived = CopyEngine.d2h, []

    def d2h(self: CopyEngine, *args: Any, **options: Any) -> Any:
        if len(arrived) == 3:
            raise MemoryError("piece")
        arrived.append(copy(self, *args, **options))
        return arrived[-1]

    monkeypatch.setattr(CopyEngine, "d2h", d2h)
    param.grad = torch.ones_like(param)
    with inject_delays(1, max_ms=200.0, share=1.0):
        optimizer.step()
        with pytest.raises(MemoryError, match="piece"):
            optimizer.synchronize()
        assert len(arrived) == 3 and all(event.query() for event in arrived)


def _peek(param: torch.nn.Parameter) -> float:
    """The first value as it is in memory now, without waiting for an update."""
    with torch._C.DisableTorchFunctionSubclass():
        return float(param.detach()[0])


def test_what_is_queued_is_done_though_the_program_ends() -> None:
    program = """
        import atexit, time, torch
        from ts_core import OffloadAdamW
        from ts_core.device.host import HostDevice
        from ts_core.optim import device_places
        from ts_core.transfer import CopyEngine

        class SeparateHost(HostDevice):
            separate_memory = True

        device = SeparateHost()
        param = torch.nn.Parameter(torch.zeros(600_000))
        optimizer = OffloadAdamW(
            [param], lr=0.5, weight_decay=0.0, device=device, copies=CopyEngine(device)
        )
        optimizer.build()
        optimizer.place_state(["shared"])
        worker = optimizer._updates.pipeline._device
        worker.submit(lambda: time.sleep(0.5))  # so that the end comes first
        param.grad = torch.ones_like(param)
        optimizer.step()
        atexit.register(lambda: print(param.detach().unique().mul(8).round()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "tensor([-4.])", done.stderr


def test_state_stays_in_its_memory_between_the_link_and_both_together() -> None:
    """A second copy of the state of the largest parameter may be more than can be page-locked."""
    param, optimizer = shared(mode="gpu")
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {name: value.data_ptr() for name, value in optimizer.state[param].items()}
    values = {name: value.clone() for name, value in optimizer.state[param].items()}
    for place in ("zero_copy", "shared", "zero_copy"):
        optimizer.place_state([place])
        state = optimizer.state[param]
        assert optimizer.buckets[0].place.name == place
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].data_ptr() == before[name]
            assert torch.equal(state[name], values[name])
    optimizer.place_state(["resident"])
    assert optimizer.state[param]["exp_avg"].data_ptr() != before["exp_avg"]
    optimizer.place_state(["shared"])
    assert torch.equal(optimizer.state[param]["exp_avg"], values["exp_avg"])


def test_a_split_that_finds_no_page_locked_memory_goes_on_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(DevicePlace):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if full and self.name == "zero_copy":
                raise OutOfBudgetError("no more memory can be page-locked")

    full = False
    monkeypatch.setattr(storage, "DevicePlace", Full)
    monkeypatch.setattr(hybrid, "_LARGE", SIZE)
    results = []
    for mode in ("cpu", "hybrid"):
        params = [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(3)]
        lines: list[str] = []
        optimizer = optimizer_of(params, mode=mode, lr=0.1)
        optimizer.build()
        inside = optimizer._updates
        if mode == "hybrid":
            inside.split = HybridSplit(
                inside.storage.device,  # type: ignore[arg-type]
                lambda: Rates(4e9, 45e9),
                lambda: 0,
                lines.append,
            )
            optimizer.place_state(["host", "resident", "host"])
            full = True
        for _ in range(6):
            for param in params:
                param.grad = torch.ones_like(param)
                optimizer._on_gradient(param)
            optimizer.step()
        optimizer.synchronize()
        results.append(params)
        state = optimizer.state_dict()["state"]
        for index, param in enumerate(params):
            shown = optimizer.state[param]["exp_avg"]
            assert shown.data_ptr() == state[index]["exp_avg"].data_ptr()
    assert sum("moves no more" in line for line in lines) == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_several_passes_leave_as_one() -> None:
    piece = Piece(1000, 4000, False, passes=3, link_share=0.5)
    assert piece.copied_bytes("shared") == Bytes(2000, 2000)
    assert piece.copied_bytes("host") == Bytes(4000, 12_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_memory_is_counted_as_it_is_taken(dtype: torch.dtype) -> None:
    arena = PinnedArena()
    device = SeparateHost()
    param = torch.nn.Parameter(torch.ones(SIZE, dtype=dtype))
    optimizer = OffloadAdamW([param], device=device, copies=CopyEngine(device), arena=arena)
    optimizer.build()
    optimizer.place_state(["zero_copy"])  # all of it in the arena
    others = arena.stats()["arena_used"] - optimizer.stats()["host_state_bytes"]
    optimizer.place_state(["shared"])
    assert arena.stats()["arena_used"] - others == optimizer.stats()["host_state_bytes"]


def test_what_comes_last_in_a_step_may_be_in_device_memory_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of those elsewhere is then not updated by both sides."""
    monkeypatch.setattr(hybrid, "_LARGE", SIZE)
    params = [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(2)]
    optimizer = optimizer_of(params, mode="hybrid")
    optimizer.build()
    optimizer.place_state(["resident", "zero_copy"])
    rates = Rates(1e9, 45e9)
    inside = HybridSplit(SeparateHost(), lambda: rates, lambda: 0, lambda line: None)
    for param in reversed(params):
        param.grad = torch.ones_like(param)
        optimizer._on_gradient(param)
    size, seconds = inside.away(optimizer.buckets)
    alone = split([Piece(SIZE, 4 * SIZE, False)], rates, 0)
    assert alone.places == ("zero_copy",) and size == 8 * SIZE
    assert seconds == pytest.approx(alone.seconds)
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "shared", "zero_copy", "resident"])
def test_no_gradient_is_kept_into_the_next_forward(place: str) -> None:
    """The largest would be there while the head's own is made."""
    param = torch.nn.Parameter(torch.ones(SIZE * 20, device="cuda"))
    optimizer = OffloadAdamW([param], lr=0.1, mode="gpu")
    optimizer.build()
    optimizer.place_state([place])
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        (param * 2.0).sum().backward()
        optimizer.step()
        optimizer.let_go()
        assert torch.cuda.memory_allocated() <= before
        optimizer.zero_grad()
    optimizer.synchronize()
    assert float(param.detach().max()) < 1.0
