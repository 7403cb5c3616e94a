"""Field reports: garbage in dead memory, rows without keys, batches without rows, ragged rows."""

from __future__ import annotations

import pytest
import torch
from field_report import (
    INF,
    NAN,
    attend,
    attend_varlen,
    check,
    ints,
    page_table,
    paginate,
    probe,
    ramp,
    report,
    seen,
)

from kvattn import errors as E


@report("N1")
def test_nan_in_slots_never_written(backend: str | None) -> None:
    """Slots past the length hold NaN; they reached the output (Dao-AILab/flash-attention#1745)."""
    lengths, q = ints(1, 3), torch.full((2, 1, 1, 64), 0.5, dtype=torch.float16)
    k, v = torch.randn(2, 2, 3, 1, 64).half()
    dead = torch.arange(3)[None, :, None, None] >= lengths[:, None, None, None]
    results = []
    for fill in (NAN, 0.0):
        caches = (torch.where(dead, fill, x) for x in (k, v))
        results.append(
            attend(q, *caches, cache_seqlens=lengths, return_softmax_lse=True, backend=backend)
        )
    for poisoned, clean in zip(*results, strict=True):
        assert poisoned.isfinite().all()
        assert torch.equal(poisoned, clean)


@report("N3")
def test_nan_in_the_tail_of_the_last_page_of_latents(backend: str | None) -> None:
    """MLA: the unused end of the last page spoiled the row (flashinfer-ai/flashinfer#941)."""
    latent = torch.full((4, 4, 1, 6), NAN)
    table = ints(2, 0, 3, 1)[None]
    for j in range(13):
        latent[table[0, j // 4], j % 4] = j
    result = attend(
        torch.zeros(1, 1, 2, 6),
        latent,
        latent[..., :4],
        cache_seqlens=13,
        page_table=table,
        return_softmax_lse=True,
        backend=backend,
    )
    check(seen(result, head=1), [6.0], [13])


@report("N4")
def test_nan_behind_the_end_without_a_causal_bound(backend: str | None) -> None:
    """Cross attention read on to the end of the page (vllm-project/vllm#47305)."""
    v = ramp(1, 32)
    v[:, 17:] = NAN
    k = torch.randn(1, 32, 1, 4)
    k[:, 17:] = NAN
    pools = {name: paginate(x, 16) for name, x in (("k_cache", k), ("v_cache", v))}
    found = probe(backend, 17, page_table=page_table(1, 32, 16), causal=False, **pools)
    check(found, [8.0], [17])


@report("N5")
def test_masks_select_and_do_not_add(backend: str | None) -> None:
    """NaN plus minus infinity is NaN, so a bias is no mask (deepbeepmeep/Wan2GP#1628)."""
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 8, 1, 8), torch.randn(1, 8, 1, 8)
    k[:, 5:] = v[:, 5:] = 0
    call = {"cache_seqlens": 5, "causal": True, "backend": backend}
    clean = attend(q, k, v, **call)
    poisoned = k.clone()
    poisoned[:, 5:] = NAN
    assert torch.equal(attend(q, poisoned, v, **call), clean)


@report("N6")
def test_a_padding_page_full_of_nan(backend: str | None) -> None:
    """Padded rows of a graph share page 0 and once spread its NaN (sgl-project/sglang#36207)."""
    k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8)
    k[0] = v[0] = NAN
    before = k.clone(), v.clone()
    q = torch.randn(2, 1, 2, 8)
    table, lengths = ints(1, 0)[:, None], ints(3, 0)
    call = {"page_table": table, "return_softmax_lse": True, "backend": backend}
    out, lse = attend(q, k, v, cache_seqlens=lengths, **call)
    alone = attend(q[:1], k, v, cache_seqlens=lengths[:1], **(call | {"page_table": table[:1]}))
    assert torch.equal(out[0], alone[0][0]) and out[0].isfinite().all()
    assert (out[1] == 0).all() and (lse[1] == -INF).all()
    new = torch.randn(2, 1, 1, 8)
    new[1] = NAN  # the padded row's new token, in a row marked inactive
    attend(q, k, v, new, new, cache_seqlens=ints(3, -1), **call)
    for pool, old, token in zip((k, v), before, (new, new), strict=True):
        assert torch.equal(pool[1, 3], token[0, 0]) and torch.equal(pool[1, :3], old[1, :3])
        assert torch.equal(pool[0].view(torch.int32), old[0].view(torch.int32))


