"""bf16 and 8-bit moments: how far they drift, that they repeat themselves, their state dicts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ts_core import OffloadAdamW, wrap
from ts_core.optim import state
from ts_core.optim.moments import Moments, bytes_per_value

DRIFT = {"bfloat16": 0.01, "int8": 0.05}


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    return model, torch.randn(256, 64), torch.randint(0, 10, (256,))


def movement(optimizer_for: Any, steps: int = 30) -> torch.Tensor:
    """The parameters after `steps`, less those before, as one vector."""
    model, inputs, labels = mlp()
    start = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
    optimizer = optimizer_for(model.parameters())
    for step in range(steps):
        rows = slice(64 * (step % 4), 64 * (step % 4) + 64)
        F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - start


@pytest.mark.parametrize("kind", DRIFT)
def test_drift_from_fp32_stays_within_its_share_of_all_movement(kind: str) -> None:
    exact = movement(lambda p: torch.optim.AdamW(p, lr=1e-3))
    found = movement(lambda p: OffloadAdamW(p, lr=1e-3, moment_dtype=kind))
    drift = ((found - exact).norm() / exact.norm()).item()
    assert 0 < drift <= DRIFT[kind]


@pytest.mark.parametrize("kind", DRIFT)
def test_a_seed_repeats_itself_and_another_differs(kind: str) -> None:
    first, again, other = (
        movement(
            lambda p, seed=seed, threads=threads: OffloadAdamW(
                p, moment_dtype=kind, seed=seed, threads=threads
            ),
            steps=5,
        )
        for seed, threads in ((0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_resume_is_bit_exact(lab: Any, kind: str, accumulation: int, clip: float | None) -> None:
    options = {
        "lr": 1e-2,
        "moment_dtype": kind,
        "max_grad_norm": clip,
        "accumulation_steps": accumulation,
    }
    through, parts = lab.model(), lab.model()
    lab.run(through, OffloadAdamW(through.parameters(), **options), 6, accumulation=accumulation)
    first = OffloadAdamW(parts.parameters(), **options)
    lab.run(parts, first, 3, accumulation=accumulation)
    saved = copy.deepcopy(first.state_dict())
    first.detach()
    resumed = OffloadAdamW(parts.parameters(), **options)
    resumed.load_state_dict(saved)
    lab.run(parts, resumed, 3, accumulation=accumulation, first=3)
    assert lab.distance(through, parts) == 0.0


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_state_is_handed_out_as_fp32_and_loads_into_torch(
    lab: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), moment_dtype=kind)
    lab.run(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(state, "MAPPED_BYTES", 0)  # through temporary files
    mapped = optimizer.state_dict()
    for key, entry in saved["state"].items():
        assert entry["exp_avg"].dtype is torch.float32
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(entry[name], mapped["state"][key][name])
    assert "exp_avg" not in optimizer.state[model.large]
    reference = torch.optim.AdamW(model.parameters())
    reference.load_state_dict(saved)
    torch.optim.AdamW(lab.model().parameters()).load_state_dict(mapped)


def test_bytes_are_those_promised(lab: Any) -> None:
    assert [bytes_per_value(kind) for kind in ("float32", "bfloat16", "int8")] == [8, 4, 2.03125]
    moments = Moments(1000, "int8", 0)
    assert moments.host_bytes() == 2 * 1000 + 2 * 4 * 4
    model = lab.model(torch.bfloat16)
    optimizer = OffloadAdamW(model.parameters(), moment_dtype="int8")
    optimizer.build()
    place = optimizer.buckets[-1].place
    assert place.host_bytes() / optimizer.buckets[-1].layout.numel < 6.1


def test_wrap_takes_a_moment_dtype_and_auto_follows_host_memory(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ts_core.engine import planning

    _, optimizer = wrap(lab.model(), moment_dtype="bf16", device="cpu")
    assert optimizer.moments == "bfloat16"
    trained = sum(p.numel() for p in lab.model().parameters())
    monkeypatch.setattr(planning, "host_floor", lambda ram: 0)
    for per_value, expected in ((13, "float32"), (9, "bfloat16"), (7, "int8")):
        monkeypatch.setattr(planning, "ram_available_bytes", lambda n=per_value: trained * n)
        model, optimizer = wrap(lab.model(), device="cpu")
        assert optimizer.moments == expected
        said = any("moment_dtype='auto'" in e for e in model._trainstream_session.events)
        assert said == (expected != "float32")


def test_auto_counts_the_host_copies_of_weights_on_a_device(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained weight on a GPU has a copy in host memory: its image, or where threads write."""
    from ts_core.config import WrapOptions
    from ts_core.device import HostDevice
    from ts_core.engine import planning

    model = lab.model().to("meta")  # stands for a GPU: not in host memory
    trained = sum(p.numel() for p in model.parameters())
    device, config = HostDevice(), WrapOptions.from_keywords({})
    for per_value, alone, copied in ((17, "float32", "float32"), (15, "float32", "bfloat16")):
        monkeypatch.setattr(planning, "ram_available_bytes", lambda n=per_value: trained * n)
        for separate, expected in ((False, alone), (True, copied)):
            device.separate_memory = separate
            said: list[str] = []
            found = planning.choose_moments(model, None, config, said.append, device)
            assert (found, bool(said)) == (expected, expected != "float32")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_state_dict_loads_back_into_its_own_optimizer(lab: Any, kind: str) -> None:
    model, twin = lab.model(), lab.model()
    optimizer = OffloadAdamW(model.parameters(), moment_dtype=kind)
    lab.run(model, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())  # live views, not a copy
    lab.run(model, optimizer, 2, first=2)
    lab.run(twin, OffloadAdamW(twin.parameters(), moment_dtype=kind), 4)
    assert lab.distance(model, twin) == 0.0
