"""`trainstream finetune --dry-run`: settings, data and plan, with no weight read or written."""

from __future__ import annotations

import dataclasses
from typing import Any

import psutil
import torch
from rich.console import Console

from ts_core.config import WrapOptions
from ts_core.engine.quantize_options import bytes_per_weight
from ts_core.memory.ram import ram_available_bytes
from ts_core.schedule.plan import in_slots
from ts_hf.budget import choose_codec
from ts_hf.cli.config import to_yaml
from ts_hf.cli.dataset import (
    check_lengths,
    check_tokens,
    make_rows,
    planned_steps,
    rows_per_step,
    step_in_words,
    told_rows,
)
from ts_hf.cli.finish import check_merge
from ts_hf.cli.folder import RunFolder
from ts_hf.cli.machine import DTYPES, pick_device, pick_dtype, plan_blocks
from ts_hf.cli.model import add_lora, check_rank, load_tokenizer, model_folder
from ts_hf.cli.report import PlainConsole
from ts_hf.cli.rows import Rows, split_sources
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.sources import overlaps
from ts_hf.cli.streaming import for_loading
from ts_hf.cli.team import processes
from ts_hf.families import find_decoder_layers
from ts_hf.fill import LoadReport, quantizable_names
from ts_hf.sizes import format_bytes
from ts_hf.skeleton import build_skeleton, load_config, take_quantization_config
from ts_hf.training.checkpointing import last_checkpoint


def dry_run(config: FinetuneConfig, console: Console | None = None) -> int:
    """Print the resolved settings, what the data gives, and where the model's bytes will be.

    Everything is checked as a run checks it: settings, the output folder, every record, the chat
    template, lengths, tokens, memory. Nothing is written but the conversion of a GGUF model.

    Returns:
        0.

    Raises:
        TrainStreamError: what would stop the run.
    """
    console = console or PlainConsole()
    check_merge(config)
    run = RunFolder(config)
    device = pick_device(config.device)
    dtype = run.notes.get("dtype") or pick_dtype(config.dtype, device)
    documents = split_sources(
        config.data, config.held_out, config.held_out_share, pairs=config.method == "dpo"
    )
    folder = model_folder(config, weights=False)
    tokenizer = load_tokenizer(config, folder)
    model_config = load_config(folder, trust_remote_code=False, overrides={})
    stored = take_quantization_config(model_config)
    check_lengths(config, model_config)
    if config.method != "full":
        check_rank(config, model_config)
    train, held_out = make_rows(config, documents, tokenizer, processes())
    check_tokens(train, held_out, model_config)
    model = build_skeleton(model_config, DTYPES[dtype], trust_remote_code=False, options={})
    lines = [
        "settings:",
        *(f"  {line}" for line in to_yaml(config).splitlines()),
        "data:",
        *(f"  {line}" for line in _data(config, documents, train, held_out)),
        "plan:",
        *(f"  {line}" for line in _plan(config, model, device, dtype, stored is not None)),
        f"output: {_output(config, run)}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _data(config: FinetuneConfig, documents: Any, train: Rows, held_out: Rows) -> list[str]:
    steps = planned_steps(config, len(train), processes())
    per_step = rows_per_step(config, processes())
    step = step_in_words(config, processes())
    return [
        f"{len(documents[0])} documents or records to train on, {len(documents[1])} held out",
        *told_rows(config, train, held_out, processes()),
        *overlaps(config.data, config.held_out),
        f"{steps} steps of {step}: {steps * per_step / len(train):.2f} passes over them",
    ]


def _plan(config: FinetuneConfig, model: Any, device: str, dtype: str, stored: bool) -> list[str]:
    parameters = sum(p.numel() for p in model.parameters())
    quantized, codec = _quantized(config, model, stored)
    with torch.device("meta"):
        trained = model if config.method == "full" else add_lora(config, model)
    # What can leave the device: matrices, but not adapters.
    sizes = [
        int(
            sum(
                p.numel() * quantized.get(id(p), p.element_size())
                for p in layer.parameters()
                if p.dim() >= 2 and (config.method == "full" or not p.requires_grad)
            )
        )
        for layer in find_decoder_layers(trained)
    ]
    largest = f"{len(sizes)} layers of up to {format_bytes(max(sizes, default=0))}"
    lines = [
        f"{type(model).__name__}: {parameters:,} parameters, {largest} in {codec}; computed in "
        f"{dtype} on {device}",
    ]
    if config.block_limit_bytes is not None:
        plan = plan_blocks(sizes, config.block_limit_bytes)
        lines.append(
            f"block_limit {format_bytes(config.block_limit_bytes)}: "
            f"{len(sizes) - len(plan.paged)} layers stay on the device, {len(plan.paged)} stream "
            f"through {in_slots(plan.slot_count)} of {format_bytes(plan.slot_bytes)}"
        )
    else:
        lines.append("no block_limit: layers stream if the device's free memory asks for it")
    count = sum(p.numel() for p in trained.parameters() if p.requires_grad)
    lines.append(
        f"{count:,} trained values; with fp32 moments, gradients and master weights about "
        f"{format_bytes(16 * count)} of memory"
    )
    total = psutil.virtual_memory().total
    lines.append(f"RAM: {format_bytes(ram_available_bytes())} free of {format_bytes(total)}")
    return lines


def _quantized(config: FinetuneConfig, model: Any, stored: bool) -> tuple[dict[int, float], str]:
    """(bytes per value of each weight that is quantized, by its id; what layers are held in)."""
    if stored:
        return {}, "full precision (the checkpoint is stored quantized, and may be kept so)"
    asked = "none" if config.method == "full" else config.quantize
    codec = choose_codec(model, _load_options(config, asked), 0.85, LoadReport())
    if codec is None:
        return {}, "full precision"
    per_value = bytes_per_weight(codec, _load_options(config, codec))
    linear = quantizable_names(model)
    return {id(p): per_value for name, p in model.named_parameters() if name in linear}, codec


def _load_options(config: FinetuneConfig, codec: str) -> WrapOptions:
    known = {item.name for item in dataclasses.fields(WrapOptions)}
    given = for_loading(config.options)
    return WrapOptions(quantize=codec, **{k: v for k, v in given.items() if k in known})


def _output(config: FinetuneConfig, run: RunFolder) -> str:
    if run.finished():
        return f"{run.path} holds this run, finished; the command would do nothing more"
    checkpoint = last_checkpoint(run.checkpoints)
    if run.begun and checkpoint is not None:
        return f"{run.path} holds this run; it would go on from {checkpoint.name}"
    others = run.others()
    return f"{run.path}, a new run" if others is None else f"a new run; {others}"
