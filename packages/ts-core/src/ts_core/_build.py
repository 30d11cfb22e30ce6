"""Builds the host core `_host` from csrc/ with ninja: from the wheel hook, or in a source checkout.

    python -m ts_core._build [--force] [--verbose]     # in a checkout; builds next to this file

It needs a C++17 compiler, pybind11 and ninja. It imports nothing of ts_core, because the wheel
hook loads it by path before the package can be imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
CSRC_DIR = PACKAGE_DIR / "csrc"
MARKER = b"TS_CORE_CSRC="
LOCK_WAIT_S = 600.0

# Instructions beyond the target's baseline, for these files alone; the rest of the module runs on
# any machine of the architecture, and the level is chosen at run time.
_X86_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cpp": ["-mavx2", "-mfma", "-mf16c", "-mavx512f"],
}
_MSVC_X86_FLAGS = {"kernels_avx2.cpp": ["/arch:AVX2"], "kernels_avx512.cpp": ["/arch:AVX512"]}
# No fused multiply-add of the compiler's choice: every SIMD level must give the same bits.
_GNU_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno",
]  # fmt: skip
_MSVC_FLAGS = ["/std:c++17", "/O2", "/EHsc", "/fp:precise", "/nologo", "/W3", "/MD"]


class BuildError(RuntimeError):
    """The host core cannot be built; the message names what is missing and how to add it."""


@dataclass(frozen=True)
class Toolchain:
    """What a build uses: a compiler (with leading words), ninja, and the include directories."""

    compiler: tuple[str, ...]
    ninja: str
    includes: tuple[str, ...]
    msvc: bool


def extension_path(package_dir: Path = PACKAGE_DIR) -> Path:
    """Where this Python looks for the built module: one file per Python version and platform."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return package_dir / f"_host{suffix}"


def sources(csrc: Path = CSRC_DIR) -> list[Path]:
    """The files the module is built from, headers included, in a fixed order."""
    return sorted(p for p in csrc.iterdir() if p.suffix in {".cpp", ".h"})


def source_hash(csrc: Path = CSRC_DIR) -> str:
    """A hash of the sources and of the flags, compiled into the module to tell when it is stale."""
    digest = hashlib.sha256()
    for path in sources(csrc):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_GNU_FLAGS, _MSVC_FLAGS, _X86_FLAGS, _MSVC_X86_FLAGS)).encode())
    return digest.hexdigest()[:32]


