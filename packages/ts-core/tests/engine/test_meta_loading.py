"""wrap(loader=...): a model on the meta device trains as one whose values were there before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW, memory_report, unwrap, wrap
from ts_core.errors import DataError, OptionError, OutOfBudgetError
from ts_core.registry import codecs
from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions
from ts_core.schedule.planner import evaluate
from ts_core.store.leaves import is_wrapper
from ts_core.testing import TinyModel, tiny_model, train

needs_codecs = pytest.mark.skipif(not codecs.has("nf4"), reason="ts-quant is not installed")
HOST: dict[str, Any] = {"device": "host", "quantize": "none"}


def empty(like: TinyModel) -> TinyModel:
    """The same model without values."""
    width, depth = like.embed.weight.shape[1], len(like.layers)
    with torch.device("meta"):
        model = TinyModel(depth, width, dropout=like.layers[0].dropout.p)
    for (_, made), (_, given) in zip(
        model.named_parameters(), like.named_parameters(), strict=True
    ):
        made.requires_grad_(given.requires_grad)
    return model


class Loader:
    """Hands out copies, and watches how many of them are alive at once."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self.names: list[str] = []
        self.most_alive = 0
        self._given: list[weakref.ref[Any]] = []

    def __call__(self, name: str) -> torch.Tensor:
        self.names.append(name)
        self._given = [r for r in self._given if r() is not None]
        self.most_alive = max(self.most_alive, len(self._given) + 1)
        found = self.values[name].clone()
        self._given.append(weakref.ref(found.untyped_storage()))
        return found


OPTIONS: dict[str, dict[str, Any]] = {
    "resident": {"param_offload": False},
    "all paged": {"param_offload": True},
    "some paged": {"param_offload": [1, 3], "prefetch_depth": 2},
    "recomputed": {"param_offload": True, "recompute": True, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_trains_as_a_model_that_was_loaded_before(name: str, full: bool) -> None:
    model = tiny_model(4, 32, dropout=0.1, full=full)
    made = empty(model)
    loader = Loader(model)
    params = dict(made.named_parameters())
    expected = train(*wrap(model, lr=1e-2, **HOST, **OPTIONS[name]), 4)
    wrapped, optimizer = wrap(made, lr=1e-2, loader=loader, **HOST, **OPTIONS[name])
    assert wrapped is made
    assert dict(made.named_parameters()).keys() == params.keys()
    assert all(p is params[n] for n, p in made.named_parameters())  # the same objects
    assert train(wrapped, optimizer, 4).differences(expected) == []
    assert sorted(loader.names) == sorted(params)  # once each, the tied one too
    assert loader.most_alive == 1
    unwrap(made)
    unwrap(model)
    other = model.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in made.state_dict().items())


def test_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ts_core.store.placing.within", lambda *_: [])  # none fits the budget
    options = {**HOST, "param_offload": True, "disk_offload": str(tmp_path)}
    model = tiny_model(4, 32)
    made, loader = empty(model), Loader(model)
    expected = train(*wrap(model, lr=1e-2, **options), 3)
    wrapped, optimizer = wrap(made, lr=1e-2, loader=loader, **options)
    assert memory_report(wrapped)["params"]["disk_blocks"] == [0, 1, 2, 3]
    assert loader.most_alive == 1
    assert train(wrapped, optimizer, 3).differences(expected) == []
    unwrap(made)
    unwrap(model)


@needs_codecs
@pytest.mark.parametrize("extra", [{}, {"error_rank": 4}, {"keep_precise": 0.2}])
def test_stored_while_it_is_read(extra: dict[str, Any]) -> None:
    options = {"device": "host", "quantize": "nf4", "param_offload": [0, 2], **extra}
    model = tiny_model(3, 64)
    made, loader = empty(model), Loader(model)
    expected = train(*wrap(model, lr=1e-2, **options), 3)
    wrapped, optimizer = wrap(made, lr=1e-2, loader=loader, **options)
    assert any(is_wrapper(p) for p in wrapped.parameters())
    assert loader.most_alive == 1
    assert train(wrapped, optimizer, 3).differences(expected) == []


def test_an_optimizer_made_before_has_the_values() -> None:
    model = tiny_model(3, 32)
    made, loader = empty(model), Loader(model)

    def adamw(of: nn.Module) -> torch.optim.AdamW:
        slow = [p for n, p in of.named_parameters() if p.requires_grad and "lora_a" in n]
        fast = [p for n, p in of.named_parameters() if p.requires_grad and "lora_b" in n]
        return torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-2}])

    expected = train(*wrap(model, adamw(model), **HOST), 3)
    found = train(*wrap(made, adamw(made), loader=loader, **HOST), 3)
    assert found.differences(expected) == []


