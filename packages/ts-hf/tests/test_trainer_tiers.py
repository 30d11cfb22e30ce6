"""Clipping, accumulation and resuming wherever weights, activations and optimizer state lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import ts_hf
from ts_core import memory_report
from ts_core.engine import hosting
from ts_core.memory.budget import PageLockBudget
from ts_core.store.placing import ImageStore
from ts_core.testing import inject_delays

STEPS = 6
PAGED = {"param_offload": True, "activation_offload": True, "min_offload_bytes": 1}
PARTS = {**PAGED, "param_offload": 0.75, "activation_offload": 0.5, "recompute": [0]}
TIERS: dict[str, dict[str, Any]] = {
    "all resident": {"param_offload": False, "activation_offload": False},
    "some blocks streamed": {"param_offload": 0.5},
    "weights and activations paged": PAGED,
    "a part of all of it": PARTS,
    "recomputed": {"param_offload": True, "recompute": True},
    "updated by a kernel": {**PAGED, "optimizer_mode": "gpu"},
    "updated in several places": {"optimizer_mode": "hybrid"},
}
# What is trained stays in memory.
FROZEN_ONLY = {"from pageable memory": PAGED, "from files": {**PAGED, "disk_offload": True}}


@pytest.fixture
def run(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[..., Any]:
    """run("full", {..}, resume=None, stock=False, **arguments): a trainer that has trained."""
    folder = checkpoint("llama")

    def train(
        kind: str,
        options: dict[str, Any],
        *,
        resume: Path | None = None,
        stock: bool = False,
        source: str = "memory",
        **arguments: Any,
    ) -> Any:
        torch.manual_seed(17)
        if kind == "nf4":
            codec = request.getfixturevalue("codec")
            model = ts_hf.load_model(folder, quantize=codec, dtype=torch.float32)
            if stock:
                _decode(model)
            model = request.getfixturevalue("lora")(model)
        else:
            model = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
        if source != "memory":
            # Of the four blocks one fits into what may be page-locked.
            budget = PageLockBudget(25_000, "a test's")
            monkeypatch.setattr(hosting, "page_lock_budget", lambda: budget)
            store = functools.partial(ImageStore, through_ring=True)
            monkeypatch.setattr(hosting, "ImageStore", store)
        if source == "files":
            options = {**options, "disk_offload": str(tmp_path / "disk")}
        fields = {
            "max_steps": STEPS,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.3,
            "adam_epsilon": 1e-4,
            "warmup_steps": 2,
            **arguments,
        }
        made = (Trainer if stock else ts_hf.TrainStreamTrainer)(
            model=model,
            args=training_arguments(**fields),
            train_dataset=token_rows(14, 12),
            **({} if stock else {"trainstream": {"quantize": "none", "offload": True, **options}}),
        )
        with inject_delays(6, max_ms=0.2):
            made.train(resume_from_checkpoint=resume)
        return made

    return train


def _decode(model: Any) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if hasattr(parameter, "codec"):
                made = torch.nn.Parameter(parameter.dequantize(), requires_grad=False)
                module._parameters[name] = made


def _logged(trainer: Any, key: str) -> torch.Tensor:
    return torch.tensor([x[key] for x in trainer.state.log_history if "grad_norm" in x])


def _trained(trainer: Any) -> dict[str, torch.Tensor]:
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def _assert_same(found: Any, wanted: Any) -> None:
    """Logs, weights and state, bit for bit."""
    for key in ("loss", "grad_norm"):
        assert torch.equal(_logged(found, key), _logged(wanted, key))
    values = _trained(wanted)
    assert [name for name, x in _trained(found).items() if not torch.equal(x, values[name])] == []
    one, other = wanted.optimizer.state_dict(), found.optimizer.state_dict()
    assert len(one["state"]) == len(values)
    for index, entry in one["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, other["state"][index][key]), (index, key)


def _assert_where(trainer: Any, tier: str) -> None:
    """That the run was what its name says."""
    report = memory_report(trainer.model)
    params, policy = report["params"], report["activations"]["policy"]
    paged = {"all resident": 0, "some blocks streamed": 2, "a part of all of it": 3}
    paged["updated in several places"] = 0
    assert len(params["paged_blocks"]) == paged.get(tier, 4)
    if tier in ("weights and activations paged", *FROZEN_ONLY):
        assert policy == ["offload", "offload", "offload", "keep"]
    if tier in ("a part of all of it", "recomputed"):
        wanted = {"recompute"} if tier == "recomputed" else {"recompute", "offload", "keep"}
        assert set(policy) == wanted and report["activations"]["recomputed"] > 0
    if tier.startswith("from"):
        kept = "disk_blocks" if tier == "from files" else "staged_blocks"
        assert len(params[kept]) == 3
    mode = {"updated by a kernel": "gpu", "updated in several places": "hybrid"}
    assert report["optimizer"]["mode"] == mode.get(tier, "cpu")


CASES = [(tier, kind) for tier in TIERS for kind in ("full", "nf4")]
CASES += [(tier, "nf4") for tier in FROZEN_ONLY]


@pytest.mark.parametrize(("tier", "kind"), CASES)
def test_clipped_as_transformers_does_and_resumed_bit_for_bit(
    tier: str, kind: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    """The norm of each step is logged, and the weights end where theirs do.

    Six steps are three, all objects made anew, and three.
    """
    options = {**TIERS, **FROZEN_ONLY}[tier]
    where = {"source": tier.removeprefix("from ") if tier in FROZEN_ONLY else "memory"}
    stock = run(kind, {}, stock=True)
    ours = run(kind, options, save_strategy="steps", save_steps=3, **where)
    _assert_where(ours, tier)
    for key, tolerance in (("loss", 5e-6), ("grad_norm", 2e-5), ("learning_rate", 0.0)):
        wanted, found = _logged(stock, key), _logged(ours, key)
        assert len(found) == STEPS
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0)
    assert (_logged(ours, "grad_norm") > 0.3).all()  # every step was clipped
    values = _trained(stock)
    for name, value in _trained(ours).items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=5e-6)
    _assert_same(run(kind, options, resume=tmp_path / "run" / "checkpoint-3", **where), ours)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["full", "nf4"])
def test_small_moments_resume_bit_for_bit(
    kind: str, moments: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    options = {**PARTS, "moment_dtype": moments}
    whole = run(kind, options, save_strategy="steps", save_steps=3)
    assert memory_report(whole.model)["optimizer"]["moments"] == moments
    _assert_same(run(kind, options, resume=tmp_path / "run" / "checkpoint-3"), whole)


@pytest.mark.parametrize("kind", ["full", "nf4"])
def test_updates_during_backward_resume_bit_for_bit(
    kind: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    """Without clipping, which is when they are made."""
    options = {**PAGED, "eager": True}
    whole = run(kind, options, max_grad_norm=0.0, save_strategy="steps", save_steps=3)
    saved = tmp_path / "run" / "checkpoint-3"
    resumed = run(kind, options, max_grad_norm=0.0, resume=saved)
    values = _trained(whole)
    assert [n for n, x in _trained(resumed).items() if not torch.equal(x, values[n])] == []
