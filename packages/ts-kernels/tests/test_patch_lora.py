"""patch_lora on PEFT's own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ts_kernels.patching import _lora, patch_lora

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8, bias=False)
        self.to(dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def adapted(dtype=torch.float32, adapters=("default",), **kw):
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["first", "second"]} | kw
    model = peft.get_peft_model(Net(dtype), peft.LoraConfig(**settings), adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, peft.LoraConfig(**settings | {"r": 3}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


@pytest.fixture
def fused_calls(monkeypatch):
    calls = []

    def spy(*args):
        calls.append(args)
        return lora_linear(*args)

    lora_linear = _lora.lora_linear
    monkeypatch.setattr(_lora, "lora_linear", spy)
    return calls


def run(model, x):
    y = model(x)
    wanted = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True)
    return [y, *(g for g in grads if g is not None)]


def close(actual, expected, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert (a - e).norm() <= tolerance * e.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast_adapter_dtype", [True, False])
def test_layers_are_fused_and_restored(fused_calls, dtype, autocast_adapter_dtype):
    model = peft.get_peft_model(
        Net(dtype),
        peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False),
        autocast_adapter_dtype=autocast_adapter_dtype,
    )
    x = torch.randn(5, 16).to(dtype)
    before = run(model, x)
    events = []
    handle = patch_lora(model, on_event=events.append)
    fused_calls.clear()  # of the comparison
    after = run(model, x)
    assert len(fused_calls) == 2 and events == ["fused LoRA: 2 layers"]
    assert handle.replaced == {"LoRA linear": 2}
    close(after, before, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = run(model, x)
    assert len(fused_calls) == 4
    handle.undo()
    assert all(map(torch.equal, run(model, x), before)) and len(fused_calls) == 4
    with torch.autocast("cpu", torch.bfloat16):
        close(under_autocast, run(model, x), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_switching_disabling_and_merging_are_followed(fused_calls, dtype):
    model = adapted(dtype, ("one", "two"))
    plain = copy.deepcopy(model)
    patch_lora(model)
    x = torch.randn(5, 16).to(dtype)

    def same(fused):
        fused_calls.clear()
        close(run(model, x), run(plain, x), dtype)
        assert len(fused_calls) == (2 if fused else 0)

    same(True)
    for each in (model, plain):
        each.set_adapter("two")
    same(True)
    for each in (model, plain):
        each.base_model.set_adapter(["one", "two"])  # both at once
    same(False)
    for each in (model, plain):
        each.set_adapter("one")
    same(True)
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        fused_calls.clear()
        assert torch.equal(model(x), plain(x)) and not fused_calls
    same(True)
    for each in (model, plain):
        each.merge_adapter()
    with torch.no_grad():
        fused_calls.clear()
        assert torch.equal(model(x), plain(x)) and not fused_calls
    for each in (model, plain):
        each.unmerge_adapter()
    same(True)
    for each in (model, plain):
        each.delete_adapter("two")
    same(True)
    assert set(model.state_dict()) == set(plain.state_dict())


def test_merging_and_unloading_a_patched_model():
    model = adapted()
    x = torch.randn(5, 16)
    expected = model(x)
    patch_lora(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), expected)
    assert isinstance(merged.first, nn.Linear) and type(merged.first) is nn.Linear


@pytest.mark.parametrize(
    "settings, in_training, in_eval",
    [
        ({"lora_dropout": 0.1}, 0, 2),
        ({"use_dora": True}, 0, 0),
        ({"lora_bias": True}, 0, 1),
        ({"use_rslora": True}, 2, 2),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_do_is_left_to_peft(fused_calls, settings, in_training, in_eval):
    if "lora_bias" in settings:
        settings = settings | {"target_modules": ["first"]}
        in_eval = 0
    model = adapted(**settings)
    plain = copy.deepcopy(model)
    patch_lora(model)
    x = torch.randn(5, 16)
    for count, mode in ((in_training, True), (in_eval, False)):
        fused_calls.clear()
        torch.manual_seed(0)
        actual = run(model.train(mode), x)
        torch.manual_seed(0)
        close(actual, run(plain.train(mode), x), torch.float32)
        assert len(fused_calls) == count


def test_mixed_batches_and_hooks_are_left_to_peft(fused_calls):
    model = adapted(adapters=("one", "two")).eval()
    patch_lora(model)
    fused_calls.clear()
    x = torch.randn(4, 16)
    mixed = model(x, adapter_names=["one", "two", "__base__", "one"])
    assert not fused_calls
    model.set_adapter("two")
    torch.testing.assert_close(mixed[1], model(x[1]))
    fused_calls.clear()
    seen = []
    layer = model.base_model.model.first
    hook = layer.lora_A["two"].register_forward_hook(lambda *args: seen.append(1))
    model(x)
    assert len(seen) == 1 and len(fused_calls) == 1  # the other layer
    hook.remove()
    model(x)
    assert len(fused_calls) == 3


def test_a_quantized_base(fused_calls, quantized):
    model = adapted(torch.bfloat16)
    for layer in (model.base_model.model.first, model.base_model.model.second):
        weight = quantized(layer.base_layer.weight.detach())
        layer.base_layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    before = run(model, x)
    patch_lora(model)
    fused_calls.clear()
    close(run(model, x), before, torch.bfloat16)
    assert len(fused_calls) == 2


def test_other_layers_of_peft_and_other_bases_are_left_alone():
    net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "conv": nn.Conv1d(4, 4, 1)})
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["embed", "conv"]))
    assert patch_lora(model).replaced == {}

    class OwnLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = adapted()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.base_model.model.first.base_layer.__class__ = OwnLinear
    patch_lora(model)
    x = torch.randn(3, 16)
    torch.testing.assert_close(model(x), plain(x))


def test_a_class_of_layers_that_computes_something_else_is_left_alone(monkeypatch):
    from peft.tuners.lora.layer import Linear

    class Doubling(Linear):
        def forward(self, x, *args, **kwargs):
            return 2 * super().forward(x, *args, **kwargs)

    model = adapted()
    model.base_model.model.first.__class__ = Doubling
    events = []
    handle = patch_lora(model, on_event=events.append)
    assert handle.replaced == {"LoRA linear": 1}
    assert any("1 of Doubling keep their own code" in event for event in events)
    assert "forward" not in model.base_model.model.first.__dict__
    state = torch.get_rng_state()
    patch_lora(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore")  # dynamo's own, which differ by version
def test_compiled():
    model = adapted()
    x = torch.randn(5, 16)
    expected = run(model, x)
    patch_lora(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(run(compiled, x), expected, torch.float32)


def test_adapters_saved_from_a_patched_model_load_in_plain_peft(tmp_path):
    model = adapted()
    patch_lora(model)
    x = torch.randn(5, 16)
    model.save_pretrained(tmp_path)
    base = copy.deepcopy(model.unload())
    again = peft.PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(again(x), adapted_output(model, x, tmp_path))


def adapted_output(model, x, folder):
    from safetensors.torch import load_file

    stored = load_file(folder / "adapter_model.safetensors")
    assert len(stored) == 4 and all(".lora_" in name for name in stored)
    net = model if isinstance(model, Net) else model.base_model.model
    h = x
    for name, activation in (("first", torch.tanh), ("second", lambda t: t)):
        layer = getattr(net, name)
        a = stored[f"base_model.model.{name}.lora_A.weight"]
        b = stored[f"base_model.model.{name}.lora_B.weight"]
        h = activation(layer(h) + 1.5 * h @ a.t() @ b.t())
    return h
