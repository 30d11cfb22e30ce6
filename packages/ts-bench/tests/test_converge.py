"""`ts-bench converge`: runs of both ways start alike, and are compared at a step all reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ts_bench import converge
from ts_bench.cli import main
from ts_bench.converge import OFF, ON, Point, Settings, run_one, text_of
from ts_core.registry import codecs, kernels


def _point(way: str, seed: int, step: int, loss: float) -> Point:
    return Point(way, seed, step, loss, 0.0, step / 10, {"recorded": 4} if way == ON else {})


def test_the_table_compares_seed_by_seed_at_the_last_common_step() -> None:
    points = [
        *(_point(way, seed, 0, 4.0) for way in (OFF, ON) for seed in (0, 1)),
        *(_point(OFF, seed, 50, 3.0 + seed / 10) for seed in (0, 1)),
        *(_point(ON, seed, 50, 3.01 + seed / 10) for seed in (0, 1)),
        _point(OFF, 0, 100, 2.0),  # one run got further
    ]
    lines = text_of(points, Settings("model", "cpu", seeds=(0, 1))).splitlines()
    assert "after 50 of 300 steps" in lines[0]
    assert lines[2].split()[:5] == ["off", "3.00000", "3.10000", "3.05000", "0.07071"]
    assert lines[3].split()[:3] == ["on", "3.01000", "3.11000"]
    assert lines[3].split()[5:] == ["0.100", "(before:", "4.00000)"]
    assert lines[4].split() == ["on", "-", "off", "+0.01000", "+0.01000", "+0.01000", "0.00000"]
    assert lines[5] == "replay, by run: [{'recorded': 4}, {'recorded': 4}]"


def test_missing_runs_are_dashes() -> None:
    points = [_point(OFF, 0, 50, 3.0), _point(ON, 1, 50, 3.0)]
    lines = text_of(points, Settings("model", "cpu", seeds=(0, 1))).splitlines()
    assert lines[2].split()[:5] == ["off", "3.00000", "-", "3.00000", "-"]
    assert lines[4].split() == ["on", "-", "off", "-", "-", "-", "-"]
    assert text_of([], Settings("model", "cpu")).startswith("no run got as far")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A model of a few thousand values, and text of eight different tokens."""
    transformers = pytest.importorskip("transformers")
    if not (codecs.has("nf4") and kernels.has("rms_norm")):
        pytest.skip("ts-quant or ts-kernels is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = tmp_path / "tiny"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    class Text:
        def __init__(self, settings: object) -> None:
            generator = torch.Generator().manual_seed(1)
            self.train = torch.randint(0, 8, (6, 12), generator=generator)
            self.held = torch.randint(0, 8, (3, 12), generator=generator)

    monkeypatch.setattr(converge, "_Text", Text)
    return Settings(str(folder), "cpu", steps=5, batch=2, eval_rows=3, every=2, lr=1e-2)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_a_run_learns_and_repeats(tiny: Settings) -> None:
    seen: list[Point] = []
    off = run_one(tiny, OFF, 0, seen.append)
    assert seen == off and [point.step for point in off] == [0, 2, 4, 5]
    assert off[-1].loss < off[0].loss - 0.1  # from ln 64 towards ln 8
    assert off[0].train_loss == 0 and 2.0 < off[1].train_loss < 5.0
    again = run_one(tiny, OFF, 0, lambda point: None)
    assert [point.loss for point in again] == [point.loss for point in off]
    other = run_one(tiny, OFF, 1, lambda point: None)
    assert other[0].loss == off[0].loss and other[-1].loss != off[-1].loss
    on = run_one(tiny, ON, 0, lambda point: None)
    assert on[-1].loss == pytest.approx(off[-1].loss, abs=0.05)


FAKE = """
import json, sys, time
way, seed = sys.argv[sys.argv.index("--only") + 1].split(",")
def tell(step, loss):
    print(json.dumps(dict(way=way, seed=int(seed), step=step, loss=loss, train_loss=1.0,
                          seconds=1.0, replay={})), flush=True)
print("a library's greeting")
tell(0, 4.0)
if way == "on" and seed == "1":
    MISBEHAVE
tell(2, 3.0)
"""


@pytest.mark.parametrize(
    ("misbehave", "status", "told"),
    [
        ("pass", 0, "0.00000"),
        ("sys.exit('no memory')", 1, "on,1: exit status 1: no memory"),
        ("tell(1, 3.5); time.sleep(600)", 0, "on,1: cut off by the time limit"),
    ],
)
def test_runs_side_by_side(tmp_path, monkeypatch, capsys, misbehave, status, told) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{FAKE.replace('MISBEHAVE', misbehave)}")
    script.chmod(0o755)
    monkeypatch.setattr("ts_bench.converge_command.sys.executable", str(script))
    out = tmp_path / "new" / "converge.jsonl"
    arguments = ["converge", "--tiny", "--model", "some", "--seeds", "2", "--jobs", "3"]
    assert main([*arguments, "--time-limit", "8", "--out", str(out)]) == status
    assert told in capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ended = {(line["way"], line["seed"]) for line in lines if line["step"] == 2}
    assert ended >= {("off", 0), ("on", 0), ("off", 1)}


def test_what_it_cannot_do_is_refused(capsys) -> None:
    assert main(["converge", "--steps", "0", "--model", "some"]) == 2
    assert "steps=0" in capsys.readouterr().err
