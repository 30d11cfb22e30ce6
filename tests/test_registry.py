"""Plug-ins: what is found, what is refused, and what the errors say."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from ts_core import errors, registry

GROUP = "trainstream.codecs"


def _registry(*entries: EntryPoint) -> registry.Registry:
    def find(group: str) -> Iterable[EntryPoint]:
        assert group == GROUP
        return entries

    return registry.Registry(GROUP, find)


def _entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=GROUP)


@pytest.fixture
def plugin_module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An importable module with good and bad plug-ins."""
    module = SimpleNamespace(
        GOOD=SimpleNamespace(API_VERSION=1, name="good"),
        FUTURE=SimpleNamespace(API_VERSION=2, name="future"),
        UNVERSIONED=SimpleNamespace(name="unversioned"),
    )
    monkeypatch.setitem(sys.modules, "plugin_module_of_test", module)  # type: ignore[misc]
    return module


def test_a_plugin_is_loaded_once_by_name(plugin_module: SimpleNamespace) -> None:
    found = _registry(_entry("good", "plugin_module_of_test:GOOD"))
    assert found.names() == ["good"]
    assert found.has("good")
    assert found.get("good") is plugin_module.GOOD
    plugin_module.GOOD = None
    assert found.get("good").name == "good"


def test_what_has_been_used_is_not_looked_for_again(plugin_module: SimpleNamespace) -> None:
    """Training asks before every micro-batch."""
    looks: list[str] = []

    def find(group: str) -> Iterable[EntryPoint]:
        looks.append(group)
        return [_entry("good", "plugin_module_of_test:GOOD")]

    found = registry.Registry(GROUP, find)
    assert found.has("good") and found.has("good") and len(looks) == 2
    found.get("good")
    looks.clear()
    assert found.has("good") and found.get("good") is plugin_module.GOOD and looks == []
    assert not found.has("other") and len(looks) == 1


def test_unknown_name_lists_installed_ones_and_the_install_line() -> None:
    found = _registry(_entry("nf4", "x:A"), _entry("int8", "x:B"))
    with pytest.raises(errors.UnknownPluginError) as caught:
        found.get("nf5")
    message = str(caught.value)
    assert "codec 'nf5'" in message
    assert "installed: int8, nf4" in message
    assert "Did you mean 'nf4'? If not, add the package" in message
    assert "pip install 'ts-quant>=0.8,<0.9'" in message
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("int4", "Did you mean 'nf4'?"),  # as many bits, though 'int8' is spelled more alike
        ("4bit", "Did you mean 'nf4'?"),
        ("load_in_4bit", "Did you mean 'nf4'?"),
        ("8-bit", "Did you mean 'int8'?"),
        ("fp4", "Did you mean 'nvfp4'?"),
        ("in8", "Did you mean 'int8'?"),
        ("int16", "Did you mean 'int8'?"),
        ("none8", "). Add the package"),
    ],
)
def test_the_name_suggested_for_an_unknown_one_is_of_as_many_bits(asked: str, hint: str) -> None:
    installed = ("fp8", "fp8_row", "int8", "mxfp4", "nf4", "nvfp4")
    found = _registry(*(_entry(name, "x:A") for name in installed))
    with pytest.raises(errors.UnknownPluginError) as caught:
        found.get(asked)
    assert hint in str(caught.value)


def test_unknown_name_with_nothing_installed_says_none() -> None:
    with pytest.raises(errors.UnknownPluginError, match=r"installed: none\)\. Add the package"):
        _registry().get("nf4")


def test_duplicate_is_refused_and_names_both(plugin_module: SimpleNamespace) -> None:
    found = _registry(
        _entry("nf4", "plugin_module_of_test:GOOD"), _entry("nf4", "plugin_module_of_test:FUTURE")
    )
    assert found.names() == ["nf4"]
    with pytest.raises(errors.DuplicatePluginError) as caught:
        found.get("nf4")
    assert "plugin_module_of_test:GOOD" in str(caught.value)
    assert "plugin_module_of_test:FUTURE" in str(caught.value)


