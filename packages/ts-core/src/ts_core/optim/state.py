"""Loading optimizer state in torch's layout into the buckets' flat memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ts_core.errors import DataError
from ts_core.optim.buckets import Bucket


def check(groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict that does not fit these param groups.

    Raises:
        DataError: naming the group or parameter that differs.
    """
    if not {"state", "param_groups"} <= set(state_dict):
        raise DataError(
            f"an optimizer state dict has the keys 'state' and 'param_groups'; this one has "
            f"{sorted(map(str, state_dict))}."
        )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise DataError(
            f"the state dict has {len(saved_groups)} param groups, the optimizer "
            f"{len(groups)}. Build the optimizer with the same groups."
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise DataError(
                f"param group {number} of the state dict has {len(saved['params'])} parameters, "
                f"the optimizer's has {len(group['params'])}. Freeze and add adapters as in the "
                f"saved run."
            )
        if saved.get("amsgrad") or saved.get("maximize"):
            raise DataError(
                f"param group {number} of the state dict was made with amsgrad or maximize, "
                f"which OffloadAdamW does not have."
            )
        for param, key in zip(group["params"], saved["params"], strict=True):
            _check_entry(param, key, state_dict["state"].get(key, {}))


def _check_entry(param: torch.nn.Parameter, key: Any, entry: Mapping[str, Any]) -> None:
    if not entry:
        return
    missing = {"step", "exp_avg", "exp_avg_sq"} - set(entry)
    if missing:
        raise DataError(
            f"the state of parameter {key} lacks {sorted(missing)}: it was not saved by an "
            f"Adam optimizer."
        )
    for name in ("exp_avg", "exp_avg_sq", "master"):
        if name in entry and tuple(entry[name].shape) != tuple(param.shape):
            raise DataError(
                f"{name} of parameter {key} has shape {tuple(entry[name].shape)}, the parameter "
                f"{tuple(param.shape)}. The state dict belongs to another model."
            )


@torch.no_grad()
def load(
    groups: Sequence[dict[str, Any]],
    place: Mapping[torch.nn.Parameter, tuple[Bucket, int]],
    state_dict: Mapping[str, Any],
) -> None:
    """Copy a checked state dict into the buckets; hyper-parameters into the groups."""
    views = {
        param: tensors
        for bucket in {id(b): b for b, _ in place.values()}.values()
        for _, param, tensors in bucket.state_views()
    }
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for param, key in zip(group["params"], saved["params"], strict=True):
            bucket, position = place[param]
            entry = state_dict["state"].get(key, {})
            bucket.steps[position] = int(entry["step"]) if entry else 0
            for name in ("exp_avg", "exp_avg_sq"):
                if entry:
                    views[param][name].copy_(entry[name])
                else:
                    views[param][name].zero_()
            if "master" in entry and "master" in views[param]:
                views[param]["master"].copy_(entry["master"])
                bucket.keep_master(position)
