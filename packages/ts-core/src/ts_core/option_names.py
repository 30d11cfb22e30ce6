"""What was meant by an option that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# How other tools call what is called something else here, and wrap() and OffloadAdamW each other's.
_FOR_WRAP = {
    "mode": "optimizer_mode",
    "max_norm": "max_grad_norm",
    "learning_rate": "lr",
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_checkpointing": "recompute",
}
_FOR_OPTIMIZER = {**_FOR_WRAP, "optimizer_mode": "mode"}
_OF_THE_OPTIMIZER = {
    "betas": "torch.optim.AdamW or OffloadAdamW",
    "eps": "torch.optim.AdamW or OffloadAdamW",
    "weight_decay": "torch.optim.AdamW or OffloadAdamW",
    "compute_grad_norm": "OffloadAdamW",
    "skip_nonfinite": "OffloadAdamW",
    "pin_moments": "OffloadAdamW",
    "seed": "OffloadAdamW",
}


def hint_for_wrap(name: str, known: Iterable[str]) -> str:
    """A sentence that says what to do instead of giving wrap() `name`; empty where none is known.

    Args:
        name: that was given.
        known: the options there are.
    """
    if name in _OF_THE_OPTIMIZER:
        return (
            f" It is one of the optimizer's: pass wrap() one ({_OF_THE_OPTIMIZER[name]}) that was "
            f"made with {name}=..."
        )
    return _nearest(name, known, _FOR_WRAP)


def hint_for_optimizer(name: str, known: Iterable[str]) -> str:
    """As `hint_for_wrap`, for OffloadAdamW."""
    return _nearest(name, known, _FOR_OPTIMIZER)


def _nearest(name: str, known: Iterable[str], other_names: dict[str, str]) -> str:
    options = list(known)
    meant = other_names.get(name)
    near = [meant] if meant in options else difflib.get_close_matches(name, options, 1)
    return f" Did you mean {near[0]!r}?" if near else ""
