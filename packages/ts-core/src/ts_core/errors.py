"""The one exception tree of trainstream.

    TrainStreamError
    ├── OptionError            (ValueError)    an option has a value that is not accepted
    │   └── NotAvailableError                  a value of the interface not built in this version
    ├── RegistryError          (LookupError)   a plug-in cannot be used
    │   ├── UnknownPluginError                 no installed package offers the name
    │   ├── DuplicatePluginError               two packages offer the same name
    │   ├── PluginVersionError                 made for another version of the interface
    │   └── BrokenPluginError                  raised while being imported
    ├── StateError             (RuntimeError)  called at the wrong time, or on the wrong model
    ├── DataError              (ValueError)    a file, a batch or a checkpoint is not usable
    ├── NonFiniteError         (RuntimeError)  a loss or a gradient is NaN or infinite
    ├── OutOfBudgetError       (MemoryError)   a memory budget cannot hold what is asked
    └── NativeCoreError        (ImportError)   the compiled host core cannot be loaded

Messages say what was wrong (with the values), what was expected, and what to do.
"""

from __future__ import annotations


class TrainStreamError(Exception):
    """Base of every error that trainstream raises on purpose."""


class OptionError(TrainStreamError, ValueError):
    """An option has a value that is not accepted."""


class NotAvailableError(OptionError):
    """A value of the public interface that this version does not build yet."""


class RegistryError(TrainStreamError, LookupError):
    """A plug-in cannot be used."""


class UnknownPluginError(RegistryError):
    """No installed package offers this name."""


class DuplicatePluginError(RegistryError):
    """Two installed packages offer the same name."""


class PluginVersionError(RegistryError):
    """The plug-in was made for another version of the plug-in interface."""


class BrokenPluginError(RegistryError):
    """The plug-in raised while being imported."""


class StateError(TrainStreamError, RuntimeError):
    """Something was called at the wrong time, or on a model in the wrong state."""


class DataError(TrainStreamError, ValueError):
    """A file, a batch or a checkpoint cannot be used."""


class NonFiniteError(TrainStreamError, RuntimeError):
    """A loss or a gradient is NaN or infinite."""


class OutOfBudgetError(TrainStreamError, MemoryError):
    """A memory budget cannot hold what is asked of it."""


class NativeCoreError(TrainStreamError, ImportError):
    """The compiled host core `ts_core._host` cannot be loaded."""