@report("N7")
@pytest.mark.parametrize("stale", [-1, 2**31 - 1, 0, 7])
def test_table_entries_behind_the_last_live_page(stale: int, backend: str | None) -> None:
    """Stale entries of the table were followed (ROCm/aiter#4245)."""
    pools = [torch.randn(3, 4, 1, 8) for _ in range(2)]
    for pool in pools:
        pool[0] = NAN
    q, narrow = torch.randn(1, 1, 2, 8), ints(2, 1)[None]
    wide = torch.full((1, 8), stale, dtype=torch.int32)
    wide[:, :2] = narrow
    call = {"cache_seqlens": 5, "backend": backend}
    expected = attend(q, *pools, page_table=narrow, **call)
    assert torch.equal(attend(q, *pools, page_table=wide, **call), expected)
    assert expected.isfinite().all()


@report("N9")
def test_requests_without_keys_between_others(backend: str | None) -> None:
    """A request with nothing cached gave a wrong row (flashinfer-ai/flashinfer#363)."""
    check(probe(backend, [0, 5, 0]), [0, 2.0, 0], [0, 5, 0])
    check(probe(backend, [0, 5, 0], sq=2), [0, 0, 2, 2, 0, 0], [0, 0, 5, 5, 0, 0])


@report("N10")
def test_the_row_of_an_empty_sequence_is_written(backend: str | None) -> None:
    """The caller's output kept its old bits there (flashinfer-ai/flashinfer#4975)."""
    out = torch.full((2, 1, 1, 4), NAN)
    check(probe(backend, [3, 0], out=out), [1.0, 0], [3, 0])
    assert out[:, 0, 0].tolist() == [[1.0] * 4, [0.0] * 4]


@report("N12")
def test_logits_below_any_finite_minus_infinity(backend: str | None) -> None:
    """Logits under -5e4 vanished behind a finite sentinel (flashinfer-ai/flashinfer#4267)."""
    q = torch.full((1, 1, 1, 128), 64.0, dtype=torch.bfloat16)
    out, lse = attend(
        q,
        torch.full_like(q, -64.0),
        torch.ones_like(q),
        cache_seqlens=1,
        return_softmax_lse=True,
        backend=backend,
    )
    assert (out == 1.0).all()
    assert lse.item() == pytest.approx(-46340.95, abs=0.01)


@report("N14")
def test_more_queries_than_keys(backend: str | None) -> None:
    """Rows before the first key got a finite lse (flashinfer-ai/flashinfer#4452)."""
    wanted = [0, 0, 0, 0.0, 0.5], [0, 0, 0, 1, 2]
    check(probe(backend, 2, sq=5, causal=True), *wanted)
    pools = {"k_cache": torch.randn(4, 1, 1, 4), "v_cache": ramp(1, 4)[0][:, None]}
    check(probe(backend, 2, sq=5, causal=True, page_table=ints(0, 1)[None], **pools), *wanted)


