"""Training kernels for PyTorch, each with a plain PyTorch reference.

Usable with nothing else installed than torch: on CUDA GPUs the kernels are Triton, everywhere
else the same functions run in PyTorch. Importing initializes no CUDA context and needs no Triton.
"""

from ts_kernels import reference
from ts_kernels._adapted_head import LoraAdapter
from ts_kernels._add_rms_norm import add_rms_norm
from ts_kernels._cross_entropy import chunked_cross_entropy
from ts_kernels._gated_mlp import gated_mlp
from ts_kernels._logprobs import sequence_logprobs
from ts_kernels._lora_linear import lora_linear
from ts_kernels._losses import causal_lm_loss, dpo_loss
from ts_kernels._rms_norm import rms_norm
from ts_kernels._rotary import rotary
from ts_kernels._targets import count_targets
from ts_kernels.patching import PatchHandle, patch_blocks, patch_lora

__version__ = "0.8.0"

__all__ = [
    "LoraAdapter",
    "PatchHandle",
    "__version__",
    "add_rms_norm",
    "causal_lm_loss",
    "chunked_cross_entropy",
    "count_targets",
    "dpo_loss",
    "gated_mlp",
    "lora_linear",
    "patch_blocks",
    "patch_lora",
    "reference",
    "rms_norm",
    "rotary",
    "sequence_logprobs",
]
