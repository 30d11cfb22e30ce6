"""Options of a step that are changed between its backward and step()."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.errors import StateError
from ts_core.optim.places import NAMES
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine


class Linked(HostDevice):
    """The host device with gradients and values crossing a link, as on a GPU."""

    separate_memory = True


def trained(
    lab: Any, place: str, linked: bool, before: dict[str, Any], after: dict[str, Any], late: bool
) -> tuple[torch.nn.Module, list[float | None]]:
    """Six steps under `after` and `before` in turn, set after the backward of a step where `late`,
    and before it otherwise; and the norms of the steps that measure them."""
    model = lab.model()
    device = Linked() if linked else HostDevice()
    optimizer = OffloadAdamW(
        lab.groups(model, True),
        lr=1e-2,
        device=device,
        copies=CopyEngine(device),
        eager=False,
        **before,
    )
    optimizer.build()
    optimizer.place_state([place] * len(optimizer.buckets))
    norms = []
    with inject_delays(5, max_ms=1.0, share=0.2):
        for step in range(6):
            options = (after, before)[step % 2]

            def change(options: dict[str, Any] = options) -> None:
                for name, value in options.items():
                    setattr(optimizer, name, value)

            if not late:
                change()
            lab.loss(model, step).backward()
            if late:
                change()
            optimizer.step()
            norms.append(optimizer.last_grad_norm if optimizer.step_options.needs_norm else None)
            optimizer.zero_grad()
        optimizer.synchronize()
    return model, norms


@pytest.mark.parametrize("linked", [False, True], ids=["host", "link"])
@pytest.mark.parametrize("place", NAMES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"max_grad_norm": 0.5}, {"max_grad_norm": 0.01}),
        ({"max_grad_norm": None}, {"max_grad_norm": 0.01}),
        ({"compute_grad_norm": True}, {"compute_grad_norm": False}),
        ({"skip_nonfinite": False}, {"skip_nonfinite": True}),
    ],
)
def test_an_update_that_waits_for_step_goes_by_the_options_of_then(
    lab: Any, before: dict[str, Any], after: dict[str, Any], place: str, linked: bool
) -> None:
    def run(late: bool) -> tuple[torch.nn.Module, list[float | None]]:
        return trained(lab, place, linked, before, after, late)

    in_time, norms = run(late=False)
    changed, late_norms = run(late=True)
    assert lab.distance(changed, in_time) == 0.0
    assert [norm is None for norm in late_norms] == [norm is None for norm in norms]
    pairs = [(a, b) for a, b in zip(late_norms, norms, strict=True) if b is not None]
    assert pairs and all(a == pytest.approx(b, rel=1e-12) for a, b in pairs)  # both in fp64


@pytest.mark.parametrize("linked", [False, True], ids=["host", "link"])
@pytest.mark.parametrize("place", NAMES)
def test_clipping_that_is_switched_off_after_backward_loses_no_update(
    lab: Any, place: str, linked: bool
) -> None:
    models = []
    for clip in (0.5, None):
        model = lab.model()
        device = Linked() if linked else HostDevice()
        optimizer = OffloadAdamW(
            model.parameters(), lr=1e-2, device=device, copies=CopyEngine(device)
        )
        optimizer.build()
        optimizer.place_state([place] * len(optimizer.buckets))
        for step in range(3):
            optimizer.max_grad_norm = clip
            lab.loss(model, step).backward()
            optimizer.max_grad_norm = None
            optimizer.step()
        optimizer.max_grad_norm = 1e-3  # and what was measured counts in no later norm
        lab.loss(model, 3).backward()
        model.large.grad = None
        optimizer.step()
        models.append((model, optimizer.last_grad_norm))
    (first, norm), (second, expected) = models
    assert lab.distance(first, second) == 0.0 and norm == expected


@pytest.mark.parametrize("place", NAMES)
def test_clipping_that_is_switched_on_after_eager_updates_comes_too_late_and_is_warned_of(
    lab: Any, place: str
) -> None:
    ours, theirs = lab.model(), lab.model()
    optimizers = []
    for model in (ours, theirs):
        device = Linked()
        optimizer = OffloadAdamW(
            model.parameters(), lr=1e-2, device=device, copies=CopyEngine(device)
        )
        optimizer.build()
        optimizer.place_state([place] * len(optimizer.buckets))
        lab.loss(model, 0).backward()
        optimizers.append(optimizer)
    optimizers[0].max_grad_norm = 1e-3
    with pytest.warns(UserWarning, match=r"clipping.*was switched on between backward and step"):
        optimizers[0].step()
    optimizers[1].step()
    assert lab.distance(ours, theirs) == 0.0  # each parameter was updated, and once
    optimizers[1].max_grad_norm = 1e-3
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        lab.loss(model, 1).backward()
        optimizer.step()
        optimizer.synchronize()
    assert lab.distance(ours, theirs) == 0.0
    assert optimizers[0].last_grad_norm == optimizers[1].last_grad_norm


def test_a_step_that_is_refused_can_be_taken_when_the_groups_are_right_again(lab: Any) -> None:
    ours, theirs = lab.model(), lab.model()
    optimizers = []
    for model in (ours, theirs):
        optimizer = OffloadAdamW(lab.groups(model, True), lr=1e-2, max_grad_norm=0.5)
        lab.run(model, optimizer, 2)
        lab.loss(model, 2).backward()
        optimizers.append(optimizer)
    first, second = (group["params"] for group in optimizers[0].param_groups)
    moved = second.pop(0)
    first.append(moved)
    with pytest.raises(StateError, match="moved between param groups"):
        optimizers[0].step()
    second.insert(0, first.pop())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.synchronize()
    assert lab.distance(ours, theirs) == 0.0
    assert optimizers[0].last_grad_norm == optimizers[1].last_grad_norm
