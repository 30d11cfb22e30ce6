"""random_weights: the architecture's own scales, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ts_hf
from ts_core.errors import OptionError


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral", "gemma2"])
def test_scales_are_those_of_the_init_rule(
    family: str, tiny_model: Callable[..., Any], tiny_config: Callable[..., Any]
) -> None:
    wanted = tiny_model(family)
    torch.manual_seed(1)
    model = ts_hf.load_model(
        tiny_config(family), random_weights=True, quantize=None, dtype=torch.float32
    )
    reference = wanted.state_dict()
    assert set(model.state_dict()) == set(reference)
    for name, tensor in model.state_dict().items():
        if reference[name].numel() < 64 or reference[name].std() == 0:
            assert torch.equal(tensor, reference[name]), name
            continue
        # Standard deviations of two samples of n values differ by about sqrt(1 / n) of it.
        spread = reference[name].std() * (6 / reference[name].numel() ** 0.5)
        assert abs(tensor.std() - reference[name].std()) < spread, name
        assert abs(tensor.mean()) < spread, name
    for name, buffer in wanted.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_tied_and_repeatable(tiny_config: Callable[..., Any]) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(ts_hf.load_model(config, random_weights=True, quantize=None))
    assert made[0].lm_head.weight is made[0].model.embed_tokens.weight
    for name, tensor in made[0].state_dict().items():
        assert torch.equal(tensor, made[1].state_dict()[name])


def test_quantized(tiny_config: Callable[..., Any], codec: str) -> None:
    model = ts_hf.load_model(tiny_config("llama"), random_weights=True, quantize=codec)
    assert model.trainstream_load.quantized_tensors == 4 * 7
    up = model.model.layers[0].mlp.up_proj.weight
    assert abs(up.dequantize().float().std() - 0.02) < 0.002
    ids = torch.randint(0, 256, (1, 7))
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_from_a_folder_that_has_only_a_config(
    tiny_config: Callable[..., Any], tmp_path: Any
) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    model = ts_hf.load_model(tmp_path, random_weights=True, quantize=None, num_hidden_layers=2)
    assert len(model.model.layers) == 2


def test_a_config_alone_has_no_weights(tiny_config: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="random_weights=True"):
        ts_hf.load_model(tiny_config("llama"))
    with pytest.raises(OptionError, match="name_or_path"):
        ts_hf.load_model(3, random_weights=True)


@pytest.mark.gpu
def test_drawn_and_encoded_on_the_gpu(tiny_config: Callable[..., Any], codec: str) -> None:
    """On a GPU machine the weights are made there, and end on the CPU all the same."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = ts_hf.load_model(tiny_config("llama"), random_weights=True, quantize=codec)
    assert torch.cuda.max_memory_allocated() > 0
    for name, parameter in model.named_parameters():
        inner = getattr(parameter, "__tensor_flatten__", None)
        tensors = [parameter] if inner is None else [getattr(parameter, n) for n in inner()[0]]
        assert all(tensor.device.type == "cpu" for tensor in tensors), name
    assert abs(model.model.layers[0].mlp.up_proj.weight.dequantize().float().std() - 0.02) < 0.002


@pytest.mark.gpu
def test_gpu_encoding_equals_cpu_encoding(
    checkpoint: Callable[..., Any], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ts_hf import fill

    folder = checkpoint("llama")
    on_gpu = ts_hf.load_model(folder, quantize=codec)
    monkeypatch.setattr(fill, "_work_device", lambda: torch.device("cpu"))
    on_cpu = ts_hf.load_model(folder, quantize=codec)
    for (name, one), (_, other) in zip(
        on_gpu.named_parameters(), on_cpu.named_parameters(), strict=True
    ):
        flatten = getattr(one, "__tensor_flatten__", None)
        for inner in [] if flatten is None else flatten()[0]:
            assert torch.equal(getattr(one, inner), getattr(other, inner)), name
