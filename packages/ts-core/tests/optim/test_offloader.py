"""GradientOffloader: what backward leaves in host memory is what autograd computed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import ts_core
from ts_core import GradientOffloader, OffloadAdamW
from ts_core.device import CudaDevice, Device
from ts_core.device.host import HostDevice
from ts_core.errors import OptionError, StateError
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine


class Linked(HostDevice):
    separate_memory = True


def expected(lab: Any, model: nn.Module, step: int, passes: int) -> dict[str, torch.Tensor]:
    """What plain torch leaves in `.grad`."""
    model.zero_grad()
    for micro in range(passes):
        lab.loss(model, step, micro).backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def check(lab: Any, device: Device, dtype: torch.dtype, passes: int, seed: int) -> None:
    target = device.torch_device
    plain, model = lab.model(dtype).to(target), lab.model(dtype).to(target)
    offloader = GradientOffloader(
        model.parameters(), accumulation_steps=passes, copies=CopyEngine(device)
    )
    names = {param: name for name, param in model.named_parameters()}
    with inject_delays(seed, max_ms=1, share=0.3):
        for step in range(3):
            wanted = expected(lab, plain, step, passes)
            for micro in range(passes):
                lab.loss(model, step, micro).backward()
            assert all(param.grad is None for param in model.parameters())
            found = {names[p]: (p, grad) for p, grad in offloader.take().items()}
            assert found.keys() == wanted.keys() and "unused" not in found
            for name, (param, grad) in found.items():
                assert grad.device.type == "cpu"
                assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
                assert torch.equal(grad, wanted[name]), name
    assert offloader.take() == {}


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [HostDevice, Linked])
def test_equal_to_autograd(lab: Any, device: Any, dtype: torch.dtype, passes: int) -> None:
    check(lab, device(), dtype, passes, seed=passes)


@pytest.mark.gpu
@pytest.mark.parametrize("passes", [1, 3])
def test_equal_to_autograd_on_a_gpu(lab: Any, passes: int) -> None:
    check(lab, CudaDevice(None), torch.bfloat16, passes, seed=passes)


def test_parts_of_a_step_are_summed_where_only_some_parameters_are_reached(lab: Any) -> None:
    """A layer that one of two passes skips, in a group of small parameters."""
    model = lab.model()
    device = Linked()
    offloader = GradientOffloader(
        model.parameters(), accumulation_steps=2, copies=CopyEngine(device)
    )
    lab.loss(model, 0).backward()
    (model[0].weight * 2.0).sum().backward()
    found = offloader.take()
    first = expected(lab, lab.model(), 0, 1)
    assert torch.equal(found[model[0].weight], first["0.weight"] + 2.0)
    assert torch.equal(found[model[2].weight], first["2.weight"])
    assert torch.equal(found[model.large], first["large"])


def test_nothing_of_the_step_stays_on_the_device(lab: Any) -> None:
    model, device = lab.model(), Linked()
    offloader = GradientOffloader(
        model.parameters(), accumulation_steps=2, copies=CopyEngine(device)
    )
    lab.loss(model, 0).backward()
    assert offloader.stats()["d2h_bytes"] >= 4 * (400 * 701 + 300 * 1000)
    assert all(piece.gradients._single is None for piece in offloader._pieces)


def test_one_pass_too_many(lab: Any) -> None:
    model = lab.model()
    offloader = GradientOffloader(model.parameters())
    lab.loss(model, 0).backward()
    with pytest.raises(StateError, match=r"gradient number 2 before take\(\).*accumulation_steps"):
        lab.loss(model, 0).backward()
    offloader.zero_grad()
    for param in model.parameters():
        param.grad = None
    lab.loss(model, 1).backward()
    assert torch.equal(offloader.take()[model.large], expected(lab, lab.model(), 1, 1)["large"])


def test_removed_it_takes_nothing(lab: Any) -> None:
    model = lab.model()
    offloader = GradientOffloader(model.parameters())
    with pytest.raises(StateError, match="GradientOffloader"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    offloader.remove()
    lab.loss(model, 0).backward()
    assert model.large.grad is not None
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(StateError, match="was removed"):
        offloader.take()
    GradientOffloader(model.parameters()).remove()  # the parameters are free again


def test_gone_without_remove_it_takes_nothing(lab: Any) -> None:
    model = lab.model()
    offloader = GradientOffloader(model.parameters())
    del offloader
    gc.collect()
    lab.loss(model, 0).backward()
    assert model.large.grad is not None
    torch.nn.utils.clip_grad_norm_([model.large], 1.0)


def test_an_optimizer_after_one_that_is_gone_keeps_its_guard(lab: Any) -> None:
    """The hooks that it leaves behind must not take the next one's mark off the parameters."""
    model = lab.model()
    offloader = GradientOffloader(model.parameters())
    del offloader
    gc.collect()
    optimizer = OffloadAdamW(model.parameters())
    lab.run(model, optimizer, 2)
    with pytest.raises(StateError, match="max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_one_taker_per_parameter(lab: Any) -> None:
    model = lab.model()
    offloader = GradientOffloader(model.parameters())
    with pytest.raises(StateError, match="takes gradients of these parameters already"):
        GradientOffloader([model.large])
    optimizer = OffloadAdamW(model.parameters(), threads=1)
    before = model.large.detach().clone()
    lab.loss(model, 0).backward()
    optimizer.step()
    assert not torch.equal(model.large, before)
    with pytest.raises(StateError, match="OffloadAdamW was made"):
        offloader.take()
    with pytest.raises(StateError, match="already"):
        GradientOffloader(model.parameters())
    optimizer.detach()
    offloader = GradientOffloader(model.parameters())
    lab.loss(model, 0).backward()
    assert model.large in offloader.take()
    optimizer.attach()
    with pytest.raises(StateError, match="OffloadAdamW was made"):
        offloader.take()


def test_a_detached_optimizer_still_learns_of_a_newer_one(lab: Any) -> None:
    model = lab.model()
    older = OffloadAdamW(model.parameters(), threads=1)
    older.detach()
    newer = OffloadAdamW(model.parameters(), threads=1)
    with pytest.raises(StateError, match="another OffloadAdamW"):
        older.step()
    newer.detach()


def test_refusals(lab: Any) -> None:
    model = lab.model()
    with pytest.raises(OptionError, match="accumulation_steps=0"):
        GradientOffloader(model.parameters(), accumulation_steps=0)
    with pytest.raises(OptionError, match="no parameter requires a gradient"):
        GradientOffloader([torch.nn.Parameter(torch.ones(2), requires_grad=False)])
    with pytest.raises(OptionError, match="cpu, meta"):
        GradientOffloader([model.large, nn.Parameter(torch.ones(2, device="meta"))])


def test_an_optimizer_of_ones_own(lab: Any) -> None:
    """Signed descent on the host: gradients out, updates behind the caller's back."""
    plain, model = lab.model(), lab.model()
    offloader = ts_core.GradientOffloader(model.parameters())
    ready = ts_core.ParamReadyHooks(model)
    for step in range(4):
        grads = expected(lab, plain, step, 1)
        with torch.no_grad():
            for name, param in plain.named_parameters():
                if name in grads:
                    param -= 1e-3 * grads[name].sign()
        lab.loss(model, step).backward()
        for param, grad in offloader.take().items():
            ready.update([param], lambda value, grad=grad: value.sub_(1e-3 * grad.sign()))
    ready.wait()
    assert lab.distance(plain, model) == 0.0
