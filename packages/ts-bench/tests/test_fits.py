"""`ts-bench fits`: two trainings of the same model in turns, and what is told of them."""

from __future__ import annotations

import json

import pytest

from ts_bench import fits
from ts_bench.cli import main
from ts_bench.fits import Fit, text_of
from ts_bench.scenarios import SCENARIOS


def test_ratios_are_taken_within_a_round() -> None:
    fit = Fit("some", [10.0, 30.0, 44.0, 9.0], [10.0, 20.0, 40.0, 10.0], True, True, 9, "as is")
    assert fit.ratios == [1.0, 1.5, 1.1, 0.9]
    assert text_of(fit) == (
        "some: trainstream 20.00 ms, torch 15.00 ms, ratio 1.050 "
        "(middle half 1.000 to 1.100, all 0.900 to 1.500, 4 rounds)\n"
        "    9 steps of warm-up; losses of the first steps equal; as is"
    )
    late = Fit("some", [1.0], [1.0], False, False, 36, "as is")
    assert "not settled after 36 steps of warm-up; losses of the first steps differ" in text_of(
        late
    )


def test_scenarios_have_no_cap() -> None:
    assert [SCENARIOS[name].limit_bytes for name in fits.NAMES] == [None, None]
    assert [SCENARIOS[name].mode for name in fits.NAMES] == ["full", "lora"]


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_the_command_trains_both(tmp_path, capsys, monkeypatch) -> None:
    taken: list[object] = []
    timed = fits._timed
    monkeypatch.setattr(
        fits, "_timed", lambda step, *args: taken.append(step) or timed(step, *args)
    )
    path = tmp_path / "new" / "fits.json"
    assert main(["fits", "--tiny", "--rounds", "2", "--steps", "3", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["kind"] == "fits" and len(data["fits"]) == 2
    for fit in data["fits"]:
        assert len(fit["ours_ms"]) == len(fit["torch_ms"]) == 2
        assert fit["losses_equal"] is True
        assert fit["warmup_steps"] >= fits.WARMUP
    assert capsys.readouterr().out.count("ratio") == 2
    # torch, ours, ours, torch: 3 steps each, and for both models
    turns = [id(step) for step in taken[:12:3]]
    assert turns[0] == turns[3] != turns[1] == turns[2]
    assert len(taken) == 24 and len({id(step) for step in taken[:12]}) == 2


def test_what_it_cannot_do_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["fits"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err
    assert main(["fits", "--tiny", "--rounds", "0"]) == 2
