"""Vision-language models: loaded, quantized, streamed and trained with images in their batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ts_hf
from ts_core import unwrap
from ts_core.errors import DataError, OptionError
from ts_core.testing import inject_delays
from ts_hf.skeleton import auto_class
from ts_hf.testing import FAMILIES, Family, token_batch

VISION = [name for name, row in FAMILIES.items() if row.images is not None]
LAYERS = 3  # decoder layers of every small model


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    """saved("llava"): a folder with a small model of the family."""

    def save(family: str) -> Path:
        folder = tmp_path / family
        FAMILIES[family].build().save_pretrained(folder)
        return folder

    return save


def load(folder: Path, **options: Any) -> Any:
    return ts_hf.load_model(folder, **{"dtype": torch.float32, "quantize": None, **options})


def stock(folder: Path) -> Any:
    auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=torch.float32)


def with_lora(row: Family, model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=row.targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.02)
    return adapted


def train(model: Any, batches: list[dict[str, torch.Tensor]], **options: Any) -> Any:
    """Losses and trained values of a step on each batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)
    device = options.setdefault("device", "cpu")
    model, optimizer = ts_hf.wrap_hf(model, adam, quantize="none", **options)
    model.train()
    losses = []
    for batch in batches:
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return losses, {name: parameter.detach().cpu().clone() for name, parameter in named}


def assert_same(found: Any, wanted: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    assert found[1].keys() == wanted[1].keys()
    assert [name for name in found[1] if not torch.equal(found[1][name], wanted[1][name])] == []


def decode_all(model: Any) -> int:
    """Put the decoded values in place of every quantized weight; how many there were."""
    count = 0
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if hasattr(parameter, "codec"):
                dense: Any = parameter
                module._parameters[name] = nn.Parameter(dense.dequantize(), requires_grad=False)
                count += 1
    return count


@pytest.mark.parametrize("family", VISION)
def test_loaded_as_from_pretrained(family: str, saved: Callable[[str], Path]) -> None:
    folder = saved(family)
    wanted, found = stock(folder), load(folder)
    assert type(found) is type(wanted)
    assert found.state_dict().keys() == wanted.state_dict().keys()
    batch = FAMILIES[family].batch(1)
    with torch.no_grad():
        logits = found(**batch).logits
        assert torch.equal(logits, wanted(**batch).logits)
        other = {**batch, "pixel_values": torch.full_like(batch["pixel_values"], 0.5)}
        assert not torch.equal(logits, found(**other).logits)  # the image counts


@pytest.mark.parametrize("family", VISION)
def test_the_decoder_layers_are_found_and_quantized_and_nothing_else(
    family: str, saved: Callable[[str], Path]
) -> None:
    """Also where the tower's stack of layers is the longer one."""
    model = load(saved(family), quantize="nf4")
    layers = ts_hf.find_decoder_layers(model)
    assert len(layers) == LAYERS
    inside = {id(p) for layer in layers for p in layer.parameters() if p.dim() == 2}
    quantized = {id(p) for p in model.parameters() if hasattr(p, "codec")}
    assert len(quantized) == 7 * LAYERS and quantized <= inside
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("family", VISION)
def test_streamed_nf4_steps_equal_resident_decoded_ones(
    family: str, saved: Callable[[str], Path]
) -> None:
    """With a batch of text between batches with images."""
    row, folder = FAMILIES[family], saved(family)
    text = token_batch(3)
    if row.images is not None and row.images.types:
        text[row.images.types] = torch.zeros_like(text["input_ids"])
    batches = [row.batch(0), text, row.batch(1)]
    with inject_delays(2, max_ms=0.3):
        model = with_lora(row, load(folder, quantize="nf4"))
        found = train(model, batches, param_offload=True, activation_offload=True)
    decoded = with_lora(row, load(folder, quantize="nf4"))
    assert decode_all(decoded) == 7 * LAYERS
    assert_same(found, train(decoded, batches, param_offload=False))


@pytest.mark.parametrize("family", VISION)
def test_the_trainer_on_a_quantized_base(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Five steps of two micro-batches: losses, norms and adapters of transformers' own Trainer."""
    row, folder = FAMILIES[family], saved(family)
    rows = [row.batch(40 + index, 1) for index in range(12)]
    decoded = stock(folder)
    quantized = load(folder, quantize="nf4")
    with torch.no_grad():
        values = dict(decoded.named_parameters())
        for name, parameter in quantized.named_parameters():
            if hasattr(parameter, "codec"):
                values[name].copy_(parameter.dequantize())
    runs = []
    for cls, model, more in (
        (transformers.Trainer, decoded, {}),
        (ts_hf.TrainStreamTrainer, quantized, {"trainstream": {"param_offload": True}}),
    ):
        trainer = cls(
            model=with_lora(row, model),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path / cls.__name__),
                max_steps=5,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                learning_rate=1e-3,
                adam_epsilon=1e-4,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=rows,
            data_collator=lambda items: {
                name: torch.cat([item[name] for item in items]) for name in items[0]
            },
            **more,
        )
        trainer.train()
        runs.append(trainer)
    lines = [[x for x in trainer.state.log_history if "grad_norm" in x] for trainer in runs]
    assert len(lines[0]) == 5
    for key, tolerance in (("loss", 5e-6), ("grad_norm", 2e-5)):
        wanted, found = (torch.tensor([line[key] for line in history]) for history in lines)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0)
    wanted, found = (
        {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
        for trainer in runs
    )
    assert found.keys() == wanted.keys() and len(found) == 2 * 7 * LAYERS
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=5e-6)


