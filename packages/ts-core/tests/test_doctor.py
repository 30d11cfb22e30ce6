"""`trainstream doctor`: the report, the lines that fix things, and the exit status."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from ts_core import _build, _native
from ts_core.doctor import GpuReport, Machine, command, diagnose
from ts_core.doctor import report as report_module

Run = Callable[..., "subprocess.CompletedProcess[str]"]
MIB, GIB = 1 << 20, 1 << 30
NO_GPU = GpuReport(reason="no CUDA driver (libcuda.so.1: not found)")
GPU = GpuReport((("Made-up H1", 80 * GIB),), 13010, "", "13.0", True, "")
MACHINE = Machine(4, 8, 64 * GIB, 60 * GIB, -1)
DOCTOR = """
import argparse, sys
from ts_core.doctor import command
parser = argparse.ArgumentParser()
command.configure(parser)
sys.exit(command.run(parser.parse_args(sys.argv[1:])))
"""


def sections(text: str) -> dict[str, str]:
    return {part.split("\n")[0]: part for part in text.strip().split("\n\n")}


def test_it_is_a_command() -> None:
    assert command.API_VERSION == 1 and command.help
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert parser.parse_args([]).measure is False
    assert parser.parse_args(["--measure"]).measure is True


@pytest.fixture(autouse=True)
def nothing_measured_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that other tests measured would be a section of the report."""
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))


def test_a_machine_without_a_gpu_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose(NO_GPU, MACHINE)
    assert found.to_fix == []
    parts = sections(found.text())
    assert list(parts) == [
        "packages",
        "native core",
        "machine",
        "GPU",
        "kernels",
        "plug-ins",
        "to fix",
    ]
    assert re.search(r"ts-core +0\.8\.0", parts["packages"])
    assert re.search(r"Python +3\.\d+", parts["packages"])
    assert re.search(r"torch +\d+\.\d+", parts["packages"])
    assert f"works: {_native.extension_path()}" in parts["native core"]
    assert _native.csrc_hash() in parts["native core"]
    assert f"SIMD level {_native.simd_level()}" in parts["native core"]
    assert "cores: 4 usable of 8 (affinity mask or cgroup CPU quota)" in parts["machine"]
    assert "RAM: 64.0 GiB, 60.0 GiB available" in parts["machine"]
    assert "page-lock limit (ulimit -l): unlimited" in parts["machine"]
    assert "no GPU: the host device is used" in parts["GPU"]
    assert "no CUDA driver (libcuda.so.1: not found)" in parts["GPU"]
    assert "commands: " in parts["plug-ins"] and "doctor" in parts["plug-ins"]
    assert parts["to fix"] == "to fix\n  nothing"


def test_this_machine_gets_the_status_of_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    status = command.run(argparse.Namespace(measure=False))
    text = capsys.readouterr().out
    assert status == (0 if text.endswith("to fix\n  nothing\n") else 1)


def test_a_working_gpu() -> None:
    found = diagnose(GPU, MACHINE)
    part = sections(found.text())["GPU"]
    assert "Made-up H1, 80.0 GiB" in part and "driver: CUDA 13.1" in part
    assert "torch: built for CUDA 13.0, sees it" in part
    assert "page-locking 64 MiB: works" in part
    assert [line for line in found.to_fix if "Triton" not in line] == []


