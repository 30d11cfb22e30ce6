"""Warnings of installed libraries that say nothing to someone who runs a command.

Importing transformers or PEFT imports torchao where it is installed, which logs about kernels of
its own for other GPUs and about its own use of torch. None of it concerns what the command does.
Each message is named here; everything else that these libraries log is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Logger -> what a message of it contains.
_MESSAGES = {
    "torchao": ("/torchao/_C", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("register_constant() on Enum subclasses is deprecated",),
}


def _wanted(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _MESSAGES.get(record.name, ()))


@contextmanager
def without_import_warnings() -> Iterator[None]:
    """Leave those messages out meanwhile."""
    loggers = [logging.getLogger(name) for name in _MESSAGES]
    for logger in loggers:
        logger.addFilter(_wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_wanted)
