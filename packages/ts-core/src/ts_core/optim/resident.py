"""AdamW with its state on the device, updated there by torch's own fused kernel.

Nothing of such a step goes through the host: gradients are taken from `param.grad` where they are,
norm, clipping and the decision to skip stay on the device, and step() queues a few kernels and
returns. With `lr` a tensor on the device, step() can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.optim import checks
from ts_core.optim.buckets import Bucket
from ts_core.optim.layout import SMALL_BYTES, FlatLayout, is_sharded
from ts_core.optim.norm_reports import NormReport, NormReports
from ts_core.optim.options import StepOptions
from ts_core.optim.resident_piece import MOMENTS, Lists, ResidentPiece
from ts_core.optim.updates import Updates
from ts_core.transfer import CopyEngine


class ResidentAdamW:
    """The update of torch.optim.AdamW(fused=True) over flat device memory.

    Args:
        pieces: the parameters with their state.
        updates: of the most updated parameter so far.
        copies: engine of the link, for the reports of norms.
        arena: where their host memory comes from.
        say: told of gradients that are not finite.

    Attributes:
        updates: of the most updated parameter.
        entries: per parameter, its state as live views, as torch.optim.AdamW keeps it.
        values: parameter values.
        report: of the last step's norm, if it was measured.
    """

    def __init__(
        self,
        pieces: Sequence[ResidentPiece],
        updates: int,
        copies: CopyEngine,
        arena: PinnedArena,
        say: Callable[[str], None],
    ) -> None:
        self.pieces: list[ResidentPiece] = []
        self.entries: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self.where: dict[torch.nn.Parameter, tuple[ResidentPiece, int]] = {}
        self.updates = updates
        self.values = 0
        self.reports = NormReports(copies, arena, say)
        self.report: NormReport | None = None
        self._device = copies.device
        self._scratch: dict[torch.device, torch.Tensor] = {}
        self._stages: list[torch.Tensor] = []
        self._signature: list[tuple[int, int]] = []
        self.add(pieces)

    def add(self, pieces: Sequence[ResidentPiece]) -> None:
        """Optimize these too."""
        for piece in pieces:
            self.pieces.append(piece)
            self.values += piece.layout.numel
            if piece.stage is not None:
                self._stages.append(piece.stage)
            for position, param in enumerate(piece.params):
                self.where[param] = (piece, position)
                self.entries[param] = piece.entry(position)
            if piece.scales_late:
                device = piece.exp_avg.device
                held = self._scratch.get(device)
                if held is None or held.numel() < piece.layout.numel:
                    self._scratch[device] = torch.zeros(piece.layout.numel, device=device)

    def take_in(
        self,
        groups: Sequence[dict[str, Any]],
        layouts: Callable[[Sequence[torch.nn.Parameter]], Iterable[FlatLayout]],
    ) -> bool:
        """Optimize what the user added to the groups since the last step; whether there was any.

        Notes parameters that are in no group any more, which are left alone from now on.

        Raises:
            StateError: a parameter has changed its group.
            OptionError: two parameters share their memory.
        """
        signature = [(id(group["params"]), len(group["params"])) for group in groups]
        if signature == self._signature:
            return False
        found = {p: index for index, group in enumerate(groups) for p in group["params"]}
        for piece in self.pieces:
            now = [found.get(param) for param in piece.params]
            if any(index not in (None, piece.group_index) for index in now):
                raise StateError(
                    "parameters were moved between param groups after their optimizer state was "
                    "made. Build the optimizer with the groups as they are to be."
                )
            piece.left_out = frozenset(k for k, index in enumerate(now) if index is None)
        new = [(index, param) for param, index in found.items() if param not in self.where]
        if new:
            checks.memory([*self.where, *(param for _, param in new)])
            self.add(new_pieces(new, layouts))
        self._signature = signature
        return bool(new)

    def stats(self) -> dict[str, Any]:
        """Counters for `OffloadAdamW.stats`, in place of the host's."""
        scratch = sum(4 * tensor.numel() for tensor in self._scratch.values())
        return {
            "buckets": len(self.pieces),
            "parameters": len(self.where),
            "values_by_place": {"fused": self.values},
            "device_state_bytes": sum(p.device_bytes() for p in self.pieces) + scratch,
        }

    # -- a step --------------------------------------------------------------------------------

    def step(
        self, groups: Sequence[dict[str, Any]], options: StepOptions, number: int
    ) -> torch.Tensor | None:
        """One update of every parameter that has a gradient, which it takes out of `param.grad`.

        Args:
            groups: the param groups with the hyper-parameters of this step; `lr` may be a tensor.
            options: of the step.
            number: of the step, for reports.

        Returns:
            The global norm before clipping, 0-d on the device, when `options` ask for it.
        """
        capturing = self._capturing()
        if not capturing:  # events may not be looked at meanwhile
            self.reports.poll()
        if self._stages:  # what lies between parameters too, which a scale of NaN has reached
            torch._foreach_zero_(self._stages)
        live = [piece for piece in self.pieces if piece.gather()]
        norm = scale = found_inf = self.report = None
        if options.needs_norm:
            norm = self._norm(live)
            if options.skip_nonfinite:
                found_inf = torch.isfinite(norm).logical_not_().float()
            if options.max_grad_norm is not None:
                scale = torch.clamp(options.max_grad_norm / (norm + 1e-6), max=1.0)
                early = [piece.gradient() for piece in live if not piece.scales_late]
                if early:
                    torch._foreach_mul_(early, scale)
            if not capturing:
                self.report = self.reports.queue(norm, number, options.skip_nonfinite)
        if live:
            self._count(live, found_inf)
        for index, group in enumerate(groups):
            mine = [piece for piece in live if piece.group_index == index]
            lists = Lists()
            for piece in mine:
                if piece.scales_late:
                    self._update_alone(piece, group, scale, found_inf)
                else:
                    piece.add_to(lists, piece.gradient())
            _fused(lists, group, found_inf)
        for piece in live:
            piece.updated()
        self.updates += bool(live)
        return norm

    def _norm(self, live: Sequence[ResidentPiece]) -> torch.Tensor:
        if not live:
            return torch.zeros((), device=self._device.torch_device)
        each = torch._foreach_norm([piece.gradient() for piece in live], 2, torch.float32)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(each))
        return norm

    def _count(self, live: Sequence[ResidentPiece], found_inf: torch.Tensor | None) -> None:
        counts = [count for piece in live for count in piece.counted()]
        if found_inf is None:
            torch._foreach_add_(counts, 1.0)
        else:
            # (one tensor for all would be read by the host, as a number)
            torch._foreach_add_(counts, [1.0 - found_inf] * len(counts))

    def _update_alone(
        self,
        piece: ResidentPiece,
        group: dict[str, Any],
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """A large low-precision parameter, whose fp32 gradient lives only as long as its update."""
        wide = self._scratch[piece.exp_avg.device][: piece.layout.numel]
        wide.copy_(piece.gradient())
        if scale is not None:
            wide.mul_(scale)
        lists = Lists()
        piece.add_to(lists, wide)
        _fused(lists, group, found_inf)

    def _capturing(self) -> bool:
        return self._device.kind == "cuda" and torch.cuda.is_current_stream_capturing()

    # -- state ---------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
        """Copy a checked state dict of torch's layout into place; hyper-parameters into groups."""
        self.reports.flush()
        steps: dict[ResidentPiece, list[int]] = {p: [0] * len(p.params) for p in self.pieces}
        for group, saved in zip(groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
            group["fused"] = True
            for param, key in zip(group["params"], saved["params"], strict=True):
                piece, position = self.where[param]
                entry = state_dict["state"].get(key, {})
                steps[piece][position] = int(entry["step"]) if entry else 0
                mine = self.entries[param]
                for name in MOMENTS:
                    if entry:
                        mine[name].copy_(entry[name])
                    else:
                        mine[name].zero_()
                if piece.master is not None:
                    if "master" in entry:
                        mine["master"].copy_(entry["master"])
                    piece.doubt_value(position)
        for piece, counts in steps.items():
            piece.set_steps(counts)
        self.updates = max((max(counts) for counts in steps.values()), default=0)


def move_to_device(
    updates: Updates,
    groups: Sequence[dict[str, Any]],
    done: int,
    say: Callable[[str], None],
) -> ResidentAdamW:
    """A device optimizer with copies of the state in `updates`, which may be dropped then.

    Raises:
        StateError: in the middle of a step, or of parameters that cannot be optimized there.
    """
    storage = updates.storage
    params = [(index, p) for index, group in enumerate(groups) for p in group["params"]]
    why = why_not([param for _, param in params])
    if updates.ranks is not None:
        why = "the average over processes would be left out"
    elif storage.homes:
        why = f"{len(storage.homes)} weights stream"
    if why:
        raise StateError(f"make_resident() is not possible: {why}. Keep state on the host.")
    updates.refuse_mid_step("make_resident()")
    updates.settle()
    checks.memory([param for _, param in params])
    pieces = []
    for bucket in updates.buckets:
        bucket.take_foreign_values()
        read = functools.partial(_read, bucket)
        pieces.append(ResidentPiece(bucket.layout, bucket.group_index, bucket.steps, read))
    missing = [(index, param) for index, param in params if param not in updates.where]
    pieces += new_pieces(missing, storage.layouts)
    assert storage.copies is not None  # made with the first layout
    return ResidentAdamW(pieces, done, storage.copies, storage.arena, say)


def _read(bucket: Bucket, name: str, out: torch.Tensor) -> None:
    bucket.place.read(name, 0, out)


def new_pieces(
    params: Sequence[tuple[int, torch.nn.Parameter]],
    layouts: Callable[[Sequence[torch.nn.Parameter]], Iterable[FlatLayout]],
) -> list[ResidentPiece]:
    """Pieces without state for parameters, each given with its group's index."""
    by_group: dict[int, list[torch.nn.Parameter]] = {}
    for index, param in params:
        by_group.setdefault(index, []).append(param)
    return [
        ResidentPiece(layout, index)
        for index, members in by_group.items()
        for layout in layouts(members)
    ]


def _fused(lists: Lists, group: dict[str, Any], found_inf: torch.Tensor | None) -> None:
    """torch's kernel; steps are counted already."""
    if not lists.params:
        return
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        lists.params,
        lists.grads,
        lists.exp_avgs,
        lists.exp_avg_sqs,
        [],
        lists.steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=found_inf,
    )


def device_bytes_needed(params: Sequence[torch.nn.Parameter]) -> int:
    """Device memory of a resident optimizer.

    Two fp32 moments, an fp32 copy of low-precision parameters, gradients kept through backward, and
    room to gather those of small parameters, and to convert a large low-precision one.
    """
    total = widest = 0
    for param in params:
        size, low = param.numel(), param.dtype is not torch.float32
        small = size * param.element_size() <= SMALL_BYTES
        total += size * (8 + param.element_size() + 4 * low + 4 * small)
        widest = max(widest, size if low and not small else 0)
    return total + 4 * widest


def why_not(params: Sequence[torch.nn.Parameter]) -> str:
    """Why these cannot be optimized on the device in one process; empty when they can."""
    if any(is_sharded(param) for param in params):
        return "parameters are sharded over processes"
    return ""
