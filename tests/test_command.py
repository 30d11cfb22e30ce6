"""The `trainstream` command itself."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys

import pytest

from trainstream import cli
from ts_core import registry

OWN_COMMANDS = ["bench", "doctor", "finetune", "plan", "report"]


def test_help_lists_own_commands_and_none_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for name in OWN_COMMANDS:
        assert f"\n    {name}" in printed
    assert "(broken)" not in printed


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"trainstream {name}" in capsys.readouterr().out


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_unknown_command_lists_the_installed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dance"]) == 2
    message = capsys.readouterr().err
    assert "'dance'" in message
    assert ", ".join(OWN_COMMANDS) in message
    assert cli.main(["finetun"]) == 2
    assert "Did you mean 'finetune'?" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "package"), sorted(cli.USUAL_PACKAGE.items()))
def test_own_command_that_is_not_installed_names_its_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = registry.Registry("trainstream.commands", lambda group: [])
    monkeypatch.setattr(registry, "commands", empty)
    assert cli.main([name]) == 2
    assert f"pip install '{package}>=0.8,<0.9'" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As in `trainstream doctor | head -1`."""
    program = (
        "import sys; from trainstream import cli\n"
        "cli._run = lambda arguments: print('first line') or 0\n"
        "sys.exit(cli.main([]))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.EXIT_BROKEN_PIPE, "")


def test_ctrl_c_that_comes_out_as_another_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes a ModuleNotFoundError of a KeyboardInterrupt in an import."""

    def load(*args: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import") from None

    monkeypatch.setattr(cli, "_build_parser", load)
    assert cli.main(["doctor"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "trainstream: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def fail(*args: object) -> None:
        raise ModuleNotFoundError("Could not import")

    monkeypatch.setattr(cli, "_build_parser", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["doctor"])


def test_what_the_machine_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(number: int) -> None:
        def load(*args: object) -> None:
            raise OSError(number, os.strerror(number), "here/file")

        monkeypatch.setattr(cli, "_build_parser", load)

    refuse(errno.ENOSPC)
    assert cli.main(["doctor"]) == cli.EXIT_ERROR
    told = capsys.readouterr().err
    assert told == "trainstream: error: here/file: No space left on device.\n"
    refuse(errno.EINVAL)
    with pytest.raises(OSError, match="here/file"):
        cli.main(["doctor"])


def test_without_ts_core_the_message_says_what_to_install() -> None:
    program = (
        "import sys, importlib.util; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'ts_core' else real(n, *a)\n"
        "from trainstream.cli import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "pip install 'ts-core>=0.8,<0.9'" in done.stderr


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainstream", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("trainstream 0.8.0 (ts-core 0.8.0")


WAITING = """
import os, sys
from trainstream import cli
cli._build_parser = lambda *args: print(os.environ.get("OMP_WAIT_POLICY")) or sys.exit(0)
if sys.argv[1] == "late":
    import types
    sys.modules["torch"] = types.ModuleType("torch")
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("when", "command", "environment", "wanted"),
    [
        ("early", "plan", {}, "PASSIVE"),
        ("early", "plan", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ("early", "plan", {"GOMP_SPINCOUNT": "7"}, "None"),
        ("early", "bench", {}, "None"),
        ("late", "plan", {}, "None"),
    ],
)
def test_threads_sleep_while_they_wait(
    when: str, command: str, environment: dict[str, str], wanted: str
) -> None:
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    others = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run(
        [sys.executable, "-c", WAITING, when, command],
        env={**others, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"{wanted}\n", done.stderr


def test_import_warnings_of_libraries_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*args: object) -> None:
        torchao = logging.getLogger("torchao")
        torchao.warning("Failed to load %s: no", "/site-packages/torchao/_C_cutlass_90a.abi3.so")
        torchao.warning("Failed to load the weights")
        logging.getLogger("torch.utils._pytree").warning(
            "%s is an Enum subclass. Calling register_constant() on Enum subclasses is deprecated",
            "KernelPreference",
        )
        sys.exit(0)

    monkeypatch.setattr(cli, "_build_parser", load)
    with pytest.raises(SystemExit):
        cli.main(["doctor"])
    assert caplog.messages == ["Failed to load the weights"]
    logging.getLogger("torchao").warning("Failed to load /torchao/_C: %s", "shown again")
    assert len(caplog.messages) == 2
