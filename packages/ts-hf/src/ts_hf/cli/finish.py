"""What a trained model leaves: the adapter or the model, the merged model, the report page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ts_core.errors import DataError, OptionError, TrainStreamError
from ts_hf.adapters import save_adapter
from ts_hf.checkpoints.atomic import atomic_directory
from ts_hf.cli.card import adapter_card
from ts_hf.cli.model import load_tokenizer, model_folder
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.streaming import for_loading, parse_options


def check_merge(config: FinetuneConfig) -> None:
    """Refuse a `merge` that cannot be done, before anything is trained.

    Raises:
        OptionError: every weight is trained, or there are no original weights.
    """
    if config.merge == "none":
        return
    if config.method == "full":
        raise OptionError(
            f"merge={config.merge!r}: method=full trains the model itself, so there is nothing to "
            f"merge. Leave merge out."
        )
    if config.merge == "original" and config.random_weights:
        raise OptionError(
            "merge='original': with random_weights there are no stored weights to merge into. "
            "Use merge=dequantized."
        )


def save_trained(config: FinetuneConfig, trainer: Any, tokenizer: Any, output: Path) -> Path:
    """Write adapter/ or model/; the folder appears whole or not at all."""
    if config.method != "full":
        card = adapter_card(config, trainer.state.global_step)
        return save_adapter(trainer.model, output / "adapter", card=card)
    saved = output / "model"
    trainer.before_save()
    with atomic_directory(saved) as aside:
        trainer.model.save_pretrained(str(aside))
        tokenizer.save_pretrained(str(aside))
    return saved


def merge_trained(config: FinetuneConfig, dtype: Any, output: Path, console: Console) -> Path:
    """Write merged/, the base model with the run's adapter merged in, as `merge` says.

    The base is loaded again and stays in host memory, so that a model that does not fit on the
    device can be merged. Call it when the trained model has been let go.

    Returns:
        The folder.

    Raises:
        TrainStreamError: as load_model and merge_adapter; there is no adapter.
    """
    import torch
    from peft import PeftModel

    from ts_hf.loading import load_model
    from ts_hf.merging import merge_adapter

    if not (output / "adapter" / "adapter_config.json").is_file():
        raise DataError(f"{output / 'adapter'} holds no adapter to merge. Put it back.")
    folder = model_folder(config)
    torch.manual_seed(config.seed)  # random_weights draws the same model again
    base = load_model(
        folder,
        quantize=config.quantize,
        dtype=dtype,
        random_weights=config.random_weights,
        **for_loading(config.options),
    )
    adapted = PeftModel.from_pretrained(base, output / "adapter", autocast_adapter_dtype=False)
    started = bool(parse_options(config.options).get("error_rank")) or None
    merged, report = merge_adapter(
        adapted, into=config.merge, started=started if config.merge == "original" else None
    )
    target = output / "merged"
    with atomic_directory(target) as aside:
        merged.save_pretrained(str(aside))
        load_tokenizer(config, folder).save_pretrained(str(aside))
    console.print(f"merged into the {config.merge} weights: {target} (error {report.error:.2e})")
    return target


def write_page(output: Path, console: Console) -> None:
    """Write report.html where the package that makes it is installed, and say where it is."""
    from ts_core.registry import commands

    if not commands.has("report"):
        console.print(
            f"for a page with plots: pip install 'ts-bench>=0.8,<0.9', then "
            f"trainstream report {output}"
        )
        return
    try:
        page = commands.get("report").write([output])
    except TrainStreamError as error:  # the run itself is done and saved
        console.print(f"no report: {error}", markup=False)
        return
    console.print(f"report: {page}", markup=False, soft_wrap=True)
