"""2-norms of gradients where they are, in few launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# What torch's kernel takes meanwhile: for every tensor one fp64 per 64 Ki values of the largest.
_CHUNK = 1 << 16
_SCRATCH_BYTES = 1 << 20


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each (0-d, fp64), on the current stream.

    Each norm is the same, bit for bit, in whatever company it is measured.

    Args:
        gradients: contiguous, on one device; of one dtype or of several.
    """
    found: list[torch.Tensor | None] = [None] * len(gradients)
    for together in _batches(gradients):
        measured = torch._foreach_norm([gradients[k] for k in together], 2, torch.float64)
        for k, norm in zip(together, measured, strict=True):
            found[k] = norm
    return [norm for norm in found if norm is not None]


def in_one(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-d tensors as one (1-D); without a launch where there is one."""
    return norms[0].view(1) if len(norms) == 1 else torch.stack(list(norms))


def _batches(gradients: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Which are measured together: of one dtype (else torch takes another way, of other bits), and
    of sizes for which little memory is taken."""
    by_size = sorted(range(len(gradients)), key=lambda k: -gradients[k].numel())
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k in by_size:
        by_dtype.setdefault(gradients[k].dtype, []).append(k)
    for members in by_dtype.values():
        while members:
            each = 8 * -(-max(gradients[members[0]].numel(), 1) // _CHUNK)
            count = max(_SCRATCH_BYTES // each, 1)
            yield members[:count]
            members = members[count:]
