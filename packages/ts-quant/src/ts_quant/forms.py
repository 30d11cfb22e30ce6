"""The forms that a matrix may be stored in when several compete for one byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ts_quant.choose import Choice
from ts_quant.codecs.base import codec_named
from ts_quant.loftq import fit_error
from ts_quant.measure import squared_error
from ts_quant.outliers import worst_channels
from ts_quant.tensor import QuantTensor

JOINT_RANKS = (4, 8, 16, 32, 64)
JOINT_OUTLIERS = (1 / 256, 1 / 128, 1 / 64, 1 / 32)
"""Shares of the input channels that may be kept apart."""

_BOTH = JOINT_OUTLIERS[1]
_FACTOR_BYTES = 2


@dataclass(frozen=True)
class Form(Choice):
    """One way to store a matrix.

    Attributes:
        codec: the format.
        outliers: input channels kept in bf16.
        rank: of the start for adapters; 0 for none.
    """

    codec: str = ""
    outliers: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Encoder:
    """How the first form is encoded, and others beside it.

    Attributes:
        codec: the format.
        block_size: values per scale.
        double_quant: one-byte scales.
    """

    codec: str
    block_size: int
    double_quant: bool

    def __call__(
        self,
        weight: Tensor,
        name: str,
        codec: str | None = None,
        channels: Tensor | None = None,
    ) -> QuantTensor:
        """`weight` in that format, or in another one, with these columns kept apart."""
        return codec_named(codec or self.codec).encode(
            weight,
            block_size=self.block_size,
            double_quant=self.double_quant,
            outlier_channels=channels,
            name=name,
        )


def plain_and_precise(
    encode: Encoder,
    weight: Tensor,
    encoded: QuantTensor,
    moments: Tensor | None,
    precise: str | None,
) -> list[Form]:
    """The first form, and the format one step more precise where there is one."""
    found = [Form("plain", 0, squared_error(weight, encoded, moments), encode.codec)]
    if precise is not None:
        better = encode(weight, "weight", precise)
        extra = max(better.nbytes - encoded.nbytes, 0)
        error = squared_error(weight, better, moments)
        found.append(Form("precise", extra, error, precise))
    return found


def ranks_and_outliers(
    encode: Encoder,
    weight: Tensor,
    encoded: QuantTensor,
    moments: Tensor | None,
    most_rank: int,
) -> list[Form]:
    """Outlier channels, a start for adapters, and both, in several sizes each.

    Errors of outlier channels are those of encoding with them; errors of a rank are what the
    leading directions of the fit leave.
    """
    base = squared_error(weight, encoded, moments)
    ranks = [rank for rank in JOINT_RANKS if rank <= min(most_rank, *weight.shape)]
    found = _with_ranks(encode, weight, encoded, moments, ranks, base, Form("plain", 0, base))
    counts = _counts(weight.shape[1])
    if not counts:
        return found
    order = worst_channels(weight, encoded, max(counts.values()), moments)
    for share, count in counts.items():
        kept = encode(weight, "weight", channels=order[:count])
        error = squared_error(weight, kept, moments)
        extra = kept.nbytes - encoded.nbytes
        label = f"{count} outlier channel{'s' if count > 1 else ''}"
        form = Form(label, extra, error, encode.codec, count)
        found.append(form)
        if share == _BOTH:
            found += _with_ranks(encode, weight, kept, moments, ranks, error, form)
    return found


def _counts(n_in: int) -> dict[float, int]:
    """Numbers of channels by share, where they differ and are few."""
    found: dict[float, int] = {}
    for share in JOINT_OUTLIERS:
        count = round(share * n_in)
        if count and count not in found.values():
            found[share] = count
    return found


def _with_ranks(
    encode: Encoder,
    weight: Tensor,
    encoded: QuantTensor,
    moments: Tensor | None,
    ranks: Sequence[int],
    error: float,
    form: Form,
) -> list[Form]:
    if not ranks:
        return []
    fit = fit_error(weight, encoded, ranks[-1], moments)
    if not fit.total:
        return []
    per_rank = _FACTOR_BYTES * sum(weight.shape)
    first = f"{form.label} and " if form.outliers else ""
    return [
        Form(
            f"{first}a rank {rank} start",
            form.extra_bytes + rank * per_rank,
            error * fit.left_over(rank) / fit.total,
            encode.codec,
            form.outliers,
            rank,
        )
        for rank in ranks
    ]
