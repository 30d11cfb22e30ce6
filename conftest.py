"""Rules for every test of the repository: GPU tests, seeds, threads, caches, leftovers."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch, transformers or matplotlib.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# OpenMP threads that spin while they wait take the cores from streams, which are threads too; so
# one thread for torch (TS_TEST_THREADS), and sleeping ones in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

REQUIRE_GPU = os.environ.get("TS_REQUIRE_GPU") == "1"
# Fail a test that leaves the process changed, and a file whose tests leave threads behind.
CHECK_LEFTOVERS = os.environ.get("TS_CHECK_LEFTOVERS") == "1"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout its ini option is unknown, which would be an error."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take (needs pytest-timeout)")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("TS_TEST_THREADS", "1")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if REQUIRE_GPU:
        pytest.fail(
            "TS_REQUIRE_GPU=1 but torch sees no CUDA GPU "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})",
            pytrace=False,
        )
    pytest.skip("needs a CUDA GPU (TS_REQUIRE_GPU=1 makes this a failure)")


def _deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _environment() -> dict[str, str]:
    # But for what pytest, torch and Triton note there for themselves.
    own = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "TRITON_", "KMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


def _set_environment(value: dict[str, str]) -> None:
    for name in _environment().keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _gpu_limits() -> dict[int, float]:
    """By GPU, the share of its memory that this process may take; wrap() sets it."""
    if not torch.cuda.is_initialized():
        return {}
    numbers = range(torch.cuda.device_count())
    return {number: torch.cuda.get_per_process_memory_fraction(number) for number in numbers}


def _set_gpu_limits(value: dict[int, float]) -> None:
    for number, now in _gpu_limits().items():
        if now != value.get(number, 1.0):
            torch.cuda.set_per_process_memory_fraction(value.get(number, 1.0), number)


def _enable_overrides(value: bool) -> None:
    if value and not torch._C._is_torch_function_enabled():
        torch._C._EnableTorchFunction().__enter__()  # for good


# What belongs to the whole process: how it is read, and how it is put back.
_SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "overrides of torch's functions": (torch._C._is_torch_function_enabled, _enable_overrides),
    "the GPU memory that torch may take": (
        lambda: {number: share for number, share in _gpu_limits().items() if share != 1.0},
        _set_gpu_limits,
    ),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (
        lambda: str(torch.get_default_device()),
        lambda value: torch.set_default_device(None if value == "cpu" else value),
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's deterministic mode": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _deterministic,
    ),
    "torch's float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "autocast on the CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
    ),
    "autocast on CUDA": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda value: torch.set_autocast_enabled("cuda", value),
    ),
    "flash attention": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cuDNN attention": (
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
    ),
    "the garbage collector": (
        gc.isenabled,
        lambda value: gc.enable() if value else gc.disable(),
    ),
    "the switch interval": (sys.getswitchinterval, sys.setswitchinterval),
    "the handler of SIGINT": (
        lambda: signal.getsignal(signal.SIGINT),
        lambda value: signal.signal(signal.SIGINT, value),
    ),
    "the handler of SIGTERM": (
        lambda: signal.getsignal(signal.SIGTERM),
        lambda value: signal.signal(signal.SIGTERM, value),
    ),
    "sys.excepthook": (lambda: sys.excepthook, lambda value: setattr(sys, "excepthook", value)),
    "the import path": (
        lambda: list(sys.path),
        lambda value: sys.path.__setitem__(slice(None), value),
    ),
    "the current folder": (os.getcwd, os.chdir),
    "the environment": (_environment, _set_environment),
}


@pytest.fixture(autouse=True)
def _no_limit_for_the_next() -> Iterator[None]:
    """A test that fails does not put the limit back under which it ran."""
    before = _gpu_limits()
    yield
    _set_gpu_limits(before)


@pytest.fixture(autouse=True)
def _process_as_it_was(_private_cache: Path, _no_limit_for_the_next: None) -> Iterator[None]:
    """A test that leaves the process changed fails itself, not a later one (CHECK_LEFTOVERS)."""
    if not CHECK_LEFTOVERS:
        yield
        return
    before = {name: read() for name, (read, _) in _SHARED.items()}
    yield
    left = []
    for name, (read, write) in _SHARED.items():
        now, then = read(), before[name]
        if now == then:
            continue
        write(then)
        if name == "the environment":
            names = sorted(k for k in {*now, *then} if now.get(k) != then.get(k))
            left.append(f"{name}: " + ", ".join(f"{k}={now.get(k)!r}" for k in names))
        else:
            left.append(f"{name}: {then!r} became {now!r}")
    if left:
        pytest.fail("the test left behind\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Once anything is compiled, step() waits for its updates: not in the tests that follow."""
    yield
    if getattr(sys.modules.get("torch._dynamo.utils"), "curr_frame", 0):
        torch._dynamo.reset()