@report("N15")
def test_zero_length_sequences_on_the_cpu(backend: str | None) -> None:
    """An arithmetic trap killed the process (pytorch/pytorch#141219)."""
    k = torch.randn(7, 0, 7, 7).half()
    out, lse = attend(k, k, k, return_softmax_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((7, 0, 7, 7), (7, 7, 0))
    with pytest.raises(E.HeadRatioError, match=r"9 .*7"):
        attend(torch.randn(7, 0, 9, 7).half(), k, k, backend=backend)


@report("N16")
def test_no_queries_at_all(backend: str | None) -> None:
    """An empty query set divided by zero in the planner (Dao-AILab/flash-attention#2503)."""
    k, v = torch.randn(2, 2, 4096, 1, 8).bfloat16()
    before = k.clone()
    q = torch.empty(2, 0, 2, 8, dtype=torch.bfloat16)
    out = attend(q, k, v, cache_seqlens=4096, backend=backend)
    assert (out.shape, out.dtype) == ((2, 0, 2, 8), torch.bfloat16)
    out = attend(q[:0].new_empty(0, 64, 2, 8), k[:0], v[:0], cache_seqlens=4096, backend=backend)
    assert out.shape == (0, 64, 2, 8)
    call = {"cu_seqlens_q": ints(0, 0, 0), "max_seqlen_q": 0, "cache_seqlens": ints(9, 9)}
    assert attend(q[0], k, v, **call, backend=backend).shape == (0, 2, 8)
    assert torch.equal(k, before)
    new = torch.randn(2, 1, 1, 8).bfloat16()  # new tokens are stored although nothing asks
    attend(q, k, v, new, new, cache_seqlens=4095, backend=backend)
    assert torch.equal(k[:, 4095:], new) and torch.equal(k[:, :4095], before[:, :4095])


@report("N17")
def test_a_batch_of_zero(backend: str | None) -> None:
    """Refusing it breaks static graphs (Dao-AILab/flash-attention#1159)."""
    q, cache = (torch.empty(0, n, 10, 64, dtype=torch.float16) for n in (3952, 16))
    out, lse = attend(q, cache, cache, return_softmax_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((0, 3952, 10, 64), (0, 10, 3952))


@report("N19")
def test_a_sequence_with_keys_and_no_queries(backend: str | None) -> None:
    """It sits between two that have both (Dao-AILab/flash-attention#1713)."""
    out, lse = attend_varlen(
        torch.zeros(300, 1, 4),
        torch.randn(300, 1, 4),
        ramp(3, 100).flatten(0, 1),
        ints(0, 150, 150, 300),
        ints(0, 100, 200, 300),
        150,
        100,
        causal=True,
        return_lse=True,
        backend=backend,
    )
    count = [0] * 50 + list(range(1, 101))
    mean = [max(0, keys - 1) / 2 for keys in count]
    check(seen((out, lse)), mean * 2, count * 2)


@report("V1")
def test_fewer_tokens_than_sequences(backend: str | None) -> None:
    """A fast path took one token for each sequence (Dao-AILab/flash-attention#1619)."""
    q, k, v = (torch.randn(1, heads, 120).bfloat16() for heads in (21, 7, 7))
    edges = ints(0, 0, 0, 0, 1)
    out = attend_varlen(q, k, v, edges, edges, 1, 1, backend=backend)
    assert torch.equal(out, v.repeat_interleave(3, 1))


@report("V3")
def test_rows_behind_the_last_sequence(backend: str | None) -> None:
    """Rows that no sequence owns came back changed (Dao-AILab/flash-attention#1661)."""
    out = torch.full((6, 1, 4), 7.0)
    result = attend(
        torch.zeros(6, 1, 4),
        torch.randn(2, 8, 1, 4),
        ramp(2, 8),
        cache_seqlens=ints(3, 5),
        cu_seqlens_q=ints(0, 2, 4),
        out=out,
        return_softmax_lse=True,
        backend=backend,
    )
    assert result[0] is out
    assert out[:, 0, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 7.0, 7.0]
    assert result[1][0, 4:].tolist() == [-INF, -INF]


@report("V4")
def test_the_longest_query_is_only_a_hint(backend: str | None) -> None:
    """Computing it needed a device sync (Dao-AILab/flash-attention#1664)."""
    q, k, v = torch.randn(5, 2, 8), torch.randn(2, 8, 1, 8), torch.randn(2, 8, 1, 8)
    call = {"cu_seqlens_q": ints(0, 1, 5), "cache_seqlens": ints(3, 7), "causal": True}
    first, *others = (
        attend(q, k, v, max_seqlen_q=bound, **call, backend=backend) for bound in (4, 64, None)
    )
    assert all(torch.equal(first, other) for other in others)
    with pytest.raises(E.MaxSeqlenTooSmallError, match="max_seqlen_q"):
        attend(q, k, v, max_seqlen_q=1, **call, backend=backend)


@report("V5")
def test_query_offsets_are_not_key_offsets(backend: str | None) -> None:
    """Later requests read a neighbour's keys (flashinfer-ai/flashinfer#4018)."""
    v = torch.tensor([0.0, 1, 2, 3, 100, 101])[:, None, None].repeat(1, 1, 4)
    result = attend_varlen(
        torch.zeros(4, 1, 4),
        torch.randn(6, 1, 4),
        v,
        ints(0, 1, 4),
        ints(0, 4, 6),
        3,
        4,
        causal=True,
        return_lse=True,
        backend=backend,
    )
    check(seen(result), [1.5, 0, 100.0, 100.5], [4, 0, 1, 2])
