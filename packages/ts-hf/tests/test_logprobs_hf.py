"""Log-probabilities of a model's sequences, and those of its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ts_hf
from ts_core import registry
from ts_core.errors import DataError, OptionError, UnknownPluginError
from ts_core.testing import inject_delays


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three rows with prompts and padding masked; the last has nothing that counts."""
    ids = torch.randint(2, 256, (3, 11))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :4] = -100
    labels[1, 8:], mask[1, 8:] = -100, 0
    labels[2] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _by_hand(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs).logits[:, :-1].double()
    targets = batch["labels"][:, 1:]
    picked = F.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (picked * (targets != -100)).sum(-1)


def _model(kind: str, tiny_model: Callable[..., Any], lora: Any = None) -> Any:
    if kind in ("granite", "cohere"):  # scaled logits
        import transformers

        name, fields = {
            "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
            "cohere": ("CohereConfig", {"logit_scale": 0.25}),
        }[kind]
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, name)(
                vocab_size=256,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
                **fields,
            )
        )
    return tiny_model(kind)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma2", "granite", "cohere"])
def test_equal_to_the_models_own_logits(
    kind: str,
    batch: dict[str, torch.Tensor],
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and gradients; with the kernel only where it stands for the model's own logits."""
    used: list[str] = []
    get = registry.kernels.get
    monkeypatch.setattr(registry.kernels, "get", lambda name: used.append(name) or get(name))
    model = _model(kind, tiny_model).eval()
    found = ts_hf.causal_lm_logprobs(model, **batch, chunk_size=5)
    (found * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wanted = _by_hand(model, batch)
    (wanted * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    assert found.dtype == torch.float32 and found.shape == (3,) and found[2] == 0
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    chunked = kind in ("llama", "gpt2", "mixtral") and registry.kernels.has("sequence_logprobs")
    assert used == (["sequence_logprobs"] if chunked else [])
    averaged = ts_hf.causal_lm_logprobs(model, **batch, average=True)
    counts = (batch["labels"][:, 1:] != -100).sum(-1).clamp(min=1)
    torch.testing.assert_close(averaged, found / counts, rtol=1e-5, atol=1e-6)


def test_labels_default_to_the_tokens_that_are_not_padding(
    batch: dict[str, torch.Tensor], tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model("llama").eval()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    found = ts_hf.causal_lm_logprobs(model, ids, attention_mask=mask)
    labels = ids.masked_fill(mask == 0, -100)
    wanted = _by_hand(model, {"input_ids": ids, "labels": labels, "attention_mask": mask})
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)


def test_lora_on_the_head_is_honoured(
    batch: dict[str, torch.Tensor], tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    base = tiny_model("llama", tie_word_embeddings=False).eval()
    plain = ts_hf.causal_lm_logprobs(base, **batch)
    model = lora(base, target_modules=["lm_head", "q_proj"], lora_alpha=64).eval()
    found = ts_hf.causal_lm_logprobs(model, **batch)
    torch.testing.assert_close(found.double(), _by_hand(model, batch), rtol=1e-6, atol=1e-5)
    assert (found - plain)[:2].abs().min() > 1e-3
    torch.testing.assert_close(ts_hf.reference_logprobs(model, [batch]), plain.detach())


def test_without_the_kernel_the_models_logits_serve(
    batch: dict[str, torch.Tensor],
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama").eval()
    wanted = ts_hf.causal_lm_logprobs(model, **batch)
    monkeypatch.setattr(registry.kernels, "has", lambda name: False)
    found = ts_hf.causal_lm_logprobs(model, **batch, chunk_size=4)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)


def _policy_and_reference(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Of three steps: [reference, policy, reference, policy, ...]."""
    found = []
    with inject_delays(seed=3, max_ms=1.0):
        for _ in range(3):
            found.append(ts_hf.reference_logprobs(model, [batch]))
            policy = ts_hf.causal_lm_logprobs(model, **batch)
            policy.sum().neg().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(policy.detach())
    return found


def _check_streaming(runs: list[Any]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    first, *others = runs[0][::2]
    assert all(torch.equal(first, other) for other in others)  # the reference stays put
    assert not torch.equal(runs[0][1], runs[0][3])


@pytest.mark.parametrize("head", [False, True])
def test_streamed_equals_resident(
    head: bool,
    batch: dict[str, torch.Tensor],
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
) -> None:
    """Policy, its gradients and the reference, bit for bit; an adapter on the head, too."""
    targets = ["lm_head", "q_proj", "up_proj"] if head else "all-linear"
    runs = []
    for offload in (True, False):
        model = lora(tiny_model("llama"), target_modules=targets)
        model, optimizer = ts_hf.wrap_hf(model, device="cpu", param_offload=offload, lr=1e-2)
        runs.append(_policy_and_reference(model, optimizer, batch))
    _check_streaming(runs)


@pytest.mark.gpu
@pytest.mark.parametrize("head", [False, True])
def test_streamed_equals_resident_on_a_gpu(
    head: bool,
    batch: dict[str, torch.Tensor],
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
) -> None:
    targets = ["lm_head", "q_proj", "up_proj"] if head else "all-linear"
    runs = []
    for offload in (True, False):
        model = lora(tiny_model("llama").bfloat16(), target_modules=targets)
        model, optimizer = ts_hf.wrap_hf(
            model, device="cuda", param_offload=offload, offload=True, lr=1e-2
        )
        on_gpu = {name: tensor.cuda() for name, tensor in batch.items()}
        runs.append(_policy_and_reference(model, optimizer, on_gpu))
    assert all(not reference.is_cuda for reference in runs[0][::2])
    _check_streaming(runs)


def test_reference_with_fused_adapters(
    batch: dict[str, torch.Tensor], tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    if not registry.kernels.has("patch_lora"):
        pytest.skip("no fused LoRA is installed (ts-kernels)")
    wanted = ts_hf.causal_lm_logprobs(tiny_model("llama").eval(), **batch).detach()
    model, _ = ts_hf.wrap_hf(lora(tiny_model("llama")), device="cpu", fused_lora=True)
    torch.testing.assert_close(ts_hf.reference_logprobs(model, [batch]), wanted)


@pytest.mark.parametrize("adapters", ["peft", "transformers", "none"])
def test_reference_is_the_base_and_leaves_no_trace(
    adapters: str,
    batch: dict[str, torch.Tensor],
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
) -> None:
    """In order, in eval mode (there is dropout), on the CPU; modes and adapters come back."""
    base = tiny_model("llama", attention_dropout=0.4)
    wanted = ts_hf.causal_lm_logprobs(base.eval(), **batch).detach()
    model = base
    if adapters == "peft":
        model = lora(base, lora_dropout=0.3)
    elif adapters == "transformers":
        peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
        base.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.train()
    base.model.layers[0].eval()
    adapted = _with_rng(lambda: _by_hand(model, batch))
    halves = [{k: v[:1] for k, v in batch.items()}, {k: v[1:].tolist() for k, v in batch.items()}]
    found = ts_hf.reference_logprobs(model, iter(halves))
    assert found.shape == (3,) and found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert model.training and not base.model.layers[0].training
    assert base.model.layers[0].self_attn.training is False and base.model.layers[1].training
    assert torch.equal(_with_rng(lambda: _by_hand(model, batch)), adapted)
    assert ts_hf.reference_logprobs(model, []).shape == (0,)


def _with_rng(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return run()


def test_modes_come_back_after_an_error(
    tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    model = lora(tiny_model("llama")).train()
    with pytest.raises(DataError, match="batch 0 has no input_ids, but ids"):
        ts_hf.reference_logprobs(model, [{"ids": 1}])
    assert model.training
    assert not model.base_model.model.model.layers[0].self_attn.q_proj.disable_adapters


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.long)}, DataError, r"is \(3,\); expected"),
        ({"input_ids": [[1]]}, DataError, "is list; expected a tensor"),
        (
            {"input_ids": torch.ones(1, 3).long(), "labels": torch.ones(1, 2).long()},
            DataError,
            r"labels has shape \(1, 2\)",
        ),
        ({"input_ids": torch.ones(1, 3).long(), "chunk_size": 0}, OptionError, "chunk_size=0"),
    ],
)
def test_refusals(
    arguments: Any, error: type[Exception], words: str, tiny_model: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=words):
        ts_hf.causal_lm_logprobs(tiny_model("llama"), **arguments)


def test_dpo_loss_needs_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not registry.kernels.has("dpo_loss"):
        pytest.skip("no dpo_loss is installed (ts-kernels)")
    four = torch.tensor([[-1.0], [-2.0], [-1.5], [-1.5]])
    loss, chosen, rejected = ts_hf.dpo_loss(*four, beta=0.5)
    assert loss.item() == pytest.approx(0.4741, abs=1e-4)
    assert chosen.item() == 0.25 and rejected.item() == -0.25

    def missing(name: str) -> Any:
        raise UnknownPluginError(f"no {name}: pip install ts-kernels")

    monkeypatch.setattr(registry.kernels, "get", missing)
    with pytest.raises(UnknownPluginError, match="pip install ts-kernels"):
        ts_hf.dpo_loss(*four)
