"""The parts of the call by themselves: append_kv, apply_rotary, merge_states."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn import quant

INF, NAN = math.inf, math.nan
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
PAGES, PAGE, HEADS, DIM = 5, 4, 2, 8
BACKENDS = ["reference", "cpu", None]
append_kv: Any = kvattn.append_kv  # called with keyword dictionaries throughout
apply_rotary: Any = kvattn.apply_rotary
attend: Any = kvattn.flash_attn_with_kvcache


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def bits(x: Tensor) -> Tensor:
    """Bytes, so that NaN equals itself."""
    return x.contiguous().view(torch.uint8)


class Canary:
    """K and V pools inside one larger buffer, and what that buffer must hold afterwards."""

    def __init__(self, dtype: torch.dtype = torch.float32, dim: int = DIM) -> None:
        shape = (2, PAGES + 2, PAGE, HEADS, dim)
        self.memory = torch.randint(0, 100, shape).to(dtype)
        self.wanted = self.memory.clone()
        self.k, self.v = self.memory[:, 1:-1]
        self.k_wanted, self.v_wanted = self.wanted[:, 1:-1]

    def expect(self, page: int, offset: int, k: Tensor, v: Tensor) -> None:
        for pool, token in ((self.k_wanted, k), (self.v_wanted, v)):
            pool[page, offset] = token

    def check(self) -> None:
        assert torch.equal(bits(self.memory), bits(self.wanted))


# append_kv ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [6, ints(6, 1)], ids=["int", "tensor"])
def test_append_behind_the_lengths_of_a_table(length: Any, backend: str | None) -> None:
    pool, (k, v) = Canary(), torch.randn(2, 2, 2, HEADS, DIM)
    table = ints(4, 0, 2, 3).reshape(2, 2)
    append = {"cache_seqlens": length, "page_table": table, "backend": backend}
    append_kv(k, v, pool.k, pool.v, **append)
    for b, first in enumerate(length.tolist() if isinstance(length, Tensor) else [6, 6]):
        for t, row in enumerate(range(first, first + 2)):
            pool.expect(int(table[b, row // PAGE]), row % PAGE, k[b, t], v[b, t])
    pool.check()
    with pytest.raises(E.AppendOverflowError, match=r"\[0\].*7 cached \+ 2 new"):
        append_kv(k, v, pool.k, pool.v, **(append | {"cache_seqlens": ints(7, 1)}))
    pool.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_append_to_rows_of_a_dense_cache(backend: str | None) -> None:
    """cache_batch_idx picks the row; an inactive sequence stores nothing."""
    pool, (k, v) = Canary(), torch.randn(2, 3, 2, HEADS, DIM)
    rows, lengths = ints(3, 1, 0), ints(2, -1, 0)
    append = {"cache_seqlens": lengths, "cache_batch_idx": rows, "backend": backend}
    append_kv(k, v, pool.k, pool.v, **append)
    for b, first in ((0, 2), (2, 0)):
        for t in range(2):
            pool.expect(int(rows[b]), first + t, k[b, t], v[b, t])
    pool.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_append_of_ragged_tokens_across_a_page_border(backend: str | None) -> None:
    pool, (k, v) = Canary(), torch.randn(2, 4, HEADS, DIM)
    table, edges, lengths = ints(1, 4, 2, 0, 3, 2).reshape(3, 2), ints(0, 1, 1, 4), ints(7, 5, 2)
    append_kv(
        k,
        v,
        pool.k,
        pool.v,
        cache_seqlens=lengths,
        page_table=table,
        cu_seqlens_k_new=edges,
        backend=backend,
    )
    pool.expect(4, 3, k[0], v[0])
    for t, (page, offset) in enumerate(((3, 2), (3, 3), (2, 0))):
        pool.expect(page, offset, k[1 + t], v[1 + t])
    pool.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["tokens", "batch"])
def test_append_by_slots(shape: str, backend: str | None) -> None:
    """-1 skips a token; the last slot of the pool is a slot like any other."""
    pool, (k, v) = Canary(), torch.randn(2, 4, HEADS, DIM)
    where = slots(7, -1, PAGES * PAGE - 1, 0)
    given = (k, v) if shape == "tokens" else (k[None], v[None])
    append_kv(*given, pool.k, pool.v, slot_mapping=where, backend=backend)
    for t, slot in enumerate(where.tolist()):
        if slot >= 0:
            pool.expect(slot // PAGE, slot % PAGE, k[t], v[t])
    pool.check()


def test_slots_carry_rotary_positions_of_their_own() -> None:
    """With slots the lengths count the new tokens; or rotary_seqlens give the positions."""
    pool, (k, v), (cos, sin) = Canary(), torch.randn(2, 3, HEADS, DIM), tables(200)
    where, positions = slots(7, -1, 9), ints(150, 3, 2)
    turned = apply_rotary(k, cos, sin, positions=positions)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "slot_mapping": where}
    pool.expect(1, 3, turned[0], v[0])
    pool.expect(2, 1, turned[2], v[2])
    append_kv(k, v, pool.k, pool.v, **rotary, cache_seqlens=positions + 1)
    pool.check()
    pool.k.zero_()
    pool.k_wanted.zero_()
    pool.expect(1, 3, turned[0], v[0])
    pool.expect(2, 1, turned[2], v[2])
    append_kv(k, v, pool.k, pool.v, **rotary, rotary_seqlens=positions)
    pool.check()
    with pytest.raises(E.AppendWithoutLengthsError, match="rotary_seqlens"):
        append_kv(k, v, pool.k, pool.v, **rotary)
    pool.check()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
def test_narrow_caches_divide_by_the_scale(dtype: torch.dtype) -> None:
    """k / k_descale by head, rounded once; v without a scale is rounded as it is."""
    pool = Canary(dtype)
    k, v = torch.randn(2, 1, 2, HEADS, DIM, dtype=torch.bfloat16)
    scale = torch.tensor([[0.25, 8.0]])
    append = {"cache_seqlens": 1, "cache_batch_idx": ints(2)}
    append_kv(k, v, pool.k, pool.v, k_descale=scale, **append)
    for t in range(2):
        stored = quant.cast(k[0, t].float() / scale[0][:, None], dtype)
        pool.expect(2, 1 + t, stored, quant.cast(v[0, t], dtype))
    pool.check()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
def test_a_scale_per_token_is_written_with_it(dtype: torch.dtype) -> None:
    pool, (k, v) = Canary(dtype), 100 * torch.randn(2, 3, HEADS, DIM)
    k[2] = 0
    scales = torch.full((2, PAGES, PAGE, HEADS), 7.0)
    where = slots(6, -1, 17)
    append_kv(k, v, pool.k, pool.v, slot_mapping=where, k_descale=scales[0], v_descale=scales[1])
    wanted = torch.full_like(scales, 7.0)
    for t, (page, offset) in ((0, (1, 2)), (2, (4, 1))):
        for side, token in enumerate((k[t], v[t])):
            amax = token.abs().amax(-1)
            wanted[side, page, offset] = torch.where(amax > 0, amax / quant.LIMIT[dtype], 1.0)
        stored = (
            quant.cast(token / wanted[side, page, offset][:, None], dtype)
            for side, token in enumerate((k[t], v[t]))
        )
        pool.expect(page, offset, *stored)
    assert torch.equal(scales, wanted)
    pool.check()
    restored = pool.k[1, 2].float() * scales[0, 1, 2][:, None]
    step = {E4M3: 2**-4, E5M2: 2**-3, torch.int8: 0.004}[dtype]
    assert (restored - k[0]).abs().max() <= step * k[0].abs().max()


@pytest.mark.parametrize("interleaved", [False, True])
def test_mxfp8_scales_are_written_in_their_layout(interleaved: bool) -> None:
    pool, (k, v) = Canary(E4M3, dim=64), torch.randn(2, 2, HEADS, 64, dtype=torch.bfloat16)
    shape = (PAGES, HEADS, 1, 1, 32, 4, 4) if interleaved else (PAGES, PAGE, HEADS, 2)
    scales = torch.full((2, *shape), 9, dtype=torch.uint8)
    sfk, sfv = scales.view(E8M0)
    append_kv(k, v, pool.k, pool.v, slot_mapping=slots(5, 18), sfk=sfk, sfv=sfv)
    wanted = torch.full_like(scales, 9)
    for t, (page, offset) in enumerate(((1, 1), (4, 2))):
        stored = []
        for side, token in enumerate((k[t], v[t])):
            data, codes = quant.mx_quantise(token)
            stored.append(data)
            for group in range(2):
                for head in range(HEADS):
                    plain, block = (page, offset, head, group), (page, head, 0, 0, offset, 0, group)
                    at = block if interleaved else plain
                    wanted[side][at] = codes.view(torch.uint8)[head, group]
        pool.expect(page, offset, *stored)
    assert torch.equal(scales, wanted)
    pool.check()


def test_tokens_of_the_cache_s_dtype_are_stored_as_they_are() -> None:
    """No scale touches them, and NaN and infinity keep their bits."""
    pool = Canary(E4M3)
    k = torch.randint(0, 256, (1, 3, HEADS, DIM), dtype=torch.uint8).view(E4M3)
    scale = torch.tensor(4.0)
    append_kv(k, k, pool.k[:1], pool.v[:1], cache_seqlens=0, k_descale=scale)
    for t in range(3):
        pool.expect(0, t, k[0, t], k[0, t])
    pool.check()


def test_append_alone_is_the_append_of_the_call() -> None:
    (k, v), (cos, sin) = torch.randn(2, 2, 3, HEADS, DIM), tables(16)
    q = torch.randn(2, 3, HEADS, DIM)
    alone, fused = torch.randn(2, 2, 12, HEADS, DIM).tile(2, 1, 1, 1, 1, 1)
    where = {"cache_seqlens": ints(4, 0), "rotary_cos": cos, "rotary_sin": sin}
    append_kv(k, v, *alone, **where)
    attend(q, *fused, k, v, **where, causal=True)
    assert torch.equal(alone, fused)


# apply_rotary ---------------------------------------------------------------------------------


def tables(rows: int, dim: int = DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("part", [2, 6, 8])
@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_turn_like_complex_numbers(part: int, interleaved: bool) -> None:
    x, (cos, sin) = torch.randn(2, 3, HEADS, DIM, dtype=torch.float64), tables(20, part)
    positions = torch.randint(0, 20, (2, 3))
    turned = apply_rotary(x, cos, sin, positions=positions, interleaved=interleaved)
    first, second = (slice(0, part, 2), slice(1, part, 2))
    if not interleaved:
        first, second = slice(0, part // 2), slice(part // 2, part)
    factor = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    wanted = torch.complex(x[..., first], x[..., second]) * factor
    torch.testing.assert_close(turned[..., first], wanted.real)
    torch.testing.assert_close(turned[..., second], wanted.imag)
    assert torch.equal(turned[..., part:], x[..., part:])


def test_every_way_to_give_positions() -> None:
    x, (cos, sin) = torch.randn(2, 3, HEADS, DIM), tables(20)
    positions = ints(4, 9)[:, None] + torch.arange(3)
    expected = apply_rotary(x, cos, sin, positions=positions)
    assert torch.equal(apply_rotary(x, cos, sin, seqlen_offsets=ints(4, 9)), expected)
    same = apply_rotary(x, cos, sin, seqlen_offsets=5)
    assert torch.equal(same, apply_rotary(x, cos, sin, seqlen_offsets=ints(5, 5)))
    packed = x.flatten(0, 1)[:5]
    edges = ints(0, 3, 3, 5)
    found = apply_rotary(packed, cos, sin, seqlen_offsets=ints(4, 0, 9), cu_seqlens=edges)
    assert torch.equal(found, expected.flatten(0, 1)[:5])
    by_position = apply_rotary(packed, cos, sin, positions=positions.flatten()[:5])
    assert torch.equal(by_position, found)
    nothing = apply_rotary(x[0, :0], cos, sin, seqlen_offsets=3, cu_seqlens=ints(0))
    assert nothing.shape == (0, HEADS, DIM)


def test_in_place_or_not() -> None:
    memory, (cos, sin) = torch.randn(2, 3, 3 * HEADS, DIM), tables(20)
    x, before = memory[:, :, HEADS : 2 * HEADS], memory.clone()
    turned = apply_rotary(x, cos, sin, seqlen_offsets=2)
    assert torch.equal(memory, before) and turned.data_ptr() != x.data_ptr()
    assert apply_rotary(x, cos, sin, seqlen_offsets=2, inplace=True) is x
    assert torch.equal(x, turned)
    rest = [0, 1, 4, 5]
    assert torch.equal(memory[:, :, rest], before[:, :, rest])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("own_tables", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_rotation_inside_the_call(
    dtype: torch.dtype, own_tables: bool, interleaved: bool, backend: str | None
) -> None:
    """Stored keys are equal bit for bit; so is attention over hand-rotated tensors."""
    q, k, v = (torch.randn(2, 2, heads, DIM, dtype=dtype) for heads in (4, HEADS, HEADS))
    cos, sin = tables(20, 6, dtype if own_tables else torch.float32)
    caches = torch.randn(2, 2, 12, HEADS, DIM, dtype=dtype)
    twin, lengths = caches.clone(), ints(3, 7)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    call = {"cache_seqlens": lengths, "causal": True, "backend": backend}
    out = attend(q, *caches, k, v, **call, **rotary)
    turned = [
        apply_rotary(x, cos, sin, seqlen_offsets=lengths, interleaved=interleaved) for x in (q, k)
    ]
    assert turned[0].dtype == dtype
    plain = attend(turned[0], *twin, turned[1], v, **call)
    assert torch.equal(caches, twin) and torch.equal(out, plain)


X = torch.randn(2, 3, HEADS, DIM)
PACKED = X.flatten(0, 1)
COS, SIN = tables(20)
with torch.inference_mode():
    INFERRED = X.clone()

ROTARY_MISTAKES: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[E.KvattnError], str]] = {
    "no positions": ((X, COS, SIN), {}, E.RotaryArgumentsError, "positions"),
    "two kinds": (
        (X, COS, SIN),
        {"positions": torch.zeros(2, 3).int(), "seqlen_offsets": 0},
        E.RotaryArgumentsError,
        "positions",
    ),
    "borders with positions": (
        (PACKED, COS, SIN),
        {"positions": torch.zeros(6).int(), "cu_seqlens": ints(0, 6)},
        E.RotaryArgumentsError,
        "cu_seqlens",
    ),
    "float positions": (
        (X, COS, SIN),
        {"positions": torch.zeros(2, 3)},
        E.RotaryArgumentsError,
        "positions",
    ),
    "shape of positions": (
        (X, COS, SIN),
        {"positions": torch.zeros(3, 2).int()},
        E.RotaryArgumentsError,
        r"\(2, 3\)",
    ),
    "number of offsets": (
        (X, COS, SIN),
        {"seqlen_offsets": ints(1, 2, 3)},
        E.RotaryArgumentsError,
        "seqlen_offsets",
    ),
    "number of ragged offsets": (
        (PACKED, COS, SIN),
        {"seqlen_offsets": ints(1, 2, 3), "cu_seqlens": ints(0, 2, 6)},
        E.RotaryArgumentsError,
        "seqlen_offsets",
    ),
    "packed without borders": (
        (PACKED, COS, SIN),
        {"seqlen_offsets": 0},
        E.RotaryArgumentsError,
        "cu_seqlens",
    ),
    "padded with borders": (
        (X, COS, SIN),
        {"seqlen_offsets": 0, "cu_seqlens": ints(0, 6)},
        E.RotaryArgumentsError,
        "cu_seqlens",
    ),
    "borders that fall": (
        (PACKED, COS, SIN),
        {"seqlen_offsets": 0, "cu_seqlens": ints(0, 4, 2, 6)},
        E.CuSeqlensError,
        "cu_seqlens",
    ),
    "borders that stop early": (
        (PACKED, COS, SIN),
        {"seqlen_offsets": 0, "cu_seqlens": ints(0, 5)},
        E.CuSeqlensError,
        "6",
    ),
    "no borders at all": (
        (PACKED, COS, SIN),
        {"seqlen_offsets": 0, "cu_seqlens": ints()},
        E.CuSeqlensError,
        "cu_seqlens",
    ),
    "past the table": ((X, COS, SIN), {"seqlen_offsets": 18}, E.RotaryTableShortError, "20"),
    "before the table": ((X, COS, SIN), {"seqlen_offsets": -1}, E.RotaryTableShortError, "-1"),
    "tables differ": ((X, COS, SIN[:9]), {"seqlen_offsets": 0}, E.RotaryShapeError, "cos"),
    "too wide": ((X[..., :4], COS, SIN), {"seqlen_offsets": 0}, E.RotaryShapeError, "R <= 4"),
    "dtype of the tables": (
        (X, COS.half(), SIN.half()),
        {"seqlen_offsets": 0},
        E.RotaryDtypeError,
        "float32",
    ),
    "rank of x": ((X[0, 0], COS, SIN), {"seqlen_offsets": 0}, E.RotaryArgumentsError, "x"),
    "no tensor": ((X, 1.0, SIN), {"seqlen_offsets": 0}, E.NotATensorError, "cos"),
    "no offset": ((X, COS, SIN), {"seqlen_offsets": [0, 1]}, E.RotaryArgumentsError, "list"),
    "a flag as offset": ((X, COS, SIN), {"seqlen_offsets": True}, E.RotaryArgumentsError, "bool"),
    "a far offset": ((X, COS, SIN), {"seqlen_offsets": 2**63}, E.RotaryArgumentsError, "int"),
    "a list of positions": ((X, COS, SIN), {"positions": [0]}, E.NotATensorError, "positions"),
    "flags as positions": (
        (X, COS, SIN),
        {"positions": torch.zeros(X.shape[:2], dtype=torch.bool)},
        E.RotaryArgumentsError,
        "bool",
    ),
    "a list of borders": (
        (PACKED, COS, SIN),
        {"seqlen_offsets": 0, "cu_seqlens": [0, 6]},
        E.NotATensorError,
        "cu_seqlens",
    ),
    "no flag": ((X, COS, SIN), {"seqlen_offsets": 0, "interleaved": 1}, E.FlagError, "interleaved"),
    "integers": ((X.long(), COS, SIN), {"seqlen_offsets": 0}, E.RotaryArgumentsError, "int64"),
    "another device": (
        (X, COS.to("meta"), SIN.to("meta")),
        {"seqlen_offsets": 0},
        E.DeviceMismatchError,
        "cos",
    ),
    "one place for many": (
        (X[:, :1].expand(X.shape), COS, SIN),
        {"seqlen_offsets": 0},
        E.RotaryArgumentsError,
        "strides",
    ),
    "a leaf": (
        (X.clone().requires_grad_(), COS, SIN),
        {"seqlen_offsets": 0},
        E.RequiresGradError,
        "x",
    ),
    "a tensor of inference mode": (
        (INFERRED, COS, SIN),
        {"seqlen_offsets": 0},
        E.InferenceTensorError,
        "x",
    ),
}


@pytest.mark.parametrize("mistake", ROTARY_MISTAKES)
def test_rotary_mistakes_are_named(mistake: str) -> None:
    arguments, options, kind, text = ROTARY_MISTAKES[mistake]
    before = X.clone()
    with pytest.raises(kind, match=text):
        apply_rotary(*arguments, **options, inplace=True)
    assert torch.equal(X, before)


# merge_states ---------------------------------------------------------------------------------


def split(count: int, dtype: torch.dtype = torch.float32) -> tuple[list[Any], Any]:
    """Attention over `count` runs of keys, one of them empty, and over all of them."""
    q, k, v = torch.randn(2, 3, 4, DIM), torch.randn(2, 24, HEADS, DIM), torch.randn(2, 24, 2, DIM)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    edges = [0, *sorted(torch.randperm(23)[: count - 2].add(1).tolist()), 24, 24]

    def over(first: int, last: int) -> Any:
        call = {"cache_seqlens": last, "cache_leftpad": ints(first, first)}
        return attend(q, k, v, return_softmax_lse=True, **call)

    return [over(a, b) for a, b in pairwise(edges)], over(0, 24)


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_parts_merge_into_the_whole(count: int) -> None:
    parts, (out, lse) = split(count)
    assert len(parts) == count
    found = kvattn.merge_states([o for o, _ in parts], [s for _, s in parts])
    torch.testing.assert_close(found, (out, lse), rtol=0, atol=1e-5)
    packed = [(o.flatten(0, 1), s.transpose(0, 1).flatten(1)) for o, s in parts]
    flat = kvattn.merge_states([o for o, _ in packed], [s for _, s in packed])
    assert torch.equal(flat[0], found[0].flatten(0, 1))


def test_parts_in_double_precision() -> None:
    """fp64 lses are merged in fp64, and outputs keep their dtype."""
    outs = list(torch.randn(3, 1, 2, 1, 4, dtype=torch.float64))
    lses = list(torch.randn(3, 1, 1, 2, dtype=torch.float64))
    out, lse = kvattn.merge_states(outs, lses)
    weights = torch.stack(lses).softmax(0).transpose(-1, -2)[..., None]
    torch.testing.assert_close(out, (torch.stack(outs) * weights).sum(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(lse, torch.stack(lses).logsumexp(0), rtol=1e-14, atol=1e-14)
    half, _ = kvattn.merge_states([o.half() for o in outs], lses)
    assert half.dtype == torch.float16


@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_logits_keep_their_weights(splits: int, dtype: torch.dtype) -> None:
    """Weights against a rounded total lse would rescale the output (FlashAttention-2's combine)."""
    q = torch.full((1, 1, 1, 128), 64.0, dtype=dtype)
    k, v = q.expand(1, 256, 1, 128).contiguous(), torch.ones(1, 256, 1, 128, dtype=dtype)
    parts = [
        attend(q, a, b, return_softmax_lse=True)
        for a, b in zip(k.chunk(splits, 1), v.chunk(splits, 1), strict=True)
    ]
    out, lse = kvattn.merge_states([o for o, _ in parts], [s for _, s in parts])
    assert (out == 1.0).all()
    assert lse.item() == pytest.approx(46346.50, abs=0.01)


def test_an_empty_part_is_selected_away() -> None:
    """Whatever it holds, and whichever infinity marks it; so is one that weighs nothing."""
    outs = torch.tensor([NAN, INF, 3.5, NAN])[:, None, None, None, None].expand(4, 1, 1, 1, 8)
    lses = torch.tensor([-INF, INF, 1.0, -1e30])[:, None, None, None]
    out, lse = kvattn.merge_states(list(outs), list(lses))
    assert (out == 3.5).all() and lse.item() == 1.0
    out, lse = kvattn.merge_states(list(outs[:2]), list(lses[:2]))
    assert (out == 0).all() and lse.item() == -INF
    same, _ = kvattn.merge_states([outs[2]], [lses[2]])
    assert torch.equal(same, outs[2])


def test_a_nan_that_counts_stays() -> None:
    out, _ = kvattn.merge_states([torch.full((1, 1, 1, 4), NAN)] * 2, [torch.zeros(1, 1, 1)] * 2)
    assert out.isnan().all()
    ones, lses = [torch.ones(1, 1, 1, 4)] * 2, [torch.full((1, 1, 1), NAN), torch.zeros(1, 1, 1)]
    assert all(x.isnan().all() for x in kvattn.merge_states(ones, lses))


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2)


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([OUT], [LSE, LSE]),
        ([OUT, OUT[:, :1]], [LSE, LSE]),
        ([OUT, OUT], [LSE, LSE.transpose(1, 2)]),
        ([OUT[0, 0]], [LSE]),
        (None, [LSE]),
        ([OUT], LSE[0, 0, 0]),
        ([OUT.long()], [LSE]),
        ([OUT], [LSE.int()]),
    ],
    ids=[
        *("nothing", "one lse too many", "shapes of outs", "lse not head first", "rank"),
        *("no outs", "a number", "integers", "an integer lse"),
    ],
)
def test_merge_mistakes_are_named(outs: Any, lses: Any) -> None:
    with pytest.raises(E.MergeStatesError, match=r"outs|lses"):
        kvattn.merge_states(outs, lses)
