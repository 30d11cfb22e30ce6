"""What the entry points of the group `trainstream.kernels` name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ts_kernels import reference
from ts_kernels._add_rms_norm import add_rms_norm
from ts_kernels._cross_entropy import chunked_cross_entropy
from ts_kernels._gated_mlp import gated_mlp
from ts_kernels._logprobs import sequence_logprobs
from ts_kernels._lora_linear import lora_linear
from ts_kernels._losses import dpo_loss
from ts_kernels._rms_norm import rms_norm
from ts_kernels._rotary import rotary
from ts_kernels.patching import patch_blocks, patch_lora


@dataclass(frozen=True)
class Kernel:
    """A kernel and its plain PyTorch reference, with the same signature.

    Attributes:
        name: the entry point's name.
        fn: what to call.
        reference: the same function op by op, for checks.
        API_VERSION: version of this interface.
    """

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    API_VERSION: int = 1


@dataclass(frozen=True)
class Patch:
    """Puts kernels into a model; `fn` returns a handle with `undo()` and `replaced`.

    Attributes:
        name: the entry point's name.
        fn: `patch_blocks(blocks, *, on_event, device)` or `patch_lora(model, *, on_event)`.
        API_VERSION: version of this interface.
    """

    name: str
    fn: Callable[..., Any]
    API_VERSION: int = 1


RMS_NORM = Kernel("rms_norm", rms_norm, reference.rms_norm)
ADD_RMS_NORM = Kernel("add_rms_norm", add_rms_norm, reference.add_rms_norm)
ROTARY = Kernel("rotary", rotary, reference.rotary)
GATED_MLP = Kernel("gated_mlp", gated_mlp, reference.gated_mlp)
LORA_LINEAR = Kernel("lora_linear", lora_linear, reference.lora_linear)
CHUNKED_CROSS_ENTROPY = Kernel(
    "chunked_cross_entropy", chunked_cross_entropy, reference.chunked_cross_entropy
)
SEQUENCE_LOGPROBS = Kernel("sequence_logprobs", sequence_logprobs, reference.sequence_logprobs)
DPO_LOSS = Kernel("dpo_loss", dpo_loss, reference.dpo_loss)
PATCH_BLOCKS = Patch("patch_blocks", patch_blocks)
PATCH_LORA = Patch("patch_lora", patch_lora)
