"""Every form of PEFT adapter on a streamed, quantized base: trained, saved, loaded, merged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ts_hf
from ts_core import quantize_model, unwrap
from ts_core.testing import inject_delays
from ts_hf.testing import FAMILIES, token_batch

peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

Train = Callable[..., tuple[list[torch.Tensor], dict[str, torch.Tensor]]]
MATRICES = ["q_proj", "v_proj", "down_proj"]
FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "r": 3},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.3},
    "bias": {"bias": "lora_only"},
    "head": {"target_modules": [*MATRICES, "lm_head"]},
    "embedding": {"target_modules": [*MATRICES, "embed_tokens"]},
    "modules-to-save": {"modules_to_save": ["lm_head"]},
    "norms-to-save": {"modules_to_save": ["input_layernorm", "norm"]},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "layers": {"layers_to_transform": [0, 2]},
}
NAMES = ["default", "sql v2", "lora_A"]


def config(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": MATRICES, "lora_alpha": 7, **changes})


def seeded(model: Any) -> Any:
    """Every zero of an adapter becomes a small number, so that nothing hides."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def build(family: str = "llama", codec: str | None = "nf4", **changes: Any) -> Any:
    model = FAMILIES[family].build(**changes)
    model.requires_grad_(False)
    if codec is not None:
        quantize_model(model, codec, blocks=ts_hf.find_decoder_layers(model))
    return model


def decoded(model: Any) -> Any:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if hasattr(parameter, "codec"):
                dense: Any = parameter
                module._parameters[name] = nn.Parameter(dense.dequantize(), requires_grad=False)
    return model


def adapt(base: Any, *, name: str = "default", **changes: Any) -> Any:
    torch.manual_seed(0)
    return seeded(peft.get_peft_model(base, config(**changes), adapter_name=name))


