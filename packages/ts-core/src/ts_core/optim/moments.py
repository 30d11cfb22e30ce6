"""The two moments of AdamW in host memory: fp32, bf16 or 8-bit.

bf16 moments are rounded stochastically. 8-bit moments are one small float per value, relative to
the largest of 256 (after Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
arXiv:2110.02861): exp_avg to nearest, exp_avg_sq as its square root and stochastically. The random
bits depend on the seed, the step and the element alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ts_core import _native

BLOCK = _native.MOMENT_BLOCK
NAMES = ("exp_avg", "exp_avg_sq")
MOMENT_KINDS = ("float32", "bfloat16", "int8")  # most precise first
_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}


def bytes_per_value(kind: str) -> float:
    """Host bytes of both moments of one trained value, for a kind of MOMENT_KINDS."""
    scale = 2 * 4 / BLOCK if kind == "int8" else 0.0
    return 2 * _STORED[kind].itemsize + scale


class Moments:
    """exp_avg and exp_avg_sq of `numel` values.

    Args:
        numel: values.
        kind: "float32", "bfloat16" or "int8".
        seed: of the stochastic rounding.
        empty: makes a zeroed 1-D tensor of (numel, dtype); torch.zeros when omitted.
    """

    def __init__(
        self,
        numel: int,
        kind: str,
        seed: int,
        empty: Callable[[int, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        make = empty or _zeros
        self.numel = numel
        self.kind = kind
        self.seed = seed
        self.stored = {name: make(numel, _STORED[kind]) for name in NAMES}
        blocks = -(-numel // BLOCK) if kind == "int8" else 0
        self.scales = {name: make(blocks, torch.float32) for name in NAMES}

    @classmethod
    def over(cls, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Moments:
        """fp32 moments in memory that there is."""
        found = cls(0, "float32", 0)
        found.numel = exp_avg.numel()
        found.stored = dict(zip(NAMES, (exp_avg, exp_avg_sq), strict=True))
        return found

    def host_bytes(self) -> int:
        """Bytes held."""
        tensors = (*self.stored.values(), *self.scales.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def pointers(self, offset: int) -> dict[str, int | str]:
        """Arguments of `_native.adamw_step` for values from `offset` (a block's start) on."""
        found: dict[str, int | str] = {"moments": self.kind, "seed": self.seed}
        for name in NAMES:
            stored = self.stored[name]
            found[f"{name}_ptr"] = stored.data_ptr() + offset * stored.element_size()
            if self.kind == "int8":
                found[f"{name}_scale_ptr"] = self.scales[name].data_ptr() + offset // BLOCK * 4
        return found

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Write values from `offset` on to `out` (fp32, 1-D, contiguous), exactly as stored."""
        if self.kind == "float32":
            out.copy_(self.stored[name][offset : offset + out.numel()])
            return
        _native.moments_to_float32(
            *self._stored(name, offset), out.data_ptr(), out.numel(), moments=self.kind, which=name
        )

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Take values from `offset` on (fp32, 1-D, in RAM); what `read` gave is kept exactly."""
        if self.kind == "float32":  # perhaps from a view of this very memory
            self.stored[name][offset : offset + values.numel()].copy_(values)
            return
        values = values.contiguous()
        _native.moments_from_float32(
            values.data_ptr(),
            *self._stored(name, offset),
            values.numel(),
            moments=self.kind,
            which=name,
            seed=self.seed,
            base=offset,
        )

    def _stored(self, name: str, offset: int) -> tuple[int, int]:
        stored = self.stored[name]
        scale = self.scales[name].data_ptr() + offset // BLOCK * 4 if self.kind == "int8" else 0
        return stored.data_ptr() + offset * stored.element_size(), scale


def _zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)
