"""What a patch leaves behind: which modules run other code now, and the way back."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import nn


class Replacement:
    """Stands in a module's instance dictionary as `forward`; copied and pickled with the module.

    The module is referred to weakly: a model that is no longer used frees its memory at once.

    Args:
        module: whose forward it is.

    Attributes:
        active: False after `undo`, should another library still hold on to this object.
    """

    kind = ""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.active = True

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("the module that this forward belonged to no longer exists.")
        return module

    def for_module(self, module: nn.Module) -> Replacement:
        """The same for another module that is like this one."""
        other = object.__new__(type(self))
        other.__setstate__({**self.__getstate__(), "_module": module})
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own code."""
        return type(self.module).forward(self.module, *args, **kwargs)


class PatchHandle:
    """The modules that one call of `patch_blocks` or `patch_lora` changed.

    Attributes:
        replaced: how many modules run a kernel, by its kind.
    """

    def __init__(self) -> None:
        self._replacements: list[Replacement] = []

    @property
    def replaced(self) -> dict[str, int]:
        return dict(Counter(replacement.kind for replacement in self._replacements))

    def install(self, replacement: Replacement) -> None:
        """Makes the replacement its module's forward."""
        replacement.module.__dict__["forward"] = replacement
        self._replacements.append(replacement)

    def undo(self) -> None:
        """Every module runs its own code again. A second call does nothing."""
        for replacement in self._replacements:
            replacement.active = False
            module = replacement._module()
            if module is not None and module.__dict__.get("forward") is replacement:
                del module.__dict__["forward"]
        self._replacements.clear()


def has_other_forward(module: nn.Module) -> bool:
    """Whether another library (or another patch) has put its own forward on this instance."""
    return "forward" in module.__dict__
