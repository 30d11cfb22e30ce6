"""The options of wrap(): accepted values, defaults, and what this version does not build yet.

One table per fact: `_ACCEPTED` says in words what each option takes and checks it, `_NOT_BUILT`
says which accepted values are not built yet. No option is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from ts_core.errors import NotAvailableError, OptionError
from ts_core.option_names import hint_for_wrap

_MOST_IN_FLIGHT = 1 << 30
_LEAST_WITHOUT_UNIT = 1 << 20  # bytes, of a text
_LEAST_NUMBER = 1000  # bytes: fewer are meant as GiB


def default_inflight_bytes(device_bytes: int | None) -> int:
    """`max_inflight_bytes` where none is given: a tenth of the device's memory, at most 1 GiB.

    Args:
        device_bytes: that the process may use; None for a device without memory of its own.
    """
    if device_bytes is None:
        return _MOST_IN_FLIGHT
    return max(1, min(_MOST_IN_FLIGHT, device_bytes // 10))


def default_leaving_bytes(device_bytes: int | None) -> int:
    """Of that, what waits on the device for a link to the host: a twentieth of its memory.

    The steps by which memory is planned may not have shown it, where the link kept up with them.
    With half as much for gradients that updates are still to read it then stays within the headroom
    (a tenth), where recordings may take some too.

    Args:
        device_bytes: as of `default_inflight_bytes`.
    """
    if device_bytes is None:
        return _MOST_IN_FLIGHT
    return max(1, min(_MOST_IN_FLIGHT, device_bytes // 20))


@dataclass(frozen=True)
class WrapOptions:
    """Every option of wrap(), as SPEC names them, with their defaults."""

    optimizer_mode: str = "cpu"
    offload: Any = "auto"
    activation_offload: Any = "auto"
    param_offload: Any = "auto"
    quantize: Any = "auto"
    quant_block_size: int = 64
    prefer: str = "exact"
    recompute: Any = "auto"
    attention: Any = "auto"
    outliers: Any = 0
    nvfp4_backward: bool = False
    kernels: Any = "auto"
    fused_lora: Any = "auto"
    keep_precise: Any = 0
    error_rank: int = 0
    error_iters: int = 1
    double_quant: bool = False
    disk_offload: Any = None
    moe_paging: bool = False
    host_arena: Any = "auto"
    peer: Any = "auto"
    moment_dtype: Any = "auto"
    device: Any = None
    blocks: Any = None
    distributed: Any = None
    guard_params: bool = True
    max_grad_norm: float | None = None
    accumulation_steps: int = 1
    vram_headroom: float = 0.10
    vram_limit: Any = None
    check_memory: bool = True
    max_inflight_bytes: int | None = None
    max_activation_slowdown: float = 0.15
    prefetch_depth: int = 1
    min_offload_bytes: int = 1 << 20
    cuda_graphs: Any = "auto"
    eager: bool | None = None
    threads: int | None = None
    profile: bool = True
    loader: Any = None
    lr: float = 1e-3
    verbose: bool = False

    vram_limit_bytes: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        limit = parse_bytes("vram_limit", self.vram_limit)
        for name in _ACCEPTED:
            check_option(name, getattr(self, name))
        for name, (built, words) in _NOT_BUILT.items():
            value = getattr(self, name)
            if not built(value):
                raise NotAvailableError(
                    f"{name}={value!r} is not available in this version of ts-core. Use {words}."
                )
        object.__setattr__(self, "vram_limit_bytes", limit)

    @staticmethod
    def from_keywords(options: dict[str, Any]) -> WrapOptions:
        """Build from wrap()'s keywords.

        Raises:
            OptionError: an unknown name (the nearest known one is named), or a bad value.
        """
        known = {f.name for f in fields(WrapOptions) if f.init}
        for name in options:
            if name not in known:
                raise OptionError(f"wrap() has no option {name!r}.{hint_for_wrap(name, known)}")
        return WrapOptions(**options)


def check_option(name: str, value: Any, called: str | None = None) -> None:
    """Refuse a value that wrap() would not take for `name`.

    Args:
        name: of the option in wrap().
        value: what was given.
        called: what the caller names it, if otherwise.

    Raises:
        OptionError: it is not accepted.
    """
    accepts, words = _ACCEPTED[name]
    if not accepts(value):
        raise OptionError(f"{called or name}={value!r} is not accepted. Use {words}.")


def parse_bytes(name: str, value: Any) -> int | None:
    """Bytes from an integer or a text such as "12GiB", "500MB", "1.5G" (powers of 1024 for
    KiB/MiB/GiB/TiB and bare letters, of 1000 for KB/MB/GB/TB).

    Raises:
        OptionError: not a size above 0, a text of less than 1 MiB without a unit, or a number below
            1000: a person who writes 12 or "12" means something else.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        if value < _LEAST_NUMBER:
            raise OptionError(_meant_gib(name, value, value, str(value)))
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)\s*", value, re.IGNORECASE)
        if match:
            number, letter, binary, byte = match.groups()
            power = " KMGT".index(letter.upper() or " ")
            base = 1000 if letter and byte and not binary else 1024
            size = int(float(number) * base**power)
            if 0 < size < _LEAST_WITHOUT_UNIT and not (letter or byte):
                raise OptionError(_meant_gib(name, value, size, number))
            if size > 0:
                return size
    raise OptionError(
        f"{name}={value!r} is not accepted. Use a number of bytes above 0, a text like '12GiB', "
        f"or None."
    )


