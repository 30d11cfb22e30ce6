"""wrap(moe_paging=True): only picked experts are copied; the numbers are those of resident ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ts_hf
from ts_core import memory_report, unwrap
from ts_core.errors import OptionError
from ts_core.testing import inject_delays
from ts_hf.testing import FAMILIES, token_batch

MOE = [name for name, family in FAMILIES.items() if family.experts]
Train = Callable[..., tuple[list[torch.Tensor], dict[str, torch.Tensor]]]
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def assert_same(found: Any, expected: Any) -> None:
    losses, trained = found
    assert all(torch.equal(a, b) for a, b in zip(losses, expected[0], strict=True))
    assert trained.keys() == expected[1].keys()
    assert [name for name in trained if not torch.equal(trained[name], expected[1][name])] == []


def watch_gradients(model: Any) -> list[torch.Tensor]:
    """A list that every gradient of a trained parameter is added to."""
    seen: list[torch.Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: seen.append(grad.clone()))
    return seen


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_equal_to_resident_bit_for_bit(
    family: str, implementation: str, adapted: Callable[..., Any], train_steps: Train
) -> None:
    runs = []
    for paging in (False, True):
        model = adapted(family, lora=ATTENTION, experts_implementation=implementation)
        model, optimizer = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", lr=1e-2, moe_paging=paging, param_offload=paging
        )
        with inject_delays(3, max_ms=0.5):
            runs.append(train_steps(model, optimizer, 3))
    assert_same(*runs)
    report = memory_report(model)["experts"]
    assert report["layers"] == 3 and report["experts"] == [6, 6, 6]
    assert report["load_bytes"] > 0


def test_a_missing_wait_would_show(
    adapted: Callable[..., Any], train_steps: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compute stream's wait for the copies the numbers are wrong: delays bite."""
    from ts_core.transfer import CopyEngine

    def run(paging: bool) -> Any:
        model = adapted("mixtral", lora=ATTENTION)
        model, optimizer = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", lr=1e-2, moe_paging=paging
        )
        with inject_delays(5, max_ms=5.0, share=1.0):
            return train_steps(model, optimizer, 2)

    expected = run(False)
    monkeypatch.setattr(CopyEngine, "wait_compute", lambda self, event: None)
    with pytest.raises(AssertionError):
        assert_same(run(True), expected)


@pytest.mark.parametrize("checkpointing", [None, True, False])  # None: off; use_reentrant
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_checkpointing_accumulation_and_clipping(
    family: str, checkpointing: bool | None, adapted: Callable[..., Any], train_steps: Train
) -> None:
    runs = []
    for paging in (False, True):
        model = adapted(family, lora=ATTENTION)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        model, optimizer = ts_hf.wrap_hf(
            model.train(),
            device="cpu",
            quantize="none",
            lr=1e-2,
            moe_paging=paging,
            accumulation_steps=2,
            max_grad_norm=0.5,
        )
        with inject_delays(4, max_ms=0.5):
            runs.append(train_steps(model, optimizer, 3, accumulation=2))
    assert_same(*runs)


@pytest.mark.parametrize("option", ["activation_offload", "recompute"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_beside_paged_and_recomputed_activations(
    option: str, implementation: str, adapted: Callable[..., Any], train_steps: Train
) -> None:
    runs = []
    for paging in (False, True):
        model = adapted("gpt_oss", lora=ATTENTION, experts_implementation=implementation)
        extra = {option: True, "min_offload_bytes": 0} if paging else {}
        model, optimizer = ts_hf.wrap_hf(
            model.train(), device="cpu", quantize="none", lr=1e-2, moe_paging=paging, **extra
        )
        with inject_delays(7, max_ms=0.5):
            runs.append(train_steps(model, optimizer, 3))
    assert_same(*runs)


def test_trained_biases_and_routers_beside_paged_experts(train_steps: Train) -> None:
    runs = []
    for paging in (False, True):
        model = FAMILIES["gpt_oss"].build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name or "router" in name)
        model, optimizer = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", lr=1e-2, moe_paging=paging
        )
        runs.append(train_steps(model, optimizer, 3))
    assert_same(*runs)
    assert any("experts.down_proj_bias" in name for name in runs[0][1])


def test_one_trained_stack_beside_a_paged_one(train_steps: Train) -> None:
    runs = []
    for paging in (False, True):
        model = FAMILIES["qwen3_moe"].build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts.down_proj" in name)
        model, optimizer = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", lr=1e-2, moe_paging=paging
        )
        runs.append(train_steps(model, optimizer, 3))
    assert_same(*runs)


