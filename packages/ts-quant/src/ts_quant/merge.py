"""Merge an adapter's update into a weight, and say what became of it.

The adapter was trained on top of the stored weight Q, so the model to reproduce is Q + D. Three
targets, none of which is exact:

    "original"     W + D       W is the full-precision weight Q was made of. Closest to W, but not
                               the sum the adapter was trained in: the two differ by W - Q. An
                               adapter that started at W - Q (LoftQ) already holds a part of that
                               difference, so what it started with is taken off: W + D - D_start.
    "dequantized"  Q + D       rounded to the weight's dtype: small updates may be rounded away.
    a codec        encode(Q + D)   an update smaller than a step of the format mostly is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, codec_named
from ts_quant.errors import NonFiniteWeightError, OptionError
from ts_quant.tensor import QuantTensor
from ts_quant.transposed import TransposedQuantTensor

ORIGINAL = "original"
DEQUANTIZED = "dequantized"


@dataclass(frozen=True)
class MatrixMerge:
    """What merging one matrix did.

    Attributes:
        name: name of the weight.
        error: ||merged - (Q + D)|| / ||Q + D||: distance from the model that was trained.
        survived: share of the update that is in the merged weight: the projection of what merging
            changed onto D, over D. 1 is all of it; near 0 means that it was rounded away.
        noise: ||change - D|| / ||D||: everything else that merging changed.
        delta: ||D|| / ||Q||: size of the update.
        squares: (||merged - (Q + D)||^2, ||Q + D||^2, <change, D>, ||D||^2), to sum over matrices.
    """

    name: str
    error: float
    survived: float
    noise: float
    delta: float
    squares: tuple[float, float, float, float] = field(repr=False)


@dataclass
class MergeReport:
    """What merging did to each matrix, and overall.

    Attributes:
        into: the target asked for.
        rows: one per merged matrix.
        notes: decisions in plain words.
    """

    into: str
    rows: list[MatrixMerge] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Relative distance of all merged matrices from the model that was trained."""
        lost, total = (sum(row.squares[index] for row in self.rows) for index in (0, 1))
        return math.sqrt(lost / total) if total else 0.0

    @property
    def survived(self) -> float:
        """Share of the whole update that the merged matrices hold; 1.0 if there was no update."""
        kept, total = (sum(row.squares[index] for row in self.rows) for index in (2, 3))
        return kept / total if total else 1.0

    def table(self, most: int = 20) -> str:
        """The matrices whose update survived least, as text, and the totals."""
        rows = sorted(self.rows, key=lambda row: row.survived)[:most]
        width = max((len(row.name) for row in rows), default=7)
        lines = [f"{'name':{width}}   error  survived    noise    delta"]
        for row in rows:
            lines.append(
                f"{row.name:{width}} {row.error:7.3%} {row.survived:9.1%} {row.noise:8.1%} "
                f"{row.delta:8.3%}"
            )
        if len(self.rows) > most:
            lines.append(f"... and {len(self.rows) - most} more")
        lines.append(
            f"into {self.into}: {len(self.rows)} matrices, error {self.error:.3%}, "
            f"{self.survived:.1%} of the update survived"
        )
        return "\n".join([*lines, *self.notes])


def merge_weight(
    base: Tensor,
    delta: Tensor,
    into: str = DEQUANTIZED,
    *,
    original: Tensor | None = None,
    started: Tensor | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    double_quant: bool = False,
    name: str = "weight",
) -> tuple[Tensor, MatrixMerge]:
    """Add an update to a weight.

    Args:
        base: the weight the adapter was trained on, a QuantTensor or an ordinary tensor.
        delta: the update D, of its shape (for LoRA: scaling * B @ A), on its device.
        into: "original", "dequantized" or the name of a codec.
        original: the full-precision weight, for "original"; the result has its dtype.
        started: what the adapter added before training, if it started at the quantization error
            (`ErrorStart.started_delta()`); matters for "original" only.
        block_size: values per scale, for a codec.
        double_quant: one-byte scales, for a codec.
        name: the weight's name, for the report and for errors.

    Returns:
        (merged weight on base's device, what happened). The computation is in fp32; a few
        full-precision copies of this one matrix exist meanwhile.

    Raises:
        OptionError: shapes that differ, "original" without `original`, or an unknown target.
        NonFiniteWeightError: the sum holds NaN or infinity, or values beyond the result's dtype.
    """
    stored = base.detach()
    dtype = stored.dtype
    quantized = isinstance(stored, QuantTensor | TransposedQuantTensor)
    # What the layer computes with: the stored weight rounded to its dtype.
    exact = (stored.dequantize() if quantized else stored).float()
    update = delta.detach().to(exact.device, torch.float32)
    if update.shape != exact.shape:
        raise OptionError(
            f"the update of {name!r} has shape {tuple(update.shape)}, but the weight has "
            f"{tuple(exact.shape)}"
        )
    trained = exact + update
    merged: Tensor
    if into == ORIGINAL:
        full = _original(original, exact, name)
        if started is not None and quantized:
            update = update - started.detach().to(update)
        merged, reference = (full.float() + update).to(full.dtype), full.float()
    elif into == DEQUANTIZED:
        merged, reference = trained.to(dtype), exact
    else:
        merged = codec_named(into).encode(
            trained.to(dtype), block_size=block_size, double_quant=double_quant, name=name
        )
        reference = exact
    if not isinstance(merged, QuantTensor):
        _refuse_non_finite(merged, name)
    result = merged.dequantize(torch.float32) if isinstance(merged, QuantTensor) else merged.float()
    return merged, _measure(name, result, reference, update, trained, exact)


def _refuse_non_finite(merged: Tensor, name: str) -> None:
    bad = merged.numel() - int(torch.isfinite(merged).sum())
    if bad:
        raise NonFiniteWeightError(
            f"weight {name!r} (shape {tuple(merged.shape)}) would hold {bad} values that are NaN, "
            f"infinite or beyond the range of {merged.dtype} after merging: the adapter has "
            f"diverged, or is of another model"
        )


def _original(original: Tensor | None, base: Tensor, name: str) -> Tensor:
    if original is None:
        raise OptionError(
            f"into='original' needs the full-precision weight of {name!r}. Give the original "
            f"checkpoint, or merge into 'dequantized' or a codec."
        )
    full = original.detach().to(base.device)
    if full.shape != base.shape:
        raise OptionError(
            f"the original weight of {name!r} has shape {tuple(full.shape)}, but the model has "
            f"{tuple(base.shape)}: it is of another model"
        )
    return full


def _measure(
    name: str, merged: Tensor, reference: Tensor, update: Tensor, trained: Tensor, base: Tensor
) -> MatrixMerge:
    change = merged - reference
    lost = _dot(merged - trained, merged - trained)
    whole, size = _dot(trained, trained), _dot(update, update)
    kept, changed, stored = _dot(change, update), _dot(change, change), _dot(base, base)
    noise = max(changed - 2 * kept + size, 0.0)
    return MatrixMerge(
        name,
        error=math.sqrt(lost / whole) if whole else 0.0,
        survived=kept / size if size else 1.0,
        noise=math.sqrt(noise / size) if size else 0.0,
        delta=math.sqrt(size / stored) if stored else 0.0,
        squares=(lost, whole, kept, size),
    )


def _dot(one: Tensor, other: Tensor) -> float:
    step = 1 << 22
    a, b = one.reshape(-1), other.reshape(-1)
    return sum(
        float((a[at : at + step].double() * b[at : at + step].double()).sum())
        for at in range(0, a.numel(), step)
    )
