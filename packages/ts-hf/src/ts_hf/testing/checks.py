"""What is checked on every family. Each check trains or runs a small model and says what held.

A check returns the text of its cell in docs/models.md, or raises AssertionError.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ts_core.errors import NotAvailableError, OptionError
from ts_core.testing import inject_delays
from ts_hf.testing.families import Family, token_batch

BIT_EQUAL = "bit-equal"
ROUNDING = "within rounding"
REFUSED = "refused"
NOT_APPLICABLE = "n/a"

STEPS = 5
_EPS = 1e-4
"""Of Adam: a smaller one turns the rounding of a zero gradient into a whole step."""

Record = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Check:
    """One column of the table.

    Attributes:
        title: its heading.
        meaning: what a cell says, for the text above the table.
        run: does it.
    """

    title: str
    meaning: str
    run: Callable[[Family], str]


def with_adapters(row: Family, **changes: Any) -> Any:
    """The family's small model with PEFT LoRA, B not zero, frozen otherwise."""
    import peft

    model = row.build(**changes)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=row.targets, **row.lora)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.02)
    torch.set_rng_state(state)
    return adapted


def train(row: Family, model: Any, optimizer: Any, steps: int = STEPS) -> Record:
    """Losses of some steps on seeded batches, and the trained values after them."""
    losses = []
    for step in range(steps):
        loss = model(**row.batch(step)).loss
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    names = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return losses, {name: parameter.detach().clone() for name, parameter in names}


def wrapped(model: Any, **options: Any) -> tuple[Any, Any]:
    """wrap_hf() on the host device, with torch's AdamW to take over."""
    import ts_hf

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-3, eps=_EPS)
    return ts_hf.wrap_hf(model, adam, **{"device": "cpu", "quantize": "none", **options})


def _assert_equal(found: Record, wanted: Record) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True)), "losses"
    different = [
        name for name, value in wanted[1].items() if not torch.equal(found[1][name], value)
    ]
    assert not different, different


def _assert_close(found: Record, wanted: Record, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=rtol, atol=0)
    for name, value in wanted[1].items():
        gap = (found[1][name] - value).abs().max().item()
        assert gap <= 1e-5, f"{name} is off by {gap:.2g}"


def _plain(row: Family, model: Any) -> Record:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(row, model, torch.optim.AdamW(trained, lr=1e-3, eps=_EPS))


def check_lora(row: Family) -> str:
    """Adapters on streamed frozen weights: the bits of resident ones, and torch within rounding."""
    resident = train(row, *wrapped(with_adapters(row), param_offload=False))
    with inject_delays(1, max_ms=0.3):
        streamed = train(row, *wrapped(with_adapters(row), param_offload=True))
    _assert_equal(streamed, resident)
    _assert_close(streamed, _plain(row, with_adapters(row)))
    return BIT_EQUAL


def check_full(row: Family) -> str:
    """Every weight trained, optimizer state on the host: torch's AdamW within rounding."""

    def model() -> Any:
        made = row.build()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(row.images is None or "vis" not in name)  # not the tower
        return made

    _assert_close(train(row, *wrapped(model(), param_offload=False)), _plain(row, model()))
    return ROUNDING


def check_nf4(row: Family) -> str:
    """Adapters on streamed NF4 weights: the bits of torch on the decoded weights."""
    import ts_hf
    from ts_core import quantize_model

    def model() -> Any:
        made = with_adapters(row)
        quantize_model(made, "nf4", blocks=ts_hf.find_decoder_layers(made))
        return made

    try:
        quantized = model()
    except OptionError:
        return REFUSED
    with inject_delays(2, max_ms=0.3):
        streamed = train(row, *wrapped(quantized, param_offload=True))
    decoded = model()
    for module in decoded.modules():
        for name, parameter in list(module._parameters.items()):
            if hasattr(parameter, "codec"):
                dense: Any = parameter
                module._parameters[name] = nn.Parameter(dense.dequantize(), requires_grad=False)
    _assert_equal(streamed, train(row, *wrapped(decoded, param_offload=False)))
    return BIT_EQUAL


def check_experts(row: Family) -> str:
    """moe_paging=True: only picked experts are copied, with the bits of resident ones."""
    from ts_core import memory_report

    if not row.experts:
        return NOT_APPLICABLE
    resident = train(row, *wrapped(with_adapters(row)))
    with inject_delays(3, max_ms=0.3):
        model, optimizer = wrapped(with_adapters(row), moe_paging=True)
        paged = train(row, model, optimizer)
    _assert_equal(paged, resident)
    report = memory_report(model)["experts"]
    assert 0 < report["load_bytes"] <= report["whole_bytes"]
    return BIT_EQUAL


