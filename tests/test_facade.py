"""`import trainstream`: what it offers, and what it must not do."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import trainstream

ALIASES = {
    "trainstream.integrations.huggingface": "ts_hf",
    "trainstream.quant": "ts_quant",
    "trainstream.fused": "ts_kernels",
    "trainstream.disk": "ts_core.disk",
    "trainstream.experts": "ts_hf.experts",
    "trainstream.packing": "ts_hf.packing",
}


def _in_fresh_process(program: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_name_in_all_exists_and_is_the_original() -> None:
    for name in trainstream.__all__:
        value = getattr(trainstream, name)
        if name in trainstream._HOME:
            home = importlib.import_module(trainstream._HOME[name])
            assert value is getattr(home, name), name


def test_all_is_what_is_exported() -> None:
    """Nothing public besides `__all__`, and `import *` gives exactly that."""
    space: dict[str, object] = {}
    exec("from trainstream import *", space)
    del space["__builtins__"]
    assert sorted(space) == trainstream.__all__
    own = {
        name
        for name, value in vars(trainstream).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert own - set(trainstream.__all__) <= {"TYPE_CHECKING", "Any", "annotations", "load"}


def test_names_for_type_checkers_are_the_real_table() -> None:
    source = importlib.util.find_spec("trainstream")
    assert source is not None
    assert source.origin is not None
    with open(source.origin, encoding="utf-8") as file:
        lines = file.read().splitlines()
    typed = {line.split()[3]: line.split()[1] for line in lines if line.startswith("    from ts_")}
    assert typed == trainstream._HOME


def test_names_are_part_of_the_package_they_come_from() -> None:
    for name, home in trainstream._HOME.items():
        module = importlib.import_module(home)
        if hasattr(module, "__all__"):
            assert name in module.__all__, f"{home}.__all__ lacks {name}"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'warp'"):
        _ = trainstream.warp  # type: ignore[attr-defined]


def test_missing_package_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ts_hf" else real(name, *a)
    )
    monkeypatch.delitem(vars(trainstream), "load_model", raising=False)
    with pytest.raises(ImportError, match=r"trainstream\.load_model comes from ts-hf") as caught:
        _ = trainstream.load_model
    assert "pip install 'ts-hf>=0.8,<0.9'" in str(caught.value)


@pytest.mark.parametrize(("alias", "target"), sorted(ALIASES.items()))
def test_alias_modules_show_the_package(alias: str, target: str) -> None:
    shown, real = importlib.import_module(alias), importlib.import_module(target)
    assert dir(shown) == sorted(real.__all__)
    for name in real.__all__:
        assert getattr(shown, name) is getattr(real, name)
    with pytest.raises(AttributeError, match=f"shows '{target}'"):
        _ = shown.no_such_name


def test_import_loads_nothing_heavy_and_touches_no_gpu() -> None:
    found = _in_fresh_process(
        "import sys, json, time; before = time.perf_counter(); import trainstream\n"
        "import trainstream.integrations.huggingface, trainstream.quant, trainstream.fused\n"
        "heavy = [m for m in ('torch', 'transformers', 'peft', 'triton', 'matplotlib') "
        "if m in sys.modules]\n"
        "print(json.dumps({'heavy': heavy}))"
    )
    assert found == {"heavy": []}


def test_using_the_core_initializes_no_cuda_and_loads_no_transformers() -> None:
    found = _in_fresh_process(
        "import sys, json, trainstream; trainstream.wrap; trainstream.OffloadAdamW\n"
        "import torch\n"
        "print(json.dumps({'cuda': torch.cuda.is_initialized(), "
        "'transformers': 'transformers' in sys.modules}))"
    )
    assert found == {"cuda": False, "transformers": False}