@pytest.mark.parametrize(("attribute", "shown"), [("FUTURE", "2"), ("UNVERSIONED", "None")])
def test_wrong_api_version_is_refused(
    plugin_module: SimpleNamespace, attribute: str, shown: str
) -> None:
    found = _registry(_entry("nf4", f"plugin_module_of_test:{attribute}"))
    with pytest.raises(errors.PluginVersionError, match=f"API_VERSION {shown}.*works with 1"):
        found.get("nf4")


def test_broken_plugin_raises_only_for_those_who_use_it(plugin_module: SimpleNamespace) -> None:
    found = _registry(
        _entry("broken", "no_such_module_of_test:X"), _entry("good", "plugin_module_of_test:GOOD")
    )
    assert found.names() == ["broken", "good"]
    assert found.get("good") is plugin_module.GOOD
    with pytest.raises(errors.BrokenPluginError) as caught:
        found.get("broken")
    assert "no_such_module_of_test:X" in str(caught.value)
    assert "ModuleNotFoundError" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


THIRD_PARTY = """
class Shouting:
    API_VERSION = 1
    help = "say it loudly (100% of it)"

    def configure(self, parser):
        parser.add_argument("word")
        parser.add_argument("--fail", action="store_true")
        parser.add_argument("--interrupt", action="store_true")
        parser.add_argument("--status", type=int, default=0)

    def run(self, args):
        if args.interrupt:
            raise KeyboardInterrupt
        if args.fail:
            from ts_core.errors import OptionError
            raise OptionError("word: 'x' is not accepted. Use a longer one.")
        print(args.word.upper())
        return args.status


command = Shouting()
"""


@pytest.fixture
def third_party(tmp_path: Path) -> Path:
    """A package of somebody else, as an installer would leave it on disk."""
    (tmp_path / "shouting.py").write_text(THIRD_PARTY, encoding="utf-8")
    (tmp_path / "shouting_broken.py").write_text("raise RuntimeError('no licence')\n")
    info = tmp_path / "shouting-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.2\n")
    points = """
        [trainstream.commands]
        shout = shouting:command
        sulk = shouting_broken:command
        """
    (info / "entry_points.txt").write_text(textwrap.dedent(points))
    return tmp_path


def _trainstream(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -c instead of -m keeps the working folder out of sys.path.
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); "
        "from trainstream.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_third_party_command_runs(third_party: Path) -> None:
    done = _trainstream(third_party, "shout", "hello", "--status", "3")
    assert (done.returncode, done.stdout) == (3, "HELLO\n"), done.stderr


def test_third_party_command_is_listed_and_the_broken_one_marked(third_party: Path) -> None:
    done = _trainstream(third_party, "--help")
    assert done.returncode == 0, done.stderr
    listed = " ".join(done.stdout.split())
    assert "shout say it loudly (100% of it)" in listed
    assert "sulk (broken) the command 'sulk' of shouting (shouting_broken:command)" in listed
    assert "no licence" in listed


def test_broken_command_says_why_when_asked_for(third_party: Path) -> None:
    done = _trainstream(third_party, "sulk")
    assert done.returncode == 2
    assert done.stderr.startswith("trainstream: error: the command 'sulk' of shouting")
    assert "RuntimeError while being imported: no licence" in done.stderr
    assert "Traceback" not in done.stderr


def test_intended_error_is_one_plain_message(third_party: Path) -> None:
    done = _trainstream(third_party, "shout", "x", "--fail")
    assert done.returncode == 2
    expected = "trainstream: error: word: 'x' is not accepted. Use a longer one.\n"
    assert done.stderr == expected


def test_interrupt_is_status_130(third_party: Path) -> None:
    done = _trainstream(third_party, "shout", "x", "--interrupt")
    assert (done.returncode, done.stderr) == (130, "trainstream: interrupted\n")
