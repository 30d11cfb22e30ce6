"""The `trainstream` command, assembled from the commands of the installed packages.

A command is an entry point of the group `trainstream.commands`: an object with `API_VERSION`,
`help`, `configure(parser)` and `run(args) -> exit status` (docs/decisions/commands.md).
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import trainstream
from trainstream._lazy import load
from trainstream._quiet import without_import_warnings
from trainstream._threads import wait_asleep

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as the shell reports a program that SIGPIPE ended
# What the machine refuses, and no fault of the program: told without a traceback.
_OF_THE_MACHINE = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "ENAMETOOLONG")
    if hasattr(errno, name)
}
# Where trainstream's own commands live, for the hint when one is not installed.
USUAL_PACKAGE = {
    "bench": "ts-bench",
    "doctor": "ts-core",
    "finetune": "ts-hf",
    "plan": "ts-core",
    "report": "ts-bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes them from `sys.argv`.

    Returns:
        The exit status: the command's own, 2 for an error that trainstream raised on purpose
        (printed as one plain message) or that files could not be written or read, 130 after
        Ctrl-C, 141 when the reader of the output went away (`trainstream ... | head`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run_interruptibly(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a reader that has gone can be answered
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE


def _run_interruptibly(arguments: list[str]) -> int:
    """`_run`, ended by Ctrl-C whatever the interrupted code makes of it.

    transformers answers an interrupted import of its modules with a ModuleNotFoundError.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        with without_import_warnings():
            return _run(arguments)
    except KeyboardInterrupt:
        pass
    except Exception:
        if not noted:
            raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    print("trainstream: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    if _asked(arguments) != "bench":  # measured with what scripts have by default
        wait_asleep()
    try:
        errors = load("ts_core.errors", "the trainstream command")
        registry = load("ts_core.registry", "the trainstream command").commands
    except ImportError as error:
        return _fail(str(error))
    try:
        parser = _build_parser(registry, errors, arguments)
        args = parser.parse_args(arguments)
        run = getattr(args, "_run", None)
        if run is None:
            parser.print_help()
            return 0
        return int(run(args))
    except errors.TrainStreamError as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"{place}{error.strerror}.")


def _build_parser(registry: Any, errors: Any, arguments: list[str]) -> argparse.ArgumentParser:
    """A parser with the commands that this call needs.

    Only the command that was asked for is imported; all of them when none was. A command whose
    package is broken is listed as such, and raises when it is asked for.
    """
    parser = argparse.ArgumentParser(
        prog="trainstream",
        description="Fine-tune and train models larger than the GPU's memory.",
    )
    parser.add_argument("--version", action="version", version=f"trainstream {_versions()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    asked = _asked(arguments)
    if asked is None:
        for name in registry.names():
            subparsers.add_parser(name, help=_escape(_help(registry, name)))
        return parser
    if asked in USUAL_PACKAGE and not registry.has(asked):
        package = USUAL_PACKAGE[asked]
        raise errors.UnknownPluginError(
            f"the command {asked!r} comes from {package}, which is not installed. "
            f"Add it: pip install '{package}>=0.8,<0.9'"
        )
    if not registry.has(asked):
        near = difflib.get_close_matches(asked, registry.names(), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise errors.UnknownPluginError(
            f"there is no command {asked!r} (installed: {', '.join(registry.names())}).{hint}"
        )
    command = registry.get(asked)
    chosen = subparsers.add_parser(asked, help=command.help, description=command.help)
    command.configure(chosen)
    chosen.set_defaults(_run=command.run)
    return parser


def _asked(arguments: list[str]) -> str | None:
    """The name of the command."""
    return next((word for word in arguments if not word.startswith("-")), None)


def _help(registry: Any, name: str) -> str:
    """A command's line in the list. One broken package must not take the list down with it."""
    try:
        return str(registry.get(name).help)
    except Exception as error:
        return f"(broken) {error}"


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("ts-core", "ts-quant", "ts-kernels", "ts-hf", "ts-bench"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return f"{trainstream.__version__} ({', '.join(found)})"


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _discard_output() -> None:
    """What is still buffered for a reader that has gone would raise again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def _fail(message: str) -> int:
    print(f"trainstream: error: {message}", file=sys.stderr)
    return EXIT_ERROR
