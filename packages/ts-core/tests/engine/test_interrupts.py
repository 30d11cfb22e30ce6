"""Ctrl-C at any line of a step: the step is whole or has not begun, and training goes on."""

from __future__ import annotations

import copy
import linecache
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from ts_core import wrap
from ts_core.interrupts import HeldBack, held_back
from ts_core.testing import tiny_model

POINTS = 24
TOKENS = torch.arange(14).view(2, 7)


def start(full: bool, resident: bool, **options: Any) -> tuple[Any, Any]:
    model = tiny_model(3, 16, full=full)
    trained = [param for param in model.parameters() if param.requires_grad]
    settings = {"offload": True, "quantize": "none", "threads": 1, "device": "host", **options}
    model, optimizer = wrap(model, torch.optim.AdamW(trained, lr=1e-2), **settings)
    if resident:
        optimizer.make_resident()
    return model, optimizer


def interrupted_at(line: int, work: Callable[[], Any], within: str = "ts_core") -> tuple[int, bool]:
    """Run `work`, with Ctrl-C at the given line of Python code in the library.

    Args:
        line: 0 for nowhere.
        work: what is run.
        within: part of the names of the files whose lines count.

    Returns:
        How many lines ran, and whether the work raised KeyboardInterrupt.
    """
    lines, came = 0, False
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines, came
        if "ts_core" not in frame.f_code.co_filename or "testing" in frame.f_code.co_filename:
            return None
        if event == "line" and within in frame.f_code.co_filename:
            lines += 1
            possible = not in_finalizer(frame) and not leaves_with(frame, last.get(frame, 0))
            last[frame] = frame.f_lineno
            if lines >= line > 0 and not came and possible:
                came = True
                signal.raise_signal(signal.SIGINT)
        elif event == "return":
            last.pop(frame, None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return lines, True
    finally:
        sys.settrace(before)
        last.clear()
    return lines, False


def leaves_with(frame: FrameType, before: int) -> bool:
    """Whether the line is that of a `with` statement which is about to call `__exit__`.

    A handler that runs there skips the call. Only tracing can make one: Python looks for signals
    after calls, at the beginning of functions and in loops.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    return before > frame.f_lineno and line.startswith(("with ", "with("))


def in_finalizer(frame: FrameType | None) -> bool:
    """Whether an exception would be lost here."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


CASES = {
    "clipped": {"max_grad_norm": 0.5},
    "late": {"eager": False},
    "kernel": {"eager": False, "optimizer_mode": "gpu"},
    "resident": {"resident": True, "full": False},
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_step_is_whole_or_has_not_begun(case: str) -> None:
    options: dict[str, Any] = {"full": True, "resident": False, **CASES[case]}
    model, optimizer = start(param_offload=True, **options)
    plain, straight = start(param_offload=False, **options)

    def backward(model: Any) -> None:
        model(TOKENS).backward()

    for each, stepping in ((model, optimizer), (plain, straight)):
        backward(each)
        stepping.step()
        stepping.zero_grad()
    backward(model)
    total, _ = interrupted_at(0, optimizer.step)
    backward(plain)
    straight.step()
    assert total > POINTS
    done = interrupted = 0
    for point in range(POINTS):
        optimizer.zero_grad()
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(straight.state_dict()))
        straight.zero_grad()
        before = values(plain)
        backward(model)
        _, raised = interrupted_at(1 + point * (total - 1) // POINTS, optimizer.step)
        interrupted += raised
        after = values(model)
        backward(plain)
        straight.step()
        stepped = values(plain)
        assert same(after, before) or same(after, stepped), point
        done += same(after, stepped)
    assert done > POINTS // 2 and interrupted > POINTS // 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def step(model: Any, optimizer: Any) -> None:
    model(TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("case", ["clipped", "eager", "resident"])
def test_after_an_interrupt_anywhere_training_goes_on(case: str) -> None:
    options: dict[str, Any] = {"full": True, "resident": False, **CASES.get(case, {})}
    model, optimizer = start(param_offload=True, **options)
    plain, straight = start(param_offload=False, **options)

    total, _ = interrupted_at(0, lambda: step(model, optimizer))
    step(plain, straight)
    for point in range(POINTS):
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(straight.state_dict()))
        interrupted_at(1 + point * (total - 1) // POINTS, lambda: step(model, optimizer))
        optimizer.zero_grad()
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(straight.state_dict()))
        step(model, optimizer)
        step(plain, straight)
        assert same(values(model), values(plain)), point


def test_an_interrupt_at_any_line_of_the_pager_leaves_its_tables_right() -> None:
    """A slot that is nobody's may still be filled; one that two tables tell of differently ends it
    all."""
    options: dict[str, Any] = {"full": False, "resident": True}
    model, optimizer = start(param_offload=True, **options)
    plain, straight = start(param_offload=False, **options)

    step(model, optimizer)
    step(plain, straight)
    weights = copy.deepcopy(plain.state_dict())
    state = copy.deepcopy(straight.state_dict())
    step(plain, straight)
    expected = values(plain)
    total, _ = interrupted_at(0, lambda: step(model, optimizer), "store/pager")
    assert total > 100
    for point in range(total):
        interrupted_at(1 + point, lambda: step(model, optimizer), "store/pager")
        optimizer.zero_grad()
        model.load_state_dict(copy.deepcopy(weights))
        optimizer.load_state_dict(copy.deepcopy(state))
        step(model, optimizer)
        assert same(values(model), expected), point


def test_another_thread_gets_the_turn_after_an_interrupted_backward() -> None:
    model, optimizer = start(True, False, param_offload=True)
    loss = model(TOKENS)
    total, _ = interrupted_at(0, loss.backward)
    for point in range(POINTS):
        optimizer.zero_grad()
        loss = model(TOKENS)
        interrupted_at(1 + point * (total - 1) // POINTS, loss.backward)
        del loss
        found: list[torch.Tensor] = []

        def look(found: list[torch.Tensor] = found) -> None:
            with torch.no_grad():
                found.append(model(TOKENS))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(20.0)
        assert found, point


def test_the_first_signal_waits_and_the_second_does_not() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back, held_back:
        signal.raise_signal(signal.SIGINT)
        done.append("first")
        signal.raise_signal(signal.SIGINT)
        done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_at_any_line_of_its_own_comes_once() -> None:
    hold = HeldBack()

    def work() -> None:
        with hold:
            pass

    total, _ = interrupted_at(0, work)
    for line in range(1, total + 1):
        assert interrupted_at(line, work)[1], line
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        work()  # no second one is left over


def test_what_was_set_meanwhile_stays_and_other_threads_are_left_alone() -> None:
    hold, came = HeldBack(), []
    try:
        with hold:
            signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []

    def elsewhere() -> None:
        with hold:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
