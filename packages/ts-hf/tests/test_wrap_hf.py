"""wrap_hf on a model with a cache: activations of its layers are paged and recomputed."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ts_core import memory_report, unwrap
from ts_core.registry import codecs
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


@pytest.mark.parametrize(
    ("config", "fields", "options"),
    [
        ("LlamaConfig", {"tie_word_embeddings": True}, {"param_offload": True}),
        ("LlamaConfig", {}, {"quantize": "nf4", "param_offload": [1]}),
        ("MixtralConfig", {"num_local_experts": 4}, {"moe_paging": True}),
        ("MixtralConfig", {"num_local_experts": 4}, {"quantize": "nf4", "moe_paging": True}),
        ("MixtralConfig", {"num_local_experts": 4}, {"quantize": "nf4", "param_offload": True}),
    ],
)
def test_a_model_on_the_meta_device_is_filled_while_it_is_wrapped(
    config: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    """Adapters, tied heads, stacked experts, buffers that no state dict has."""
    if "quantize" in options and not codecs.has("nf4"):
        pytest.skip("ts-quant is not installed")
    made = getattr(transformers, config)(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **fields,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    full = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(made), lora)
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(made)
    empty = peft.get_peft_model(bare, lora)
    values = {
        name: tensor.detach().clone()
        for name, tensor in (*full.named_parameters(), *full.named_buffers())
    }
    shared = {"device": "host", "lr": 1e-2, "quantize": "none", **options}
    tokens = torch.randint(0, 96, (2, 12))
    losses = []
    for model, loader in ((full, None), (empty, values.__getitem__)):
        wrapped, optimizer = wrap_hf(model, loader=loader, **shared)
        found = []
        for _ in range(3):
            loss = wrapped(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]