def assert_same(found: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert found[1].keys() == expected[1].keys()
    assert [n for n in found[1] if not torch.equal(found[1][n], expected[1][n])] == []


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("form", FORMS)
def test_trains_saves_and_loads_in_plain_peft(
    form: str, train_steps: Train, tmp_path: Path
) -> None:
    changes = FORMS[form]
    model = adapt(build(), **changes).train()
    model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, param_offload=True)
    with inject_delays(1, max_ms=0.3):
        streamed = train_steps(model, optimizer, 3)
    plain = adapt(decoded(build()), **changes).train()
    plain, optimizer = ts_hf.wrap_hf(
        plain, device="cpu", lr=1e-2, quantize="none", param_offload=False
    )
    assert_same(streamed, train_steps(plain, optimizer, 3))

    folder = ts_hf.save_adapter(model, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of missing and unexpected keys
        again = peft.PeftModel.from_pretrained(decoded(build()), folder)
    if form != "bias":  # of which PEFT allows one adapter only
        loaded = again.load_adapter(folder, adapter_name="again")
        assert not [key for key in loaded.missing_keys if ".again." in key]
        assert not loaded.unexpected_keys
    with torch.no_grad():
        expected = model.eval()(**token_batch(3)).logits
        assert torch.equal(again.eval()(**token_batch(3)).logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_named_anything(name: str, train_steps: Train, tmp_path: Path) -> None:
    model = adapt(build(), name=name)
    model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, param_offload=True)
    train_steps(model, optimizer, 2)
    folder = ts_hf.save_adapter(model, tmp_path / "adapter")
    place = folder if name == "default" else folder / name
    again = peft.PeftModel.from_pretrained(decoded(build()), place)
    with torch.no_grad():
        expected = model.eval()(**token_batch(3)).logits
        assert torch.equal(again.eval()(**token_batch(3)).logits, expected)


def test_several_adapters(train_steps: Train, tmp_path: Path) -> None:
    """One is trained and then the other; each is saved; both together, and each alone, compute."""

    def both(base: Any) -> Any:
        model = adapt(base, name="one")
        model.add_adapter("two", config(r=2, target_modules=["q_proj", "up_proj"]))
        return seeded(model)

    found = []
    for streamed in (True, False):
        model = both(build() if streamed else decoded(build()))
        records = []
        for name in ("one", "two"):
            model.set_adapter(name)
            model, optimizer = ts_hf.wrap_hf(
                model, device="cpu", lr=1e-2, quantize="none", param_offload=streamed
            )
            records.append(train_steps(model, optimizer, 2))
            if name == "one":
                unwrap(model)
        found.append(records)
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    model.base_model.set_adapter(["one", "two"])
    with torch.no_grad():
        together = model.eval()(**token_batch(3)).logits
    folder = ts_hf.save_adapter(model, tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(decoded(build()), folder / "one", adapter_name="one")
    again.load_adapter(folder / "two", adapter_name="two")
    again.base_model.set_adapter(["one", "two"])
    with torch.no_grad():
        assert torch.equal(again.eval()(**token_batch(3)).logits, together)


@pytest.mark.parametrize("form", ["lora", "dora", "modules-to-save"])
def test_resume(form: str, train_steps: Train, tmp_path: Path) -> None:
    """Six steps at once; three, saved, loaded by PEFT, wrapped again, three more: the same bits."""
    changes = FORMS[form]

    def start(base: Any) -> tuple[Any, Any]:
        return ts_hf.wrap_hf(base, device="cpu", lr=1e-2, param_offload=True)

    model, optimizer = start(adapt(build(), **changes))
    straight = train_steps(model, optimizer, 4)
    model, optimizer = start(adapt(build(), **changes))
    train_steps(model, optimizer, 2)
    folder = ts_hf.save_adapter(model, tmp_path / "adapter")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again = peft.PeftModel.from_pretrained(build(), folder, is_trainable=True)
    again, optimizer = start(again)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    losses = []
    for step in (2, 3):
        torch.manual_seed(100 + step)
        loss = again(**token_batch(10 * step)).loss
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(losses, straight[0][2:], strict=True))
    trained = {n: p.detach() for n, p in again.named_parameters() if p.requires_grad}
    assert [n for n in trained if not torch.equal(trained[n], straight[1][n])] == []


@pytest.mark.parametrize("method", ["loha", "lokr", "ia3", "prompt", "prefix"])
def test_other_methods_of_peft(method: str, train_steps: Train) -> None:
    """They need no support of their own: streamed weights look like any others."""
    configs = {
        "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
        "lokr": lambda: peft.LoKrConfig(r=2, target_modules=["q_proj"], init_weights=False),
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }
    found = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = peft.get_peft_model(build(codec=None), configs[method]())
        model, optimizer = ts_hf.wrap_hf(
            model, device="cpu", lr=1e-2, quantize="none", param_offload=streamed
        )
        found.append(train_steps(model, optimizer, 2))
    assert_same(*found)


ON_EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_adapters_on_stacked_experts(
    family: str, implementation: str, train_steps: Train, tmp_path: Path
) -> None:
    """PEFT adds to the whole stack; paged by expert, only to the picked ones: the same numbers."""
    found = []
    for options in ({"param_offload": False}, {"param_offload": True}, {"moe_paging": True}):
        base = build(family, codec=None, experts_implementation=implementation)
        model = adapt(base, **ON_EXPERTS)
        model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, quantize="none", **options)
        with inject_delays(2, max_ms=0.3):
            found.append(train_steps(model, optimizer, 2))
    folder = ts_hf.save_adapter(model, tmp_path / "adapter")
    base = build(family, codec=None, experts_implementation=implementation)
    again = peft.PeftModel.from_pretrained(base, folder)
    with torch.no_grad():
        expected = model.eval()(**token_batch(3)).logits
        assert torch.equal(again.eval()(**token_batch(3)).logits, expected)
        with model.disable_adapter(), again.disable_adapter():
            expected = model(**token_batch(3)).logits
            assert torch.equal(again(**token_batch(3)).logits, expected)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    unwrap(model)
    with torch.no_grad():
        assert torch.equal(model(**token_batch(3)).logits, again(**token_batch(3)).logits)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_stored_experts(
    implementation: str, checkpointing: bool, train_steps: Train
) -> None:
    """NF4 experts with adapters on them, resident, paged with the block, or paged by expert."""
    found = []
    for options in (None, {"param_offload": False}, {"param_offload": True}, {"moe_paging": True}):
        base = build("qwen3_moe", experts_implementation=implementation)
        if options is None:
            base = decoded(base)
        model = adapt(base, **ON_EXPERTS)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model, optimizer = ts_hf.wrap_hf(
            model.train(), device="cpu", lr=1e-2, quantize="none", **(options or {})
        )
        with inject_delays(2, max_ms=0.3):
            found.append(train_steps(model, optimizer, 2))
    for record in found[1:]:
        assert_same(record, found[0])
    with torch.no_grad():
        expected = model.eval()(**token_batch(3)).logits
        unwrap(model)
        found_again = model(**token_batch(3)).logits
    torch.testing.assert_close(found_again, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_all_linear_on_a_mixture_of_experts(family: str, train_steps: Train) -> None:
    """PEFT then adapts the stacked experts and the routers by itself."""
    found = []
    for options in ({"param_offload": False}, {"moe_paging": True, "param_offload": True}):
        model = adapt(build(family, codec=None), target_modules="all-linear")
        adapted = {name for name, p in model.named_parameters() if p.requires_grad}
        assert any("mlp.experts" in name for name in adapted)
        assert any("mlp.gate" in name for name in adapted)
        model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, quantize="none", **options)
        with inject_delays(3, max_ms=0.3):
            found.append(train_steps(model, optimizer, 2))
    assert_same(*found)


