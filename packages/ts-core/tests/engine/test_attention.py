"""The order of attention kernels: where it is changed, when it is not, and that it is put back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ts_core import OffloadAdamW, memory_report, unwrap, wrap
from ts_core.device import HostDevice, resolve_device
from ts_core.engine import attention
from ts_core.engine.attention import AttentionChoice, time_backends
from ts_core.engine.attention_order import settle_torchs_order
from ts_core.engine.own_forward import OwnForward


class SeparateHost(HostDevice):
    separate_memory = True


def order() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


class Attends(nn.Module):
    """Keeps the order that its attention calls saw."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.seen: list[list[int]] = []
        self.flash: list[bool] = []
        self.fail = False

    def forward(self, x: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        parts = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        self.seen.append(order())
        self.flash.append(torch.backends.cuda.flash_sdp_enabled())
        if self.fail:
            raise ValueError("in the middle")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=True)


@pytest.fixture(autouse=True)
def order_is_put_back() -> Iterator[None]:
    if torch.cuda.is_available():
        settle_torchs_order(torch.device("cuda"))  # torch's first call would change it
    before = order()
    yield
    assert order() == before


def choice(asked: str | None, model: nn.Module, device: Any = None) -> tuple[Any, list[str]]:
    said: list[str] = []
    made = AttentionChoice(asked, device or HostDevice(), said.append)
    made.install(model)
    return made, said


def test_a_name_comes_first_and_the_order_is_put_back() -> None:
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(2, 12, 16)
    usual = order()
    made, _ = choice("math", model, SeparateHost())
    model(x)
    assert model.seen.pop()[0] == int(SDPBackend.MATH) and order() == usual
    made.remove()
    made, _ = choice("math", model)
    found = model(x)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = Attends.forward(model, x)
    assert torch.equal(found, wanted)
    model.fail = True
    with pytest.raises(ValueError, match="in the middle"):
        model(x)
    assert order() == usual
    with made.again():
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    made.remove()
    model.seen.clear()
    model.fail = False
    model(x)
    assert model.seen == [usual]
    assert made.report() == {"mode": "math", "backend": "math", "timings_ms": {}}


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_mask_or_positions_keep_torchs_order(name: str) -> None:
    model, usual = Attends(), order()
    made, _ = choice("math", model, SeparateHost())
    value = None if name == "attention_mask" else torch.arange(12)
    model(torch.randn(2, 12, 16), **{name: value})
    assert (model.seen.pop() == usual) == (value is not None)
    if name == "position_ids":
        with made.again():  # what backward computes again follows the forward
            assert order() == usual
        with torch.no_grad():
            model.eval()(torch.randn(2, 12, 16))
        with made.again():  # an evaluation in between does not count
            assert order() == usual
    made.remove()


def test_none_and_auto_without_a_gpu_change_nothing() -> None:
    for asked in (None, "auto", "cudnn", "efficient", "flash"):
        model, usual = Attends(), order()
        made, said = choice(asked, model)
        model(torch.randn(2, 12, 16))
        assert model.seen == [usual] and not model._forward_pre_hooks
        assert bool(said) == (asked is not None)
        made.remove()


def test_deterministic_mode_is_read_at_every_forward() -> None:
    model = Attends()
    made, said = choice("cudnn", model, SeparateHost())
    x = torch.randn(2, 12, 16)
    model(x)
    assert model.seen.pop()[0] == int(SDPBackend.CUDNN_ATTENTION)
    try:
        torch.use_deterministic_algorithms(True)
        model(x)
        model(x)
        assert model.seen.pop()[0] == int(SDPBackend.FLASH_ATTENTION)
        assert sum("cudnn is left out" in line for line in said) == 1
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert attention.not_deterministic() == {"cudnn", "efficient"}
    finally:
        torch.use_deterministic_algorithms(False)
    assert attention.not_deterministic() == set()
    made.remove()


def test_auto_times_once_and_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    times = {"torch": 2.0, "flash": 1.9, "math": 1.0, "cudnn": 0.5}

    def timed(query: torch.Tensor, key: torch.Tensor, options: Any, device: Any) -> Any:
        shapes.append(tuple(query.shape))
        assert options == {"is_causal": True}
        return dict(times)

    monkeypatch.setattr(attention, "time_backends", timed)
    model = Attends()
    made, said = choice("auto", model, SeparateHost())
    x = torch.randn(2, 12, 16)
    with torch.no_grad():
        model.eval()(x)
    assert not shapes  # an evaluation decides nothing
    model.train()
    model(x).sum().backward()
    model(x)
    assert shapes == [(2, 2, 12, 8)] and made.backend == "cudnn"
    assert model.seen.pop()[0] == int(SDPBackend.CUDNN_ATTENTION)
    assert made.report()["timings_ms"] == {"flash": 1.9, "math": 1.0, "cudnn": 0.5}
    assert any("cudnn first" in line for line in said)
    made.remove()

    times.update(torch=0.1)
    model = Attends()
    made, said = choice("auto", model, SeparateHost())
    model(x)
    assert made.backend is None and "too little to matter" in said[-1]
    made.remove()


