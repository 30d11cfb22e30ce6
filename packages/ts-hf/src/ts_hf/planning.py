"""Reading a transformers config for `trainstream plan`: a model with shapes and no memory.

The object named by the entry point `transformers` of the group `trainstream.models`. All of its
functions run under a FakeTensorMode that the caller has entered, so nothing is allocated.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ts_core.errors import DataError
from ts_hf.families import find_decoder_layers
from ts_hf.skeleton import (
    BUILD_ERRORS,
    auto_class,
    cannot_build,
    load_config,
    take_quantization_config,
)

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class ConfigReader:
    """Builds models from a config folder or a config.json."""

    API_VERSION = 1

    def find_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The decoder layers."""
        return find_decoder_layers(model)

    def build(self, source: str, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
        """The model of a config, with parameters of `dtype`, in training mode.

        Args:
            source: a folder with a config.json, or such a file.
            dtype: of the parameters.
            trust_remote_code: whether code that the folder ships may run.

        Raises:
            DataError: no readable config, or no language model can be made of it.
        """
        from transformers.initialization import no_init_weights

        path = Path(source)
        folder = path.parent if path.is_file() and path.suffix == ".json" else path
        if path.is_file() and path.name != "config.json":
            raise DataError(
                f"{path} is not a config.json. Give a model's folder, or its config.json."
            )
        if not folder.is_dir():
            raise DataError(
                f"{source} is neither a folder nor a config.json. Give the folder of a model: its "
                f"config.json is enough, since no weights are read. Nothing is fetched from the "
                f"hub."
            )
        config = load_config(folder, trust_remote_code=trust_remote_code, overrides={})
        take_quantization_config(config)
        if getattr(config, "use_cache", False):
            config.use_cache = False
        try:
            # Some rules draw until the values fit, which those of fake tensors never do.
            fake = isinstance(torch.empty(0), FakeTensor)
            with no_init_weights() if fake else nullcontext():
                model: Any = auto_class(config).from_config(
                    config, dtype=dtype, trust_remote_code=trust_remote_code
                )
            model.tie_weights()  # left out with the rules
        except BUILD_ERRORS as error:
            raise DataError(cannot_build(config, error)) from error
        made: nn.Module = model.train()
        return made

    def loss(self, model: nn.Module, batch: int, length: int) -> Tensor:
        """The model's own loss of predicting each next token of a batch [batch, length]."""
        ids = torch.zeros(batch, length, dtype=torch.long)
        result: Tensor = model(input_ids=ids, labels=ids).loss
        return result

    def active_share(self, model: nn.Module) -> float:
        """Of stacked experts, the share that one token uses; 1 without experts."""
        config: Any = getattr(model, "config", None)
        config = getattr(config, "text_config", None) or config
        used = getattr(config, "num_experts_per_tok", None)
        total = next(
            (getattr(config, name) for name in _EXPERT_COUNTS if getattr(config, name, None)), None
        )
        return float(used) / float(total) if used and total else 1.0


reader = ConfigReader()
