"""What the codecs' package offers beyond codecs, found without naming the package."""

from __future__ import annotations

from typing import Any


def codec_hook(name: str) -> Any:
    """The attribute `name` of whichever installed codec has it, or None."""
    from ts_core.registry import codecs

    for codec_name in codecs.names():
        found = getattr(codecs.get(codec_name), name, None)
        if found is not None:
            return found
    return None
