"""Saving adapters without touching the base model, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ts_core.errors import StateError
from ts_hf.checkpoints.atomic import atomic_directory
from ts_hf.families import find_decoder_layers


def save_adapter(model: nn.Module, directory: str | Path, *, card: str | None = None) -> Path:
    """Write the PEFT adapter(s) of `model` as plain PEFT loads them.

    The folder (adapter_config.json, adapter_model.safetensors) appears complete or not at all; one
    that is already there is replaced. The base model, wrapped and quantized or not, is not decoded
    or copied for it.

    Args:
        model: a PEFT model, wrapped by trainstream or not.
        directory: where to write.
        card: the text of its README.md; None leaves PEFT's, a form to be filled in.

    Returns:
        The folder.

    Raises:
        StateError: the model has no adapters.
    """
    if not is_peft_model(model):
        raise StateError(
            f"a {type(model).__name__} has no adapters to save. Add them with "
            f"peft.get_peft_model, or save the model with save_pretrained."
        )
    synchronize(model)
    target = Path(directory)
    with atomic_directory(target) as aside:
        model.save_pretrained(str(aside), state_dict=adapter_state_dict(model))  # type: ignore[operator]
        if card is not None:
            (aside / "README.md").write_text(card, encoding="utf-8")
    return target


def is_peft_model(model: Any) -> bool:
    """Whether `model` is a peft.PeftModel, without importing peft if nothing else has."""
    return any(cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def synchronize(model: nn.Module) -> None:
    """Wait for optimizer updates in flight of a wrapped model; nothing for another."""
    session = getattr(model, "_trainstream_session", None)
    if session is not None and session.optimizer is not None:
        session.optimizer.synchronize()


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What PEFT picks adapters from: everything but the frozen base weights of the layers.

    `model.state_dict()` of a wrapped model decodes every quantized weight, only for PEFT to drop
    them. References, not copies.
    """
    prefix = str(getattr(getattr(model, "base_model", None), "prefix", "lora_"))
    in_layers = {
        id(parameter) for layer in find_decoder_layers(model) for parameter in layer.parameters()
    }
    kept: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        belongs = parameter.requires_grad or prefix in name or "modules_to_save" in name
        if belongs or id(parameter) not in in_layers:
            kept[name] = parameter.detach()
    kept.update(dict(model.named_buffers()))
    return kept
