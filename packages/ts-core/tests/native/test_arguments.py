"""Nonsense from the caller is an error in words, never a crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ts_core import _native

N = 8
BUFFERS = torch.ones(5, N)
GOOD: dict[str, Any] = {
    "param_ptr": BUFFERS[0].data_ptr(),
    "param_dtype": "float32",
    "grad_ptr": BUFFERS[1].data_ptr(),
    "grad_dtype": "float32",
    "exp_avg_ptr": BUFFERS[2].data_ptr(),
    "exp_avg_sq_ptr": BUFFERS[3].data_ptr(),
    "master_ptr": 0,
    "n": N,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "step": 1,
}


def test_good_arguments_are_accepted() -> None:
    _native.adamw_step(**GOOD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"param_dtype": "float64"}, r"param_dtype='float64' is not one of 'float32'"),
        ({"grad_dtype": "torch.bfloat16"}, "grad_dtype='torch.bfloat16'"),
        ({"grad_dtype": ""}, "grad_dtype=''"),
        ({"n": -1}, "n=-1: expected a number >= 0"),
        ({"n": 1 << 62}, "more than any address space"),
        ({"n": 1 << 70}, "beyond 64 bits"),
        ({"param_ptr": 0}, "param_ptr is a null pointer; 32 bytes were expected"),
        ({"grad_ptr": 0}, "grad_ptr is a null"),
        ({"exp_avg_ptr": 0}, "exp_avg_ptr is a null"),
        ({"exp_avg_sq_ptr": 0}, "exp_avg_sq_ptr is a null"),
        ({"param_ptr": -8}, r"param_ptr=-8: expected an address"),
        ({"param_ptr": 1 << 64}, "expected an address"),
        ({"param_ptr": (1 << 64) - 4}, "ends beyond the address space"),
        ({"exp_avg_ptr": GOOD["param_ptr"] + 4}, "param_ptr and exp_avg_ptr overlap"),
        ({"master_ptr": GOOD["exp_avg_sq_ptr"]}, "exp_avg_sq_ptr and master_ptr overlap"),
        ({"lr": -1.0}, "lr=-1: expected a finite number >= 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"beta1": 1.0}, r"beta1=1: expected a number in \[0, 1\)"),
        ({"beta2": -0.1}, "beta2=-0.1"),
        ({"beta2": float("nan")}, "beta2=nan"),
        ({"eps": -1e-8}, "eps="),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"step": 0}, "step=0: expected 1 for the first update"),
        ({"step": -3}, "step=-3"),
        ({"grad_scale": float("inf")}, "grad_scale=inf"),
        ({"threads": -1}, "threads=-1"),
        ({"moments": "fp8"}, "moments='fp8' is not one of 'float32', 'bfloat16', 'int8'"),
        ({"moments": "int8"}, "exp_avg_scale_ptr is a null pointer; 4 bytes were expected"),
        ({"moments": "bfloat16", "base": 128}, "base=128: expected a multiple of 256"),
        ({"base": -256}, "base=-256"),
        ({"seed": -1}, "seed=-1: expected 0 to"),
        ({"seed": 1 << 64}, "seed=18446744073709551616"),
        (
            {
                "moments": "int8",
                "exp_avg_scale_ptr": BUFFERS[4].data_ptr(),
                "exp_avg_sq_scale_ptr": BUFFERS[4].data_ptr() + 3,
            },
            "exp_avg_scale_ptr and exp_avg_sq_scale_ptr overlap",
        ),
        ({"threads": 1 << 40}, "threads="),
    ],
)
def test_adamw_refuses_values(change: dict[str, Any], words: str) -> None:
    before = BUFFERS.clone()
    with pytest.raises(ValueError, match=words):
        _native.adamw_step(**{**GOOD, **change})
    assert torch.equal(BUFFERS, before)


@pytest.mark.parametrize(
    "change",
    [
        {"param_ptr": 1.5},
        {"param_ptr": "0x1000"},
        {"param_ptr": None},
        {"n": 8.0},
        {"n": None},
        {"step": 1.5},
        {"lr": "fast"},
        {"param_dtype": torch.float32},
        {"threads": 2.5},
        {"seed": 1.5},
        {"base": "0"},
        {"moments": None},
        {"exp_avg_scale_ptr": None},
    ],
)
def test_adamw_refuses_types(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        _native.adamw_step(**{**GOOD, **change})


def test_null_pointers_are_fine_for_no_elements() -> None:
    empty = {name: 0 for name in GOOD if name.endswith("_ptr")}
    _native.adamw_step(**{**GOOD, **empty, "n": 0})
    assert _native.grad_stats(0, "float32", 0) == (0.0, 0)
    _native.copy_bytes(0, 0, 0)


def test_values_are_checked_even_for_no_elements() -> None:
    with pytest.raises(ValueError, match="beta1"):
        _native.adamw_step(**{**GOOD, "n": 0, "beta1": 2.0})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, "float32", 1), "grad_ptr is a null pointer"),
        ((BUFFERS.data_ptr(), "int8", 1), "dtype='int8'"),
        ((BUFFERS.data_ptr(), "float32", -5), "n=-5"),
        ((BUFFERS.data_ptr(), "float32", 1, -2), "threads=-2"),
    ],
)
def test_grad_stats_refuses_values(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _native.grad_stats(*arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moments": "nf4"}, "moments='nf4'"),
        ({"which": "v"}, "which='v' is not one of 'exp_avg', 'exp_avg_sq'"),
        ({"n": -1}, "n=-1"),
        ({"float_ptr": 0}, "float_ptr is a null pointer; 32 bytes"),
        ({"stored_ptr": 0}, "stored_ptr is a null pointer; 8 bytes"),
        ({"scale_ptr": 0}, "scale_ptr is a null pointer; 4 bytes"),
        ({"stored_ptr": BUFFERS[0].data_ptr() + 8}, "overlap"),
        ({"threads": -1}, "threads=-1"),
    ],
)
def test_moment_conversions_refuse_values(change: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {
        "float_ptr": BUFFERS[0].data_ptr(),
        "stored_ptr": BUFFERS[1].data_ptr(),
        "scale_ptr": BUFFERS[2].data_ptr(),
        "n": N,
        "moments": "int8",
        "which": "exp_avg",
    }
    before = BUFFERS.clone()
    for convert in (_native.moments_from_float32, _native.moments_to_float32):
        with pytest.raises(ValueError, match=words):
            convert(**{**good, **change})
    with pytest.raises(ValueError, match="base=7"):
        _native.moments_from_float32(**good, base=7)
    assert torch.equal(BUFFERS, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, BUFFERS.data_ptr(), 4), "dst_ptr is a null"),
        ((BUFFERS.data_ptr(), 0, 4), "src_ptr is a null"),
        ((BUFFERS.data_ptr(), BUFFERS.data_ptr() + 2, 4), "dst_ptr and src_ptr overlap"),
        ((BUFFERS.data_ptr(), BUFFERS.data_ptr(), -4), "nbytes=-4"),
    ],
)
def test_copy_refuses_values(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _native.copy_bytes(*arguments)


def test_neighbouring_ranges_do_not_overlap() -> None:
    buffer = torch.arange(16, dtype=torch.uint8)
    _native.copy_bytes(buffer.data_ptr() + 8, buffer.data_ptr(), 8)
    assert buffer.tolist() == [*range(8), *range(8)]


def test_an_unknown_level_names_those_there_are() -> None:
    before = _native.simd_level()
    with pytest.raises(ValueError, match=r"'sse9' cannot run on this machine; it has .*'scalar'"):
        _native.set_simd_level("sse9")
    assert _native.simd_level() == before


def test_event_wait_settings_are_checked_and_kept() -> None:
    before = _native.event_wait()
    with pytest.raises(ValueError, match="policy='sleep'"):
        _native.set_event_wait("sleep")
    with pytest.raises(ValueError, match="sleep_us=0"):
        _native.set_event_wait("poll", 50, 0)
    assert _native.event_wait() == before
    try:
        _native.set_event_wait("spin", 1, 2)
        assert _native.event_wait() == ("spin", 1, 2)
    finally:
        _native.set_event_wait(*before)


def test_a_null_event_is_refused() -> None:
    with pytest.raises(ValueError, match="event=0"):
        _native.wait_event(0)
    with pytest.raises(ValueError, match="event=0"):
        _native.event_done(0)