def check_kernels(row: Family) -> str:
    """kernels=True, fused_lora=True: which kernels replace the model's code (checked alike)."""
    plain = train(row, *wrapped(with_adapters(row), param_offload=True), 3)
    model, optimizer = wrapped(
        with_adapters(row), param_offload=True, kernels=True, fused_lora=True
    )
    _assert_close(train(row, model, optimizer, 3), plain, rtol=1e-4)
    kinds = {kind for patch in model._trainstream_session.patches for kind in patch.replaced}
    return ", ".join(sorted(kinds)) or "none"


def check_packing(row: Family) -> str:
    """A packed row gives the loss and gradients of its sequences one by one, within rounding."""
    from ts_hf.packing import PackedCollator
    from ts_hf.packing_layout import PackedInputs

    model = with_adapters(row)
    rows = [
        {"input_ids": token_batch(9, 1, length)["input_ids"][0].tolist()} for length in (5, 9, 3)
    ]
    try:
        packed = PackedInputs(lambda text: None)(model, PackedCollator()(rows))
    except OptionError:
        return REFUSED
    count = sum(len(item["input_ids"]) - 1 for item in rows)

    def gradients() -> dict[str, torch.Tensor]:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    loss = model(**packed).loss
    loss.backward()
    together = gradients()
    total = torch.zeros(())
    for item in rows:
        ids = torch.tensor([item["input_ids"]])
        alone = model(input_ids=ids, labels=ids).loss * ((ids.shape[1] - 1) / count)
        alone.backward()
        total += alone.detach()
    torch.testing.assert_close(loss.detach(), total, rtol=2e-6, atol=0)
    for name, value in gradients().items():
        torch.testing.assert_close(together[name], value, rtol=1e-3, atol=1e-6)
    return ROUNDING


def check_cache(row: Family) -> str:
    """TrainStreamCache with streamed weights: the tokens and logits of transformers' cache."""
    import ts_hf

    model, _ = wrapped(with_adapters(row), param_offload=True)
    model.eval()
    inputs = {key: value for key, value in row.batch(4).items() if key != "labels"}
    inputs["attention_mask"][1, :3] = 0
    try:
        cache = ts_hf.TrainStreamCache(model, 32, resident_layers=1, page_tokens=4)
    except NotAvailableError:
        return REFUSED
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    for sample in (False, True):
        found = []
        for past in (None, cache):
            cache.reset()
            torch.manual_seed(5)
            found.append(
                model.generate(**inputs, past_key_values=past, do_sample=sample, **options)
            )
        assert torch.equal(found[0].sequences, found[1].sequences)
        logits = zip(found[0].logits, found[1].logits, strict=True)
        assert all(torch.equal(a, b) for a, b in logits)
    return "equal"


def _joined(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def check_trainer(row: Family) -> str:
    """Five steps under TrainStreamTrainer: the losses of transformers.Trainer within rounding."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    import ts_hf

    rows = [row.batch(70 + index, 1) for index in range(8)]
    losses = []
    streaming = {"trainstream": {"param_offload": True, "quantize": "none"}}
    runs: list[tuple[Any, dict[str, Any]]] = [(Trainer, {}), (ts_hf.TrainStreamTrainer, streaming)]
    for cls, options in runs:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=2,
                learning_rate=1e-3,
                adam_epsilon=_EPS,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            trainer = cls(
                model=with_adapters(row),
                args=arguments,
                train_dataset=rows,
                data_collator=_joined,
                **options,
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == STEPS
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=5e-6, atol=0)
    return ROUNDING


CHECKS: dict[str, Check] = {
    "lora": Check(
        "LoRA, weights streamed",
        "five steps equal to resident weights bit for bit, to torch.optim.AdamW within rounding",
        check_lora,
    ),
    "full": Check(
        "all weights trained",
        "five steps equal to torch.optim.AdamW within rounding, optimizer state on the host",
        check_full,
    ),
    "nf4": Check(
        "NF4 base",
        "five LoRA steps on streamed NF4 weights equal to plain torch on the decoded weights",
        check_nf4,
    ),
    "experts": Check(
        "`moe_paging`",
        "five LoRA steps that copy only picked experts equal to resident experts",
        check_experts,
    ),
    "kernels": Check(
        "`kernels`, `fused_lora`",
        "which fused kernels take the place of the model's own code; losses within rounding",
        check_kernels,
    ),
    "packing": Check(
        "packing",
        "a packed row gives the loss and gradients of its sequences one by one",
        check_packing,
    ),
    "cache": Check(
        "`TrainStreamCache`",
        "greedy and sampled tokens and their logits equal to those of transformers' cache",
        check_cache,
    ),
    "trainer": Check(
        "Trainer",
        "five losses of TrainStreamTrainer equal to those of transformers.Trainer",
        check_trainer,
    ),
}
