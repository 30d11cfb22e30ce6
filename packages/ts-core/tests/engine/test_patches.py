"""Which kernel plug-ins wrap() takes by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ts_core.config import WrapOptions
from ts_core.engine import patches


class Installed:
    def __init__(self, *names: str) -> None:
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def get(self, name: str) -> str:
        assert name in self._names
        return name


@pytest.mark.parametrize(
    ("stored", "kind", "names", "expected", "words"),
    [
        (True, "cuda", ("patch_blocks", "patch_lora"), ["patch_blocks", "patch_lora"], ""),
        (False, "cuda", ("patch_blocks", "patch_lora"), [], "no weight of the blocks is quantized"),
        (True, "host", ("patch_blocks", "patch_lora"), [], "there is no GPU"),
        (True, "cuda", ("patch_blocks",), ["patch_blocks"], "ts-kernels is not installed"),
    ],
)
def test_auto_is_on_for_quantized_blocks_on_a_gpu(
    stored: bool,
    kind: str,
    names: tuple[str, ...],
    expected: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patches, "kernels", Installed(*names))
    device: Any = SimpleNamespace(kind=kind)
    said: list[str] = []
    config = WrapOptions.from_keywords({})
    assert patches.patches_chosen(config, stored, device, said.append) == expected
    assert len(said) == 2 - len(expected) and all(words in line for line in said)


def test_what_the_user_says_is_not_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "kernels", Installed("patch_blocks", "patch_lora"))
    device: Any = SimpleNamespace(kind="cuda")
    said: list[str] = []
    config = WrapOptions.from_keywords({"kernels": False, "fused_lora": True})
    assert patches.patches_chosen(config, True, device, said.append) == [] and not said
    assert patches.patches_asked_for(config) == ["patch_lora"]
