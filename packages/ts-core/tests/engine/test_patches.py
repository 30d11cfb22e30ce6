"""Which kernel plug-ins wrap() takes by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import HostDevice
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


def test_where_one_plug_in_raises_none_stays() -> None:
    undone: list[str] = []

    def put(blocks: Any, **_: Any) -> Any:
        return SimpleNamespace(undo=lambda: undone.append("blocks"))

    def fail(model: Any, **_: Any) -> Any:
        raise RuntimeError("no memory")

    both = [
        SimpleNamespace(name="patch_blocks", fn=put),
        SimpleNamespace(name="patch_lora", fn=fail),
    ]
    model, device = nn.Module(), HostDevice()
    with pytest.raises(RuntimeError, match="no memory"):
        patches.apply_patches(both, model, [], device, print)
    assert undone == ["blocks"]
    assert len(patches.apply_patches(both[:1], model, [], device, print)) == 1