def test_autocast(adapted: Callable[..., Any]) -> None:
    gradients = []
    for paging in (False, True):
        model = adapted("mixtral", lora=ATTENTION)
        model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="none", moe_paging=paging)
        seen = watch_gradients(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**token_batch(1)).loss
        loss.backward()
        gradients.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_backward_twice_and_evaluation_in_between(adapted: Callable[..., Any]) -> None:
    found = []
    for paging in (False, True):
        model = adapted("qwen2_moe", lora=ATTENTION)
        model, _ = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", moe_paging=paging, accumulation_steps=2
        )
        seen = watch_gradients(model)
        first = model(**token_batch(1)).loss
        with torch.no_grad():
            seen.append(model(**token_batch(2)).logits)
        first.backward(retain_graph=True)
        first.backward()
        found.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_values_are_the_users_own(adapted: Callable[..., Any]) -> None:
    """Reading, writing, state dicts and unwrap() see and change the experts as in plain torch."""
    plain, paged = adapted("mixtral", lora=ATTENTION), adapted("mixtral", lora=ATTENTION)
    name = "base_model.model.model.layers.1.mlp.experts.down_proj"
    paged, _ = ts_hf.wrap_hf(paged, device="cpu", quantize="none", moe_paging=True)

    def same() -> bool:
        with torch.no_grad():
            a, b = (model(**token_batch(3)).logits for model in (plain, paged))
        return torch.equal(a, b)

    assert same()
    assert torch.equal(paged.state_dict()[name], plain.state_dict()[name])
    for model in (plain, paged):
        weight = dict(model.named_parameters())[name]
        with torch.no_grad():
            weight[2].mul_(1.5)
    assert same()
    for model in (plain, paged):
        dict(model.named_parameters())[name].data = torch.full((6, 64, 96), 0.01)
    assert same()
    state = {name: torch.randn(6, 64, 96)}
    for model in (plain, paged):
        model.load_state_dict(state, strict=False)
    assert same()
    with torch.no_grad():
        paged(**token_batch(3))
        dict(paged.named_parameters())[name].data.add_(0.25)  # leaves no trace
        dict(plain.named_parameters())[name].data.add_(0.25)
    assert same()
    unwrap(paged)
    assert same()
    experts = paged.get_base_model().model.layers[0].mlp.experts
    assert "forward" not in experts.__dict__ and experts.num_experts == 6


def test_after_an_exception_the_next_step_is_right(adapted: Callable[..., Any]) -> None:
    model = adapted("qwen3_moe", lora=ATTENTION)
    model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="none", moe_paging=True)
    experts = model.get_base_model().model.layers[1].mlp.experts
    with torch.no_grad():
        expected = model(**token_batch(1)).logits
        own, experts.act_fn = experts.act_fn, None
        with pytest.raises(TypeError):
            model(**token_batch(1))
        experts.act_fn = own
        assert torch.equal(model(**token_batch(1)).logits, expected)
    assert experts.num_experts == 6 and experts.gate_up_proj.shape[0] == 6


def test_room_for_one_slot_suffices(adapted: Callable[..., Any], train_steps: Train) -> None:
    """Then nothing is fetched ahead, and the numbers stay the same."""
    one = 3 * 64 * 96 * 4  # of one expert
    runs = []
    for limit in (None, 9 * one):
        model = adapted("mixtral", lora=ATTENTION)
        model, optimizer = ts_hf.wrap_hf(
            model,
            device="cpu",
            quantize="none",
            lr=1e-2,
            moe_paging=True,
            param_offload=limit is None,
            vram_limit=limit,
            check_memory=False,
            vram_headroom=0,
        )
        with inject_delays(9, max_ms=0.5):
            runs.append(train_steps(model, optimizer, 3))
    assert_same(*runs)
    report = memory_report(model)
    assert report["experts"]["slot_bytes"] <= 6 * one
    assert report["gpu"]["peak_allocated"] <= 9 * one
    unwrap(model)


def test_what_cannot_be_paged_is_refused(adapted: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="no stacked experts were found"):
        ts_hf.wrap_hf(adapted("llama"), device="cpu", moe_paging=True)
    with pytest.raises(OptionError, match="are trained"):
        ts_hf.wrap_hf(FAMILIES["mixtral"].build(), device="cpu", moe_paging=True)


