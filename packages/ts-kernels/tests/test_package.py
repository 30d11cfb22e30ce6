"""The package as others meet it: importing, plug-ins, and a downstream package of five lines."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import ts_kernels
from ts_kernels import plugins

# Makes these modules look as if they were not installed.
BLOCKER = "import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"

TRAIN = """
import torch, ts_kernels
x = torch.randn(2, 5, 8, requires_grad=True)
h = ts_kernels.rms_norm(x, torch.ones(8), 1e-6)
ts_kernels.causal_lm_loss(h, torch.randn(11, 8), torch.randint(0, 11, (2, 5))).backward()
assert x.grad.isfinite().all()
"""

SIBLINGS = ("ts_core", "ts_quant", "ts_hf", "ts_bench", "trainstream")


def run_python(code, blocked=(), path=()):
    source = str(Path(ts_kernels.__file__).parents[1])
    code = BLOCKER.format(blocked=tuple(blocked)) + code
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), source])},
    )


def test_importing_initializes_no_cuda_and_imports_no_triton_kernel():
    done = run_python(
        "import ts_kernels, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not any(name.startswith('ts_kernels.triton_kernels') for name in sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


def test_works_without_triton_and_without_siblings():
    done = run_python(TRAIN, blocked=("triton", *SIBLINGS))
    assert done.returncode == 0, done.stderr


DOWNSTREAM = '''
"""A language model of five lines, on nothing but torch and ts_kernels."""

import torch
from ts_kernels import causal_lm_loss, rms_norm

embed = torch.nn.Parameter(torch.randn(32, 16))
scale = torch.nn.Parameter(torch.ones(16))

def train(tokens, steps, lr=0.5):
    losses = []
    for _ in range(steps):
        hidden = rms_norm(embed[tokens], scale, 1e-6)
        loss = causal_lm_loss(hidden, embed, tokens)
        gradients = torch.autograd.grad(loss, (embed, scale))
        with torch.no_grad():
            for parameter, gradient in zip((embed, scale), gradients):
                parameter -= lr * gradient
        losses.append(loss.item())
    return losses
'''


def test_a_downstream_package_trains(tmp_path):
    package = tmp_path / "downstream"
    package.mkdir()
    (package / "__init__.py").write_text(DOWNSTREAM)
    done = run_python(
        "import torch; torch.manual_seed(0)\n"
        "import downstream\n"
        "losses = downstream.train(torch.arange(32).reshape(2, 16), steps=30)\n"
        "assert losses[-1] < 0.5 * losses[0], losses\n"
        f"assert not any(map(sys.modules.get, {SIBLINGS!r}))\n",
        blocked=SIBLINGS,
        path=[tmp_path],
    )
    assert done.returncode == 0, done.stderr


def readme_examples():
    readme = Path(__file__).parents[1] / "README.md"
    return re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_examples_run():
    examples = readme_examples()
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_the_example_of_another_library_needs_nothing_else():
    (example,) = (text for text in readme_examples() if "class Block" in text)
    done = run_python(example, blocked=("triton", "transformers", "peft", *SIBLINGS))
    assert done.returncode == 0, done.stderr


def test_all_lists_what_is_public():
    public = {
        name
        for name, value in vars(ts_kernels).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | {"reference", "__version__"} == set(ts_kernels.__all__)


KERNELS = (
    plugins.RMS_NORM,
    plugins.ADD_RMS_NORM,
    plugins.ROTARY,
    plugins.GATED_MLP,
    plugins.LORA_LINEAR,
    plugins.CHUNKED_CROSS_ENTROPY,
    plugins.SEQUENCE_LOGPROBS,
    plugins.DPO_LOSS,
)
PATCHES = (plugins.PATCH_BLOCKS, plugins.PATCH_LORA)


def test_plugins_carry_the_interface():
    for plugin in (*KERNELS, *PATCHES):
        assert plugin.API_VERSION == 1
        assert plugin.fn is getattr(ts_kernels, plugin.name)
    for plugin in KERNELS:
        assert inspect.signature(plugin.fn) == inspect.signature(plugin.reference)


def test_entry_points_load():
    found = {
        entry.name: entry.load()
        for entry in entry_points(group="trainstream.kernels")
        if entry.value.startswith("ts_kernels.")
    }
    assert found == {plugin.name: plugin for plugin in (*KERNELS, *PATCHES)}


def test_doctests():
    import doctest

    from ts_kernels import (
        _add_rms_norm,
        _cross_entropy,
        _gated_mlp,
        _lora_linear,
        _rms_norm,
        _rotary,
    )
    from ts_kernels.patching import _blocks

    modules = (_add_rms_norm, _cross_entropy, _gated_mlp, _lora_linear, _rms_norm, _rotary)
    for module in (*modules, _blocks):
        results = doctest.testmod(module, extraglobs={"torch": __import__("torch")})
        assert results.attempted and not results.failed