_RAISED: pytest.StashKey[list[BaseException]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = yield
    if report.failed and call.excinfo is not None:  # none where it passed against expectation
        item.stash.setdefault(_RAISED, []).append(call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    """A failed test holds nothing any more when the next one begins."""
    result = yield
    if item.stash.get(_RAISED, None):
        _let_go(item.stash[_RAISED])
    return result


def _let_go(raised: list[BaseException]) -> None:
    """Drop what tracebacks hold: models, sessions, device memory. What they say is written down."""
    seen: set[int] = set()
    while raised:
        error = raised.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # a frame's `f_locals`, once asked for, is not cleared
        raised += [found for found in (error.__cause__, error.__context__) if found is not None]
        raised += getattr(error, "exceptions", ())
    sys.last_traceback = None  # where pytest keeps it, too
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # CUDA may be what failed, and said so
            torch.cuda.empty_cache()


_threads_before: dict[str, set[threading.Thread]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _threads_before.setdefault(nodeid.split("::")[0], set(threading.enumerate()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: Any, nextitem: Any) -> Any:
    """The library's threads end with the objects that a file's tests dropped (CHECK_LEFTOVERS)."""
    result = yield
    if CHECK_LEFTOVERS and (nextitem is None or nextitem.path != item.path):
        before = _threads_before[item.nodeid.split("::")[0]]
        item.funcargs.clear()  # the last test's objects too
        end = time.monotonic() + 30
        while not item.session.testsfailed:  # tracebacks hold what failed
            threads = set(threading.enumerate()) - before
            left = sorted(t.name for t in threads if t.name.startswith("trainstream-"))
            if not left:
                break
            if time.monotonic() > end:
                pytest.fail(f"threads of what this file's tests dropped: {left}", pytrace=False)
            del threads
            gc.collect()
            time.sleep(0.01)
    return result


@pytest.fixture
def started_threads() -> Callable[[], list[threading.Thread]]:
    """Which threads that were started since the fixture was made are alive.

    Counts of all threads would depend on what ran before: threads of earlier tests end when the
    collector comes to it.
    """
    before = set(threading.enumerate())

    def alive() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before]

    return alive


@pytest.fixture
def open_files() -> Callable[[], list[str]]:
    """Paths of the files that the process holds open; compare those of the test's own folder."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("needs /proc/self/fd")

    def paths() -> list[str]:
        found = []
        for descriptor in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found.append(os.readlink(folder / descriptor))
        return found

    return paths


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test starts from the same seeds, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests never read or write the user's cache folder (unless one is named on purpose)."""
    if "TRAINSTREAM_CACHE_DIR" in os.environ:
        yield Path(os.environ["TRAINSTREAM_CACHE_DIR"])
        return
    folder = tmp_path_factory.mktemp("trainstream-cache")
    os.environ["TRAINSTREAM_CACHE_DIR"] = str(folder)
    yield folder
    del os.environ["TRAINSTREAM_CACHE_DIR"]
