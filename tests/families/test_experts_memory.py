"""What paged experts copy, and the device memory that they are planned with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ts_hf
from ts_core import memory_report, unwrap
from ts_core.device import resolve_device
from ts_core.errors import OutOfBudgetError
from ts_hf.testing import token_batch

ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def test_only_picked_experts_are_copied(adapted: Callable[..., Any]) -> None:
    model = adapted("qwen3_moe", lora=ATTENTION)
    model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="none", moe_paging=True)
    one = sum(
        model.get_base_model().model.layers[0].mlp.experts._parameters[name][0].nbytes
        for name in ("gate_up_proj", "down_proj")
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    report = memory_report(model)["experts"]
    assert report["picked"] == 3 * 2  # one token, three layers, two experts each
    assert report["load_bytes"] == report["picked"] * one
    assert report["whole_bytes"] == 3 * 6 * one
    assert report["slot_bytes"] <= 2 * 3 * one
    copied = memory_report(model)["transfers"]["h2d"]["bytes"]
    assert copied == report["load_bytes"]


def test_backward_copies_again_what_forward_picked(adapted: Callable[..., Any]) -> None:
    model = adapted("mixtral", lora=ATTENTION)
    model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="none", moe_paging=True)
    batch = token_batch(0, 1, 2)
    model(**batch).loss.backward()
    report = memory_report(model)["experts"]
    # Forward: three layers. Backward: the last two are still there, the first comes again.
    assert report["calls"] == 3 and report["loads"] == 4


def test_the_limit_counts_the_slots(adapted: Callable[..., Any]) -> None:
    model = adapted("mixtral", lora=ATTENTION)
    one = 3 * 64 * 96 * 4  # of one expert
    model, _ = ts_hf.wrap_hf(
        model,
        device="cpu",
        quantize="none",
        moe_paging=True,
        param_offload=True,
        vram_limit=11 * one // 2,
        check_memory=False,
        vram_headroom=0,
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    memory = memory_report(model)
    assert memory["resident"]["experts"] == memory["experts"]["slot_bytes"] <= 2 * 3 * one
    with pytest.raises(OutOfBudgetError), torch.no_grad():
        model(**token_batch(0, 4, 32))
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    unwrap(model)


def test_the_plan_counts_slots_in_the_codec_that_was_named(adapted: Callable[..., Any]) -> None:
    from ts_core.engine.experts import experts_to_page, without_experts
    from ts_core.schedule import ModelProfile

    experts = experts_to_page(adapted("mixtral", lora=ATTENTION), True)
    whole = 3 * 6 * 3 * 64 * 96 * 4
    profile = ModelProfile((), fixed_device=whole + 1000)
    assert without_experts(profile, experts).fixed_device == 1000 + whole * 2 // 3
    stored = without_experts(profile, experts, 0.5).fixed_device
    assert stored == 1000 + whole * 2 // 3 // 8
    assert without_experts(profile, ()) is profile


@pytest.mark.gpu
def test_gpu_memory_is_that_of_the_picked_experts(adapted: Callable[..., Any]) -> None:
    """One token in eight layers of sixteen experts: a small part of them is on the device."""
    sizes = {"num_hidden_layers": 8, "num_local_experts": 16, "intermediate_size": 1024}
    model = adapted("mixtral", lora=ATTENTION, hidden_size=256, dtype=torch.bfloat16, **sizes)
    whole = sum(p.nbytes for p in model.parameters() if p.dim() == 3)
    resolve_device("cuda").take_workspaces()  # torch's own are not what is measured
    before = torch.cuda.memory_allocated()
    model, _ = ts_hf.wrap_hf(model, device="cuda", quantize="none", moe_paging=True)
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(1, 80, (1, 1), device="cuda")
    with torch.no_grad():
        model(input_ids=ids)
    assert torch.cuda.max_memory_allocated() - before < whole / 4