@pytest.mark.parametrize("family", VISION)
def test_an_adapter_is_saved_for_plain_peft_and_merged(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    row, folder = FAMILIES[family], saved(family)
    model = with_lora(row, load(folder))
    train(model, [row.batch(0), row.batch(1)], param_offload=True)
    batch = row.batch(5)
    with torch.no_grad():
        wanted = model.eval()(**batch).logits
    ts_hf.save_adapter(model, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(stock(folder), tmp_path / "adapter")
    merged, _ = ts_hf.merge_adapter(unwrap(model), into="dequantized")
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, wanted)
        torch.testing.assert_close(merged.eval()(**batch).logits, wanted, rtol=1e-5, atol=1e-5)


def test_random_weights_and_fields_of_the_text_model() -> None:
    row = FAMILIES["llava"]
    config = transformers.LlavaConfig(**row.fields)
    torch.manual_seed(0)
    model = ts_hf.load_model(
        config, random_weights=True, quantize="nf4", num_key_value_heads=4, num_hidden_layers=2
    )
    assert len(ts_hf.find_decoder_layers(model)) == 2
    assert model.config.text_config.num_key_value_heads == 4
    with torch.no_grad():
        assert torch.isfinite(model(**row.batch(0)).loss)
    with pytest.raises(OptionError, match="Did you mean 'num_key_value_heads'"):
        ts_hf.load_model(config, random_weights=True, num_key_value_head=4)


def test_architectures_say_which_model_it_is() -> None:
    """Of types that are known with a vision tower and without."""
    both, text = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    named = {"MllamaForConditionalGeneration": both, "MllamaForCausalLM": text}
    for name, auto in named.items():
        assert auto_class(transformers.MllamaConfig(architectures=[name])) is auto
    assert auto_class(transformers.MllamaConfig()) is text
    assert auto_class(transformers.LlavaConfig()) is both
    assert auto_class(transformers.LlamaConfig(architectures=["SomethingElse"])) is text


@pytest.mark.parametrize("family", VISION)
def test_a_plan_counts_the_tower_and_the_layers(family: str, saved: Callable[[str], Path]) -> None:
    from ts_core.planning.estimate import Training, describe

    folder = saved(family)
    profile = describe(str(folder), Training(1, 12, 4, torch.float32)).profile
    model = stock(folder)
    layers = [p.nbytes for x in ts_hf.find_decoder_layers(model) for p in x.parameters()]
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert len(profile.pageable) == LAYERS
    assert 0.95 * sum(layers) <= sum(profile.pageable) <= sum(layers)  # norms stay
    rest = total - sum(profile.pageable)
    assert rest <= profile.fixed_device <= rest + 2**18  # adapters, buffers


def test_packing_refuses_images() -> None:
    batch = FAMILIES["llava"].batch(0, 1)
    row = {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]}
    assert ts_hf.PackedCollator()([row])["input_ids"].shape == (1, 12)
    for pixels in (batch["pixel_values"], batch["pixel_values"].tolist()):
        with pytest.raises(DataError, match=r"'pixel_values', an array.*packing would lose"):
            ts_hf.PackedCollator()([{**row, "pixel_values": pixels}])


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("family", VISION)
def test_streamed_equals_resident_on_a_gpu(
    family: str, quantize: str | None, saved: Callable[[str], Path]
) -> None:
    row, folder = FAMILIES[family], saved(family)
    batches = [row.batch(seed) for seed in range(3)]
    runs = []
    for streams in (False, True):
        model = with_lora(row, load(folder, quantize=quantize))
        options = {"param_offload": streams, "offload": True, "attention": None}
        with sdpa_kernel(SDPBackend.MATH):  # others may add up in another order each time
            runs.append(train(model, batches, device="cuda", **options))
    assert_same(runs[1], runs[0])