def test_two_adapters_on_stacked_experts() -> None:
    base = build("mixtral", codec=None)
    model = adapt(base, name="one", **ON_EXPERTS)
    model.add_adapter("two", config(**{**ON_EXPERTS, "r": 2}))
    seeded(model)
    model.base_model.set_adapter(["one", "two"])
    with torch.no_grad():
        expected = model.eval()(**token_batch(3)).logits
        model, _ = ts_hf.wrap_hf(model, device="cpu", quantize="none", moe_paging=True)
        found = model(**token_batch(3)).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_autograd_keeps_no_adapted_expert() -> None:
    base = build("mixtral", experts_implementation="grouped_mm")
    model, _ = ts_hf.wrap_hf(adapt(base, **ON_EXPERTS), device="cpu", moe_paging=True)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**token_batch(0, 1, 4)).loss
    assert kept and max(kept) < 2 * 96 * 64  # values of two experts' smaller matrix
    loss.backward()


@pytest.mark.parametrize("into", ["dequantized", "original", "nf4"])
@pytest.mark.parametrize("form", ["rslora", "head", "ranks", "several", "named", "norms-to-save"])
def test_merged_after_training(form: str, into: str, train_steps: Train, tmp_path: Path) -> None:
    """The report's distances are those of the weights: nothing is scaled or left out wrongly."""
    plain = FAMILIES["llama"].build()
    plain.save_pretrained(tmp_path / "base")
    base = ts_hf.load_model(tmp_path / "base", quantize="nf4", dtype=torch.float32)
    model = adapt(base, name="sql v2" if form == "named" else "default", **FORMS.get(form, {}))
    if form == "several":
        model.add_adapter("two", config(r=2, target_modules=["q_proj", "up_proj"]))
        seeded(model)
        model.base_model.set_adapter(["default", "two"])
    model, optimizer = ts_hf.wrap_hf(model, device="cpu", lr=1e-2, param_offload=True)
    train_steps(model, optimizer, 2)
    unwrap(model)
    wanted = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A") and module.lora_A:
            weight: Any = module.get_base_layer().weight
            update = sum(
                module.get_delta_weight(key)
                for key in module.active_adapters
                if key in module.lora_A
            )
            before = weight.dequantize() if hasattr(weight, "codec") else weight
            if into == "original":
                before = plain.get_submodule(name).weight
            wanted[f"{name}.weight"] = (before + update).detach()
    with torch.no_grad():
        logits = model.eval()(**token_batch(3)).logits
    merged, report = ts_hf.merge_adapter(model, into=into)
    assert len(report.rows) == len(wanted) > 0
    state = merged.state_dict()
    for name, value in wanted.items():
        distance = (state[name] - value).norm() / value.norm()
        assert distance < (0.12 if into == "nf4" else 1e-6), name
    if into == "dequantized":
        with torch.no_grad():
            found = merged.eval()(**token_batch(3)).logits
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert not [name for name in state if "lora" in name or "base_layer" in name]


