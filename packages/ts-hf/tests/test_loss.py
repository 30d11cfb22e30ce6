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


HEAD_LORA = {"target_modules": ["lm_head", "q_proj"]}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:Model.*tie_word_embeddings:UserWarning")
def test_lora_on_the_head_is_honoured(
    tied: bool, tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    """Loss and gradients; and as it is at each use: switched off, scaled, merged."""
    model = lora(tiny_model("llama", tie_word_embeddings=tied), **HEAD_LORA).train()
    batch, chunked = _batch(), ChunkedLoss(5, pytest.fail)
    assert chunked.applies(model, batch)

    def check() -> float:
        model.zero_grad()
        loss, _ = chunked(model, batch, None)
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        wanted = model(**batch).loss
        wanted.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)
        return loss.item()

    adapted = check()
    head = model.base_model.model.lm_head
    assert head.lora_A["default"].weight.requires_grad
    head.scaling["default"] *= 8
    assert abs(check() - adapted) > 1e-4
    with model.disable_adapter(), torch.no_grad():
        loss, _ = chunked(model, batch, None)
        torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-6, atol=0)
    model.merge_adapter()
    assert chunked.applies(model, batch)
    loss, _ = chunked(model, batch, None)
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:.*lora_bias=True:peft.utils.warning.PeftWarning")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({**HEAD_LORA, "lora_dropout": 0.1}, "has dropout"),
        ({**HEAD_LORA, "use_dora": True}, "not plain LoRA"),
        ({**HEAD_LORA, "lora_bias": True}, "has a bias"),
        ({"modules_to_save": ["lm_head"]}, "its head is a ModulesToSaveWrapper"),
    ],
)
def test_other_adapters_of_the_head_use_the_models_own_loss(
    changes: dict[str, Any], reason: str, tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    said: list[str] = []
    model = lora(tiny_model("llama", tie_word_embeddings=False), **changes).train()
    assert not ChunkedLoss(4, said.append).applies(model, _batch())
    assert len(said) == 1 and reason in said[0]
    if reason == "has dropout":  # which is off in evaluation
        assert ChunkedLoss(4, said.append).applies(model.eval(), _batch())


def test_two_adapters_of_the_head_at_once(
    tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    import peft

    model = lora(tiny_model("llama", tie_word_embeddings=False), **HEAD_LORA)
    model.add_adapter("other", peft.LoraConfig(r=2, task_type="CAUSAL_LM", **HEAD_LORA))
    model.base_model.set_adapter(["default", "other"])
    said: list[str] = []
    chunked = ChunkedLoss(4, said.append)
    assert not chunked.applies(model, _batch()) and "2 active adapters" in said[0]
    model.base_model.set_adapter(["other"])
    assert chunked.applies(model, _batch())


def test_a_head_in_flight_is_not_taken_for_a_quantized_one(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a parameter may keep the class of one in flight; the kernel must not see it."""
    from ts_core.optim import read_guard

    class Copying:
        """An update whose values are still crossing the link."""

        def wait(self) -> bool:
            return False

    model, batch = tiny_model("llama", tie_word_embeddings=False), _batch()
    chunked = ChunkedLoss(4, pytest.fail)
    wanted, _ = chunked(model, batch, None)
    wanted.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    seen: list[type] = []
    kernel = registry.kernels.get(KERNEL)

    class Watched:
        @staticmethod
        def fn(hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(weight))
            return kernel.fn(hidden, weight, *args, **kwargs)

    monkeypatch.setattr(registry.kernels, "get", lambda name: Watched)
    read_guard.guard([model.lm_head.weight], Copying())  # type: ignore[arg-type]
    loss, _ = chunked(model, batch, None)
    assert type(model.lm_head.weight) is read_guard.ParameterInFlight
    read_guard.release([model.lm_head.weight])
    loss.backward()
    assert seen == [torch.Tensor]
    assert torch.equal(loss, wanted) and torch.equal(model.lm_head.weight.grad, gradient)


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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("logits_to_keep", "always computes all logits"),
        ("get_output_embeddings", "its head is a NoneType"),
        ("get_decoder", "the decoder of Renamed was not found"),
        ("loss_function", "has a loss of its own"),
    ],
)
def test_a_release_that_renames_what_it_needs(
    name: str,
    reason: str,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """The model's own loss is taken then, with an event, and training is as it was."""
    from transformers import Trainer

    import ts_hf

    def model() -> Any:
        made = tiny_model("llama")
        base: Any = type(made)

        def gone(self: Any) -> Any:
            raise AttributeError(name)

        class Renamed(base):  # type: ignore[misc]
            if name == "get_decoder":
                get_decoder = property(gone)
                base_model_prefix = "gone"
            if name == "get_output_embeddings":

                def get_output_embeddings(self) -> None:
                    return None

            if name == "logits_to_keep":

                def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
                    return super().forward(input_ids=input_ids, labels=labels, **kwargs)

        if name == "loss_function":
            own = made.loss_function
            made.loss_function = lambda *args, **kwargs: own(*args, **kwargs)
        made.__class__ = Renamed
        return made

    losses = []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        arguments = training_arguments(max_steps=2, gradient_accumulation_steps=2)
        trainer = cls(model=model(), args=arguments, train_dataset=token_rows(8, 12))
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=5e-6)
    events = trainer.model._trainstream_session.events
    told = [str(event) for event in events if "chunked_loss" in str(event)]
    assert len(told) == 1 and reason in told[0]


def test_without_the_kernel_it_says_so(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.kernels, "has", lambda name: False)
    said: list[str] = []
    model = tiny_model("llama")
    chunked = ChunkedLoss(4, said.append)
    assert not chunked.applies(model, _batch())
    assert not chunked.applies(model, _batch())
    assert len(said) == 1 and "pip install 'ts-kernels>=0.8,<0.9'" in said[0]  # once, not per batch
