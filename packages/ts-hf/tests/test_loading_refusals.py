"""Checkpoints and options that load_model refuses, by the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ts_hf
from ts_core.errors import (
    DataError,
    NotAvailableError,
    OptionError,
    UnknownPluginError,
)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"no tensor for '{NORM}'; 1 of the"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "'model.extra.weight' has no"),
        (lambda t: t.update({NORM: torch.ones(65)}), rf"'{NORM}'.*shape \[65\].*has \[64\]"),
        (lambda t: t.update({NORM: torch.ones(64, 1)}), rf"'{NORM}'.*shape \[64, 1\]"),
    ],
)
def test_wrong_tensors(
    change: Callable[..., Any], words: str, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint("llama")
    _rewrite(folder, change)
    with pytest.raises(DataError, match=words) as caught:
        ts_hf.load_model(folder, quantize=None)
    assert str(folder) in str(caught.value)


def test_missing_shard(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", shards=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name, shard = sorted(index["weight_map"].items())[5]
    (folder / shard).unlink()
    with pytest.raises(DataError, match=f"{shard} does not exist"):
        ts_hf.load_model(folder)
    del name


def test_truncated_shard(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", shards=True)
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match=rf"{shard.name} is truncated: tensor 'model\."):
        ts_hf.load_model(folder)


def test_index_that_lies(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", shards=True)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(iter(index["weight_map"]))
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"][name])
    right = dict(index["weight_map"])
    index["weight_map"][name] = other
    file.write_text(json.dumps(index))
    with pytest.raises(DataError, match=f"does not contain tensor '{name}'"):
        ts_hf.load_model(folder)
    index["weight_map"] = {**right, name: "../other.safetensors"}
    file.write_text(json.dumps(index))
    with pytest.raises(DataError, match="must be a file of the same"):
        ts_hf.load_model(folder)
    file.write_text("{")
    with pytest.raises(DataError, match="is not a safetensors index"):
        ts_hf.load_model(folder)


def test_values_that_cannot_be_quantized(checkpoint: Callable[..., Path], codec: str) -> None:
    folder = checkpoint("llama")
    name = "model.layers.2.mlp.up_proj.weight"
    _rewrite(folder, lambda tensors: tensors[name].view(-1)[3:4].fill_(float("nan")))
    with pytest.raises(DataError, match=name):
        ts_hf.load_model(folder, quantize=codec)


def test_conversion_that_cannot_work(checkpoint: Callable[..., Path]) -> None:
    """A mixture-of-experts checkpoint that lacks one expert's matrix."""
    folder = checkpoint("mixtral")
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    _rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(DataError, match=r"experts"):
        ts_hf.load_model(folder, quantize=None)


def test_two_names_for_one_tensor(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    _rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(DataError, match=r"both\s+stand for 'model\.norm\.weight'"):
        ts_hf.load_model(folder, quantize=None)


def test_no_weights_or_only_a_pickle(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="holds no weights"):
        ts_hf.load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DataError, match=r"pytorch_model\.bin, a pickle"):
        ts_hf.load_model(folder)


def test_folder_and_config_errors(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder '/no/such/place'"):
        ts_hf.load_model("/no/such/place")
    (tmp_path / "a-file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        ts_hf.load_model(tmp_path / "a-file")
    folder = checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llamma9"}))
    with pytest.raises(DataError, match=r"config\.json.*architecture 'llamma9'"):
        ts_hf.load_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(DataError, match=r"no causal language model can be made for .*'vit'"):
        ts_hf.load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json"):
        ts_hf.load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"no config\.json"):
        ts_hf.load_model(folder)


def test_stored_in_a_way_that_is_not_read(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotAvailableError, match="gptq"):
        ts_hf.load_model(folder)


def test_disk_offload_that_cannot_be(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="disk_offload"):
        ts_hf.load_model(checkpoint("llama"), disk_offload=tmp_path / "file")
    with pytest.raises(OptionError, match="disk_offload=3"):
        ts_hf.load_model(checkpoint("llama"), disk_offload=3)
    with pytest.raises(OptionError, match="disk_offload=''"):  # would be the present folder
        ts_hf.load_model(checkpoint("llama"), disk_offload="")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize", True),
        ("quantize", 4),
        ("dtype", "bfloat16"),
        ("dtype", torch.int8),
        ("quant_block_size", 7),
        ("quant_block_size", 0),
        ("quant_block_size", True),
        ("ram_fraction", 0),
        ("ram_fraction", 1.5),
        ("ram_fraction", True),
    ],
)
def test_values_not_accepted(option: str, value: Any, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match=option):
        ts_hf.load_model(checkpoint("llama"), **{option: value})


def test_unknown_codec_names_the_installed_ones(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UnknownPluginError, match="nf5"):
        ts_hf.load_model(checkpoint("llama"), quantize="nf5")
