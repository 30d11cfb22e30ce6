"""Fine-tune and train models larger than the GPU's memory, on the machine you have.

    model, optimizer = trainstream.wrap(model, optimizer)

A thin facade: each name below lives in its own package and is imported when first used, so
`import trainstream` loads neither torch nor any other package, and touches no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainstream._lazy import load

if TYPE_CHECKING:
    from ts_core import OffloadAdamW as OffloadAdamW
    from ts_core import TrainStreamSession as TrainStreamSession
    from ts_core import find_blocks as find_blocks
    from ts_core import memory_report as memory_report
    from ts_core import unwrap as unwrap
    from ts_core import wrap as wrap
    from ts_core.errors import TrainStreamError as TrainStreamError

__version__ = "0.8.0"

# Public name -> module that has it.
_HOME = {
    "OffloadAdamW": "ts_core",
    "TrainStreamSession": "ts_core",
    "find_blocks": "ts_core",
    "memory_report": "ts_core",
    "unwrap": "ts_core",
    "wrap": "ts_core",
    "TrainStreamError": "ts_core.errors",
    "causal_lm_loss": "ts_kernels",
    "chunked_cross_entropy": "ts_kernels",
    "rms_norm": "ts_kernels",
    "QuantTensor": "ts_quant",
    "quantize": "ts_quant",
    "TrainStreamTrainer": "ts_hf",
    "load_model": "ts_hf",
    "wrap_hf": "ts_hf",
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
