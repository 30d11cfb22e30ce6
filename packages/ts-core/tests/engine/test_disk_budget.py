"""disk_offload and memory: what the plan counts, what leaves RAM, what never goes to files."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.engine import assembling, hosting, planning
from ts_core.errors import OptionError, OutOfBudgetError
from ts_core.memory.budget import PageLockBudget
from ts_core.testing import TinyModel, tiny_model, train

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`machine(available, page_lock)`: RAM and page-lock budget as wrap() sees them."""

    def pretend(available: int, page_lock: int) -> None:
        budget = PageLockBudget(page_lock, "a test's")
        monkeypatch.setattr(planning, "ram_available_bytes", lambda: available)
        monkeypatch.setattr(planning, "ram_limit_bytes", lambda: 1 << 40)
        monkeypatch.setattr(planning, "host_floor", lambda ram: 0)
        for module in (planning, hosting):
            monkeypatch.setattr(module, "page_lock_budget", lambda: budget)

    return pretend


@pytest.mark.parametrize("page_lock", [0, 100_000, 1 << 30])
def test_the_ram_check_counts_only_what_stays_in_memory(
    machine: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    page_lock: int,
) -> None:
    """As on a GPU: images are new memory. 6 blocks of 82 KB do not fit in 250 KB of RAM."""
    real = planning.model_profile

    def from_elsewhere(*arguments: Any, **keywords: Any) -> Any:
        profile = real(*arguments, **keywords)
        return planning.replace(profile, in_host=0)

    monkeypatch.setattr(planning, "model_profile", from_elsewhere)
    options: dict[str, Any] = {"device": "host", "param_offload": True, "quantize": "none"}
    machine(250_000, page_lock)
    with pytest.raises(OutOfBudgetError, match=r"host memory.*disk_offload"):
        wrap(tiny_model(6, 64), **options)
    model, _ = wrap(tiny_model(6, 64), disk_offload=tmp_path, **options)
    session = model._trainstream_session
    params = memory_report(model)["params"]
    image = session.pager.images[0].size_bytes
    kept = (6 - len(params["disk_blocks"])) * image
    assert kept <= min(page_lock, session.plan.host["weights"]) <= 250_000
    assert (kept > 0) == (page_lock > image)
    unwrap(model)


def test_trained_weights_never_go_to_files(
    machine: Callable[[int, int], None], tmp_path: Path
) -> None:
    def half_trained() -> TinyModel:
        model = tiny_model(6, 32)
        for layer in model.layers[::2]:
            layer.requires_grad_(True)
        return model

    records = []
    for offload in (False, True):
        machine(1 << 34, 0)
        model, optimizer = wrap(
            half_trained(),
            lr=1e-2,
            device="host",
            param_offload=offload,
            quantize="none",
            disk_offload=tmp_path if offload else None,
        )
        records.append(train(model, optimizer, 4))
    assert records[0].differences(records[1]) == []
    params = memory_report(model)["params"]
    assert params["paged_blocks"] == [0, 1, 2, 3, 4, 5]
    assert params["disk_blocks"] == [1, 3, 5] and params["staged_blocks"] == []
    unwrap(model)


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_weights_on_disk_leave_memory(machine: Callable[[int, int], None], tmp_path: Path) -> None:
    machine(1 << 34, 0)
    model = tiny_model(6, 1024)  # images of 20 MiB
    gc.collect()
    before = anonymous_bytes()
    model, optimizer = wrap(
        model, lr=1e-2, device="host", param_offload=True, quantize="none", disk_offload=tmp_path
    )
    stored = memory_report(model)["params"]["disk_bytes"]
    assert stored > 100 * MIB
    gc.collect()
    slots = 2 * stored // 6
    assert anonymous_bytes() < before - stored + slots + 8 * MIB
    train(model, optimizer, 2)
    assert anonymous_bytes() < before - stored + slots + 16 * MIB
    unwrap(model)
    assert all(p.untyped_storage().nbytes() < stored // 6 for p in model.parameters())


def test_without_room_in_memory_unwrapped_weights_stay_in_their_files(
    machine: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ts_core.store import placing

    machine(1 << 34, 0)
    model, _ = wrap(
        tiny_model(4, 32), device="host", param_offload=True, quantize="none", disk_offload=tmp_path
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    log = model._trainstream_session.log
    monkeypatch.setattr(placing, "ram_available_bytes", lambda: 1 << 20)
    unwrap(model)
    assert list(tmp_path.iterdir()) == [] and any("stay in their" in line for line in log.lines)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.layers[0].up.weight.fill_(1.0)
    model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("where", ["ParamPager", "session_optimizer", "PlacementAdapter"])
def test_a_wrap_that_fails_late_leaves_no_hooks_threads_or_files(
    machine: Callable[[int, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    machine(1 << 34, 0)
    model = tiny_model(4, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(0, 37, (2, 7))
    expected = model(tokens)
    options: dict[str, Any] = {"device": "host", "param_offload": True, "quantize": "none"}

    def fails(*_: Any, **__: Any) -> None:
        raise OutOfBudgetError("no room at the last moment")

    with monkeypatch.context() as patch:
        patch.setattr(assembling, where, fails)
        with pytest.raises(OutOfBudgetError, match="last moment"):
            wrap(model, disk_offload=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
    assert torch.equal(model(tokens), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model, optimizer = wrap(model, disk_offload=tmp_path, **options)
    train(model, optimizer, 1)
    unwrap(model)


@pytest.mark.parametrize(
    ("paged", "full", "why"),
    [
        ([], False, "none streams"),
        (True, False, "the page-lock budget of 1024.0 MiB has room for all"),
        (True, True, "those that stream hold trained weights, which stay in memory"),
    ],
)
def test_one_event_says_why_no_block_is_on_disk(
    machine: Callable[[int, int], None], tmp_path: Path, paged: Any, full: bool, why: str
) -> None:
    machine(1 << 34, (1 << 30) - 1)
    model, optimizer = wrap(
        tiny_model(4, 64, full=full),
        device="host",
        quantize="none",
        param_offload=paged,
        disk_offload=tmp_path,
    )
    train(model, optimizer, 2)
    report = memory_report(model)
    assert [line for line in report["events"] if line.startswith("disk_offload")] == [
        f"disk_offload: no block is on disk, since {why}"
    ]
    assert report["params"]["disk_blocks"] == []


def test_no_such_event_where_blocks_are_on_disk_or_no_directory_was_given(
    machine: Callable[[int, int], None], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"device": "host", "quantize": "none", "param_offload": True}
    machine(1 << 34, 1 << 30)
    models = [wrap(tiny_model(4, 64), **options)[0]]
    machine(1 << 34, 0)
    models.append(wrap(tiny_model(4, 64), disk_offload=tmp_path, **options)[0])
    assert [len(memory_report(model)["params"]["disk_blocks"]) for model in models] == [0, 4]
    for model in models:
        assert not any("no block is on disk" in line for line in memory_report(model)["events"])
        unwrap(model)


def test_a_directory_is_made_or_refused_where_nothing_goes_to_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "host", "quantize": "none"}
    wrap(tiny_model(), disk_offload=tmp_path / "new" / "one", **options)
    assert (tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").write_text("")
    model = tiny_model()
    with pytest.raises(OptionError, match=r"disk_offload='.*/file/x' cannot be used.*Name a dir"):
        wrap(model, disk_offload=tmp_path / "file" / "x", **options)
    assert not hasattr(model, "_trainstream_session")
