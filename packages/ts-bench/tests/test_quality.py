"""`ts-bench quality`: cases, resuming, the table; a tiny model stands for the real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_bench import quality
from ts_bench.cli import main
from ts_bench.quality import QualitySettings, Row, measure
from ts_bench.quality_cases import BASELINE, CASES, named
from ts_bench.quality_report import HEADINGS, append_row, markdown, read_rows, table
from ts_core.errors import DataError, OptionError
from ts_core.registry import codecs

SETTINGS = {"model": "tiny"}


def _row(case: str, seed: int | None, perplexity: float, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "bytes_per_weight": 0.5,
        "weight_error": None,
        "kept_precise": 0,
        "seconds": 1.0,
        "settings": SETTINGS,
    }
    return Row(case, seed, perplexity, **{**fields, **changes})


def test_cases_by_name() -> None:
    assert [case.name for case in named(["nf4", BASELINE, "nf4"])] == [BASELINE, "nf4"]
    assert named(None)[0].name == BASELINE and len(named(None)) == len(CASES)
    with pytest.raises(OptionError, match="'nf5' is unknown"):
        named(["nf5"])
    in_fp32 = {case.name for case in named(None, "float32")}
    assert set(CASES) - in_fp32 == {"fp8 products", "fp8 outliers data products"}
    with pytest.raises(OptionError, match="needs bfloat16, not float32"):
        named(["fp8 products"], "float32")
    assert CASES["nf4 loftq"].starts_adapters and not CASES["nf4"].starts_adapters


def test_table_compares_seed_by_seed() -> None:
    rows = [
        _row(BASELINE, None, 10.0),
        _row("nf4", None, 11.0, weight_error=0.09),
        *(_row(BASELINE, seed, value) for seed, value in ((0, 8.0), (1, 10.0))),
        *(_row("nf4", seed, value) for seed, value in ((0, 8.8), (1, 11.0))),
        _row("alone", None, 5.0),
    ]
    lines = {line[0]: dict(zip(HEADINGS[:5], line[:5], strict=True)) for line in table(rows)}
    assert lines["nf4"]["loaded"] == "11.0000" and lines["nf4"]["vs bf16"] == "+10.00%"
    assert lines["nf4"]["weight error"] == "9.00%"
    after = {line[0]: line[5:] for line in table(rows)}
    assert after["nf4"] == ["9.9000 ± 1.5556", "+10.00% ± 0.00%"]  # every seed is 10 % worse
    assert after["alone"] == ["", ""]
    text = markdown(rows)
    assert text.count("\n") == 5 and "| nf4 |" in text


def test_rows_are_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.jsonl"
    assert read_rows(file) == []
    rows = [_row("nf4", None, 3.0), _row("nf4", 1, 2.0)]
    for row in rows:
        append_row(file, row)
    assert read_rows(file) == rows
    with file.open("a") as stream:
        stream.write('{"case": 1}\n')
    with pytest.raises(DataError, match="line 3"):
        read_rows(file)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QualitySettings:
    """Settings for a model of a few thousand values and random text."""
    transformers = pytest.importorskip("transformers")
    if not codecs.has("nf4"):
        pytest.skip("no codec is installed (ts-quant)")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = tmp_path / "tiny"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    class Text:
        def __init__(self, settings: QualitySettings) -> None:
            generator = torch.Generator().manual_seed(1)
            self.train = torch.randint(0, 64, (16, 12), generator=generator)
            self.held = torch.randint(0, 64, (4, 12), generator=generator)
            self.settings = {"steps": settings.steps}

    monkeypatch.setattr(quality, "_Text", Text)
    return QualitySettings(str(folder), "cpu", "float32", steps=2, batch=2, rank=4, seeds=(0, 1))


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_measures_resumes_and_refuses_other_settings(tiny: QualitySettings) -> None:
    cases = named(["nf4", "nf4 keep-precise data", "nf4 loftq"])
    seen: list[Row] = []
    progress: list[tuple[str, int, int]] = []
    rows = measure(cases, tiny, on_row=seen.append, on_progress=lambda *what: progress.append(what))
    assert rows == seen and len(rows) == 4 * 3 and progress[-1] == ("done", 12, 12)
    by_case = {(row.case, row.seed): row for row in rows}
    assert by_case[("nf4", None)].bytes_per_weight == pytest.approx(0.5625)
    assert by_case[("nf4 loftq", None)].weight_error == pytest.approx(0.09, abs=0.02)
    assert by_case[("nf4 keep-precise data", None)].bytes_per_weight > 0.5625
    assert by_case[(BASELINE, 0)].perplexity != by_case[(BASELINE, 1)].perplexity
    assert all(40 < row.perplexity < 100 for row in rows)  # random text, 64 tokens

    # Known rows are not measured again, and the rest is what it would have been.
    again: list[Row] = []
    whole = measure(cases, tiny, known=rows[:10], on_row=again.append)
    assert [(row.case, row.seed, row.perplexity) for row in whole] == [
        (row.case, row.seed, row.perplexity) for row in rows
    ]
    assert len(again) == 2
    with pytest.raises(OptionError, match="measured with"):
        measure(cases, replace(tiny, steps=3), known=rows)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_products_in_fp8_are_emulated_on_a_cpu(tiny: QualitySettings) -> None:
    names = ["fp8", "fp8 products", "fp8 outliers data", "fp8 outliers data products"]
    settings = replace(tiny, dtype="bfloat16", steps=1, seeds=(0,))
    found = {(row.case, row.seed): row for row in measure(named(names), settings)}
    for seed in (None, 0):
        values = [found[name, seed].perplexity for name in names]
        assert len(set(values)) == 4 and all(40 < value < 100 for value in values)
    plain, kept = (found[name, None].bytes_per_weight for name in names[::2])
    assert plain == pytest.approx(1.031, abs=0.001) and 1.06 < kept < 1.2


def test_the_command_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "--cases", "nf5"]) == 2
    assert "'nf5' is unknown" in capsys.readouterr().err
    assert main(["quality", "--batch", "0"]) == 2
    assert "batch=0" in capsys.readouterr().err