@pytest.mark.parametrize(
    ("gpu", "machine", "words"),
    [
        (
            GpuReport(GPU.devices, 13010, "", "", False, ""),
            MACHINE,
            "this torch is a build without CUDA: python -m pip install --force-reinstall torch",
        ),
        (
            GpuReport(GPU.devices, 12040, "", "13.0", False, ""),
            MACHINE,
            r"built for CUDA 13.0, cannot use the GPU with this driver \(CUDA 12.4\): update",
        ),
        (
            GpuReport(GPU.devices, 13010, "", "13.0", True, "cuMemHostRegister: no"),
            Machine(4, 8, GIB, GIB, 65536),
            r"ulimit -l is 64 KiB\): run `ulimit -l unlimited`",
        ),
        (
            GpuReport(GPU.devices, 13010, "", "13.0", True, "cuMemHostRegister: no"),
            Machine(4, 8, GIB, GIB, 8 * MIB, container=True),
            r"ulimit -l is 8 MiB\): start the container with --ulimit memlock=-1:-1",
        ),
        (
            GpuReport(GPU.devices, 13010, "", "13.0", True, "cuMemHostRegister: no"),
            Machine(4, 8, GIB, GIB, -1, wsl=True),
            r"sets no limit: raise memory= in %UserProfile%\\.wslconfig",
        ),
    ],
)
def test_each_fault_of_a_gpu_has_its_line(gpu: GpuReport, machine: Machine, words: str) -> None:
    found = diagnose(gpu, machine)
    assert len([line for line in found.to_fix if re.search(words, line)]) == 1
    assert all("\n" not in line for line in found.to_fix)


def test_a_low_limit_is_named_but_no_fault_without_a_gpu() -> None:
    found = diagnose(NO_GPU, Machine(1, 1, GIB, GIB, 65536, container=True))
    part = sections(found.text())["machine"]
    assert "page-lock limit (ulimit -l): 64 KiB" in part and "runs under a container" in part
    assert found.to_fix == []


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"ts-quant": "0.7.1"}, r"ts-quant 0.7.1 and ts-core .*pip install 'ts-quant==0\.8\.\*'"),
        ({"torch": "2.8.0+cpu"}, r"torch 2.8.0\+cpu is older than 2.9: .*'torch>=2.9'"),
        ({"torch": "2.10rc1", "ts-hf": "0.9.0a1"}, "ts-hf 0.9.0a1 and ts-core"),
        ({"torch": None}, "torch is not installed: .*'torch>=2.9'"),
    ],
)
def test_versions_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], words: str
) -> None:
    real = report_module._version
    monkeypatch.setattr(
        report_module,
        "_version",
        lambda name: versions[name] if name in versions else real(name),
    )
    found = diagnose(NO_GPU, MACHINE)
    assert len(found.to_fix) == 1 and re.search(words, found.to_fix[0])


def test_a_name_offered_twice_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dist:
        def __init__(self, name: str) -> None:
            self.name = name
            self.metadata = {"Name": name}

    entries = []
    for owner in ("package-a", "package-b"):
        entry = EntryPoint("nf9", f"{owner}:codec", "trainstream.codecs")
        entries.append(entry._for(Dist(owner)))  # type: ignore[attr-defined]

    def entry_points(group: str) -> EntryPoints:
        return EntryPoints(entries if group == "trainstream.codecs" else [])

    monkeypatch.setattr(report_module.metadata, "entry_points", entry_points)
    found = diagnose(NO_GPU, MACHINE)
    (line,) = found.to_fix
    assert "codec 'nf9' is offered by package-a, package-b" in line


def test_a_missing_triton_matters_with_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = report_module._version
    monkeypatch.setattr(
        report_module, "_version", lambda name: None if "triton" in name else real(name)
    )
    monkeypatch.setattr(report_module, "find_spec", lambda name: None)
    assert diagnose(NO_GPU, MACHINE).to_fix == []
    found = diagnose(GPU, MACHINE)
    assert found.to_fix == ["Triton is missing (slow kernels): python -m pip install triton"]


def test_rates_are_shown_when_measured_and_from_then_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ts_core.schedule import hardware

    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware, "_MIB", 1 << 12)
    assert "measured" not in sections(diagnose(NO_GPU, MACHINE).text())
    part = sections(diagnose(NO_GPU, MACHINE, measure=True).text())["measured"]
    assert re.search(r"host copy +\d+\.\d GB/s", part)
    assert re.search(r"host AdamW +\d+\.\d\d G parameters/s", part)
    assert "if other work ran then" in part and "trainstream doctor --measure" in part
    assert re.search(r"measured \d{4}-\d\d-\d\d \d\d:\d\d, kept in ", part)
    assert sections(diagnose(NO_GPU, MACHINE).text())["measured"] == part


