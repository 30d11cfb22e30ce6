"""Fine-tune and train models larger than the GPU's memory, on the machine you have.

    model, optimizer = trainstream.wrap(model, optimizer)

A thin facade: each name below lives in its own package and is imported when first used, so
`import trainstream` loads neither torch nor any other package, and touches no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainstream._lazy import load

if TYPE_CHECKING:
    from ts_core import ActivationOffloader as ActivationOffloader
    from ts_core import GradientOffloader as GradientOffloader
    from ts_core import HardwareProfile as HardwareProfile
    from ts_core import OffloadAdamW as OffloadAdamW
    from ts_core import PagedKVCache as PagedKVCache
    from ts_core import ParamPager as ParamPager
    from ts_core import ParamReadyHooks as ParamReadyHooks
    from ts_core import StreamedModel as StreamedModel
    from ts_core import TrainStreamError as TrainStreamError
    from ts_core import TrainStreamSession as TrainStreamSession
    from ts_core import find_blocks as find_blocks
    from ts_core import init_lora_from_error as init_lora_from_error
    from ts_core import memory_report as memory_report
    from ts_core import pinned_stats as pinned_stats
    from ts_core import profile_hardware as profile_hardware
    from ts_core import quantize_model as quantize_model
    from ts_core import reserve_pinned as reserve_pinned
    from ts_core import transfer_stats as transfer_stats
    from ts_core import unwrap as unwrap
    from ts_core import wrap as wrap
    from ts_hf import PackedCollator as PackedCollator
    from ts_hf import PaddedCollator as PaddedCollator
    from ts_hf import TrainStreamCache as TrainStreamCache
    from ts_hf import TrainStreamCallback as TrainStreamCallback
    from ts_hf import TrainStreamTrainer as TrainStreamTrainer
    from ts_hf import best_fit as best_fit
    from ts_hf import causal_lm_logprobs as causal_lm_logprobs
    from ts_hf import load_model as load_model
    from ts_hf import merge_adapter as merge_adapter
    from ts_hf import pack_sequences as pack_sequences
    from ts_hf import reference_logprobs as reference_logprobs
    from ts_hf import save_adapter as save_adapter
    from ts_hf import wrap_hf as wrap_hf
    from ts_kernels import add_rms_norm as add_rms_norm
    from ts_kernels import causal_lm_loss as causal_lm_loss
    from ts_kernels import chunked_cross_entropy as chunked_cross_entropy
    from ts_kernels import dpo_loss as dpo_loss
    from ts_kernels import gated_mlp as gated_mlp
    from ts_kernels import lora_linear as lora_linear
    from ts_kernels import rms_norm as rms_norm
    from ts_kernels import rotary as rotary
    from ts_kernels import sequence_logprobs as sequence_logprobs
    from ts_quant import QuantTensor as QuantTensor
    from ts_quant import quantize as quantize

__version__ = "0.8.0"

# Public name -> module that has it.
_HOME = {
    "ActivationOffloader": "ts_core",
    "GradientOffloader": "ts_core",
    "HardwareProfile": "ts_core",
    "OffloadAdamW": "ts_core",
    "PagedKVCache": "ts_core",
    "ParamPager": "ts_core",
    "ParamReadyHooks": "ts_core",
    "StreamedModel": "ts_core",
    "TrainStreamError": "ts_core",
    "TrainStreamSession": "ts_core",
    "find_blocks": "ts_core",
    "init_lora_from_error": "ts_core",
    "memory_report": "ts_core",
    "pinned_stats": "ts_core",
    "profile_hardware": "ts_core",
    "quantize_model": "ts_core",
    "reserve_pinned": "ts_core",
    "transfer_stats": "ts_core",
    "unwrap": "ts_core",
    "wrap": "ts_core",
    "PackedCollator": "ts_hf",
    "PaddedCollator": "ts_hf",
    "TrainStreamCache": "ts_hf",
    "TrainStreamCallback": "ts_hf",
    "TrainStreamTrainer": "ts_hf",
    "best_fit": "ts_hf",
    "causal_lm_logprobs": "ts_hf",
    "load_model": "ts_hf",
    "merge_adapter": "ts_hf",
    "pack_sequences": "ts_hf",
    "reference_logprobs": "ts_hf",
    "save_adapter": "ts_hf",
    "wrap_hf": "ts_hf",
    "add_rms_norm": "ts_kernels",
    "causal_lm_loss": "ts_kernels",
    "chunked_cross_entropy": "ts_kernels",
    "dpo_loss": "ts_kernels",
    "gated_mlp": "ts_kernels",
    "lora_linear": "ts_kernels",
    "rms_norm": "ts_kernels",
    "rotary": "ts_kernels",
    "sequence_logprobs": "ts_kernels",
    "QuantTensor": "ts_quant",
    "quantize": "ts_quant",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'trainstream' has no attribute {name!r}")
    value = getattr(load(home, f"trainstream.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
