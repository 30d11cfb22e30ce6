"""The model and the tokenizer of a run."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from ts_core.errors import DataError, NotAvailableError, OptionError
from ts_core.memory.ram import ram_available_bytes
from ts_hf.checkpoints.locate import resolve_folder
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.streaming import for_loading
from ts_hf.demo_model import NAME as DEMO_MODEL
from ts_hf.demo_model import cache_folder, demo_model_folder
from ts_hf.families import find_decoder_layers
from ts_hf.loading import load_model
from ts_hf.sizes import format_bytes
from ts_hf.skeleton import build_skeleton, load_config, take_quantization_config

_ALWAYS_FITS = 16  # up to this rank adapters are small beside any model: not worth a look
_BYTES_PER_VALUE = 16  # fp32 weight, gradient and two moments


def model_folder(config: FinetuneConfig, *, weights: bool = True) -> Path:
    """The transformers folder of the run's model; a GGUF file is converted once.

    Raises:
        DataError: there is none.
    """
    path = Path(config.model).expanduser()
    if config.model == DEMO_MODEL:
        return demo_model_folder()
    if path.suffix == ".gguf":
        return _converted(path)
    if config.random_weights and path.is_file():
        return path.parent  # of its config.json
    return resolve_folder(config.model, weights=weights and not config.random_weights)


def _converted(file: Path) -> Path:
    """The folder that the GGUF `file` was converted to: one for each path, size and date."""
    from ts_hf.gguf import convert_gguf

    if not file.is_file():
        raise DataError(f"there is no file {str(file)!r}. Check the path.")
    state = file.stat()
    mark = hashlib.sha256(
        f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode(errors="surrogateescape")
    ).hexdigest()[:12]
    folder = cache_folder() / "models" / f"{file.stem}-{mark}"
    if not (folder / "config.json").is_file():
        convert_gguf(file, folder)
    return folder


def load_tokenizer(config: FinetuneConfig, folder: Path) -> Any:
    """The tokenizer, of the model's folder unless another is given.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    if config.tokenizer is not None:
        folder = resolve_folder(config.tokenizer, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if not tokenizer("a b", add_special_tokens=False)["input_ids"]:
            # What transformers makes up where it finds no tokenizer file: one of no tokens.
            raise ValueError("no tokenizer file is there, or it has no tokens")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise DataError(
            f"{folder} has no tokenizer that transformers can load: {error}. Give the folder or "
            f"hub id of one as 'tokenizer'."
        ) from error
    return tokenizer


def load_for_training(config: FinetuneConfig, folder: Path, dtype: torch.dtype) -> Any:
    """The model in host RAM, with adapters unless every weight is trained.

    Raises:
        TrainStreamError: as load_model; adapters that cannot be made.
    """
    if config.method != "full":
        plain = load_config(folder, trust_remote_code=False, overrides={})
        take_quantization_config(plain)
        check_rank(config, plain)
    model = load_model(
        folder,
        quantize="none" if config.method == "full" else config.quantize,
        dtype=dtype,
        random_weights=config.random_weights,
        **for_loading(config.options),
    )
    if config.method != "full":
        model = add_lora(config, model)
    if config.gradient_checkpointing:
        model.enable_input_require_grads()
    return model


def check_rank(config: FinetuneConfig, model_config: Any) -> None:
    """Refuse adapters of a rank that is of no use, or for which there is no memory.

    Args:
        config: the run's settings.
        model_config: of transformers, without how the weights are stored.

    Raises:
        OptionError: names the range for this model and machine.
    """
    if config.lora_rank <= _ALWAYS_FITS:
        return
    skeleton = build_skeleton(
        copy.deepcopy(model_config), torch.float32, trust_remote_code=False, options={}
    )
    with torch.device("meta"):  # PEFT itself says which weights get adapters, and of what shape
        adapted = add_lora(dataclasses.replace(config, lora_rank=1), skeleton)
    widest = max(
        (
            min(module.in_features, module.out_features)
            for module in adapted.modules()
            if hasattr(module, "lora_A") and hasattr(module, "in_features")
        ),
        default=config.lora_rank,
    )
    per_rank = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    free = ram_available_bytes()
    fits = max(1, free // (_BYTES_PER_VALUE * max(1, per_rank)))
    if config.lora_rank <= min(widest, fits):
        return
    values = config.lora_rank * per_rank
    raise OptionError(
        f"lora_rank={config.lora_rank} is not accepted for this model: expected 1 to "
        f"{min(widest, fits)}. Its adapters would have {values:,} values "
        f"({format_bytes(values * _BYTES_PER_VALUE)} with gradients and moments, of "
        f"{format_bytes(free)} of free RAM), and no adapted weight has more than {widest} rows or "
        f"columns on its smaller side. Usual ranks are 8 to 64."
    )


def _no_text(model: Any) -> str | None:
    """Of a vision-language model, a pattern of the modules outside its decoder layers.

    The data has no images, so adapters of the tower would learn nothing.
    """
    if model.config.get_text_config(decoder=True) is model.config:
        return None
    layers = find_decoder_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and list(module) == layers:
            return rf"(?!{re.escape(name)}\.).*"
    return None


def add_lora(config: FinetuneConfig, model: Any) -> Any:
    """`model` with the run's adapters.

    Raises:
        NotAvailableError: peft is not installed.
        OptionError: PEFT refuses lora_targets.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise NotAvailableError(
            f"method={config.method!r} needs the peft package: pip install 'peft>=0.17'"
        ) from error
    targets: Any = list(config.lora_targets)
    if targets == ["all-linear"]:
        targets = "all-linear"
    try:
        return get_peft_model(
            model,
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=targets,
                exclude_modules=_no_text(model),
                task_type="CAUSAL_LM",
            ),
            autocast_adapter_dtype=False,  # the optimizer keeps an fp32 master copy of bf16
        )
    except ValueError as error:
        raise OptionError(f"lora_targets={targets!r}: {error}") from error
