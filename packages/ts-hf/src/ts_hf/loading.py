"""load_model: a transformers model in host RAM, quantized while it is read."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from ts_core.config import WrapOptions
from ts_core.engine.quantize_options import quantize_options
from ts_core.errors import OptionError
from ts_core.memory.heap import HeapTrimmer, trim_heap
from ts_core.store.leaves import is_wrapper
from ts_hf.budget import check_stored, choose_codec
from ts_hf.checkpoints.keymap import Target, check_shape, plan_targets
from ts_hf.checkpoints.locate import open_checkpoint, resolve_folder
from ts_hf.checkpoints.stored import (
    expanded_because,
    is_stored,
    read_stored,
    stored_checkpoint,
    stored_entries,
)
from ts_hf.fill import Encoder, Filler, LoadReport
from ts_hf.on_disk import LayerFiles
from ts_hf.random_fill import fill_randomly, random_state
from ts_hf.skeleton import build_skeleton, load_config, take_quantization_config

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
    """Load a causal or vision-language model into host RAM, one tensor at a time.

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
            A checkpoint that is stored quantized (bitsandbytes 4-bit, ModelOpt or
            compressed-tensors NVFP4, MXFP4, block FP8) is kept as stored under "auto" or its own
            codec's name, and decoded under None.
        keep_precise: share of extra bytes (up to 0.5; "auto" and True mean 0.05) for storing the
            matrices that lose most one step more precise; those are read a second time.
        error_rank, error_iters: fit what each matrix lost with that rank (LoftQ), for adapters to
            start at: `ts_core.init_lora_from_error(model)` after adding them, or wrap().
        double_quant: int8 and nf4 scales as one byte each.
        disk_offload: None, or a directory on a local disk with room for the model: the matrices of
            the decoder layers are written to files there as they are read, and mapped, so that RAM
            need not hold them. Give the same directory to `wrap(disk_offload=...)`.
        random_weights: read no weights: draw them by the architecture's own init rule (on a GPU
            when there is one), for benchmarks at size.
        ram_fraction: share of free RAM that "auto" may plan with, in (0, 1].
        trust_remote_code: let the checkpoint's own Python code define the architecture.
        **config_overrides: fields of the config (or of its text model's), `attn_implementation`,
            `experts_implementation`.

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
    _check_options(dtype=dtype, ram_fraction=ram_fraction, disk_offload=disk_offload)
    if quantize is True or not isinstance(quantize, (str, bool, type(None))):
        raise OptionError(
            f"quantize={quantize!r}: expected 'auto', 'none', None, False or the name of an "
            f"installed codec such as 'nf4'."
        )
    options = WrapOptions(
        quantize=quantize,
        quant_block_size=quant_block_size,
        keep_precise=keep_precise,
        error_rank=error_rank,
        error_iters=error_iters,
        double_quant=double_quant,
    )
    started = time.perf_counter()
    folder, source = _resolve(name_or_path, random_weights, trust_remote_code)
    config = load_config(source, trust_remote_code=trust_remote_code, overrides=config_overrides)
    stored_config = take_quantization_config(config)
    model = build_skeleton(
        config, dtype, trust_remote_code=trust_remote_code, options=config_overrides
    )
    report = LoadReport()
    files = None if disk_offload is None else LayerFiles(model, disk_offload)
    if random_weights or folder is None:
        _fill_randomly(model, options, ram_fraction, report, files)
    else:
        _fill_from(folder, stored_config, model, options, ram_fraction, report, files)
    if files is not None:
        files.close(report.events.append)
    trim_heap()
    _finish(model, folder)
    report.seconds = time.perf_counter() - started
    logger.info("%s", report.summary())
    model.trainstream_load = report  # type: ignore[assignment]
    return model


def _fill_from(
    folder: Path,
    stored_config: Any,
    model: Any,
    options: WrapOptions,
    ram_fraction: float,
    report: LoadReport,
    files: LayerFiles | None,
) -> None:
    """Read a checkpoint into the skeleton."""
    disk = files is not None
    checkpoint, plan = stored_checkpoint(open_checkpoint(folder), stored_config)
    targets = plan_targets(model, checkpoint)
    expand = False
    if plan is None:
        report.quantize = choose_codec(model, options, ram_fraction, report, disk)
    else:
        expand = _stored_choice(plan, targets, options, report)
        if expand:
            choose_codec(model, options, ram_fraction, report, disk)  # refuses what does not fit
        elif not disk:
            check_stored(checkpoint.size_bytes, plan.format)
    encode = _encoder(report, options)
    filler = Filler(model, encode, report, frozen=report.stored_as is not None, keep=files)
    wanted = model.state_dict()
    trimmer = HeapTrimmer()
    apart: set[str] = set()  # stored weights whose codes could not be joined

    def read(target: Target) -> set[str]:
        if is_stored(target):
            made = read_stored(target, model, plan, expand=expand)
            if not expand and expanded_because(target) is None:
                apart.update(name for name, value in made.items() if not is_wrapper(value))
        else:
            made = target.read(model)
        names = set(made)
        for name in names:
            check_shape(name, made[name].shape, wanted, target.sources[0][0])
            filler.place(name, made.pop(name))
        trimmer.read(target.size_bytes)
        return names

    names_of = [read(target) for target in targets]
    if apart:
        report.events.append(
            f"{len(apart)} stored weights are decoded to full precision: their scales cannot be "
            f"joined as the model joins the weights (the first: {min(apart)!r})"
        )
    if encode is not None:
        filler.only = set(encode.improved())
        for target, names in zip(targets, names_of, strict=True):
            if filler.only & names:
                read(target)
    _complete(filler, encode, report)


def _fill_randomly(
    model: Any,
    options: WrapOptions,
    ram_fraction: float,
    report: LoadReport,
    files: LayerFiles | None,
) -> None:
    report.quantize = choose_codec(model, options, ram_fraction, report, files is not None)
    encode = _encoder(report, options)
    filler = Filler(model, encode, report, keep=files)
    go_back = random_state()
    fill_randomly(filler)
    if encode is not None:
        filler.only = set(encode.improved())
        if filler.only:
            go_back()
            fill_randomly(filler)
    _complete(filler, encode, report)


def _encoder(report: LoadReport, options: WrapOptions) -> Encoder | None:
    settings = quantize_options(options, report.quantize, report.events.append)
    if report.quantize is None:
        return None
    return Encoder(report.quantize, block_size=options.quant_block_size, **settings)


def _complete(filler: Filler, encode: Encoder | None, report: LoadReport) -> None:
    filler.finish()
    if encode is not None and encode.report is not None:
        report.storage = encode.report
        report.kept_precise = len(encode.report.kept_precise)


def _stored_choice(
    plan: Any, targets: list[Target], options: WrapOptions, report: LoadReport
) -> bool:
    """Whether a checkpoint stored quantized is to be decoded; notes what becomes of it."""
    asked = options.quantize
    if asked in (None, False, "none"):
        report.events.append(
            f"quantize={asked!r}: the checkpoint's {len(plan.weights)} weights in {plan.format} "
            f"are decoded to full precision"
        )
        return True
    report.stored_as = plan.format
    found = {entry.weight.codec for target in targets for entry in stored_entries(target)}
    if asked != "auto" and found != {asked}:
        raise OptionError(
            f"quantize={asked!r}: the checkpoint stores its weights in {plan.format} already "
            f"({', '.join(sorted(found))}), and encoding them a second time would lose more. Use "
            f"quantize='auto' to keep them as stored, or 'none' to decode them."
        )
    for name in ("keep_precise", "error_rank", "double_quant"):
        if getattr(options, name):
            report.events.append(
                f"{name}={getattr(options, name)!r}: nothing to do, the weights are stored already"
            )
    reasons: dict[str, int] = {}
    for target in targets:
        because = expanded_because(target) if is_stored(target) else None
        if because is not None:
            reasons[because] = reasons.get(because, 0) + 1
    for because, count in reasons.items():
        report.events.append(f"{count} stored weights are decoded to full precision: {because}")
    return False


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


def _check_options(*, dtype: Any, ram_fraction: Any, disk_offload: Any) -> None:
    if disk_offload is not None and (
        not isinstance(disk_offload, (str, Path)) or disk_offload == ""
    ):
        raise OptionError(f"disk_offload={disk_offload!r}: expected None or a directory.")
    if dtype not in DTYPES:
        raise OptionError(
            f"dtype={dtype!r}: expected torch.bfloat16, torch.float32 or torch.float16."
        )
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
