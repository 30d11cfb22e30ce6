"""Names that are looked up in another package when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


def load(module: str, wanted: str) -> ModuleType:
    """Import `module` of a sibling package, or say which package is missing.

    Args:
        module: dotted name, such as "ts_hf" or "ts_core.errors".
        wanted: what the caller asked for, named in the message.

    Raises:
        ImportError: the package is not installed.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        distribution = package.replace("_", "-")
        raise ImportError(
            f"{wanted} comes from {distribution}, which is not installed. "
            f"Add it: pip install '{distribution}>=0.8,<0.9' (from this repository or its wheels; "
            f"README.md says why the version range matters)"
        )
    return importlib.import_module(module)


def forward(alias: str, target: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a module that stands for another package.

    Args:
        alias: the full name of the module that forwards.
        target: the package whose attributes it shows.
    """

    def get(name: str) -> Any:
        # Look-ups by the import machinery and by inspect must not import the target.
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {alias!r} has no attribute {name!r}")
        module = load(target, alias)
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"module {alias!r} (which shows {target!r}) has no attribute {name!r}"
            ) from None

    def names() -> list[str]:
        module = load(target, alias)
        return sorted(getattr(module, "__all__", dir(module)))

    return get, names
