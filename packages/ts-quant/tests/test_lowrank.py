"""Low-rank fits, LoftQ, and adapters that start at what quantization lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ts_quant
from ts_quant.lora_start import ErrorStart
from ts_quant.lowrank import EXACT_SIDE, column_scales, fit_low_rank


def _norm(matrix: torch.Tensor) -> float:
    return float(matrix.double().norm())


@pytest.mark.parametrize("shape", [(48, 31), (31, 48), (7, 5)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_fit_is_the_best_there_is(shape: tuple[int, int], weighted: bool) -> None:
    matrix = torch.randn(shape)
    scale = torch.rand(shape[1]) + 0.05 if weighted else None
    fit = fit_low_rank(matrix, 4, scale)
    weights = torch.ones(shape[1]) if scale is None else scale
    singular = torch.linalg.svdvals((matrix * weights).double())
    best = math.sqrt(float(singular[4:].square().sum()))
    assert _norm((matrix - fit.b @ fit.a) * weights) == pytest.approx(best, rel=1e-5)
    assert math.sqrt(fit.left_over(4)) == pytest.approx(best, rel=1e-4)
    assert math.sqrt(fit.left_over(2)) == pytest.approx(
        float(singular[2:].square().sum()) ** 0.5, rel=1e-4
    )
    # Any other factors of that rank do worse in this norm.
    other = fit_low_rank(matrix, 4)
    assert _norm((matrix - other.b @ other.a) * weights) >= best * (1 - 1e-6)


def test_large_matrices_are_sampled_close_to_the_optimum_and_repeatably() -> None:
    side = EXACT_SIDE + 44
    matrix = torch.randn(side, 12) @ torch.randn(12, side + 9) + torch.randn(side, side + 9)
    before = torch.get_rng_state()
    fit = fit_low_rank(matrix, 12)
    assert torch.equal(before, torch.get_rng_state())
    again = fit_low_rank(matrix, 12)
    assert torch.equal(fit.a, again.a) and torch.equal(fit.b, again.b)
    best = float(torch.linalg.svdvals(matrix)[12:].square().sum()) ** 0.5
    assert _norm(matrix - fit.b @ fit.a) <= best * 1.001


def test_rank_zero_and_ranks_beyond_the_matrix() -> None:
    matrix = torch.randn(6, 4)
    none = fit_low_rank(matrix, 0)
    assert none.b.shape == (6, 0) and none.total == pytest.approx(float(matrix.square().sum()))
    full = fit_low_rank(matrix, 99)
    assert full.a.shape == (4, 4)
    torch.testing.assert_close(full.b @ full.a, matrix)


def test_silent_channels_are_not_free_to_be_wrong() -> None:
    moments = torch.tensor([4.0, 0.0, 1.0])
    scales = column_scales(moments, 3, torch.device("cpu"))
    assert scales[1] > 0 and scales[0] == 2 and scales[2] == 1
    assert torch.equal(column_scales(torch.zeros(3), 3, torch.device("cpu")), torch.ones(3))


@pytest.mark.parametrize(
    "moments", [torch.ones(4), torch.tensor([1.0, float("nan"), 1]), torch.tensor([1.0, -1, 1])]
)
def test_statistics_that_do_not_fit_are_refused(moments: torch.Tensor) -> None:
    with pytest.raises(ts_quant.OptionError, match="activation statistics"):
        column_scales(moments, 3, torch.device("cpu"))


@pytest.mark.parametrize("codec", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loftq_of_one_round_is_plain_quantization_and_the_fit_of_its_error(
    codec: str, dtype: torch.dtype
) -> None:
    weight = (torch.randn(96, 64) * 0.1).to(dtype)
    found = ts_quant.loftq(weight, codec, rank=8)
    plain = ts_quant.quantize(weight, codec)
    assert torch.equal(found.weight.dequantize(), plain.dequantize())
    lost = weight.float() - plain.dequantize(torch.float32)
    best = float(torch.linalg.svdvals(lost)[8:].square().sum()) ** 0.5
    assert _norm(lost - found.b @ found.a) == pytest.approx(best, rel=1e-3)
    assert found.error == pytest.approx(_norm(lost) / _norm(weight), rel=1e-4)
    assert found.error_with_factors == pytest.approx(best / _norm(weight), rel=1e-3)
    assert found.rounds == 1


def test_more_rounds_never_do_worse() -> None:
    weight = torch.randn(80, 64) * torch.linspace(0.1, 3, 64)
    errors = [
        ts_quant.loftq(weight, "nf4", rank=16, iters=iters).error_with_factors
        for iters in (1, 2, 5)
    ]
    assert errors[0] >= errors[1] >= errors[2]
    assert errors[2] < errors[0]  # the alternation does something


def test_statistics_lower_the_output_error() -> None:
    torch.manual_seed(3)
    weight = torch.randn(64, 96)
    channel = torch.logspace(-1, 1, 96)
    x = torch.randn(4000, 96) * channel
    moments = x.square().mean(0)
    plain = ts_quant.loftq(weight, "nf4", rank=8)
    aware = ts_quant.loftq(weight, "nf4", rank=8, second_moments=moments)

    def output_error(found: ts_quant.LoftQResult) -> float:
        approximate = found.weight.dequantize() + found.b @ found.a
        return _norm(x @ (weight - approximate).t())

    assert output_error(aware) < 0.9 * output_error(plain)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "rank=0"),
        ({"iters": 0}, "iters=0"),
        ({"rank": True}, "rank=True"),
        ({"codec": "nf5"}, "nf5"),
    ],
)
def test_loftq_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ts_quant.OptionError, match=words):
        ts_quant.loftq(torch.randn(8, 8), **{"codec": "nf4", "rank": 2, **arguments})
    with pytest.raises(ts_quant.OptionError, match="matrix"):
        ts_quant.loftq(torch.randn(8), "nf4")


def _adapted(rank: int, alpha: int, **changes: Any) -> tuple[Any, torch.Tensor, torch.nn.Linear]:
    peft = pytest.importorskip("peft")
    layer = torch.nn.Linear(48, 32, bias=False)
    weight = layer.weight.detach().clone()
    found = ts_quant.loftq(weight, "nf4", rank=8)
    layer.weight = torch.nn.Parameter(found.weight, requires_grad=False)
    layer.error_start = ErrorStart(found.b, found.a)  # type: ignore[assignment]
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"], **changes)
    model = peft.get_peft_model(torch.nn.Sequential(layer), config)
    return model, weight, layer


@pytest.mark.parametrize(("rank", "alpha"), [(8, 8), (8, 32), (8, 1), (4, 16), (12, 16)])
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_start_at_the_error_whatever_alpha_and_r(
    rank: int, alpha: int, rslora: bool
) -> None:
    model, weight, layer = _adapted(rank, alpha, use_rslora=rslora)
    lost = weight - layer.weight.dequantize()  # type: ignore[operator]
    assert ts_quant.init_lora_from_error(model) == 1
    x = torch.eye(48)
    delta = (model(x) - torch.nn.functional.linear(x, layer.weight)).t().detach()
    used = min(rank, 8)
    expected = fit_low_rank(lost, used)
    torch.testing.assert_close(delta, expected.b @ expected.a, atol=1e-5, rtol=1e-4)
    best = float(torch.linalg.svdvals(lost)[used:].square().sum()) ** 0.5
    assert _norm(lost - delta) == pytest.approx(best, rel=1e-3)
    start = layer.error_start
    assert isinstance(start, ErrorStart) and start.started == ("default", used)
    torch.testing.assert_close(start.started_delta(), delta, atol=1e-5, rtol=1e-4)
    # Rows beyond the fit can still be trained: A random, B zero.
    if rank > 8:
        assert bool(model.base_model.model[0].lora_A["default"].weight[8:].abs().min() > 0)


def test_models_without_factors_are_left_alone() -> None:
    model, _, layer = _adapted(4, 4)
    del layer.error_start
    before = {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}
    assert ts_quant.init_lora_from_error(model) == 0
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_dora_and_several_active_adapters_are_refused() -> None:
    model, _, _ = _adapted(4, 4, use_dora=True)
    with pytest.raises(ts_quant.OptionError, match="DoRA"):
        ts_quant.init_lora_from_error(model)
    peft = pytest.importorskip("peft")
    model, _, _ = _adapted(4, 4)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["0"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ts_quant.OptionError, match="2 active adapters"):
        ts_quant.init_lora_from_error(model)


@pytest.mark.gpu
def test_a_gpu_gives_the_codes_of_a_cpu_and_the_same_fit() -> None:
    weight = torch.randn(400, 320) @ torch.diag(torch.linspace(0.2, 3, 320))
    moments = torch.rand(320) + 0.1
    here = ts_quant.loftq(weight, "nf4", rank=16, second_moments=moments)
    there = ts_quant.loftq(weight.cuda(), "nf4", rank=16, second_moments=moments)
    assert there.weight.buffers()[0].is_cuda and there.b.is_cuda
    for one, other in zip(here.weight.buffers(), there.weight.buffers(), strict=True):
        assert torch.equal(one, other.cpu())
    # Factors are unique only as a product, and directions of near singular values may mix.
    assert there.error == pytest.approx(here.error, rel=1e-4)
    assert there.error_with_factors == pytest.approx(here.error_with_factors, rel=1e-3)
