"""The table of scenarios: shapes that are the real ones, and values that are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ts_bench.scenarios import (
    GB,
    QWEN_1_5B,
    QWEN_3B,
    QWEN_14B,
    SCENARIOS,
    TINY,
    Scenario,
    get_scenario,
)
from ts_bench.workload import PROJECTIONS, config_of
from ts_core.errors import OptionError


@pytest.mark.parametrize(
    ("shape", "billions"),
    # Parameters without the embedding, as published for Qwen2.5 on its model cards.
    [(QWEN_1_5B, 1.31), (QWEN_3B, 2.77), (QWEN_14B, 13.1)],
)
def test_shapes_have_the_published_sizes(shape, billions) -> None:
    assert shape.block_parameters / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize("shape", [TINY, QWEN_1_5B, QWEN_3B, QWEN_14B])
def test_block_parameters_counts_what_transformers_builds(shape) -> None:
    from transformers import AutoModelForCausalLM

    scenario = dataclasses.replace(SCENARIOS["tiny"], shape=shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(scenario))
    matrices = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS
    ]
    assert len(matrices) == 7 * shape.num_layers
    assert sum(matrix.weight.numel() for matrix in matrices) == shape.block_parameters
    assert model.config.tie_word_embeddings is shape.tied


def test_names_tell_the_settings() -> None:
    scenario = get_scenario("lora-14b-nf4-1x512-24g")
    assert (scenario.shape, scenario.batch, scenario.tokens) == (QWEN_14B, 1, 512)
    assert (scenario.mode, scenario.base, scenario.lora_rank) == ("lora", "nf4", 16)
    assert scenario.limit_bytes == 24 * GB
    assert get_scenario("full-1.5b-4x512-8g").limit_bytes == 8 * GB
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name
        assert name.endswith("-clip") == (scenario.max_grad_norm is not None)
        assert name.startswith(scenario.mode) or not scenario.needs_gpu
        if scenario.needs_gpu:
            assert f"{scenario.batch}x{scenario.tokens}" in name


def test_unknown_name_lists_all() -> None:
    with pytest.raises(OptionError) as caught:
        get_scenario("lora-70b")
    assert all(name in str(caught.value) for name in SCENARIOS)


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "qlora"},
        {"base": "nf5"},
        {"batch": 0},
        {"tokens": 1},
        {"lora_rank": True},
        {"limit_bytes": 0},
        {"documents": 3},
        {"documents": 0},
    ],
)
def test_wrong_values_are_refused_by_name(change) -> None:
    (option,) = change
    with pytest.raises(OptionError, match=f"^{option}: .*not accepted"):
        dataclasses.replace(SCENARIOS["tiny"], **change)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_survives_the_way_to_another_process(scenario) -> None:
    assert Scenario.from_dict(scenario.to_dict()) == scenario