def _meant_gib(name: str, value: Any, size: int, number: str) -> str:
    return (
        f"{name}={value!r} is {size} bytes: did you mean {number}GiB? (For so few bytes, write "
        f"{number}B.)"
    )


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_fraction(value: Any, low: float = 0.0, high: float = 1.0) -> bool:
    return _is_number(value) and low <= value <= high


def _is_index_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_int(item, 0) for item in value)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        return any(
            value is other or (value == other and type(value) is type(other)) for other in values
        )

    return accepts


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _optional(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _size(value: Any) -> bool:
    try:
        parse_bytes("size", value)
    except OptionError:
        return False
    return True


def _blocks(value: Any) -> bool:
    if isinstance(value, nn.ModuleList | nn.Sequential):
        value = list(value)
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(item, nn.Module) for item in value)
    )


_AUTO_BOOL = _one_of("auto", True, False)
_AUTO_BOOL_NONE = _one_of("auto", True, False, None)
_FLAG = (_bool, "True or False")

_ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer_mode": (_one_of("cpu", "gpu", "auto", "hybrid"), "'cpu', 'gpu', 'auto' or 'hybrid'"),
    "offload": (_one_of("auto", True), "'auto' or True (to train without it, do not wrap)"),
    "activation_offload": (
        lambda v: _AUTO_BOOL(v) or _is_fraction(v),
        "'auto', True, False or a fraction from 0 to 1",
    ),
    "param_offload": (
        lambda v: _AUTO_BOOL(v) or _is_fraction(v) or _is_index_list(v),
        "'auto', True, False, a fraction from 0 to 1 or a list of block indices",
    ),
    "quantize": (
        lambda v: v is None or v is False or isinstance(v, str),
        "'auto', 'none', None, False or the name of an installed codec",
    ),
    "quant_block_size": (lambda v: _is_int(v, 2) and v % 2 == 0, "an even integer of at least 2"),
    "prefer": (_one_of("exact", "speed"), "'exact' or 'speed'"),
    "recompute": (
        lambda v: _AUTO_BOOL(v) or _is_fraction(v) or _is_index_list(v),
        "'auto', True, False, a fraction from 0 to 1 or a list of block indices",
    ),
    "attention": (
        _one_of("auto", "cudnn", "efficient", "flash", "math", None),
        "'auto', 'cudnn', 'efficient', 'flash', 'math' or None",
    ),
    "outliers": (
        lambda v: _AUTO_BOOL_NONE(v) or _is_fraction(v, 0.0, 0.1),
        "0, False, None, 'auto', True or a number from 0 to 0.1",
    ),
    "nvfp4_backward": _FLAG,
    "kernels": (_AUTO_BOOL_NONE, "'auto', True, False or None"),
    "fused_lora": (_AUTO_BOOL_NONE, "'auto', True, False or None"),
    "keep_precise": (
        lambda v: _AUTO_BOOL_NONE(v) or _is_fraction(v, 0.0, 0.5),
        "0, False, None, 'auto', True or a fraction up to 0.5",
    ),
    "error_rank": (lambda v: _is_int(v, 0), "an integer of at least 0"),
    "error_iters": (lambda v: _is_int(v, 1), "an integer of at least 1"),
    "double_quant": _FLAG,
    "disk_offload": (
        _optional(lambda v: (isinstance(v, str) and v != "") or hasattr(v, "__fspath__")),
        "None or a directory",
    ),
    "moe_paging": _FLAG,
    "host_arena": (
        lambda v: _one_of("auto", False, None)(v) or _size(v),
        "'auto', False, None, a number of bytes from 1000 on, or a text like '8GiB'",
    ),
    "peer": (
        lambda v: _one_of("auto", True, False, None)(v) or _is_int(v, 1) or _size(v),
        "'auto', False or None",
    ),
    "moment_dtype": (
        _one_of("auto", "float32", "bfloat16", "bf16", torch.bfloat16, "int8"),
        "'auto', 'float32', 'bfloat16', 'bf16', torch.bfloat16 or 'int8'",
    ),
    "device": (
        _optional(lambda v: isinstance(v, str | torch.device)),
        "None, 'cuda', 'cuda:N', 'cpu', 'host' or a torch.device",
    ),
    "blocks": (_optional(_blocks), "None or a list of modules"),
    "distributed": (_one_of(None, True, False), "None, True or False"),
    "guard_params": _FLAG,
    "max_grad_norm": (_optional(lambda v: _is_number(v) and v > 0), "None or a number above 0"),
    "accumulation_steps": (lambda v: _is_int(v, 1), "an integer of at least 1"),
    "vram_headroom": (lambda v: _is_fraction(v) and v < 1, "a fraction of at least 0 and below 1"),
    "vram_limit": (_size, "None, a number of bytes above 0, or a text like '12GiB'"),
    "check_memory": _FLAG,
    "max_inflight_bytes": (_optional(lambda v: _is_int(v, 1)), "None or a number of bytes"),
    "max_activation_slowdown": (lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "prefetch_depth": (lambda v: _is_int(v, 1), "an integer of at least 1"),
    "min_offload_bytes": (lambda v: _is_int(v, 0), "a number of bytes"),
    "cuda_graphs": (_AUTO_BOOL, "'auto', True or False"),
    "eager": (_one_of(None, True, False), "None, True or False"),
    "threads": (_optional(lambda v: _is_int(v, 1)), "None or an integer of at least 1"),
    "profile": _FLAG,
    "loader": (_optional(callable), "None or a function from a name to a tensor"),
    "lr": (lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "verbose": _FLAG,
}

_OFF = _one_of("auto", False, None)
_NOT_BUILT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peer": (_OFF, "'auto', False or None"),
}
