"""trainstream for transformers: load quantized, wrap, train, save.

Importing this imports neither torch's CUDA part nor transformers; each name is loaded on first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.8.0"

_HOMES = {
    "load_model": "ts_hf.loading",
    "LoadReport": "ts_hf.fill",
    "find_decoder_layers": "ts_hf.families",
    "wrap_hf": "ts_hf.wrapping",
    "TrainStreamTrainer": "ts_hf.training.trainer",
    "TrainStreamCache": "ts_hf.cache",
    "streaming_trainer": "ts_hf.training.trainer",
    "TrainStreamCallback": "ts_hf.training.memory_log",
    "causal_lm_logprobs": "ts_hf.losses",
    "dpo_loss": "ts_hf.losses",
    "reference_logprobs": "ts_hf.losses",
    "PackedCollator": "ts_hf.packing",
    "PaddedCollator": "ts_hf.padding",
    "best_fit": "ts_hf.packing",
    "pack_sequences": "ts_hf.packing",
    "save_adapter": "ts_hf.adapters",
    "merge_adapter": "ts_hf.merging",
    "demo_model_folder": "ts_hf.demo_model",
}

__all__ = [
    "LoadReport",
    "PackedCollator",
    "PaddedCollator",
    "TrainStreamCache",
    "TrainStreamCallback",
    "TrainStreamTrainer",
    "best_fit",
    "causal_lm_logprobs",
    "demo_model_folder",
    "dpo_loss",
    "find_decoder_layers",
    "load_model",
    "merge_adapter",
    "pack_sequences",
    "reference_logprobs",
    "save_adapter",
    "streaming_trainer",
    "wrap_hf",
]

if TYPE_CHECKING:
    from ts_hf.adapters import save_adapter as save_adapter
    from ts_hf.cache import TrainStreamCache as TrainStreamCache
    from ts_hf.demo_model import demo_model_folder as demo_model_folder
    from ts_hf.families import find_decoder_layers as find_decoder_layers
    from ts_hf.fill import LoadReport as LoadReport
    from ts_hf.loading import load_model as load_model
    from ts_hf.losses import causal_lm_logprobs as causal_lm_logprobs
    from ts_hf.losses import dpo_loss as dpo_loss
    from ts_hf.losses import reference_logprobs as reference_logprobs
    from ts_hf.merging import merge_adapter as merge_adapter
    from ts_hf.packing import PackedCollator as PackedCollator
    from ts_hf.packing import best_fit as best_fit
    from ts_hf.packing import pack_sequences as pack_sequences
    from ts_hf.padding import PaddedCollator as PaddedCollator
    from ts_hf.training.memory_log import TrainStreamCallback as TrainStreamCallback
    from ts_hf.training.trainer import TrainStreamTrainer as TrainStreamTrainer
    from ts_hf.training.trainer import streaming_trainer as streaming_trainer
    from ts_hf.wrapping import wrap_hf as wrap_hf


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ts_hf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