def test_auto_stops_looking_where_there_is_no_call_to_time() -> None:
    """The mode that looks stands in the way of block replay."""
    model = nn.Sequential(nn.Linear(4, 4))
    made, said = choice("auto", model, SeparateHost())
    modes: list[int] = []
    model[0].register_forward_hook(
        lambda *_: modes.append(torch._C._len_torch_function_stack())  # type: ignore[func-returns-value]
    )
    x = torch.randn(2, 4)
    with torch.no_grad():
        model(x)
    for _ in range(attention._LOOKS + 1):
        model(x).sum().backward()
    assert modes == [0, *[1] * attention._LOOKS, 0]
    assert "no call without a mask" in said[-1] and len(said) == 1
    made.remove()


@pytest.mark.parametrize("outer_first", [False, True])
def test_blocks_get_their_own_forward_back_once_there_is_nothing_to_do(outer_first: bool) -> None:
    """Also where others put something around it since, and are done earlier or later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = AttentionChoice("auto", SeparateHost(), lambda _: None)
    made.install(model, list(model))
    outer = [OwnForward(block, lambda own, args, kwargs: own(*args, **kwargs)) for block in model]
    x = torch.randn(2, 4)
    for _ in range(attention._LOOKS):
        model(x).sum().backward()
    assert all("forward" in block.__dict__ for block in model)
    if outer_first:
        for around in outer:
            around.remove()
    model(x)
    if not outer_first:
        assert all("forward" in block.__dict__ for block in model)
        for around in outer:
            around.remove()
    assert not any("forward" in block.__dict__ for block in model)
    made.remove()


def test_timing_leaves_the_generators_and_the_values_alone() -> None:
    query = torch.randn(2, 2, 12, 8, requires_grad=True)
    before = torch.get_rng_state()
    found = time_backends(query, query, {"is_causal": True}, HostDevice())
    assert torch.equal(torch.get_rng_state(), before) and query.grad is None
    assert {"torch", "math"} <= found.keys() and all(ms > 0 for ms in found.values())
    assert "cudnn" not in found  # needs a GPU


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_are_timed_on_what_they_will_be_given(
    autocast: torch.dtype | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast casts inside the call: of float32 most kernels run nothing, of bfloat16 all do."""
    own, seen = F.scaled_dot_product_attention, set()

    def attend(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.add(q.dtype)
        return own(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    query = torch.randn(2, 2, 12, 8, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        time_backends(query, query, {"is_causal": True}, HostDevice())
    assert seen == {dtype if autocast is None or dtype == torch.float64 else autocast}


def test_only_the_device_is_timed() -> None:
    """It is kept busy until the host has queued the call, whose own time does not count."""

    class Stamp:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def seconds_since(self, earlier: Any) -> float:
            return self.seconds - float(earlier.seconds)

    class Clock(HostDevice):
        """Nothing but `delay` takes time."""

        seconds = 0.0

        def delay(self, stream: Any, seconds: float) -> None:
            self.seconds += seconds

        def timestamp(self) -> Any:
            return Stamp(self.seconds)

    query = torch.randn(1, 1, 4, 8)
    clock = Clock()
    found = time_backends(query, query, {}, clock)
    assert clock.seconds > 0 and set(found.values()) == {0.0}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Attends() for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for layer in self.layers:
            layer.qkv.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, out in zip(self.layers, self.out, strict=True):
            x = x + out(layer(x).transpose(1, 2).flatten(2))
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_wrapped_with_a_name_equals_the_kernel_chosen_by_hand(recompute: bool) -> None:
    x = torch.randn(2, 12, 16)
    model, optimizer = wrap(
        Stack(), lr=1e-2, attention="math", param_offload=True, device="host", recompute=recompute
    )
    reference = Stack()
    theirs = OffloadAdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        with sdpa_kernel(SDPBackend.MATH):
            reference(x).square().mean().backward()
        theirs.step()
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, wanted)
    for layer in model.layers:  # what backward computed again, too
        assert len(layer.seen) == 3 * (1 + recompute) and not any(layer.flash)
    assert memory_report(model)["attention"]["backend"] == "math"
    unwrap(model)
    model(x)
    assert torch.backends.cuda.flash_sdp_enabled() and not model._forward_pre_hooks
    assert not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["auto", "cudnn", "efficient", "flash", "math"])
def test_on_a_gpu(asked: str) -> None:
    found, said = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = Big().to("cuda", torch.bfloat16)
        made = AttentionChoice(asked, resolve_device("cuda"), said.append)
        made.install(model)
        x = torch.randn(1, 2048, 2048, device="cuda", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        found.append(model(x).float())
        made.remove()
    assert torch.isfinite(found[0]).all()
    assert (found[0] - found[1]).abs().max() <= 0.05
    if asked == "auto":
        assert {"flash", "math"} <= made.timings_ms.keys() and said


FIRST_CALL = """
import sys, torch
from torch.nn import functional as F
from ts_core import wrap

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        self.seen = []
    def forward(self, x):
        x = self.inner(x).view(1, 1, -1, 64)
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x)
            self.seen.append(list(torch._C._get_sdp_priority_order()))
        return x

model = Net()
if sys.argv[1] != "none":
    model, optimizer = wrap(model, lr=1e-3, device="cuda", attention=sys.argv[1])
x = torch.randn(8, 64, dtype=torch.bfloat16, device="cuda")
model.cuda()(x).sum().backward()
print(model.seen, "|", list(torch._C._get_sdp_priority_order()))
"""


@pytest.mark.gpu
def test_the_first_attention_call_of_a_process_keeps_both_orders(run_python: Any) -> None:
    """torch sets its order for the GPU in that call: not over the one asked for, and not lost."""
    _, own = run_python(FIRST_CALL, "none").stdout.split("|")
    for name, backend in (("efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH)):
        inside, after = run_python(FIRST_CALL, name).stdout.split("|")
        assert [seen[0] for seen in json.loads(inside)] == [int(backend)] * 2
        assert json.loads(after) == json.loads(own)


def test_torchs_own_order_is_in_place_before_another_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose first attention call changes the order of the process."""
    usual = order()
    own = [int(SDPBackend.CUDNN_ATTENTION), *(k for k in usual if k != 3)]
    asked: list[torch.device] = []

    def first_call(device: torch.device) -> None:
        asked.append(device)
        torch._C._set_sdp_priority_order(own)

    monkeypatch.setattr(attention, "settle_torchs_order", first_call)
    model = Attends()
    made, _ = choice("math", model, SeparateHost())
    try:
        model(torch.randn(2, 12, 16))
        assert asked == [torch.device("cpu")] and order() == own
        assert model.seen.pop()[0] == int(SDPBackend.MATH)
    finally:
        made.remove()
        torch._C._set_sdp_priority_order(usual)


class Big(Attends):
    """Heads as in a model of 7B, so that a call takes long enough to be worth timing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2048, 3 * 2048)

    def forward(self, x: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        parts = self.qkv(x).unflatten(-1, (3, 16, 128)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_forwards_in_several_threads_put_back_their_own() -> None:
    """They overlap without nesting: the first to begin is the first to end."""
    usual = order()
    models = [Attends(), Attends()]
    begun = [threading.Event(), threading.Event()]
    go_on = [threading.Event(), threading.Event()]
    made = [choice("math", model, SeparateHost())[0] for model in models]
    after: list[list[int]] = []

    def hold(k: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            begun[k].set()
            assert go_on[k].wait(30)

        return hook

    def forward(k: int) -> None:
        models[k](torch.randn(2, 12, 16))
        after.append(order())

    for k, model in enumerate(models):
        model.register_forward_pre_hook(hold(k))
    threads = [threading.Thread(target=forward, args=(k,)) for k in range(2)]
    for k, thread in enumerate(threads):
        thread.start()
        assert begun[k].wait(30)
    for k, thread in enumerate(threads):
        go_on[k].set()
        thread.join(30)
    assert [model.seen[0][0] for model in models] == [int(SDPBackend.MATH)] * 2
    assert after[0] != usual and after[1] == usual
    for one in made:
        one.remove()


def test_one_model_in_two_threads_keeps_what_each_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of torch must be left by the thread that entered it, also when it ends first."""
    monkeypatch.setattr(attention, "time_backends", lambda *_: {"torch": 0.0})
    model, usual = Attends(), order()
    made, said = choice("auto", model, SeparateHost())
    begun, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def forward() -> None:
        try:
            model(torch.randn(2, 12, 16))
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    thread = threading.Thread(target=forward)

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is thread:
            begun.set()
            assert go_on.wait(30)
        else:
            go_on.set()
            thread.join(30)

    model.register_forward_pre_hook(wait)
    thread.start()
    assert begun.wait(30)
    model(torch.randn(2, 12, 16), position_ids=torch.arange(12))
    assert errors == [] and len(said) == 1 and order() == usual
    made.remove()
