"""The wheel's build hook: compiles the host core and puts exactly that file into the wheel.

Bound to the wheel target alone (see pyproject.toml), so that an sdist carries csrc/ and no binary.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeCoreHook(BuildHookInterface[Any]):
    """Builds `ts_core/_host` with `src/ts_core/_build.py`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the module; an editable install has it next to the source, a wheel inside."""
        package = Path(self.root, "src", "ts_core")
        build = _load_build_script(package / "_build.py")
        in_place = build.extension_path(package)
        if version == "editable":
            build.build_in_place()
            return
        self._folder = tempfile.TemporaryDirectory(prefix="ts-core-wheel-")
        built = Path(self._folder.name, in_place.name)
        build.build(built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(built)] = f"ts_core/{built.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what `initialize` built outside the source tree."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _load_build_script(path: Path) -> ModuleType:
    # By path: importing ts_core would need torch, which a build environment does not have.
    spec = importlib.util.spec_from_file_location("ts_core_build_script", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name while the class is made.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
