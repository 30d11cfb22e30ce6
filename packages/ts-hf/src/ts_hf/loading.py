"""load_model: a transformers model in host RAM, quantized while it is read."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from ts_core.errors import NotAvailableError, OptionError
from ts_hf.budget import choose_codec
from ts_hf.checkpoints.keymap import check_shape, plan_targets
from ts_hf.checkpoints.locate import open_checkpoint, resolve_folder
from ts_hf.fill import Filler, LoadReport, make_encoder
from ts_hf.heap import HeapTrimmer, trim_heap
from ts_hf.random_fill import fill_randomly
from ts_hf.skeleton import build_skeleton, load_config

logger = logging.getLogger("trainstream.hf")

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def load_model(
    name_or_path: Any,
    *,
    quantize: str | bool | None = "auto",
    dtype: torch.dtype = torch.bfloat16,
    quant_block_size: int = 64,
    keep_precise: float | str | bool | None = 0,
    error_rank: int = 0,
    error_iters: int = 1,
    double_quant: bool = False,
    disk_offload: str | Path | None = None,
    random_weights: bool = False,
    ram_fraction: float = 0.85,
    trust_remote_code: bool = False,
    **config_overrides: Any,
) -> Any:
    """Load a causal language model into host RAM, one tensor at a time.

    The decoder layers' nn.Linear weights are quantized while they are read, everything else is
    cast to `dtype`; peak RAM is the finished model plus one tensor (read, cast and encoded). Tied
    embeddings stay tied. The model is returned in eval mode, on the CPU, as `from_pretrained`
    does; with quantized weights every parameter is frozen, ready for adapters.

    Args:
        name_or_path: a folder with config.json and safetensors weights (one file, or shards and
            their index), or a hub id; with `random_weights`, a config (PretrainedConfig) too.
        quantize: "auto" (only if the model would not fit in `ram_fraction` of the free RAM; then
            the most precise installed codec that fits), None / "none" / False, or the name of an
            installed codec.
        dtype: torch.bfloat16, float32 or float16.
        quant_block_size: values per scale, an even int >= 2.
        keep_precise, error_rank, error_iters, double_quant, disk_offload: not available in this
            version; only their defaults are accepted.
        random_weights: read no weights: draw them by the architecture's own init rule (on a GPU
            when there is one), for benchmarks at size.
        ram_fraction: share of free RAM that "auto" may plan with, in (0, 1].
        trust_remote_code: let the checkpoint's own Python code define the architecture.
        **config_overrides: fields of the config, `attn_implementation`, `experts_implementation`.

    Returns:
        The model (a transformers PreTrainedModel). `model.trainstream_load` is a LoadReport.

    Raises:
        OptionError, NotAvailableError: an option's value is not accepted, or not built yet;
            quantization of a model most of whose layer weights are not in nn.Linear.
        DataError: config or weights are missing, damaged, or do not belong together; the message
            names the file and the tensor, and nothing half-made is returned.
        OutOfBudgetError: the model does not fit in the free RAM.
        UnknownPluginError: no installed package offers the codec.
    """
    _check_options(
        quantize=quantize,
        dtype=dtype,
        quant_block_size=quant_block_size,
        ram_fraction=ram_fraction,
        not_built={
            "keep_precise": (keep_precise, (0, 0.0, False, None)),
            "error_rank": (error_rank, (0,)),
            "error_iters": (error_iters, (1,)),
            "double_quant": (double_quant, (False,)),
            "disk_offload": (disk_offload, (None,)),
        },
    )
    started = time.perf_counter()
    folder, source = _resolve(name_or_path, random_weights, trust_remote_code)
    config = load_config(source, trust_remote_code=trust_remote_code, overrides=config_overrides)
    model = build_skeleton(
        config, dtype, trust_remote_code=trust_remote_code, options=config_overrides
    )
    report = LoadReport()
    targets = (
        [] if random_weights or folder is None else plan_targets(model, open_checkpoint(folder))
    )
    report.quantize = choose_codec(model, quantize, quant_block_size, ram_fraction, report)
    encode = None
    if report.quantize is not None:
        _, encode = make_encoder(report.quantize, block_size=quant_block_size)
    filler = Filler(model, encode, report)
    if random_weights:
        fill_randomly(filler)
    else:
        wanted = model.state_dict()
        trimmer = HeapTrimmer()
        for target in targets:
            made = target.read(model)
            for name in list(made):
                check_shape(name, made[name].shape, wanted, target.sources[0][0])
                filler.place(name, made.pop(name))
            trimmer.read(target.size_bytes)
    filler.finish()
    trim_heap()
    _finish(model, folder)
    report.seconds = time.perf_counter() - started
    logger.info("%s", report.summary())
    model.trainstream_load = report  # type: ignore[assignment]
    return model


def _resolve(
    name_or_path: Any, random_weights: bool, trust_remote_code: bool
) -> tuple[Path | None, Any]:
    """(folder or None, what load_config takes)."""
    if not isinstance(name_or_path, (str, Path)):
        from transformers import PretrainedConfig

        if not isinstance(name_or_path, PretrainedConfig):
            raise OptionError(
                f"name_or_path must be a folder, a hub id or a transformers config, not "
                f"{type(name_or_path).__name__}."
            )
        if not random_weights:
            raise OptionError(
                "a config alone has no weights: give a folder or a hub id, or random_weights=True."
            )
        return None, name_or_path
    folder = resolve_folder(str(name_or_path), weights=not random_weights, code=trust_remote_code)
    return folder, folder


def _check_options(
    *,
    quantize: Any,
    dtype: Any,
    quant_block_size: Any,
    ram_fraction: Any,
    not_built: dict[str, tuple[Any, tuple[Any, ...]]],
) -> None:
    for option, (value, accepted) in not_built.items():
        if not any(type(value) is type(item) and value == item for item in accepted):
            raise NotAvailableError(
                f"{option}={value!r} is not available in this version of ts-hf; leave it at "
                f"{accepted[0]!r}."
            )
    if quantize is True or not isinstance(quantize, (str, bool, type(None))):
        raise OptionError(
            f"quantize={quantize!r}: expected 'auto', 'none', None, False or the name of an "
            f"installed codec such as 'nf4'."
        )
    if dtype not in DTYPES:
        raise OptionError(
            f"dtype={dtype!r}: expected torch.bfloat16, torch.float32 or torch.float16."
        )
    block = quant_block_size
    if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
        raise OptionError(f"quant_block_size={block!r}: expected an even int of at least 2.")
    if isinstance(ram_fraction, bool) or not (
        isinstance(ram_fraction, (int, float)) and 0 < ram_fraction <= 1
    ):
        raise OptionError(f"ram_fraction={ram_fraction!r}: expected a number in (0, 1].")


def _finish(model: Any, folder: Path | None) -> None:
    """What from_pretrained does last: eval mode, generation settings, where it came from."""
    model.eval()
    if folder is None:
        return
    model.config.name_or_path = str(folder)
    model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
