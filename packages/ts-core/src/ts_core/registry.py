"""Plug-ins between the packages: entry points, loaded by name on first use.

A plug-in is an object named by an entry point of one of the groups below, carrying an integer
`API_VERSION`. Nothing is imported until its name is asked for, so a broken plug-in raises only
for those who use it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ts_core.errors import (
    BrokenPluginError,
    DuplicatePluginError,
    PluginVersionError,
    UnknownPluginError,
)


@dataclass(frozen=True)
class GroupInfo:
    """What a group of plug-ins is for, the interface version, and who usually provides it."""

    noun: str
    api_version: int
    usual_package: str


GROUPS: dict[str, GroupInfo] = {
    "trainstream.codecs": GroupInfo("codec", 1, "ts-quant"),
    "trainstream.kernels": GroupInfo("kernel", 1, "ts-kernels"),
    "trainstream.models": GroupInfo("model family", 1, "ts-hf"),
    "trainstream.bench_engines": GroupInfo("benchmark engine", 1, "ts-bench"),
    "trainstream.commands": GroupInfo("command", 1, "ts-hf"),
}


class Registry:
    """The plug-ins of one entry-point group.

    Args:
        group: an entry-point group, one of `GROUPS`.
        find: returns the group's entry points; replaced in tests.
    """

    def __init__(
        self, group: str, find: Callable[[str], Iterable[EntryPoint]] | None = None
    ) -> None:
        self.group = group
        self.info = GROUPS[group]
        self._find = find or _installed
        self._loaded: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Names offered by installed packages, sorted; imports nothing."""
        return sorted({entry.name for entry in self._find(self.group)})

    def get(self, name: str) -> Any:
        """The plug-in called `name`, imported on first use.

        Raises:
            UnknownPluginError: no installed package offers it.
            DuplicatePluginError: two packages offer it.
            BrokenPluginError: its module raises while being imported.
            PluginVersionError: its `API_VERSION` is not this registry's.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def has(self, name: str) -> bool:
        """Whether an installed package offers `name`; imports nothing, and looks on the disk only
        until `name` has been used.
        """
        return name in self._loaded or name in self.names()

    def _load(self, name: str) -> Any:
        noun = self.info.noun
        found = [entry for entry in self._find(self.group) if entry.name == name]
        if not found:
            listed = ", ".join(self.names()) or "none"
            near = _closest(name, self.names())
            hint = f"Did you mean {near[0]!r}? If not, add" if near else "Add"
            raise UnknownPluginError(
                f"no installed package offers the {noun} {name!r} (installed: {listed}). "
                f"{hint} the package that does; for trainstream's own: "
                f"pip install '{self.info.usual_package}>=0.8,<0.9'"
            )
        if len(found) > 1:
            places = ", ".join(f"{_owner(entry)} ({entry.value})" for entry in found)
            raise DuplicatePluginError(
                f"the {noun} {name!r} is offered more than once: {places}. "
                f"Uninstall all but one of these packages."
            )
        entry = found[0]
        try:
            plugin = entry.load()
        except Exception as error:
            raise BrokenPluginError(
                f"the {noun} {name!r} of {_owner(entry)} ({entry.value}) raised "
                f"{type(error).__name__} while being imported: {error}. "
                f"Reinstall or remove that package."
            ) from error
        version = getattr(plugin, "API_VERSION", None)
        if version != self.info.api_version:
            raise PluginVersionError(
                f"the {noun} {name!r} of {_owner(entry)} has API_VERSION {version!r}, but this "
                f"ts-core works with {self.info.api_version}. Install versions of both packages "
                f"that agree."
            )
        return plugin


def _closest(name: str, names: list[str]) -> list[str]:
    """The name that was meant, perhaps: for "int4" or "4bit" rather one of 4 than "int8"."""
    digits = re.findall(r"\d+", name)
    alike = [other for other in names if digits and re.findall(r"\d+", other) == digits]
    least = 0.0 if re.search(r"\d[-_ ]?bit", name) else 0.5  # the number is all that is meant
    return difflib.get_close_matches(name, alike, 1, least) or difflib.get_close_matches(
        name, names, 1
    )


def _installed(group: str) -> Iterable[EntryPoint]:
    unique: dict[tuple[str, str, str], EntryPoint] = {}
    for entry in entry_points(group=group):
        unique[(entry.name, entry.value, _owner(entry))] = entry
    return unique.values()


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"


codecs = Registry("trainstream.codecs")
kernels = Registry("trainstream.kernels")
models = Registry("trainstream.models")
bench_engines = Registry("trainstream.bench_engines")
commands = Registry("trainstream.commands")
