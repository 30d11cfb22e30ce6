"""The chunked loss is the model's own loss, or is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ts_core import registry
from ts_hf.training.loss import KERNEL, ChunkedLoss


@pytest.fixture(autouse=True)
def _needs_the_kernel() -> None:
    if not registry.kernels.has(KERNEL):
        pytest.skip("no chunked loss is installed (ts-kernels)")


def _batch(masked: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (3, 11))
    labels = ids.clone()
    labels[0, :masked] = -100
    labels[2, -masked:] = -100
    mask = torch.ones_like(ids)
    mask[2, -masked:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("gpt2", {}),
        ("mixtral", {}),
    ],
)
@pytest.mark.parametrize("num_items", [None, 40])
def test_equals_the_models_own_loss(
    family: str, changes: dict[str, Any], num_items: int | None, tiny_model: Callable[..., Any]
) -> None:
    said: list[str] = []
    model = tiny_model(family, **changes).train()
    batch = _batch()
    chunked = ChunkedLoss(5, said.append)
    assert chunked.applies(model, batch), said
    assert model.training
    loss, outputs = chunked(model, batch, num_items)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    kwargs = {} if num_items is None else {"num_items_in_batch": num_items}
    wanted = model(**batch, **kwargs).loss
    wanted.backward()
    assert outputs.logits.shape[1] == 1  # of the last position only
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and gradients[name] is not None, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)
    assert said == []


def test_shift_labels_are_taken_as_they_are(tiny_model: Callable[..., Any]) -> None:
    model, batch = tiny_model("llama"), _batch()
    chunked = ChunkedLoss(1024, pytest.fail)
    wanted, _ = chunked(model, batch, None)
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    assert chunked.applies(model, {**batch, "shift_labels": shifted})
    loss, _ = chunked(model, {**batch, "shift_labels": shifted}, None)
    assert torch.equal(loss, wanted)


def test_every_label_masked(tiny_model: Callable[..., Any]) -> None:
    model, batch = tiny_model("llama"), _batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for num_items in (None, torch.tensor(0)):
        model.zero_grad()
        loss, _ = ChunkedLoss(1024, pytest.fail)(model, batch, num_items)
        loss.backward()
        assert loss.item() == 0
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or not parameter.grad.any(), name


def test_lora_in_the_layers_is_honoured(
    tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    model, batch = lora(tiny_model("llama")), _batch()
    chunked = ChunkedLoss(4, pytest.fail)
    assert chunked.applies(model, batch)
    loss, _ = chunked(model, batch, None)
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-6, atol=0)


def test_lora_on_the_head_uses_the_models_own_loss(
    tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    said: list[str] = []
    for changes in ({"target_modules": ["lm_head", "q_proj"]}, {"modules_to_save": ["lm_head"]}):
        model = lora(tiny_model("llama", tie_word_embeddings=False), **changes)
        assert not ChunkedLoss(4, said.append).applies(model, _batch())
        assert "its head is a" in said.pop()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "caps its logits"),
        ("mixtral", {"output_router_logits": True}, "router loss"),
    ],
)
def test_models_that_do_more_than_the_head(
    family: str, changes: dict[str, Any], reason: str, tiny_model: Callable[..., Any]
) -> None:
    said: list[str] = []
    assert not ChunkedLoss(4, said.append).applies(tiny_model(family, **changes), _batch())
    assert len(said) == 1 and reason in said[0]


def test_scaled_logits_are_noticed_by_their_values() -> None:
    """No name is looked for: Granite divides its logits, and the check on the model sees it."""
    from transformers import AutoModelForCausalLM, GraniteConfig

    config = GraniteConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=4.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    said: list[str] = []
    model = AutoModelForCausalLM.from_config(config)
    assert not ChunkedLoss(4, said.append).applies(model, _batch())
    assert "not simply the head" in said[0]


def test_a_changed_hidden_state_is_noticed(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    said: list[str] = []
    assert not ChunkedLoss(4, said.append).applies(model, _batch())
    assert "not simply the head" in said[0]


def test_without_the_kernel_it_says_so(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.kernels, "has", lambda name: False)
    said: list[str] = []
    model = tiny_model("llama")
    chunked = ChunkedLoss(4, said.append)
    assert not chunked.applies(model, _batch())
    assert not chunked.applies(model, _batch())
    assert len(said) == 1 and "pip install ts-kernels" in said[0]  # once, not per batch
