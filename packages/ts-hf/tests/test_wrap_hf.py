"""wrap_hf on a model with a cache: activations of its layers are paged and recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ts_core import memory_report, unwrap
from ts_hf import wrap_hf


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def trained(**options: Any) -> tuple[LlamaForCausalLM, list[torch.Tensor]]:
    model = small_llama()
    model, optimizer = wrap_hf(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        device="host",
        quantize="none",
        min_offload_bytes=0,
        max_inflight_bytes=1,
        **options,
    )
    model.train()
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(0, 64, (2, 16))
        output = model(input_ids=tokens, labels=tokens)
        assert output.past_key_values is None
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.detach())
    optimizer.synchronize()
    return model, [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("offload", "recompute", "wanted"),
    [(True, False, "oook"), (False, True, "rrrr"), (True, [1], "orok")],
)
def test_activations_of_a_llama(offload: Any, recompute: Any, wanted: str) -> None:
    _, expected = trained(activation_offload=False, recompute=False)
    model, found = trained(activation_offload=offload, recompute=recompute)
    assert all(map(torch.equal, expected, found))
    report = memory_report(model)["activations"]
    assert "".join(mode[0] for mode in report["policy"]) == wanted
    assert report["recomputed"] == 3 * wanted.count("r")
    assert (report["fetches"] > 0) == ("o" in wanted)


def test_a_cache_is_made_where_it_is_used() -> None:
    """In evaluation, when asked for, and after unwrap()."""
    model, _ = trained(activation_offload=False, recompute=False)
    tokens = torch.randint(0, 64, (1, 5))
    assert model(input_ids=tokens).past_key_values is None
    assert model(input_ids=tokens, use_cache=True).past_key_values is not None
    with torch.no_grad():
        assert model.eval()(input_ids=tokens).past_key_values is not None
        assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 8)
    assert unwrap(model).train()(input_ids=tokens).past_key_values is not None
