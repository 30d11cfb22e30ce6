"""Frozen 4- and 8-bit weights for PyTorch.

    q = ts_quant.quantize(weight, "nf4")          # a QuantTensor: codes and scales
    linear.weight = torch.nn.Parameter(q, requires_grad=False)
    ts_quant.error(weight, "nf4").relative        # what the format loses on this weight

Importing this package imports torch and nothing else: no Triton, no CUDA context.
"""

from ts_quant import aten as _aten  # noqa: F401  (registers the operations of QuantTensor)
from ts_quant.api import quantize
from ts_quant.choose import Choice, choose
from ts_quant.codecs import fp4 as _fp4  # noqa: F401  (registers the codecs)
from ts_quant.codecs import fp8 as _fp8  # noqa: F401  (registers the codec)
from ts_quant.codecs import int8 as _int8  # noqa: F401  (registers the codec)
from ts_quant.codecs import nf4 as _nf4  # noqa: F401  (registers the codec)
from ts_quant.error_stats import error_stats
from ts_quant.errors import (
    CheckpointError,
    FrozenWeightError,
    KernelError,
    NonFiniteWeightError,
    NotAvailableError,
    OptionError,
    QuantError,
)
from ts_quant.loftq import LoftQResult, loftq
from ts_quant.lora_start import ErrorStart, init_lora_from_error
from ts_quant.matmul.dispatch import emulate_tensor_cores
from ts_quant.matmul.options import MatmulOptions, configure_matmul
from ts_quant.matmul.report import MatmulReport, matmul_report
from ts_quant.measure import ErrorStats, error
from ts_quant.merge import MatrixMerge, MergeReport, merge_weight
from ts_quant.outliers import worst_channels
from ts_quant.readers.folder import iterate_checkpoint
from ts_quant.readers.plan import ReadPlan, StoredWeight, plan_reading
from ts_quant.storage_report import Considered, MatrixReport, StorageReport
from ts_quant.stored import iterate_quantized, load_quantized, save_quantized
from ts_quant.storing import Stored, Storer
from ts_quant.tensor import QuantTensor
from ts_quant.transposed import TransposedQuantTensor

__version__ = "0.8.0"

__all__ = [
    "CheckpointError",
    "Choice",
    "Considered",
    "ErrorStart",
    "ErrorStats",
    "FrozenWeightError",
    "KernelError",
    "LoftQResult",
    "MatmulOptions",
    "MatmulReport",
    "MatrixMerge",
    "MatrixReport",
    "MergeReport",
    "NonFiniteWeightError",
    "NotAvailableError",
    "OptionError",
    "QuantError",
    "QuantTensor",
    "ReadPlan",
    "StorageReport",
    "Stored",
    "StoredWeight",
    "Storer",
    "TransposedQuantTensor",
    "choose",
    "configure_matmul",
    "emulate_tensor_cores",
    "error",
    "error_stats",
    "init_lora_from_error",
    "iterate_checkpoint",
    "iterate_quantized",
    "load_quantized",
    "loftq",
    "matmul_report",
    "merge_weight",
    "plan_reading",
    "quantize",
    "save_quantized",
    "worst_channels",
]
