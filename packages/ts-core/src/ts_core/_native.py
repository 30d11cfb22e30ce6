"""The compiled host core, typed and documented; `_host` itself is loaded on first use.

Pointers are addresses as integers (`tensor.data_ptr()`), sizes are in bytes or elements as named,
and the caller keeps the memory alive until the call returns. Every function that works on memory
or waits releases the GIL.

In a source checkout (csrc/ lies beside this file) the module is built when the sources have changed
since it was; see `_build.py`. `TRAINSTREAM_VERBOSE_BUILD=1` shows the build.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ts_core._native_args import address, integer
from ts_core._native_args import seed as checked_seed
from ts_core.errors import NativeCoreError, OptionError, StateError

MOMENT_BLOCK = 256
"""Values per scale of 8-bit moments; calls may split a tensor at its multiples."""

_PACKAGE_DIR = Path(__file__).resolve().parent
_loaded: ModuleType | None = None
_load_lock = threading.Lock()


class EventWait(NamedTuple):
    """How host threads wait: check for `spin_us`, then sleep `sleep_us` between checks."""

    policy: str
    spin_us: int
    sleep_us: int


class DriverInfo(NamedTuple):
    """What the CUDA driver says; `reason` is why it cannot be used, empty when it can."""

    reason: str
    version: int
    devices: list[tuple[str, int]]


def load() -> ModuleType:
    """The module `ts_core._host`, built first where this is a source checkout that has changed.

    Raises:
        NativeCoreError: it cannot be built or loaded; the message names the line that fixes it.
        OptionError: TRAINSTREAM_SIMD or a TRAINSTREAM_EVENT_* variable has a value not accepted.
    """
    global _loaded
    if _loaded is None:
        with _load_lock:
            if _loaded is None:
                module = _import(_up_to_date_extension())
                _configure(module, os.environ)
                atexit.register(module.shutdown_pool)
                _loaded = module
    return _loaded


def is_source_checkout() -> bool:
    """Whether the module's sources lie beside it, so that it is rebuilt when they change."""
    return (_PACKAGE_DIR / "csrc").is_dir()


def extension_path() -> Path:
    """The file that `load` loads, whether it exists or not."""
    from ts_core import _build

    return _build.extension_path(_PACKAGE_DIR)


def _up_to_date_extension() -> Path:
    from ts_core import _build

    path = extension_path()
    if is_source_checkout():
        verbose = os.environ.get("TRAINSTREAM_VERBOSE_BUILD", "0") not in ("", "0")
        try:
            _build.build_in_place(verbose=verbose)
        except _build.BuildError as error:
            raise NativeCoreError(str(error)) from error
    elif not path.is_file():
        others = ", ".join(sorted(p.name for p in _PACKAGE_DIR.glob("_host.*"))) or "none"
        raise NativeCoreError(
            f"ts-core's compiled core {path.name} is not in {_PACKAGE_DIR} (found: {others}). "
            f"This installation is not for this Python; reinstall it with it: {_reinstall_line()}"
        )
    return path


def _import(path: Path) -> ModuleType:
    name = "ts_core._host"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NativeCoreError(f"{path} is not an extension module of this Python")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        fix = "python -m ts_core._build --force" if is_source_checkout() else _reinstall_line()
        raise NativeCoreError(
            f"ts-core's compiled core {path} cannot be loaded: {error}. Replace it with: {fix}"
        ) from error
    sys.modules[name] = module
    return module


def _reinstall_line() -> str:
    return "python -m pip install --force-reinstall --no-deps 'ts-core>=0.8,<0.9'"


def _configure(module: ModuleType, environ: os._Environ[str] | dict[str, str]) -> None:
    level = environ.get("TRAINSTREAM_SIMD")
    if level:
        try:
            module.set_simd_level(level)
        except ValueError as error:
            raise OptionError(f"TRAINSTREAM_SIMD: {error}") from None
    policy = environ.get("TRAINSTREAM_EVENT_WAIT") or "poll"
    spin_us = _env_int(environ, "TRAINSTREAM_EVENT_SPIN_US", 50)
    sleep_us = _env_int(environ, "TRAINSTREAM_EVENT_SLEEP_US", 100)
    try:
        module.set_event_wait(policy, spin_us, sleep_us)
    except ValueError as error:
        raise OptionError(f"TRAINSTREAM_EVENT_WAIT and its times: {error}") from None


