"""Putting the kernels into models that other libraries wrote, and taking them out again.

Nothing of transformers or PEFT is imported: modules are recognized by what they hold, and what
they compute is compared before they are replaced.
"""

from ts_kernels.patching._blocks import patch_blocks
from ts_kernels.patching._handle import PatchHandle
from ts_kernels.patching._lora import patch_lora

__all__ = ["PatchHandle", "patch_blocks", "patch_lora"]
