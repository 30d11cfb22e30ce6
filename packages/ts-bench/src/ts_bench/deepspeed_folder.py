"""Where DeepSpeed is, when it is not installed.

Once DeepSpeed can be imported, accelerate imports it in every program that uses transformers. So a
source folder of it stays off PYTHONPATH: the environment variable TS_BENCH_DEEPSPEED names it, and
only what measures DeepSpeed puts it on the path.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = "TS_BENCH_DEEPSPEED"


def deepspeed_folder() -> str | None:
    """The folder that TS_BENCH_DEEPSPEED names, if the package `deepspeed` lies in it."""
    folder = os.environ.get(FOLDER)
    if folder and (Path(folder) / "deepspeed" / "__init__.py").exists():
        return folder
    return None


def deepspeed_is_there() -> bool:
    """Whether DeepSpeed can be imported, after `use_deepspeed_folder`; changes nothing."""
    return deepspeed_folder() is not None or find_spec("deepspeed") is not None


def use_deepspeed_folder() -> None:
    """Put that folder, if there is one, first on this process's path."""
    folder = deepspeed_folder()
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