def test_training_does_not_write_into_the_callers_tensors() -> None:
    model = tiny_model(3, 32, full=True)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    before = {name: value.clone() for name, value in state.items()}
    made = empty(model)
    wrapped, optimizer = wrap(made, lr=1e-1, loader=state.__getitem__, **HOST)
    train(wrapped, optimizer, 2)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    assert not torch.equal(wrapped.norm.weight, before["norm.weight"])


def test_values_are_cast_and_made_contiguous() -> None:
    model = tiny_model(3, 32, dtype=torch.bfloat16)
    made = empty(model).to(torch.bfloat16)
    wide = {
        n: v.double().t().contiguous().t() if v.dim() == 2 else v.double()
        for n, v in model.state_dict().items()
    }
    expected = train(*wrap(model, lr=1e-2, **HOST), 2)
    found = train(*wrap(made, lr=1e-2, loader=wide.__getitem__, **HOST), 2)
    assert found.differences(expected) == []
    assert all(p.is_contiguous() for p in made.parameters())


class Buffered(nn.Module):
    """Two modules with one buffer, which is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        steps = torch.arange(4, dtype=torch.int64)
        for layer in self.layers:
            layer.register_buffer("steps", steps, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + layer.steps
        return x


def test_buffers() -> None:
    torch.manual_seed(0)
    model = Buffered()
    with torch.device("meta"):
        made = Buffered()
    values = {**model.state_dict(), "layers.0.steps": torch.arange(4)}
    wrap(made, lr=1e-2, loader=values.__getitem__, **HOST)
    assert made.layers[0].steps is made.layers[1].steps
    assert torch.equal(made(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_only_a_part_on_the_meta_device() -> None:
    model = tiny_model(3, 32)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.layers[1].up.to("meta")
    asked = []

    def load(name: str) -> torch.Tensor:
        asked.append(name)
        return expected[name]

    wrap(model, lr=1e-2, loader=load, **HOST)
    assert sorted(asked) == ["layers.1.up.bias", "layers.1.up.weight"]
    assert all(torch.equal(v, expected[n]) for n, v in model.state_dict().items())


def test_nothing_on_the_meta_device_is_said() -> None:
    model, _ = wrap(tiny_model(), lr=1e-2, loader=lambda name: 1 / 0, **HOST)
    assert any("loader: nothing to do" in event for event in memory_report(model)["events"])


def test_without_a_loader_the_remedy_is_named() -> None:
    with pytest.raises(OptionError, match=r"embed.weight.*loader=.*load_model\("):
        wrap(empty(tiny_model()), **HOST)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda good, name: {}[name], r"'layers\.2.*'\) has no values"),
        (lambda good, name: good[:1], "where the model has"),
        (lambda good, name: good.long(), "int64 values, where the model has torch.float32"),
        (lambda good, name: good.to("meta"), "meta device"),
        (lambda good, name: good.tolist(), "returned a list"),
    ],
)
def test_bad_values_are_named(broken: Callable[[torch.Tensor, str], Any], says: str) -> None:
    model = tiny_model(3, 32)
    values, made = model.state_dict(), empty(model)

    def load(name: str) -> Any:
        good = values[name]
        return broken(good, name) if name == "layers.2.down.weight" else good

    with pytest.raises(DataError, match=says) as caught:
        wrap(made, loader=load, param_offload=True, **HOST)
    assert "layers.2.down.weight" in str(caught.value)
    assert not hasattr(made, "_trainstream_session")


def test_a_loader_that_is_no_function() -> None:
    with pytest.raises(OptionError, match=r"loader='weights\.bin'"):
        wrap(tiny_model(), loader="weights.bin")


def test_a_refused_run_reads_nothing_and_can_be_wrapped_again() -> None:
    model = tiny_model(4, 64)
    made, loader = empty(model), Loader(model)
    with pytest.raises(OutOfBudgetError):
        wrap(made, vram_limit=1000, param_offload=False, loader=loader, **HOST)
    assert loader.names == [] and all(p.is_meta for p in made.parameters())
    assert not any("_trainstream_load" in p.__dict__ for p in made.parameters())
    expected = train(*wrap(model, lr=1e-2, **HOST), 2)
    assert train(*wrap(made, lr=1e-2, loader=loader, **HOST), 2).differences(expected) == []


def test_parameters_that_cannot_change_inside() -> None:
    made = empty(tiny_model())
    optimizer = OffloadAdamW([p for p in made.parameters() if p.requires_grad])
    with pytest.raises(OptionError, match="belongs to an OffloadAdamW already"):
        wrap(made, optimizer, loader=lambda name: 1 / 0, **HOST)
    made = empty(tiny_model())
    made.norm.weight.requires_grad_()
    made.norm.weight.register_hook(lambda grad: grad)
    with pytest.raises(OptionError, match=r"norm\.weight is on the meta device and has hooks"):
        wrap(made, loader=lambda name: 1 / 0, **HOST)
    made = empty(tiny_model())
    watch = weakref.ref(made.norm.weight)
    with pytest.raises(OptionError, match="weak references"):
        wrap(made, loader=lambda name: 1 / 0, **HOST)
    assert watch() is made.norm.weight


@pytest.mark.parametrize("paged", [False, True])
def test_the_plan_counts_what_is_to_be_loaded_where_there_is_one_memory(paged: bool) -> None:
    """On the host device all weights come to lie in host memory, paged or not."""
    model = ModelProfile(pageable=(100, 100), fixed_device=50, host_state=30, to_load=250)
    options = PlanOptions(param_offload=paged)
    for available, fits in ((280, True), (279, False)):
        machine = MachineProfile(None, host_available=available, counts_fixed=False)
        plan = evaluate(model, machine, options)
        assert plan.fits is fits and plan.host["total"] == 280
    apart = MachineProfile(None, host_available=230 if paged else 30, counts_fixed=True)
    assert evaluate(model, apart, options).fits


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, [1, 3]])
def test_straight_to_a_gpu(paged: Any) -> None:
    model = tiny_model(4, 64)
    made, loader = empty(model), Loader(model)
    options = {"device": "cuda", "quantize": "none", "param_offload": paged, "lr": 1e-2}
    expected = train(*wrap(model, **options), 3, device="cuda")
    wrapped, optimizer = wrap(made, loader=loader, **options)
    assert made.embed.weight.is_cuda and loader.most_alive == 1
    assert train(wrapped, optimizer, 3, device="cuda").differences(expected) == []


PEAK = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
from ts_core import wrap

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(width, 2, bias=False)

def train_nothing(width, depth):
    with torch.device("meta"):
        model = nn.Sequential(*[Block(width) for _ in range(depth)])
    shapes = {name: p.shape for name, p in model.named_parameters()}
    total = sum(p.nbytes for p in model.parameters())
    # Values are made by several steps, as those of a checkpoint are (read, cast).
    wrap(model, lr=1e-3, device="host", loader=lambda n: torch.randn(shapes[n]) * 0.5, **options)
    return model, total

def status(key):
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith(key))

options = {"quantize": sys.argv[1], "param_offload": sys.argv[2] == "paged"}
train_nothing(64, 3)  # import and compile everything
with open("/proc/self/clear_refs", "w") as stream:
    stream.write("5")  # VmHWM starts again from the present RSS
before = status("VmRSS")
model, total = train_nothing(1024, 16)
print((status("VmHWM") - before) / total)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads peak RAM as Linux tells it"
)
@pytest.mark.parametrize(
    ("codec", "where", "most"),
    [("none", "resident", 1.2), ("none", "paged", 1.2), ("nf4", "paged", 0.8)],
)
def test_peak_memory_is_that_of_the_wrapped_model(
    codec: str, where: str, most: float, run_python: Callable[..., Any]
) -> None:
    """256 MiB in fp32, in 64 matrices; without giving back what was freed, half as much again.

    (What the allocator keeps differs from run to run: nf4 0.3 to 0.6. Loaded at once, over 1.)
    """
    if not codecs.has(codec) and codec != "none":
        pytest.skip("ts-quant is not installed")
    peak = float(run_python(PEAK, codec, where).stdout.split()[-1])
    assert 0.1 < peak < most