def built_hash(extension: Path) -> str | None:
    """The source hash inside a built module, read without importing it; None if there is none."""
    try:
        with (
            open(extension, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            at = data.find(MARKER)
            if at < 0:
                return None
            start = at + len(MARKER)
            text = bytes(data[start : start + 32])
    except (OSError, ValueError):  # no such file, or an empty one
        return None
    return text.decode("ascii", "replace")


def is_current(extension: Path, csrc: Path = CSRC_DIR) -> bool:
    """Whether `extension` was built from the sources as they are now."""
    return built_hash(extension) == source_hash(csrc)


def find_toolchain() -> Toolchain:
    """The compiler, ninja and headers to build with.

    Raises:
        BuildError: something is missing; the message names each thing and the line that adds it.
    """
    missing = []
    msvc = os.name == "nt"
    compiler: tuple[str, ...] = ()
    named = os.environ.get("CXX")
    if named:
        compiler = tuple(shlex.split(named, posix=not msvc))
        if shutil.which(compiler[0]) is None:
            missing.append(
                f"the compiler that CXX names, {compiler[0]!r} (unset CXX or correct it)"
            )
    else:
        for candidate in ["cl"] if msvc else ["g++", "c++", "clang++"]:
            if shutil.which(candidate) is not None:
                compiler = (candidate,)
                break
        else:
            missing.append(_compiler_hint())
    ninja = _find_ninja()
    if ninja is None:
        missing.append("ninja (python -m pip install ninja)")
    includes = []
    try:
        import pybind11

        includes.append(pybind11.get_include())
    except ImportError:
        missing.append("pybind11 (python -m pip install 'pybind11>=2.13')")
    python_include = sysconfig.get_path("include")
    if not Path(python_include, "Python.h").is_file():
        missing.append(
            f"Python's headers, Python.h in {python_include} "
            f"(Debian/Ubuntu: apt-get install python3-dev)"
        )
    if missing or ninja is None:
        raise BuildError(
            "the host core cannot be built here; missing: "
            + "; ".join(missing)
            + ". A built wheel of ts-core needs none of these."
        )
    includes.append(python_include)
    return Toolchain(compiler, ninja, tuple(includes), msvc)


def _compiler_hint() -> str:
    if sys.platform == "darwin":
        return "a C++17 compiler (xcode-select --install)"
    if os.name == "nt":
        return "the MSVC compiler cl on PATH (run from a 'x64 Native Tools' prompt)"
    return "a C++17 compiler (Debian/Ubuntu: apt-get install g++)"


def _find_ninja() -> str | None:
    try:
        import ninja
    except ImportError:
        return shutil.which("ninja")
    binary = Path(ninja.BIN_DIR, "ninja.exe" if os.name == "nt" else "ninja")
    return str(binary) if binary.is_file() else shutil.which("ninja")


def ninja_file(toolchain: Toolchain, csrc: Path, target: str, extra_flags: Sequence[str]) -> str:
    """The text of a build.ninja that compiles csrc's .cpp files into `target`."""
    define = f'{"/D" if toolchain.msvc else "-D"}TS_CSRC_HASH="{source_hash(csrc)}"'
    flags = [*(_MSVC_FLAGS if toolchain.msvc else _GNU_FLAGS), *extra_flags]
    compiler = _command(toolchain.compiler)
    lines = ["ninja_required_version = 1.8", f"flags = {_command(flags)}"]
    if toolchain.msvc:
        includes = [f"/I{path}" for path in toolchain.includes]
        libs = Path(sys.base_prefix, "libs")
        compile_line = f"{compiler} /showIncludes $flags $more {_command(includes)} /c $in /Fo$out"
        link_line = f"{compiler} /nologo /LD $in /Fe$out /link /LIBPATH:{_command([str(libs)])}"
        dependencies = ["  deps = msvc"]
    else:
        includes = [word for path in toolchain.includes for word in ("-isystem", path)]
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        shared = shared or ["-shared", "-pthread", "-ldl"]
        compile_line = (
            f"{compiler} -MMD -MF $out.d $flags $more {_command(includes)} -c $in -o $out"
        )
        link_line = f"{compiler} $in {_command(shared)} -o $out"
        dependencies = ["  depfile = $out.d", "  deps = gcc"]
    lines += ["rule compile", f"  command = {compile_line}", "  description = $in", *dependencies]
    lines += ["rule link", f"  command = {link_line}", "  description = $out"]
    objects = []
    for path in sources(csrc):
        if path.suffix != ".cpp":
            continue
        objects.append(f"{path.stem}.o")
        lines.append(f"build {path.stem}.o: compile {_path(str(path))}")
        more = file_flags(path.name, msvc=toolchain.msvc)
        if path.name == "version.cpp":
            more.append(define)
        if more:
            lines.append(f"  more = {_command(more)}")
    lines += [f"build {_path(target)}: link {' '.join(objects)}", f"default {_path(target)}", ""]
    return "\n".join(lines)


def file_flags(name: str, *, msvc: bool) -> list[str]:
    """Flags beyond the common ones for one source file, on this architecture."""
    x86 = platform.machine().lower() in {"x86_64", "amd64", "x64"}
    return list((_MSVC_X86_FLAGS if msvc else _X86_FLAGS).get(name, [])) if x86 else []


def _command(words: Sequence[str]) -> str:
    joined = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    return joined.replace("$", "$$")


def _path(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def build(
    output: Path,
    *,
    csrc: Path = CSRC_DIR,
    work_dir: Path | None = None,
    extra_flags: Sequence[str] = (),
    verbose: bool = False,
) -> bool:
    """Builds csrc into `output`, recompiling only what changed since the last build there.

    Args:
        output: the file to write; replaced by renaming, so that a running process keeps its copy.
        csrc: the source folder.
        work_dir: where objects are kept between builds; default: `default_work_dir(csrc)`.
        extra_flags: appended to the compiler's flags (for checks such as -Werror).
        verbose: print the commands and their output.

    Returns:
        Whether anything was compiled or linked.

    Raises:
        BuildError: a tool is missing, the compiler fails (its output is in the message), or the
            folder cannot be written.
    """
    toolchain = find_toolchain()
    work = work_dir or default_work_dir(csrc)
    target = f"_host-{output.name}"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _lock(work / "lock"):
            _write_if_changed(
                work / "build.ninja", ninja_file(toolchain, csrc, target, extra_flags)
            )
            before = _stamp(work / target)
            _run_ninja(toolchain, work, verbose)
            built = work / target
            compiled = _stamp(built) != before
            if compiled or not output.exists() or not is_current(output, csrc):
                aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
                try:
                    shutil.copy2(built, aside)
                    os.replace(aside, output)
                finally:
                    aside.unlink(missing_ok=True)
            return compiled
    except OSError as error:
        raise BuildError(
            f"the host core cannot be written: {error}. Make {output.parent} and {work} writable, "
            f"or install ts-core from a wheel."
        ) from error


def build_in_place(*, verbose: bool = False, force: bool = False) -> Path:
    """Brings the module next to this file up to date with csrc/ and returns its path."""
    output = extension_path()
    if force or not is_current(output):
        build(output, verbose=verbose)
    return output


def default_work_dir(csrc: Path) -> Path:
    """packages/ts-core/build/<platform> in a checkout, else a folder of the user's cache."""
    name = f"native-{sysconfig.get_config_var('SOABI') or sys.implementation.cache_tag}"
    project = csrc.parent.parent.parent
    if (project / "pyproject.toml").is_file():
        return project / "build" / name
    cache = os.environ.get("TRAINSTREAM_CACHE_DIR") or Path.home() / ".cache" / "trainstream"
    place = hashlib.sha256(str(csrc).encode()).hexdigest()[:12]
    return Path(cache) / "build" / f"{name}-{place}"


def _run_ninja(toolchain: Toolchain, work: Path, verbose: bool) -> None:
    command = [toolchain.ninja, "-C", str(work), *(["-v"] if verbose else [])]
    if verbose:
        print(f"building the host core: {shlex.join(command)}", flush=True)
    done = subprocess.run(
        command,
        stdout=None if verbose else subprocess.PIPE,
        stderr=None if verbose else subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        output = (done.stdout or "the output is above").strip()
        raise BuildError(
            f"compiling the host core failed with {shlex.join(toolchain.compiler)} "
            f"(a C++17 compiler is needed, such as g++ 9 or later):\n{output[-4000:]}"
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, so that processes build one after the other."""
    with open(path, "a+b") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise BuildError(
                    f"another process has been building the host core for {LOCK_WAIT_S:.0f} s "
                    f"(it holds {path}). End it, then try again."
                )
            time.sleep(0.1)
        yield  # closing the file gives the lock back


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def main(arguments: Sequence[str]) -> int:
    """Builds in place; `--force` even if nothing changed, `--verbose` to see the commands."""
    unknown = [word for word in arguments if word not in {"--force", "--verbose"}]
    if unknown:
        print(f"unknown argument {unknown[0]!r}; use --force, --verbose", file=sys.stderr)
        return 2
    try:
        path = build_in_place(verbose="--verbose" in arguments, force="--force" in arguments)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
