"""From a model's config to a plan, without its weights and without memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ts_core.config import WrapOptions
from ts_core.engine.placement import block_leaves, model_profile
from ts_core.engine.planning import gradients_in_flight, norm_of
from ts_core.engine.quantize import quantizable_weights
from ts_core.engine.residence import staying
from ts_core.errors import DataError, OptionError
from ts_core.optim.moments import bytes_per_value
from ts_core.planning.adapters import add_adapters
from ts_core.planning.meter import measure_step
from ts_core.planning.stack import short_stack
from ts_core.planning.updates import Trained, trained_parts
from ts_core.registry import models
from ts_core.schedule import ModelProfile
from ts_core.schedule.plan import Work
from ts_core.store.leaves import stored_bytes

READER = "transformers"


@dataclass(frozen=True)
class Training:
    """What is to be trained, and how.

    Attributes:
        batch, length: sequences per step, and tokens of each.
        rank: of the adapters; None trains every parameter.
        dtype: of the weights.
        moments: how the optimizer keeps moments.
        dtype_asked: whether `dtype` was asked for, rather than the usual one of the rank.
    """

    batch: int
    length: int
    rank: int | None
    dtype: torch.dtype
    moments: str = "float32"
    dtype_asked: bool = False

    def in_words(self) -> str:
        """For a headline."""
        what = "all parameters" if self.rank is None else f"adapters of rank {self.rank}"
        kind = str(self.dtype).removeprefix("torch.") + " weights"
        if self.dtype is torch.float32:  # products and activations are counted so
            kind += " under bf16 autocast"
        return f"{what}, {kind}, {self.batch} x {self.length} tokens"


@dataclass(frozen=True)
class Described:
    """A model as the planner sees it.

    Attributes:
        profile: bytes and work.
        weights: per block, count and bytes of the weights that a codec can store.
        total_bytes: all weights as loaded.
        parameters: how many.
        notes: what could not be known.
        staying: trained parameters (fake) whose optimizer state may be on the device.
        trained: what the optimizer keeps state of.
    """

    profile: ModelProfile
    weights: list[tuple[int, int]]
    total_bytes: int
    parameters: int
    notes: tuple[str, ...] = ()
    staying: tuple[nn.Parameter, ...] = ()
    trained: tuple[Trained, ...] = ()


def describe(
    source: str,
    training: Training,
    trust_remote_code: bool = False,
    config: WrapOptions | None = None,
) -> Described:
    """Build the model of a config with fake tensors, and count.

    Args:
        source: what the installed reader takes; for ts-hf a folder with a config.json.
        training: what is to be trained.
        trust_remote_code: whether code that the folder ships may run.
        config: options of wrap(); None for its defaults.

    Raises:
        UnknownPluginError: no installed package reads configs.
        DataError: the source is not readable, or the model has no stack of blocks.
    """
    reader = models.get(READER)
    config = config or WrapOptions(quantize="none", moment_dtype=training.moments)
    with FakeTensorMode():
        model: nn.Module = reader.build(source, training.dtype, trust_remote_code)
        blocks = list(reader.find_blocks(model))
        if not blocks:
            raise DataError(f"no stack of repeated blocks was found in the model of {source}.")
        parameters = sum(p.numel() for p in model.parameters())
        total = sum(stored_bytes(p) for p in model.parameters())
        if training.rank is not None:
            model.requires_grad_(False)
            if not add_adapters(blocks, training.rank):
                raise DataError(f"the blocks of {source} have no linear layer to adapt.")
        leaves = block_leaves(model, blocks)
        stay = tuple(staying(model, None, leaves, config, training.moments))
        profile = model_profile(
            model,
            leaves,
            bytes_per_value(training.moments),
            gradients_in_flight(None, config),
            config.optimizer_mode == "cpu",
            config.max_inflight_bytes,
        )
        weights = quantizable_weights(blocks)
        trained = trained_parts(model, leaves)
        work = _work(model, blocks, training, reader.active_share(model))
        profile = replace(profile, in_host=0, work=work)
        notes: tuple[str, ...] = ()
        try:
            profile = _with_footprint(profile, model, blocks, training, reader)
        except Exception as error:
            # Model code may branch on values, which fake tensors have none of, and raise anything.
            notes = (
                f"activations are unknown, and 30 % of device memory is set aside for them: the "
                f"model cannot be run without its values ({type(error).__name__})",
            )
    return Described(profile, weights, total, parameters, notes, stay, trained)


def _with_footprint(
    profile: ModelProfile,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    training: Training,
    reader: Any,
) -> ModelProfile:
    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = reader.loss(model, training.batch, training.length)
        return found

    with short_stack(model, blocks) as fewer:
        step = measure_step(model, fewer, loss)
    return replace(
        profile,
        activations=_stretched(step.activations, len(blocks)),
        inputs=_stretched(step.inputs, len(blocks)),
        transient=step.transient,
        head=step.head,
    )


def _stretched(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Values of all blocks from those of a shorter stack: first, the like ones between, last."""
    missing = count - len(values)
    return (*values[:-1], *([values[1]] * missing if missing else ()), values[-1])


def _work(
    model: nn.Module, blocks: Sequence[nn.Module], training: Training, active_share: float
) -> Work:
    tokens = training.batch * training.length
    flops = []
    inside: set[int] = set()
    for block in blocks:
        values = 0.0
        for parameter in block.parameters():
            inside.add(id(parameter))
            if parameter.dim() >= 2:
                values += parameter.numel() * (active_share if parameter.dim() > 2 else 1.0)
        # Scores and their product with the values, half of them masked out.
        norm = norm_of(block)
        attention = 2.0 * training.length * (0 if norm is None else norm.numel())
        flops.append(tokens * (2.0 * values + attention))
    heads = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in inside
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    return Work(
        block_flops=tuple(flops),
        other_flops=2.0 * tokens * sum(weight.numel() for weight in heads),
        backward=2.0 if training.rank is None else 1.0,
        updates=sum(p.numel() for p in trained),
        gradient_bytes=trained_bytes,
        updated_bytes=trained_bytes,
    )


def check_training(batch: int, length: int, rank: int | None) -> None:
    """Refuse numbers that make no training.

    Raises:
        OptionError: one below 1.
    """
    for name, value in (("--batch", batch), ("--seq", length), ("--lora", rank)):
        if value is not None and value < 1:
            raise OptionError(f"{name} {value} is not accepted. Use an integer of at least 1.")