@pytest.mark.parametrize("into", ["dequantized", "original", "nf4"])
@pytest.mark.parametrize("form", ["dora", "experts", "all-linear-experts"])
def test_merged_as_peft_merges(form: str, into: str, tmp_path: Path) -> None:
    """DoRA and adapters on stacked experts: what PEFT's own merge makes of the decoded weights."""
    family = "llama" if form == "dora" else "qwen3_moe"
    changes = {"dora": FORMS["dora"], "experts": ON_EXPERTS}.get(form)
    plain = FAMILIES[family].build()
    plain.save_pretrained(tmp_path / "base")

    def model() -> Any:
        base = ts_hf.load_model(tmp_path / "base", quantize="nf4", dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
            made = adapt(base, **(changes or FORMS["all-linear"]))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1.2)
        return made

    twin = model()
    before = {
        name.replace(".base_layer", ""): parameter.dequantize()
        if hasattr(parameter, "codec")
        else parameter.detach().clone()
        for name, parameter in twin.get_base_model().named_parameters()
    }
    theirs = decoded(twin).merge_and_unload().state_dict()
    merged, report = ts_hf.merge_adapter(model(), into=into)
    state = merged.state_dict()
    assert state.keys() == theirs.keys()
    adapted = {row.name.split("[")[0] for row in report.rows}
    assert len(adapted) == {"dora": 9, "experts": 9}.get(form, 3 * (4 + 1 + 2))  # the router too
    originals = plain.state_dict()
    for name, value in theirs.items():
        if into == "original":
            value = originals[name] + (value - before[name])
        distance = float((state[name] - value).norm() / value.norm())
        allowed = 0.12 if into == "nf4" and name in adapted else 1e-5
        assert distance <= allowed, (name, distance)
    assert report.survived > (0.0 if into == "nf4" else 0.99)


@pytest.mark.parametrize("keep_dtype", [True, False])
def test_adapters_keep_their_dtype(keep_dtype: bool, train_steps: Train, tmp_path: Path) -> None:
    """PEFT makes fp32 adapters on a bf16 base unless told not to: trained and saved as they are."""
    from safetensors.torch import load_file

    base = build(dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config(), autocast_adapter_dtype=not keep_dtype)
    dtype = torch.bfloat16 if keep_dtype else torch.float32
    model, optimizer = ts_hf.wrap_hf(seeded(model), device="cpu", lr=1e-2, param_offload=True)
    train_steps(model, optimizer, 2)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    folder = ts_hf.save_adapter(model, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    unwrap(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}


@pytest.mark.filterwarnings("ignore:(Model|Setting|You are|Found).*:UserWarning")
@pytest.mark.parametrize(
    "changes", [{"modules_to_save": ["lm_head"]}, {"target_modules": [*MATRICES, "lm_head"]}]
)
def test_tied_embeddings(changes: dict[str, Any], train_steps: Train, tmp_path: Path) -> None:
    """A head tied to the embedding: trained as a copy or adapted, saved, loaded, merged."""
    found = []
    for streamed in (True, False):
        base = build(tie_word_embeddings=True)
        model = adapt(base if streamed else decoded(base), **changes)
        model, optimizer = ts_hf.wrap_hf(
            model, device="cpu", lr=1e-2, quantize="none", param_offload=streamed
        )
        found.append(train_steps(model, optimizer, 2))
        if streamed:
            folder = ts_hf.save_adapter(model, tmp_path / "adapter")
            with torch.no_grad():
                expected = model.eval()(**token_batch(3)).logits
                embedding = model.get_input_embeddings().weight.clone()
            unwrap(model)
            merged, _ = ts_hf.merge_adapter(model, into="dequantized")
    assert_same(*found)
    again = peft.PeftModel.from_pretrained(decoded(build(tie_word_embeddings=True)), folder)
    with torch.no_grad():
        assert torch.equal(again.eval()(**token_batch(3)).logits, expected)
        assert torch.equal(again.get_input_embeddings().weight, embedding)
        found_logits = merged.eval()(**token_batch(3)).logits
    torch.testing.assert_close(found_logits, expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    reloaded = ts_hf.load_model(tmp_path / "merged", quantize=None, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(reloaded(**token_batch(3)).logits, found_logits)
        assert torch.equal(reloaded.get_input_embeddings().weight, embedding)
