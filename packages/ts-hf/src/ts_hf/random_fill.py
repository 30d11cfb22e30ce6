"""Random weights of the right scale, made module by module: models at size without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ts_core.memory.heap import HeapTrimmer
from ts_hf.fill import Filler


def fill_randomly(filler: Filler) -> None:
    """Initialize every parameter of the skeleton by its architecture's own init rules.

    One module's own parameters exist in full precision at a time; they are drawn on the GPU when
    there is one (from torch's generator of that device, so torch.manual_seed repeats them), encoded
    there if they are to be quantized, and kept on the CPU.

    transformers runs the rule of a module, then those of the modules around it, which may rescale
    it (GPT-2's output projections). So does this: everything else is on the meta device meanwhile,
    where writing does nothing.
    """
    device = _draw_device()
    trimmer = HeapTrimmer()
    tied_targets = set(getattr(filler.model, "all_tied_weights_keys", None) or ())
    for name, chain in _modules_with_rules(filler.model):
        module = chain[0][0]
        skeleton = {leaf: value for leaf, value in module._parameters.items() if value is not None}
        wanted = [leaf for leaf in skeleton if _join(name, leaf) not in tied_targets]
        if not wanted:
            continue
        made = {
            leaf: nn.Parameter(torch.zeros_like(value, device=device), requires_grad=False)
            for leaf, value in skeleton.items()
        }
        module._parameters.update(made)
        try:
            with torch.no_grad():
                for member, owner in chain:
                    owner._init_weights(member)
        finally:
            module._parameters.update(skeleton)
        for leaf in wanted:
            trimmer.read(made[leaf].numel() * made[leaf].element_size())
            filler.place(_join(name, leaf), made.pop(leaf).detach())


def random_state() -> Callable[[], None]:
    """Remember torch's generator that `fill_randomly` draws from; call it to go back there."""
    if _draw_device().type == "cuda":
        return partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
    return partial(torch.set_rng_state, torch.get_rng_state())


def _draw_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


Chain = list[tuple[nn.Module, Any]]


def _modules_with_rules(model: nn.Module) -> list[tuple[str, Chain]]:
    """Every module by name, with itself and the modules around it, innermost first.

    Each comes with the innermost PreTrainedModel around it, whose `_init_weights` is its rule.
    """
    from transformers import PreTrainedModel

    found: list[tuple[str, Chain]] = []

    def walk(name: str, module: nn.Module, around: Chain) -> None:
        owner = module if isinstance(module, PreTrainedModel) or not around else around[0][1]
        chain = [(module, owner), *around]
        found.append((name, chain))
        for leaf, child in module.named_children():
            walk(_join(name, leaf), child, chain)

    walk("", model, [])
    return found


def _join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
