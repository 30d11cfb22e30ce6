"""The exceptions of ts_quant.

    QuantError
    ├── OptionError        (ValueError)    an argument has a value that is not accepted
    │   └── NotAvailableError              a value of the interface not built in this version
    ├── NonFiniteWeightError (ValueError)  a weight to be encoded holds NaN or infinity
    ├── CheckpointError    (ValueError)    a file of weights is damaged or not of its format
    ├── FrozenWeightError  (RuntimeError)  an operation would train or edit a quantized weight
    └── KernelError        (RuntimeError)  a Triton kernel cannot be built on this machine

Messages say what was wrong (with the values), what was expected, and what to do.
"""

from __future__ import annotations


class QuantError(Exception):
    """Base of every error that ts_quant raises on purpose."""


class OptionError(QuantError, ValueError):
    """An argument has a value that is not accepted."""


class NotAvailableError(OptionError):
    """A value of the public interface that this version does not build yet."""


class NonFiniteWeightError(QuantError, ValueError):
    """A weight to be encoded holds NaN or infinity."""


class CheckpointError(QuantError, ValueError):
    """A file of weights is damaged, truncated, or not of the format it claims."""


class FrozenWeightError(QuantError, RuntimeError):
    """An operation would train, edit in place or pickle a quantized weight."""


class KernelError(QuantError, RuntimeError):
    """A Triton kernel cannot be built on this machine."""