def test_generation(adapted: Callable[..., Any]) -> None:
    tokens = []
    for paging in (False, True):
        model = adapted("qwen3_moe", lora=ATTENTION).eval()
        model, _ = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", moe_paging=paging, param_offload=paging
        )
        cache = ts_hf.TrainStreamCache(model, 64, resident_layers=1, page_tokens=4)
        inputs = {k: v for k, v in token_batch(4).items() if k != "labels"}
        tokens.append(
            model.generate(
                **inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*tokens)


def test_under_the_trainer_with_resume(adapted: Callable[..., Any], tmp_path: Path) -> None:
    """TrainStreamTrainer(moe_paging=True): transformers' losses, and an exact resume."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in token_batch(1, 12)["input_ids"]]

    def run(cls: Any, folder: str, resume: bool = False, **options: Any) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            adam_epsilon=1e-4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = cls(
            model=adapted("qwen3_moe", lora=ATTENTION),
            args=arguments,
            train_dataset=rows,
            **options,
        )
        trainer.remove_callback(PrinterCallback)
        checkpoint = str(tmp_path / "ours" / "checkpoint-3")
        trainer.train(resume_from_checkpoint=checkpoint if resume else None)
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    options = {"trainstream": {"moe_paging": True, "quantize": "none"}}
    wanted = run(Trainer, "stock")
    found = run(ts_hf.TrainStreamTrainer, "ours", **options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=5e-6, atol=0)
    assert run(ts_hf.TrainStreamTrainer, "again", resume=True, **options) == found


def test_inference_mode_then_training(adapted: Callable[..., Any]) -> None:
    found = []
    for paging in (False, True):
        model = adapted("mixtral", lora=ATTENTION)
        model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="nf4", moe_paging=paging)
        with torch.inference_mode():
            logits = model(**token_batch(2)).logits.clone()
        seen = watch_gradients(model)
        model(**token_batch(1)).loss.backward()
        found.append([logits, *seen])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "use_mamba_kernels": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "glm4_moe", "jamba", "minimax_m2", "nemotron_h", "olmoe", "qwen3_next"],
)
def test_families_that_were_not_thought_of(family: str) -> None:
    """Experts are found by their form, shared and ungated ones and other mixers beside them."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]
    default = config()
    config = config(**{name: value for name, value in SMALL.items() if hasattr(default, name)})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    batch = {**token_batch(1), "use_cache": False}
    model(**batch).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model, _ = ts_hf.wrap_hf(
        model, device="cpu", quantize="none", moe_paging=True, accumulation_steps=2
    )
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, n=name: found.__setitem__(n, grad.clone()))
    model(**batch).loss.backward()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert memory_report(model)["experts"]["loads"] > 0


def test_two_forwards_before_one_backward(adapted: Callable[..., Any]) -> None:
    found = []
    for paging in (False, True):
        model = adapted("gpt_oss", lora=ATTENTION)
        model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="nf4", moe_paging=paging)
        seen = watch_gradients(model)
        with inject_delays(8, max_ms=0.5):
            losses = [model(**token_batch(seed)).loss for seed in (1, 2)]
            (losses[0] + 2 * losses[1]).backward()
        found.append([*losses, *seen])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_gpu_equal_to_resident(
    family: str, implementation: str, adapted: Callable[..., Any], train_steps: Train
) -> None:
    runs = []
    for paging in (False, True):
        model = adapted(
            family, lora=ATTENTION, experts_implementation=implementation, dtype=torch.bfloat16
        )
        model, optimizer = ts_hf.wrap_hf(
            model, device="cuda", quantize="none", lr=1e-2, moe_paging=paging, param_offload=paging
        )
        with inject_delays(3, max_ms=1.0):
            runs.append(train_steps(model, optimizer, 4, device="cuda"))
    assert_same(*runs)
    experts = memory_report(model)["experts"]
    assert 0 < experts["load_bytes"] <= experts["whole_bytes"]
    module = next(m for m in model.modules() if isinstance(m.__dict__.get("num_experts"), int))
    assert {p.device.type for n, p in module.named_parameters() if p.dim() == 3} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["nf4", "mxfp4", "fp8"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_gpu_stored_experts_equal_resident_ones(
    codec: str, implementation: str, adapted: Callable[..., Any], train_steps: Train
) -> None:
    runs = []
    for options in ({"param_offload": False}, {"param_offload": True}, {"moe_paging": True}):
        model = adapted(
            "qwen3_moe", lora=ATTENTION, experts_implementation=implementation, dtype=torch.bfloat16
        )
        model, optimizer = ts_hf.wrap_hf(model, device="cuda", quantize=codec, lr=1e-2, **options)
        with inject_delays(5, max_ms=1.0):
            runs.append(train_steps(model, optimizer, 3, device="cuda"))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@pytest.mark.gpu
def test_gpu_generation(adapted: Callable[..., Any]) -> None:
    tokens = []
    for paging in (False, True):
        model = adapted("qwen3_moe", lora=ATTENTION, dtype=torch.bfloat16).eval()
        model, _ = ts_hf.wrap_hf(model, device="cuda", quantize="none", moe_paging=paging)
        inputs = {k: v.cuda() for k, v in token_batch(4).items() if k != "labels"}
        tokens.append(model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0))
    assert torch.equal(*tokens)
