"""When everything fits: AdamW with its state on the device, by torch's own fused kernel.

The switch keeps param groups, step counts and moments; from then on gradients stay in
`param.grad`, and a step costs what it costs in stock torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class ResidentAdamW:
    """torch.optim.AdamW(fused=True) over another optimizer's groups and state.

    Args:
        param_groups: the owner's groups, shared (a changed lr takes effect here).
        state: per parameter, step (a number), exp_avg and exp_avg_sq in host memory (fp32).
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        state: Mapping[torch.Tensor, dict[str, Any]],
    ) -> None:
        params = [param for group in param_groups for param in group["params"]]
        for group in param_groups:
            group["fused"] = True
        self.inner = torch.optim.AdamW(params, fused=True)
        self.inner.param_groups = param_groups
        for param in params:
            entry = state.get(param)
            if entry is None or not entry["step"]:
                continue
            self.inner.state[param] = {
                "step": torch.tensor(float(entry["step"]), device=param.device),
                "exp_avg": entry["exp_avg"].to(param.device, copy=True),
                "exp_avg_sq": entry["exp_avg_sq"].to(param.device, copy=True),
            }

    def step(
        self,
        max_grad_norm: float | None,
        wants_norm: bool,
        skip_nonfinite: bool,
        say: Callable[[str], None],
    ) -> torch.Tensor | None:
        """One update of every parameter that has a gradient.

        Args:
            max_grad_norm: clip to this.
            wants_norm: measure the norm.
            skip_nonfinite: look at the norm (which waits for the device) and leave the step out,
                telling `say`, if it is not finite.

        Returns:
            The global norm before clipping as a 0-d tensor on the device, when asked for.
        """
        norm = None
        if wants_norm:
            gradients = [
                param.grad
                for group in self.inner.param_groups
                for param in group["params"]
                if param.grad is not None
            ]
            norm = torch.nn.utils.get_total_norm(gradients)
            if skip_nonfinite and not torch.isfinite(norm).item():
                say("a gradient is NaN or infinite; the update is skipped, as asked")
                return norm
            if max_grad_norm is not None:
                scale = torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)
                if gradients:
                    torch._foreach_mul_(gradients, scale)
        self.inner.step()
        return norm

    def load(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Load a state dict of torch's layout; returns the groups to share from now on."""
        self.inner.load_state_dict(state_dict)
        for group in self.inner.param_groups:
            group["fused"] = True
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups


def device_bytes_needed(params: Sequence[torch.nn.Parameter]) -> int:
    """Device memory that the switch adds: two fp32 moments, and gradients kept through backward."""
    return sum(param.numel() * (8 + param.element_size()) for param in params)


def can_be_resident(params: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the device optimizer's arithmetic is ours: fp32 parameters (no master copy)."""
    return all(param.dtype is torch.float32 for param in params)
