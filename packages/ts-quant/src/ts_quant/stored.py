"""Quantized weights in safetensors files, as they are in memory.

Each buffer of a weight NAME is one tensor of the file, NAME.BUFFER (NAME.codes, NAME.absmax, ...;
`ts_quant.codecs.scales` lists the buffers of each scale layout); ordinary tensors keep their names.
The file's metadata says what belongs together:

    trainstream.layout   "1"
    trainstream.weights  JSON: {NAME: {"codec": "nf4", "shape": [out, in], "dtype": "bfloat16",
                         "layout": {"scales": "float32", "block_size": 64, "rows": 1},
                         "buffers": ["codes", "absmax"]}}; in the layout "outliers": c where
                         c columns are kept apart (`ts_quant.codecs.outliers`), "channel_scale":
                         true where columns have factors (`ts_quant.codecs.channel_scale`);
                         "transposed": true where the tensor is seen with its last two dimensions
                         swapped

Any safetensors reader can open such a file; nothing needs unpickling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs.finite_scales import refuse_bad_scales
from ts_quant.codecs.outliers import checked
from ts_quant.errors import CheckpointError, OptionError
from ts_quant.safetensors_file import Entry, read_header, read_tensor, sizes, unique, write_file
from ts_quant.tensor import QuantTensor
from ts_quant.transposed import TransposedQuantTensor

LAYOUT_KEY = "trainstream.layout"
WEIGHTS_KEY = "trainstream.weights"
LAYOUT_VERSION = "1"

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def save_quantized(tensors: Mapping[str, Tensor], file: str | Path) -> Path:
    """Write QuantTensors and ordinary tensors to one safetensors file.

    The file appears complete or not at all. Beside the tensors, one buffer at a time is copied.

    Args:
        tensors: by name, on any device; `dict(model.named_parameters())` for example.
        file: where to write.

    Returns:
        The file's path.

    Raises:
        OptionError: two tensors of the file would have one name, a name is no str, or a value is no
            tensor with memory (another library's wrapper, a meta tensor).
        CheckpointError: a dtype that safetensors has no name for.
    """
    flat: dict[str, Tensor] = {}
    weights: dict[str, Any] = {}
    if not isinstance(tensors, Mapping):
        raise OptionError(f"tensors is a {type(tensors).__name__}, not a mapping of names to them")
    for name, given in tensors.items():
        if not isinstance(name, str):
            raise OptionError(f"{name!r} cannot name a weight: expected a str")
        swapped = isinstance(given, TransposedQuantTensor)
        tensor = given.stored if isinstance(given, TransposedQuantTensor) else given
        if isinstance(tensor, QuantTensor):
            spec = tensor.spec
            names = tensor.__tensor_flatten__()[0]
            weights[name] = {
                "codec": spec.codec,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "layout": {
                    "scales": spec.scales,
                    "block_size": spec.block_size,
                    "rows": spec.rows,
                    **({"outliers": spec.outliers} if spec.outliers else {}),
                    **({"channel_scale": True} if spec.channel_scale else {}),
                },
                "buffers": names,
                **({"transposed": True} if swapped else {}),
            }
            parts = {f"{name}.{part}": getattr(tensor, part) for part in names}
        else:
            parts = {name: tensor}
        for key, part in parts.items():
            if key in flat:
                raise OptionError(f"two tensors of {Path(file).name} would be called {key!r}")
            flat[key] = part
    metadata = {"format": "pt", LAYOUT_KEY: LAYOUT_VERSION, WEIGHTS_KEY: json.dumps(weights)}
    path = Path(file)
    write_file(path, flat, metadata)
    return path


def load_quantized(file: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a file written by `save_quantized`, on the CPU.

    Args:
        file: the file.
        names: which tensors to read; None for all.

    Raises:
        CheckpointError: the file is missing, damaged or truncated, or does not hold a name asked
            for; the message names the file and the tensor.
    """
    wanted = None if names is None else set(names)
    found = dict(iterate_quantized(file, wanted))
    missing = sorted((wanted or set()) - set(found))
    if missing:
        raise CheckpointError(f"{file} holds no tensor {missing[0]!r} ({len(missing)} missing)")
    return found


def iterate_quantized(
    file: str | Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """`load_quantized`, one tensor at a time: (name, tensor), ordinary tensors last.

    The header and the description are checked before the first tensor is read.
    """
    path = Path(file)
    entries, metadata = read_header(path)
    weights = _weights(path, metadata, entries)
    wanted = None if names is None else set(names)
    owned = {f"{name}.{part}" for name, fields in weights.items() for part in fields["buffers"]}
    for name, fields in weights.items():
        if wanted is None or name in wanted:
            yield name, _build(path, name, fields, entries)
    for name, entry in entries.items():
        if name not in owned and (wanted is None or name in wanted):
            yield name, read_tensor(entry)


def _weights(
    file: Path, metadata: Mapping[str, str], entries: Mapping[str, Entry]
) -> dict[str, dict[str, Any]]:
    version = metadata.get(LAYOUT_KEY)
    if version != LAYOUT_VERSION:
        raise CheckpointError(
            f"{file} has {LAYOUT_KEY}={version!r} in its metadata; this version reads "
            f"{LAYOUT_VERSION!r}, as save_quantized writes it"
        )
    try:
        weights = json.loads(metadata[WEIGHTS_KEY], object_pairs_hook=unique)
        for name, fields in weights.items():
            _check_description(name, fields, entries)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the description of its quantized weights is damaged: {error!r}"
        ) from error
    found: dict[str, dict[str, Any]] = weights
    return found


def _check_description(name: str, fields: Any, entries: Mapping[str, Entry]) -> None:
    try:
        sizes(fields["shape"])
    except ValueError as error:
        raise CheckpointError(f"weight {name!r} has an impossible shape: {error}") from error
    if fields["dtype"] not in _DTYPES:
        raise CheckpointError(f"weight {name!r} has dtype {fields['dtype']!r}")
    if not isinstance(fields["codec"], str) or not isinstance(fields["layout"], dict):
        raise CheckpointError(f"weight {name!r} is not described by codec and layout")
    if name in entries:
        raise CheckpointError(f"it holds {name!r} twice, as a quantized weight and as a tensor")
    for part in fields["buffers"]:
        if f"{name}.{part}" not in entries:
            raise CheckpointError(f"weight {name!r} lacks its tensor {name}.{part}")


def _build(
    file: Path, name: str, fields: Mapping[str, Any], entries: Mapping[str, Entry]
) -> Tensor:
    try:
        built = QuantTensor.from_buffers(
            fields["codec"],
            {part: read_tensor(entries[f"{name}.{part}"]) for part in fields["buffers"]},
            shape=fields["shape"],
            dtype=_DTYPES[fields["dtype"]],
            layout=fields["layout"],
        )
        named = dict(zip(built.__tensor_flatten__()[0], built.buffers(), strict=True))
        refuse_bad_scales(name, named, built.spec.scales)
        if built.spec.outliers:
            checked(built.buffers()[-1].view(-1), built.shape, built.device)
        return TransposedQuantTensor(built) if fields.get("transposed") is True else built
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OptionError as error:
        raise CheckpointError(f"{file}: weight {name!r}: {error}") from error