def _env_int(environ: os._Environ[str] | dict[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 10_000_000:
        raise OptionError(f"{name}={text!r}: expected whole microseconds, 0 to 10000000")
    return value


# --- machine ------------------------------------------------------------------------------------


def simd_level() -> str:
    """The SIMD level in use: "avx512", "avx2", "neon" or "scalar"."""
    return str(load().simd_level())


def available_simd_levels() -> list[str]:
    """The levels this machine can run, best first; "scalar" is always one."""
    return list(load().available_simd_levels())


def set_simd_level(level: str) -> None:
    """Uses another SIMD level from now on; all give the same bits. TRAINSTREAM_SIMD does the same.

    Raises:
        ValueError: this machine cannot run `level`.
    """
    load().set_simd_level(level)


def usable_cores() -> int:
    """Cores this process may keep busy: its affinity mask, cut by its cgroup's CPU quota."""
    return int(load().usable_cores())


def csrc_hash() -> str:
    """The hash of the sources that the loaded module was built from."""
    return str(load().csrc_hash)


# --- memory -------------------------------------------------------------------------------------


def copy_bytes(dst_ptr: int, src_ptr: int, nbytes: int, threads: int = 0) -> None:
    """Copies `nbytes` of host memory on several threads.

    Args:
        dst_ptr, src_ptr: addresses of ranges that do not overlap; any alignment.
        threads: 0 for all usable cores; never more than those.

    Raises:
        ValueError: a null pointer, a negative size, or ranges that overlap.
    """
    load().copy_bytes(
        address("dst_ptr", dst_ptr),
        address("src_ptr", src_ptr),
        integer("nbytes", nbytes),
        integer("threads", threads),
    )


def adamw_step(
    param_ptr: int,
    param_dtype: str,
    grad_ptr: int,
    grad_dtype: str,
    exp_avg_ptr: int,
    exp_avg_sq_ptr: int,
    master_ptr: int,
    n: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    threads: int = 0,
    moments: str = "float32",
    exp_avg_scale_ptr: int = 0,
    exp_avg_sq_scale_ptr: int = 0,
    seed: int = 0,
    base: int = 0,
) -> None:
    """One AdamW update of `n` elements in place, with decoupled weight decay.

    As torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101), t = step:

        g <- grad_scale g;  p <- p (1 - lr weight_decay);  m <- lerp(m, g, 1 - beta1)
        v <- beta2 v + (1 - beta2) g g
        p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    The factors are computed in double and rounded once to fp32; the elements in fp32, with one
    rounding per operation (the lerp is one fused multiply-add, as in torch) and subnormal numbers
    kept. Any number of threads and any SIMD level give the same bits.

    With `moments` other than "float32" they are expanded to fp32, updated, used for the parameter
    and then rounded. The random bits of that are a function of (seed, step, base + element), so
    they do not depend on threads or SIMD level, nor on splitting a tensor into several calls at
    multiples of MOMENT_BLOCK elements with `base` set.

    "bfloat16": both moments rounded stochastically.

    "int8": one byte per value, and per MOMENT_BLOCK values one fp32 scale, the power of two of the
    largest magnitude. exp_avg: sign, 3 bits exponent, 4 bits fraction, rounded to nearest (at most
    1/32 of a value down to 2**-6 of the scale; multiples of 2**-10 of it below). exp_avg_sq: its
    square root, 4 bits exponent, 4 bits fraction, rounded stochastically (at most 1/16, down to
    2**-14 of the scale), never from above zero to zero. Zeroed bytes and scales are zero moments.
    An element with an infinite or NaN moment is stored as such (exp_avg reads back as NaN,
    exp_avg_sq as infinity) and leaves its neighbours and their scale alone; a huge finite one
    makes its block's scale large, so that small neighbours round to zero in exp_avg and up in
    exp_avg_sq (smaller steps, never larger ones). exp_avg below 2**-126 and the square root of
    exp_avg_sq below 2**-74 are too small to be held.

    Args:
        param_ptr: the parameter, `param_dtype` ("float32", "bfloat16" or "float16").
        grad_ptr: the gradient, `grad_dtype`; only read.
        exp_avg_ptr, exp_avg_sq_ptr: the moments m and v: fp32, bf16 or bytes, as `moments` says.
        master_ptr: the parameter in fp32, updated instead, with `param` written from it rounded to
            nearest even; 0 for none, and then p is read from `param`, and rounded back to it.
        n: elements; may be 0.
        step: 1 for the first update.
        threads: 0 for all usable cores; never more than those.
        moments: "float32", "bfloat16" or "int8".
        exp_avg_scale_ptr, exp_avg_sq_scale_ptr: for "int8", ceil(n / MOMENT_BLOCK)
            fp32 scales each.
        seed: of the random bits, 0 to 2**64 - 1; only the moments "bfloat16" and "int8" use any.
        base: the place of the first element in its tensor, a multiple of MOMENT_BLOCK.

    Raises:
        ValueError: a dtype or number not accepted, a null pointer with n > 0, ranges that overlap.
    """
    load().adamw_step(
        address("param_ptr", param_ptr),
        param_dtype,
        address("grad_ptr", grad_ptr),
        grad_dtype,
        address("exp_avg_ptr", exp_avg_ptr),
        address("exp_avg_sq_ptr", exp_avg_sq_ptr),
        address("master_ptr", master_ptr),
        integer("n", n),
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        integer("step", step),
        grad_scale,
        integer("threads", threads),
        moments,
        address("exp_avg_scale_ptr", exp_avg_scale_ptr),
        address("exp_avg_sq_scale_ptr", exp_avg_sq_scale_ptr),
        checked_seed(seed),
        integer("base", base),
    )


def moments_to_float32(
    stored_ptr: int,
    scale_ptr: int,
    float_ptr: int,
    n: int,
    *,
    moments: str,
    which: str,
    threads: int = 0,
) -> None:
    """Expands `n` stored moments to fp32; exact for every value that `adamw_step` stores.

    A tensor may be expanded in parts that start at multiples of MOMENT_BLOCK elements.

    Args:
        stored_ptr: the stored moments, as `moments` ("float32", "bfloat16" or "int8") says.
        scale_ptr: their ceil(n / MOMENT_BLOCK) fp32 scales for "int8", else 0.
        float_ptr: `n` fp32 numbers, written.
        which: "exp_avg" or "exp_avg_sq"; the 8-bit forms differ.
        threads: 0 for all usable cores; never more than those.

    Raises:
        ValueError: a name not accepted, a null pointer with n > 0, ranges that overlap.
    """
    load().moments_to_float32(
        address("stored_ptr", stored_ptr),
        address("scale_ptr", scale_ptr),
        address("float_ptr", float_ptr),
        integer("n", n),
        moments,
        which,
        integer("threads", threads),
    )


def moments_from_float32(
    float_ptr: int,
    stored_ptr: int,
    scale_ptr: int,
    n: int,
    *,
    moments: str,
    which: str,
    seed: int = 0,
    step: int = 0,
    base: int = 0,
    threads: int = 0,
) -> None:
    """Rounds `n` fp32 moments to the stored form, with the rounding of `adamw_step`.

    Storing what `moments_to_float32` gave yields the bytes and scales it was given, bit for bit.
    (Of non-finite numbers too; -0.0 becomes 0.0 in the 8-bit exp_avg.)

    Args:
        float_ptr: `n` fp32 numbers; only read.
        stored_ptr, scale_ptr, moments, which, threads: as for `moments_to_float32`; written.
        seed, step, base: where the random bits come from, as in `adamw_step`.

    Raises:
        ValueError: a name or number not accepted, a null pointer with n > 0, ranges that overlap.
    """
    load().moments_from_float32(
        address("float_ptr", float_ptr),
        address("stored_ptr", stored_ptr),
        address("scale_ptr", scale_ptr),
        integer("n", n),
        moments,
        which,
        checked_seed(seed),
        integer("step", step),
        integer("base", base),
        integer("threads", threads),
    )


def grad_stats(grad_ptr: int, dtype: str, n: int, threads: int = 0) -> tuple[float, int]:
    """The sum of squares (fp64) of `n` elements, and how many are infinite or NaN.

    The order of additions depends on `n` alone: any number of threads and any SIMD level give the
    same bits. With an infinite or NaN element the sum is infinite or NaN too.

    Raises:
        ValueError: a dtype not accepted, a negative n, a null pointer with n > 0.
    """
    squares, nonfinite = load().grad_stats(
        address("grad_ptr", grad_ptr), dtype, integer("n", n), integer("threads", threads)
    )
    return float(squares), int(nonfinite)


# --- the CUDA driver ----------------------------------------------------------------------------


def driver_info() -> DriverInfo:
    """The driver's CUDA version (13000 for 13.0) and its devices as (name, bytes).

    Opens the driver but creates no context, so nothing is allocated on a device.
    """
    module = load()
    reason = str(module.driver_unavailable_reason())
    if reason:
        return DriverInfo(reason, 0, [])
    return DriverInfo("", int(module.driver_version()), list(module.driver_devices()))


def wait_event(event: int, *, device: int = 0, timeout: float | None = None) -> None:
    """Waits until everything before a CUDA event on its stream is done.

    Checks back to back for a short while, then sleeps between checks, so that a waiting thread
    holds no core (TRAINSTREAM_EVENT_WAIT and its times change that). Ctrl-C interrupts it, except
    under "block".

    Args:
        event: the handle of a recorded event (`torch.cuda.Event.cuda_event`); the caller keeps the
            event alive.
        device: whose primary context is used when the calling thread has no CUDA context.
        timeout: seconds; None waits as long as it takes. "block" ignores it.

    Raises:
        TimeoutError: not done within `timeout`.
        StateError: there is no CUDA driver, or it reports an error (such as a kernel that failed).
    """
    module = load()
    try:
        done = module.wait_event(
            address("event", event), device, -1.0 if timeout is None else max(timeout, 0.0)
        )
    except module.DriverError as error:
        raise StateError(f"waiting for a CUDA event failed: {error}") from None
    if not done:
        raise TimeoutError(f"the CUDA event was not done within {timeout} s")


def event_done(event: int, *, device: int = 0) -> bool:
    """Whether everything before a CUDA event on its stream is done; does not wait.

    Raises:
        StateError: there is no CUDA driver, or it reports an error.
    """
    module = load()
    try:
        return bool(module.event_done(address("event", event), device))
    except module.DriverError as error:
        raise StateError(f"checking a CUDA event failed: {error}") from None


def set_event_wait(policy: str = "poll", spin_us: int = 50, sleep_us: int = 100) -> None:
    """Changes how `wait_event` waits: "poll", "spin" (holds a core) or "block" (in the driver).

    Raises:
        ValueError: another policy, or times outside 0 to 10 seconds.
    """
    load().set_event_wait(policy, spin_us, sleep_us)


def event_wait() -> EventWait:
    """How `wait_event` waits now."""
    return EventWait(*load().event_wait())


def register_memory(ptr: int, nbytes: int, *, device: int = 0) -> str:
    """Page-locks host memory for every CUDA context; returns "" or the driver's reason to refuse.

    Uses the thread's current context, else `device`'s primary context, which is created if need be:
    call it only once CUDA has been initialized on purpose.

    Raises:
        ValueError: a null pointer or a negative size.
    """
    return str(load().register_memory(address("ptr", ptr), integer("nbytes", nbytes), device))


def unregister_memory(ptr: int, *, device: int = 0) -> str:
    """Undoes `register_memory`; returns "" or the driver's reason to refuse."""
    return str(load().unregister_memory(address("ptr", ptr), device))
