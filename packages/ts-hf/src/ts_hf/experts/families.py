"""Finding the modules that stack experts."""

from __future__ import annotations

import inspect
from functools import partial

from torch import nn

from ts_core.engine.experts_layer import StackedExperts
from ts_hf.experts.adapters import active_adapters, adapters_around, pass_on, why_not

COUNT = "num_experts"
_ONE_BY_ONE = "eager"


def find_experts(model: nn.Module) -> list[StackedExperts]:
    """The modules of a transformers model that stack experts, in the order of its modules.

    Args:
        model: a transformers model, in a PEFT wrapper or not, on any device.

    Returns:
        One entry per module; empty for a dense model, and for families that keep their experts as
        a list of modules (those are ordinary weights of their block).
    """
    found = []
    wrappers = adapters_around(model)
    for name, module in model.named_modules():
        count = module.__dict__.get(COUNT)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            continue
        stacked = tuple(
            key
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.dim() >= 2 and parameter.shape[0] == count
        )
        position = _index_argument(module)
        if position is None or not any(module._parameters[key].dim() >= 3 for key in stacked):
            continue
        found.append(
            StackedExperts(
                name,
                module,
                stacked,
                index_position=position[0],
                index_name=position[1],
                count_attribute=COUNT,
                one_by_one=partial(_one_by_one, module),
                refused=why_not(wrappers.get(id(module), [])),
                adapters=partial(active_adapters, wrappers.get(id(module), [])),
                around=tuple((w, partial(pass_on, w)) for w in wrappers.get(id(module), [])),
            )
        )
    return found


class StackedExpertsPlugin:
    """Plug-in of the group `trainstream.models`."""

    API_VERSION = 1

    @staticmethod
    def find_experts(model: nn.Module) -> list[StackedExperts]:
        """See `ts_hf.experts.find_experts`."""
        return find_experts(model)


def _index_argument(module: nn.Module) -> tuple[int, str] | None:
    """Place and name of the expert indices among the arguments of forward."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for place, name in enumerate(names):
        if name in ("top_k_index", "router_indices", "topk_indices", "selected_experts"):
            return place, name
    return None


def _one_by_one(module: nn.Module) -> bool:
    """Whether forward loops over experts; the other implementations take the whole stack."""
    config = getattr(module, "config", None)
    chosen = getattr(config, "_experts_implementation", _ONE_BY_ONE)
    return chosen == _ONE_BY_ONE
