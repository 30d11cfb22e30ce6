"""The build script: what it rebuilds, what it refuses, and how it says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_core import _build, _native

pytestmark = pytest.mark.skipif(
    not _native.is_source_checkout(), reason="an installed wheel has no sources to build"
)
Run = Callable[..., "subprocess.CompletedProcess[str]"]
VERSION_CPP = """
#include "part.h"
extern "C" const char* marker() { return "TS_CORE_CSRC=" TS_CSRC_HASH; }
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with two small sources: building it takes a second, not a minute."""
    csrc = tmp_path / "proj/src/ts_core/csrc"
    csrc.mkdir(parents=True)
    (tmp_path / "proj/pyproject.toml").write_text("")
    (csrc / "version.cpp").write_text(VERSION_CPP)
    (csrc / "part.h").write_text("#pragma once\nint part();\n")
    (csrc / "part.cpp").write_text('#include "part.h"\nint part() { return 1; }\n')
    (csrc / "other.cpp").write_text("int other() { return 2; }\n")
    return csrc


def objects(csrc: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in _build.default_work_dir(csrc).glob("*.o")}


def test_only_what_changed_is_compiled(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "_host.test.so"
    output.parent.mkdir()
    assert _build.build(output, csrc=project) is True
    assert _build.built_hash(output) == _build.source_hash(project)
    first, inode = objects(project), output.stat().st_ino
    assert first.keys() == {"version.o", "part.o", "other.o"}

    assert _build.build(output, csrc=project) is False
    assert objects(project) == first and output.stat().st_ino == inode

    (project / "part.cpp").write_text('#include "part.h"\nint part() { return 3; }\n')
    assert not _build.is_current(output, project)
    assert _build.build(output, csrc=project) is True
    second = objects(project)
    assert second["part.o"] > first["part.o"] and second["version.o"] > first["version.o"]
    assert second["other.o"] == first["other.o"]

    # A header rebuilds those that include it.
    (project / "part.h").write_text("#pragma once\nint part();\n// more\n")
    _build.build(output, csrc=project)
    third = objects(project)
    assert third["part.o"] > second["part.o"] and third["other.o"] == first["other.o"]
    assert _build.is_current(output, project)
    assert [p.name for p in output.parent.iterdir()] == [output.name]  # nothing left aside


def test_a_deleted_or_broken_output_is_made_again(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "_host.test.so"
    _build.build(output, csrc=project)
    for content in (None, b"", b"not a library"):
        output.unlink()
        if content is not None:
            output.write_bytes(content)
        assert _build.built_hash(output) is None
        _build.build(output, csrc=project)
        assert _build.is_current(output, project)


def test_a_running_process_keeps_the_file_it_loaded(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "_host.test.so"
    _build.build(output, csrc=project)
    with open(output, "rb") as loaded:
        before = loaded.read()
        (project / "other.cpp").write_text("int other() { return 4; }\n")
        _build.build(output, csrc=project)
        loaded.seek(0)
        assert loaded.read() == before != output.read_bytes()


def test_builds_at_the_same_time_wait_for_each_other(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "_host.test.so"
    results: list[bool | BaseException] = []

    def work() -> None:
        try:
            results.append(_build.build(output, csrc=project))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["False", "False", "False", "True"]
    assert _build.is_current(output, project)


def test_a_lock_that_is_never_given_back_is_an_error(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_build, "LOCK_WAIT_S", 0.2)
    work = _build.default_work_dir(project)
    work.mkdir(parents=True)
    with (
        _build._lock(work / "lock"),
        pytest.raises(_build.BuildError, match="another process has been building"),
    ):
        _build.build(tmp_path / "out.so", csrc=project)


def test_a_compiler_error_is_shown(project: Path, tmp_path: Path) -> None:
    (project / "part.cpp").write_text("int part() { return nonsense; }\n")
    with pytest.raises(_build.BuildError, match=r"compiling the host core failed") as caught:
        _build.build(tmp_path / "out.so", csrc=project)
    assert "nonsense" in str(caught.value)
    assert not (tmp_path / "out.so").exists()


def test_each_missing_tool_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("pybind11", "ninja"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(_build.BuildError) as caught:
        _build.find_toolchain()
    for words in ("C++17 compiler (", "pip install ninja", "pip install 'pybind11>=2.13'"):
        assert words in str(caught.value)


def test_a_compiler_named_by_cxx_is_used_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(_build.BuildError, match="CXX names, 'no-such-compiler'"):
        _build.find_toolchain()
    monkeypatch.setenv("CXX", f"{shutil.which('g++') or 'c++'} -DNDEBUG")
    assert _build.find_toolchain().compiler[1:] == ("-DNDEBUG",)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no POSIX permissions")
def test_a_folder_that_cannot_be_written_is_said_in_words(project: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(_build.BuildError, match=r"cannot be written: .* or install ts-core"):
        _build.build(blocked / "out.so", csrc=project)


def test_flags_are_portable_and_never_relax_the_arithmetic() -> None:
    text = _build.ninja_file(_build.find_toolchain(), _build.CSRC_DIR, "out.so", [])
    assert "-march=native" not in text and "-ffast-math" not in text and "-Ofast" not in text
    assert "-static" not in text and "-Werror" not in text
    assert "-ffp-contract=off" in text


@pytest.mark.slow
def test_the_sources_compile_without_a_warning() -> None:
    """All but the two files of bindings, whose headers would take longer than the rest together."""
    toolchain = _build.find_toolchain()
    if toolchain.msvc:
        pytest.skip("flags of GCC and Clang")
    command = [*toolchain.compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wshadow", '-DTS_CSRC_HASH="x"']
    command += [word for path in toolchain.includes for word in ("-isystem", path)]
    for path in _build.sources():
        if path.suffix == ".cpp" and not path.name.startswith("bind"):
            flags = _build.file_flags(path.name, msvc=False)
            done = subprocess.run(
                [*command, *flags, str(path)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{path.name}\n{done.stderr}"


def test_kernel_objects_hold_no_function_the_linker_could_share() -> None:
    """Compiled for instructions a machine may lack, they must not lend functions to the rest."""
    work = _build.default_work_dir(_build.CSRC_DIR)
    for name in ("kernels_avx2.o", "kernels_avx512.o"):
        if not (work / name).exists():
            pytest.skip("the module was not built here")
        lines = subprocess.run(
            ["nm", "-C", str(work / name)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        shared = [line for line in lines if line[17:18] in "TWVu"]
        assert [line.split(" ", 2)[2] for line in shared] == [f"ts::{name[8:-2]}_kernels()"]
        assert not [line for line in lines if line[17:18] == "U" and "std::" in line]