def test_importing_initializes_nothing(run_python: Run) -> None:
    run_python(
        "import sys, ts_core.doctor\n"
        "assert 'torch' not in sys.modules and 'ts_core._host' not in sys.modules"
    )


@pytest.mark.parametrize("csrc", [False, True], ids=["installed", "checkout"])
def test_a_broken_core_is_reported_with_the_line_that_fixes_it(
    run_python: Run, tmp_path: Path, csrc: bool
) -> None:
    """A copy of the package whose compiled module is garbage, with no compiler in reach."""
    if csrc and not _native.is_source_checkout():
        pytest.skip("an installed wheel has no sources")
    package = tmp_path / "ts_core"
    ignore = shutil.ignore_patterns("_host.*", "__pycache__", *([] if csrc else ["csrc"]))
    shutil.copytree(Path(_native.__file__).resolve().parent, package, ignore=ignore)
    _build.extension_path(package).write_bytes(b"not a library")
    done = run_python(DOCTOR, status=1, PYTHONPATH=str(tmp_path), PATH="/nowhere", CXX=None)
    parts = sections(done.stdout)
    assert f"BROKEN: {_build.extension_path(package)}" in parts["native core"]
    fix = "apt-get install g++" if csrc else "pip install --force-reinstall --no-deps 'ts-core"
    assert parts["to fix"].count("native core: ") == 1 and fix in parts["to fix"]
    assert len(parts["to fix"].splitlines()) == 2
    assert "machine" in parts and "plug-ins" in parts  # the rest is still reported
    assert "Traceback" not in done.stderr


@pytest.fixture
def made_up_gpu(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    host = _native.load()
    host.use_driver_library(str(fake_driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    yield
    host.use_driver_library("")


def test_a_low_page_lock_limit_is_found_and_named(
    made_up_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that obeys RLIMIT_MEMLOCK, in a process that lowered its limit to 64 KiB."""
    resource = pytest.importorskip("resource", reason="no resource limits on this system")
    monkeypatch.setenv("FAKE_CUDA_OBEY_MEMLOCK", "1")
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, limits[1]))
    try:
        status = command.run(argparse.Namespace(measure=False))
        refused = sections(capsys.readouterr().out)
        monkeypatch.delenv("FAKE_CUDA_OBEY_MEMLOCK")
        diagnosis = diagnose()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    assert status == 1
    assert "page-lock limit (ulimit -l): 64 KiB" in refused["machine"]
    assert "Made-up GPU, 8.0 GiB" in refused["GPU"]
    assert "segments of torch's memory: stay as they are, since PYTORCH_CUDA" in refused["GPU"]
    reason = "page-locking 64 MiB was REFUSED: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"
    assert reason in refused["GPU"]
    assert "(ulimit -l is 64 KiB)" in refused["to fix"] and "memlock" in refused["to fix"]
    # A driver that locks memory in spite of the limit is no fault.
    assert "page-locking 64 MiB: works" in diagnosis.text()
    assert "memlock" not in diagnosis.text()


@pytest.mark.gpu
def test_a_real_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    found = diagnose(measure=True)
    print(found.text())
    parts = sections(found.text())
    properties = torch.cuda.get_device_properties(0)
    assert properties.name in parts["GPU"] and "sees it" in parts["GPU"]
    assert "segments of torch's memory: " in parts["GPU"]
    assert "page-locking 64 MiB: works" in parts["GPU"]
    for line in (r"host to device +\d+\.\d GB/s \(page-locked", r"device to host +\d+\.\d GB/s"):
        assert re.search(line, parts["measured"])
