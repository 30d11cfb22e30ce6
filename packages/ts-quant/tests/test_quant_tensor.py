"""QuantTensor as a tensor: copies, moves, general operations, modules, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ts_quant
from ts_quant import FrozenWeightError, OptionError, QuantTensor
from ts_quant.frozen_view import FrozenView

MakeLinear = Callable[..., nn.Linear]


@pytest.fixture
def q(codec: str) -> QuantTensor:
    return ts_quant.quantize(torch.randn(24, 40).bfloat16(), codec)


def same_bytes(a: QuantTensor, b: QuantTensor) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def shares_memory(a: QuantTensor, b: QuantTensor) -> bool:
    return all(x.data_ptr() == y.data_ptr() for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_flatten_and_unflatten(q: QuantTensor) -> None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    assert is_traceable_wrapper_subclass(q)
    names, meta = q.__tensor_flatten__()
    scales = {"nvfp4": ["scale", "global_scale"], "fp8": ["scale"], "mxfp4": ["scale"]}
    assert names == ["codes", *scales.get(q.codec, ["absmax"])]
    inner = {name: getattr(q, name) for name in names}
    back = QuantTensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())
    assert back.shape == q.shape and back.dtype == q.dtype and back.codec == q.codec
    assert shares_memory(back, q)
    assert hash(meta) == hash(copy.deepcopy(meta)) and meta == copy.deepcopy(meta)


def test_dequantize_into_out(q: QuantTensor) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        out = torch.full((24, 40), float("nan"), dtype=dtype)
        version = out._version
        assert q.dequantize(out=out) is out
        assert torch.equal(out, q.dequantize(dtype))
        assert out._version > version  # autograd would notice a saved `out`
    assert torch.equal(
        q.dequantize(torch.float32, out=torch.empty(24, 40)), q.dequantize(torch.float32)
    )
    with torch.inference_mode():
        assert torch.equal(q.dequantize(out=torch.empty(24, 40)), q.dequantize(torch.float32))


def test_dequantize_refuses_what_does_not_fit(q: QuantTensor) -> None:
    with pytest.raises(OptionError, match="int32"):
        q.dequantize(torch.int32)
    with pytest.raises(OptionError, match=r"\(40, 24\).*expected shape \(24, 40\)"):
        q.dequantize(out=torch.empty(40, 24))
    with pytest.raises(OptionError, match="contiguous"):
        q.dequantize(out=torch.empty(40, 24).t())
    with pytest.raises(OptionError, match="contradicts"):
        q.dequantize(torch.bfloat16, out=torch.empty(24, 40))
    with pytest.raises(OptionError, match=r"torch\.uint8"):
        q.dequantize(out=torch.empty(24, 40, dtype=torch.uint8))
    with pytest.raises(OptionError, match="meta"):
        q.dequantize(out=torch.empty(24, 40, device="meta"))


def test_detach_shares_and_clone_copies(q: QuantTensor) -> None:
    for alias in (q.detach(), q.data, q.contiguous(), q.to(torch.bfloat16)):
        assert isinstance(alias, QuantTensor) and shares_memory(alias, q)
    for made in (q.clone(), copy.deepcopy(q)):
        assert isinstance(made, QuantTensor) and same_bytes(made, q)
        assert not shares_memory(made, q)


def test_a_change_of_dtype_keeps_the_codes(q: QuantTensor) -> None:
    for dtype, moved in (
        (torch.float32, q.float()),
        (torch.float16, q.to(torch.float16)),
        (torch.float64, q.double()),
        (torch.float32, q.to("cpu", torch.float32)),
    ):
        assert isinstance(moved, QuantTensor) and moved.dtype is dtype and same_bytes(moved, q)
        assert not shares_memory(moved, q)
        assert torch.equal(moved.dequantize(), q.dequantize(dtype))
    assert q.dtype is torch.bfloat16
    whole = q.to(torch.int32)
    assert type(whole) is Tensor and torch.equal(whole, q.dequantize().to(torch.int32))


def test_moves_between_devices(q: QuantTensor) -> None:
    there = q.to("meta")
    assert isinstance(there, QuantTensor) and there.device.type == "meta"
    assert all(buffer.device.type == "meta" for buffer in there.buffers())
    here = q.to("cpu", copy=True)
    assert isinstance(here, QuantTensor) and same_bytes(here, q) and not shares_memory(here, q)
    assert q.cpu() is q


@pytest.mark.gpu
def test_moves_to_a_gpu_and_back(q: QuantTensor) -> None:
    for there in (q.cuda(), q.to("cuda", non_blocking=True), q.pin_memory().to("cuda")):
        assert isinstance(there, QuantTensor) and there.device.type == "cuda"
        assert torch.equal(there.dequantize().cpu(), q.dequantize())
        assert isinstance(there.cpu(), QuantTensor) and same_bytes(there.cpu(), q)
    pinned = q.pin_memory()
    assert pinned.is_pinned() and not q.is_pinned()
    there.record_stream(torch.cuda.current_stream())


def test_copy_from_a_dense_tensor_encodes_in_place(q: QuantTensor) -> None:
    addresses = [buffer.data_ptr() for buffer in q.buffers()]
    new = torch.randn(24, 40)
    assert q.copy_(new) is q
    assert [buffer.data_ptr() for buffer in q.buffers()] == addresses
    # copy_ between tensors rounds to the target's dtype first.
    assert same_bytes(q, ts_quant.quantize(new.bfloat16(), q.codec))
    q.copy_(new.t().contiguous().t())
    assert same_bytes(q, ts_quant.quantize(new.bfloat16(), q.codec))
    q.copy_(torch.ones(40))  # broadcast, as copy_ does
    assert torch.equal(q.dequantize(), torch.ones(24, 40).bfloat16())


def test_copy_from_quantized_tensors(q: QuantTensor, codec: str) -> None:
    other = ts_quant.quantize(torch.randn(24, 40), codec)
    q.copy_(other)
    assert same_bytes(q, other) and not shares_memory(q, other)
    fixed = codec in ("fp8", "nvfp4", "mxfp4")
    coarser = ts_quant.quantize(torch.randn(24, 40), "nf4" if fixed else codec, block_size=128)
    q.copy_(coarser)
    assert q.block_size == {"fp8": 32, "nvfp4": 16, "mxfp4": 32}.get(codec, 64)
    assert same_bytes(q, ts_quant.quantize(coarser.dequantize(torch.bfloat16), codec))
    dense = torch.zeros(24, 40)
    dense.copy_(q)
    assert torch.equal(dense, q.dequantize().float())  # by way of q's own dtype, as any copy_


def test_a_refused_copy_leaves_the_weight_alone(q: QuantTensor) -> None:
    before = q.clone()
    bad = torch.randn(24, 40)
    bad[0, 0] = float("nan")
    with pytest.raises(ts_quant.NonFiniteWeightError):
        q.copy_(bad)
    with pytest.raises(RuntimeError):
        q.copy_(torch.randn(40, 24))
    assert same_bytes(q, before)


def test_general_operations_see_the_decoded_weight(q: QuantTensor) -> None:
    w = q.dequantize()
    x = torch.randn(5, 40).bfloat16()
    other = torch.randn(24, 40).bfloat16()
    cases: list[tuple[object, object]] = [
        (q.t(), w.t()),
        (q.T, w.T),
        (q.transpose(0, 1), w.transpose(0, 1)),
        (q.view(-1), w.view(-1)),
        (q.reshape(12, 80), w.reshape(12, 80)),
        (q[3], w[3]),
        (q[:, 2:9], w[:, 2:9]),
        (q + other, w + other),
        (other * q, other * w),
        (x @ q.t(), x @ w.t()),
        (torch.matmul(x, q.mT), torch.matmul(x, w.mT)),
        (
            torch.addmm(torch.zeros(24).bfloat16(), x, q.t()),
            torch.addmm(torch.zeros(24).bfloat16(), x, w.t()),
        ),
        (q.sum(), w.sum()),
        (q.abs().max(), w.abs().max()),
        (torch.cat([q, other]), torch.cat([w, other])),
        (torch.linalg.norm(q), torch.linalg.norm(w)),
        (nn.functional.embedding(torch.tensor([1, 5, 1]), q), w[[1, 5, 1]]),
        (torch.einsum("oi,bi->bo", q, x), torch.einsum("oi,bi->bo", w, x)),
        (torch.where(other > 0, q, other), torch.where(other > 0, w, other)),
        (q == w, w == w),
    ]
    for got, expected in cases:
        assert isinstance(got, Tensor) and not isinstance(got, QuantTensor)
        assert isinstance(expected, Tensor) and torch.equal(got, expected)
    assert torch.equal(q, q.clone()) and torch.equal(q, w) and not torch.equal(q, other)
    assert q.sum().item() == w.sum().item()
    assert [type(part) for part in q.split(8)] == [FrozenView] * 3
    assert q.numel() == 960 and q.size() == w.size() and q.stride() == w.stride()
    assert q.is_floating_point() and not q.is_sparse


def test_shape_only_operations_do_not_decode(
    q: QuantTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("decoded for nothing")

    monkeypatch.setattr(QuantTensor, "dequantize", refuse)
    for made in (torch.empty_like(q), torch.zeros_like(q), q.new_zeros(3), torch.ones_like(q)):
        assert type(made) is Tensor and made.dtype is torch.bfloat16
    assert torch.zeros_like(q).shape == (24, 40) and torch.zeros_like(q).is_contiguous()
    assert torch.zeros_like(q, dtype=torch.float32).dtype is torch.float32
    assert torch.full_like(q, 3.0).sum().item() == 3.0 * 960


def test_gradients_flow_through_general_operations(q: QuantTensor) -> None:
    x = torch.randn(5, 40, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randn(5, 40, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(5, 24).bfloat16()
    (x @ q.t()).backward(grad)
    (y @ q.dequantize().t()).backward(grad)
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    z = torch.randn(24, 40, dtype=torch.bfloat16, requires_grad=True)
    (z * q).sum().backward()
    assert z.grad is not None and torch.equal(z.grad, q.dequantize())


@pytest.mark.parametrize(
    "edit",
    [
        lambda q: q.mul_(2),
        lambda q: q.add_(torch.ones(24, 40)),
        lambda q: q.zero_(),
        lambda q: q.fill_(1.0),
        lambda q: nn.init.normal_(q),
        lambda q: q.__setitem__(0, 0.0),
        lambda q: torch.add(q, 1, out=q),
        lambda q: q.requires_grad_(),
        lambda q: setattr(q, "requires_grad", True),
        lambda q: nn.Parameter(q),
        lambda q: setattr(q, "data", torch.zeros(24, 40)),
        lambda q: q.index_add_(0, torch.tensor([0]), torch.ones(1, 40)),
    ],
)
def test_training_and_editing_are_refused(
    q: QuantTensor, edit: Callable[[QuantTensor], object]
) -> None:
    before = q.clone()
    with pytest.raises(FrozenWeightError, match=r"frozen.*dequantize"):
        edit(q)
    assert same_bytes(q, before) and not q.requires_grad
    assert q.requires_grad_(False) is q
    q.requires_grad = False


def test_data_takes_over_another_quant_tensor(q: QuantTensor, codec: str) -> None:
    parameter = nn.Parameter(q, requires_grad=False)
    parameter.data = parameter.data.to(torch.float32)
    assert parameter.dtype is torch.float32 and same_bytes(parameter, q)  # type: ignore[arg-type]
    other = ts_quant.quantize(torch.randn(24, 40), codec, block_size=32)
    parameter.data = other
    assert parameter.block_size == other.block_size  # type: ignore[attr-defined]
    plain = ts_quant.quantize(torch.randn(24, 40), "fp8", layout="row")
    parameter.data = plain  # another format and other buffers
    assert torch.equal(parameter, plain) and parameter.codec == "fp8"  # type: ignore[attr-defined]
    parameter.data = other
    assert torch.equal(parameter, other)


def test_nothing_pickles_it(q: QuantTensor, tmp_path: object) -> None:
    with pytest.raises(FrozenWeightError, match="safetensors"):
        pickle.dumps(q)
    with pytest.raises(FrozenWeightError, match="safetensors"):
        torch.save({"w": q}, f"{tmp_path}/w.pt")


def test_repr_names_the_format(q: QuantTensor, codec: str) -> None:
    text = repr(q)
    assert codec in text and "(24, 40)" in text and "bfloat16" in text and str(q.nbytes) in text
    assert str(q) == text and f"{q}" == text


@pytest.mark.parametrize("wrap", [lambda q: q, ts_quant.TransposedQuantTensor], ids=["", "swapped"])
def test_a_shallow_copy_shares_the_buffers(q: QuantTensor, wrap: Callable[[Any], Any]) -> None:
    weight = wrap(q)
    copied = copy.copy(weight)
    assert type(copied) is type(weight) and copied is not weight
    for mine, other in zip(copied.buffers(), weight.buffers(), strict=True):
        assert mine.data_ptr() == other.data_ptr()


def test_one_byte_floats_are_ordinary_tensors(q: QuantTensor) -> None:
    """No file could say of a stored weight that it decodes to them."""
    narrow = q.to(torch.float8_e4m3fn)
    assert type(narrow) is torch.Tensor
    assert torch.equal(narrow.float(), q.dequantize().to(torch.float8_e4m3fn).float())


def test_swapped_buffers_are_read_afresh(q: QuantTensor) -> None:
    expected = q.dequantize()
    for name in q.__tensor_flatten__()[0]:
        old = getattr(q, name)
        setattr(q, name, old.clone())
        old.zero_()
    assert torch.equal(q.dequantize(), expected)
    assert torch.equal(q + 0, expected)
    assert torch.equal(q.clone().dequantize(), expected)


def test_results_follow_the_inner_tensors_device(q: QuantTensor) -> None:
    for name in q.__tensor_flatten__()[0]:
        setattr(q, name, getattr(q, name).to("meta"))
    assert q.device.type == "cpu"  # fixed when the wrapper was made
    assert q.dequantize().device.type == "meta"
    assert q.t().device.type == "meta"
    assert q.clone().device.type == "meta" and "meta" in repr(q)
    assert torch.empty_like(q).device.type == "meta"


# -- inside modules ------------------------------------------------------------------------------


def test_in_a_module(frozen: MakeLinear, codec: str) -> None:
    linear = frozen(40, 24, codec)
    assert isinstance(linear.weight, QuantTensor) and isinstance(linear.weight, nn.Parameter)
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]
    assert not linear.weight.requires_grad and linear.bias.requires_grad
    assert sum(p.numel() for p in linear.parameters()) == 24 * 40 + 24


def test_deepcopy_of_a_module(frozen: MakeLinear, codec: str) -> None:
    pair = nn.ModuleList([frozen(40, 24, codec), nn.Linear(40, 24)])
    pair[1].weight = pair[0].weight  # tied
    pair[0].weight.tag = ["kept"]
    twin = copy.deepcopy(pair)
    assert isinstance(twin[0].weight, nn.Parameter) and twin[0].weight is twin[1].weight
    assert same_bytes(twin[0].weight, pair[0].weight)
    assert not shares_memory(twin[0].weight, pair[0].weight)
    assert twin[0].weight.tag == ["kept"] and twin[0].weight.tag is not pair[0].weight.tag


def test_module_to_dtype_and_device(frozen: MakeLinear, codec: str) -> None:
    linear = frozen(40, 24, codec)
    expected = linear.weight.dequantize(torch.bfloat16)
    linear.to(torch.bfloat16)
    assert isinstance(linear.weight, QuantTensor) and isinstance(linear.weight, nn.Parameter)
    assert linear.weight.dtype is torch.bfloat16 and linear.bias.dtype is torch.bfloat16
    assert torch.equal(linear.weight.dequantize(), expected)
    linear.to("meta")
    assert isinstance(linear.weight, QuantTensor) and linear.weight.device.type == "meta"
    with pytest.raises(FrozenWeightError, match="requires_grad"):
        frozen(40, 24, codec).requires_grad_(True)


def test_state_dict_and_load_state_dict(frozen: MakeLinear, codec: str) -> None:
    linear = frozen(40, 24, codec, dtype=torch.bfloat16)
    served = linear.state_dict()["weight"]
    assert isinstance(served, QuantTensor) and torch.equal(served, linear.weight)
    weight, address = linear.weight, linear.weight.buffers()[0].data_ptr()
    dense = {"weight": torch.randn(24, 40), "bias": torch.zeros(24)}
    linear.load_state_dict(dense)
    assert linear.weight is weight and linear.weight.buffers()[0].data_ptr() == address
    assert same_bytes(linear.weight, ts_quant.quantize(dense["weight"].bfloat16(), codec))
    other = frozen(40, 24, codec, dtype=torch.bfloat16)
    other.load_state_dict(linear.state_dict())
    assert same_bytes(other.weight, linear.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        linear.load_state_dict({"weight": torch.randn(24, 41), "bias": torch.zeros(24)})
    plain = nn.Linear(40, 24)
    plain.load_state_dict(linear.state_dict())
    assert torch.equal(plain.weight, linear.weight.dequantize().float())


def test_loading_the_dequantized_weights_changes_nothing(frozen: MakeLinear, codec: str) -> None:
    """A session serves decoded weights; loading them back must give the same values."""
    linear = frozen(64, 48, codec, dtype=torch.bfloat16)
    before = linear.weight.dequantize()
    linear.load_state_dict({"weight": before, "bias": linear.bias.detach()})
    after = linear.weight.dequantize()
    step = {"int8": 2.0**-7, "nvfp4": 2.0**-8}.get(codec, 0.0)
    assert float((after.float() - before.float()).abs().max()) <= step * float(before.abs().max())
