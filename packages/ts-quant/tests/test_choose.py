"""Spending a byte budget: against exhaustive search, and through `Storer`."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ts_quant
from ts_quant.choose import Choice, choose

choices = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0, 1, allow_nan=False)), min_size=0, max_size=3
)


def _options(drawn: list[tuple[float, list[tuple[int, float]]]]) -> dict[str, list[Choice]]:
    return {
        f"m{index}": [Choice("plain", 0, base), *(Choice("better", b, e) for b, e in more)]
        for index, (base, more) in enumerate(drawn)
    }


def _cost(found: dict[str, Choice]) -> tuple[int, float]:
    return sum(c.extra_bytes for c in found.values()), sum(c.error for c in found.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1, allow_nan=False), choices), min_size=1, max_size=4),
    st.integers(0, 120),
)
def test_within_the_budget_and_near_the_optimum(
    drawn: list[tuple[float, list[tuple[int, float]]]], budget: int
) -> None:
    options = _options(drawn)
    found = choose(options, budget)
    spent, error = _cost(found)
    assert set(found) == set(options) and spent <= budget
    best = min(
        (sum(c.error for c in pick))
        for pick in itertools.product(*options.values())
        if sum(c.extra_bytes for c in pick) <= budget
    )
    # Greedy along the hull misses at most what one step gains.
    largest_step = max(
        max(0.0, group[0].error - min(c.error for c in group)) for group in options.values()
    )
    assert best - 1e-12 <= error <= best + largest_step + 1e-9


def test_unlimited_budget_takes_the_least_error() -> None:
    random.seed(1)
    options = {
        f"m{i}": [Choice("plain", 0, 1.0)]
        + [Choice(str(k), random.randint(1, 9), random.random()) for k in range(4)]
        for i in range(6)
    }
    found = choose(options, 10**9)
    assert all(found[name].error == min(c.error for c in group) for name, group in options.items())


def test_what_is_refused() -> None:
    with pytest.raises(ts_quant.OptionError, match="budget_bytes=-1"):
        choose({}, -1)
    with pytest.raises(ts_quant.OptionError, match="no choice"):
        choose({"m": []}, 1)
    with pytest.raises(ts_quant.OptionError, match="first choice"):
        choose({"m": [Choice("x", 3, 0.0)]}, 1)


def _weights() -> dict[str, torch.Tensor]:
    """Six matrices; two with a heavy tail, which a blockwise format stores badly."""
    made = {f"layer{i}.weight": torch.randn(64, 128) * 0.05 for i in range(6)}
    for name in ("layer2.weight", "layer4.weight"):
        made[name] = made[name] * (1 + 20 * (torch.rand(64, 128) < 0.01))
    return made


def _store(storer: ts_quant.Storer, weights: dict[str, torch.Tensor], *, twice: bool) -> Any:
    if twice:  # as a checkpoint is read: everything once, then what is to be better
        found = {name: storer.store(weight, name) for name, weight in weights.items()}
        for name in storer.improved():
            found[name] = storer.store(weights[name], name)
        return found
    for name, weight in weights.items():
        storer.measure(weight, name)
    storer.improved()
    return {name: storer.store(weight, name) for name, weight in weights.items()}


@pytest.mark.parametrize("twice", [False, True])
def test_keep_precise_takes_those_that_lose_most_within_its_share(twice: bool) -> None:
    weights = _weights()
    plain = sum(ts_quant.quantize(w, "nf4").nbytes for w in weights.values())
    storer = ts_quant.Storer("nf4", keep_precise=0.31)
    found = _store(storer, weights, twice=twice)
    kept = {name for name, stored in found.items() if stored.weight.codec == "int8"}
    assert kept == {"layer2.weight", "layer4.weight"} == set(storer.report.kept_precise)
    total = sum(stored.weight.nbytes for stored in found.values())
    assert total == storer.report.stored_bytes <= plain * 1.31
    for name, row in storer.report.rows.items():
        exact, stored = weights[name], found[name].weight.dequantize()
        assert row.error == pytest.approx(float((stored - exact).norm() / exact.norm()), rel=1e-4)
        assert ("int8 leaves" in row.reason) == (name in kept)
        assert "nf4 alone loses" in row.reason
    assert json.loads(storer.report.to_json())["matrices"][2]["codec"] == "int8"
    assert "layer2.weight" in storer.report.table()


def test_a_share_too_small_keeps_nothing() -> None:
    weights = _weights()
    storer = ts_quant.Storer("nf4", keep_precise=0.01)
    found = _store(storer, weights, twice=False)
    assert {stored.weight.codec for stored in found.values()} == {"nf4"}


def test_error_rank_gives_factors_that_lower_the_error() -> None:
    weights = _weights()
    storer = ts_quant.Storer("nf4", error_rank=8, error_iters=2)
    assert not storer.needs_measuring
    for name, weight in weights.items():
        stored = storer.store(weight, name)
        assert stored.start is not None and stored.start.a.shape == (8, 128)
        near = stored.weight.dequantize() + stored.start.b @ stored.start.a
        row = storer.report.rows[name]
        assert row.rank == 8 and row.error_with_start is not None
        assert float((near - weight).norm() / weight.norm()) == pytest.approx(
            row.error_with_start, rel=1e-3
        )
    assert storer.report.rank_pattern() == {f"layer{i}": 8 for i in range(6)}


def test_joint_choice_beats_either_alone_at_the_same_bytes() -> None:
    weights = _weights()
    low_rank = torch.randn(64, 2) @ torch.randn(2, 128)
    weights["layer0.weight"] = low_rank + 0.5 * torch.sign(torch.randn(64, 128))
    errors = {}
    for name, options in {
        "joint": {"joint_budget": 0.2},
        "precise": {"keep_precise": 0.2},
        "plain": {},
    }.items():
        storer = ts_quant.Storer("nf4", **options)  # type: ignore[arg-type]
        found = _store(storer, weights, twice=False)
        spent = storer.report.stored_bytes + sum(
            s.start.nbytes // 2 for s in found.values() if s.start is not None
        )
        plain = sum(ts_quant.quantize(w, "nf4").nbytes for w in weights.values())
        assert spent <= plain * 1.2 + 1
        total = 0.0
        for row in storer.report.rows.values():
            left = row.error if row.error_with_start is None else row.error_with_start
            assert left is not None
            total += left**2
        errors[name] = total
    assert errors["joint"] <= errors["precise"] <= errors["plain"]
    assert errors["joint"] < errors["plain"]


def test_statistics_weigh_what_is_lost_and_must_know_the_layer() -> None:
    weight = torch.randn(32, 64)
    moments = torch.logspace(-2, 2, 64)
    storer = ts_quant.Storer("nf4", error_rank=4, second_moments={"a": moments})
    stored = storer.store(weight, "a.weight")
    scale = moments.sqrt()
    lost = ((stored.weight.dequantize() - weight) * scale).norm() / (weight * scale).norm()
    assert storer.report.rows["a.weight"].error == pytest.approx(float(lost), rel=1e-4)
    with pytest.raises(ts_quant.OptionError, match=r"nothing for 'b' .*the first 'a'"):
        storer.store(weight, "b.weight")


def test_storer_refuses() -> None:
    for options, words in (
        ({"keep_precise": 0.6}, "keep_precise=0.6"),
        ({"keep_precise": "some"}, "some"),
        ({"error_rank": -1}, "error_rank=-1"),
        ({"error_iters": 0}, "error_iters=0"),
    ):
        with pytest.raises(ts_quant.OptionError, match=words):
            ts_quant.Storer("nf4", **options)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="no format one step more precise"):
        ts_quant.Storer("int8", keep_precise=0.05)
    with pytest.raises(ts_quant.NonFiniteWeightError, match="layer9"):
        ts_quant.Storer("nf4").store(torch.full((4, 4), float("nan")), "layer9")
