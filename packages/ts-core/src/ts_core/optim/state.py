"""Optimizer state in torch's layout: handing it out, checking it, loading it into the buckets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ts_core.errors import DataError, OptionError
from ts_core.optim import checks
from ts_core.optim.buckets import Bucket
from ts_core.optim.layout import is_sharded, local

MAPPED_BYTES = 64 << 20


def live(bucket: Bucket) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Per parameter: step (filled on save) and views of what state is fp32 in memory."""
    views = bucket.place.live()
    for position, param in enumerate(bucket.params):
        entry = {"step": torch.tensor(0.0)}
        for name, flat in views.items():
            entry[name] = _like(param, bucket.layout.view(flat, position))
        yield param, entry


def fill_steps(buckets: Sequence[Bucket], entries: Mapping[Any, dict[str, Any]]) -> None:
    """Write the step counts into the entries handed out by `live`."""
    for bucket in buckets:
        for position, param in enumerate(bucket.params):
            if param in entries:
                entries[param]["step"].fill_(float(bucket.steps[position]))


def filled(buckets: Sequence[Bucket], mapping: type[Any]) -> Any:
    """All state, steps included; call when nothing is in flight.

    What is not in memory as it is shown (low-precision moments, state in several places) is written
    out in fp32: from MAPPED_BYTES on to temporary files mapped into memory, which the system may
    drop from RAM.
    """
    found = mapping(dict) if mapping is not dict else {}
    missing = {b: [n for n in b.state_names if n not in b.place.live()] for b in buckets}
    size_bytes = sum(4 * len(names) * bucket.layout.numel for bucket, names in missing.items())
    mapped = size_bytes >= MAPPED_BYTES
    expanded = {id(b): _expand(b, names, mapped) for b, names in missing.items()}
    for bucket in buckets:
        extra = expanded.get(id(bucket), {})
        for position, (param, entry) in enumerate(live(bucket)):
            for name, flat in extra.items():
                entry[name] = _like(param, bucket.layout.view(flat, position))
            entry["step"].fill_(float(bucket.steps[position]))
            found[param] = entry
    return found


def _expand(bucket: Bucket, names: Sequence[str], mapped: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name in names:
        found[name] = _mapped(bucket.layout.numel) if mapped else torch.empty(bucket.layout.numel)
        bucket.place.read(name, 0, found[name])
    return found


def _mapped(numel: int) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0)
    with tempfile.NamedTemporaryFile(prefix="trainstream-state-", delete=False) as file:
        file.truncate(numel * 4)
    path = Path(file.name)
    try:
        return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)
    finally:
        path.unlink()  # the mapping keeps the bytes until the tensor is gone


def _like(param: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """`part` as torch would hold it: a DTensor where the parameter is one."""
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        part,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return made


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
        names = ("lr", "betas", "eps", "weight_decay")
        if all(name in saved for name in names):
            try:
                checks.hyper(*(saved[name] for name in names))
            except (OptionError, TypeError, ValueError) as error:
                raise DataError(f"param group {number} of the state dict: {error}") from None
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
    if not 0 <= float(entry["step"]) < 1 << 53:
        raise DataError(
            f"the state of parameter {key} has step {float(entry['step'])}; expected a count."
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
    buckets: Sequence[Bucket],
    place: Mapping[torch.nn.Parameter, tuple[int, int]],
    state_dict: Mapping[str, Any],
) -> None:
    """Copy a checked state dict into the buckets; hyper-parameters into the groups."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for param, key in zip(group["params"], saved["params"], strict=True):
            index, position = place[param]
            bucket = buckets[index]
            entry = state_dict["state"].get(key, {})
            bucket.steps[position] = int(entry["step"]) if entry else 0
            offset, size = bucket.layout.offsets[position], bucket.layout.sizes[position]
            for name in ("exp_avg", "exp_avg_sq"):
                values = local(entry[name]).reshape(-1) if entry else torch.zeros(size)
                bucket.place.write(name, offset, values)
            if "master" in entry and bucket.has_master:
                bucket.place.write("master", offset, local(entry["master"]).reshape(-1))
                bucket.master_loaded(position)
