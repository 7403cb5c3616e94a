"""The operators under torch.compile: schemas, graphs, recompilation, mutation, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import cpp_builder
from torch._inductor import exc as inductor_exc
from torch.library import opcheck

import kvattn
from kvattn import errors as E
from kvattn import ops

LAYERS, PAGES, PAGE, HEADS, KV_HEADS, DIM = 3, 12, 4, 4, 2, 16
TABLE = torch.tensor([[7, 0, 9, 2, 5, 11], [3, 1, 10, 4, 6, 8]], dtype=torch.int32)


def no_compiler() -> str | None:
    """Why Inductor cannot build its C++ kernels here, or None."""
    try:
        cpp_builder.get_cpp_compiler()
    except inductor_exc.InvalidCxxCompiler as error:
        return str(error)
    return None


MISSING = no_compiler()
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
)
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
COMPILERS = ["eager", "aot_eager", INDUCTOR]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rotary_tables(rows: int = 32, dim: int = 8) -> tuple[Tensor, Tensor]:
    angle = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    return angle.cos(), angle.sin()


def pools() -> Tensor:
    """All layers, keys and values in one buffer: (layers, 2, pages, page, heads, dim)."""
    return torch.randn(LAYERS, 2, PAGES, PAGE, KV_HEADS, DIM)


def decode(
    pool: Tensor, x: Tensor, lengths: Tensor, table: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """A decode step of all layers: K and V of each are views of the one buffer."""
    for layer in pool:
        k = x[:, :, :KV_HEADS]
        out = kvattn.flash_attn_with_kvcache(
            x,
            layer[0],
            layer[1],
            k,
            k * 0.5,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lengths,
            page_table=table,
            causal=True,
        )
        assert isinstance(out, Tensor)
        x = torch.nn.functional.layer_norm(x + out, (DIM,))
    return x


# Schemas --------------------------------------------------------------------------------------


def tokens(count: int, dim: int = DIM) -> dict[str, Tensor]:
    return {"k": torch.randn(2, count, KV_HEADS, dim), "v": torch.randn(2, count, KV_HEADS, dim)}


def dense(rows: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    k, v = torch.randn(2, rows, 24, KV_HEADS, DIM).to(dtype)
    return {"k_cache": k.clone(), "v_cache": v.clone()}


def paged() -> dict[str, Tensor]:
    k, v = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM)
    return {"k_cache": k.clone(), "v_cache": v.clone(), "page_table": TABLE}


def latent() -> dict[str, Tensor]:
    cache = torch.randn(PAGES, PAGE, 1, 24)
    return {"k_cache": cache, "v_cache": cache[..., :16], "page_table": TABLE}


def query(rows: int = 1) -> dict[str, Any]:
    return {"q": torch.randn(2, rows, HEADS, DIM), "cache_seqlens": ints(3, 9), "causal": True}


def rotary() -> dict[str, Tensor]:
    cos, sin = rotary_tables()
    return {"rotary_cos": cos, "rotary_sin": sin}


def norms(*names: str) -> dict[str, Any]:
    return {f"{name}_norm_weight": torch.rand(DIM) for name in names} | {"norm_eps": 1e-5}


def ragged() -> dict[str, Any]:
    edges = ints(0, 1, 4)
    call = {"q": torch.randn(4, HEADS, DIM), "cu_seqlens_q": edges, "cu_seqlens_k_new": edges}
    new = {name: torch.randn(4, KV_HEADS, DIM) for name in ("k", "v")}
    return {**call, **new, "cache_seqlens": ints(3, 9), "max_seqlen_q": 3}


def scaled_by_token() -> dict[str, Any]:
    scales = {name: torch.ones(2, 24, KV_HEADS) for name in ("k_descale", "v_descale")}
    return {**dense(dtype=torch.int8), **scales}  # opcheck cannot compare FP8


ATTEND: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": lambda: query() | dense(),
    "rows of a cache": lambda: query() | dense(5) | {"cache_batch_idx": ints(4, 1)},
    "paged": lambda: query(3) | paged(),
    "a prefix on the device": lambda: query() | paged() | {"common_prefix_len": ints(0)},
    "window, soft cap, sinks": lambda: (
        query(3) | paged() | {"window_size": (4, 1), "softcap": 5.0, "sinks": torch.zeros(HEADS)}
    ),
    "norm": lambda: query() | dense() | norms("q"),
    "latent": lambda: query() | latent() | {"q": torch.randn(2, 1, HEADS, 24)},
    "packed": lambda: {
        "q": torch.randn(4, HEADS, DIM),
        "k_cache": torch.randn(9, KV_HEADS, DIM),
        "v_cache": torch.randn(9, KV_HEADS, DIM),
        "cu_seqlens_q": ints(0, 1, 4),
        "cu_seqlens_k": ints(0, 4, 9),
        "seqused_k": ints(4, 2),
    },
}
APPEND: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": lambda: query() | dense() | tokens(1),
    "paged": lambda: query(3) | paged() | tokens(3),
    "rotary": lambda: query() | paged() | tokens(1) | rotary(),
    "ragged": lambda: ragged() | paged() | rotary(),
    "norms": lambda: query() | paged() | tokens(1) | rotary() | norms("q", "k"),
    "slots": lambda: query() | paged() | tokens(1) | {"slot_mapping": torch.tensor([30, 38])},
    "int8, a scale per token": lambda: query() | scaled_by_token() | tokens(1),
}  # fmt: skip


def op_arguments(call: dict[str, Any]) -> tuple[Any, ...]:
    q = call["q"]
    out = q.new_zeros((*q.shape[:-1], call["v_cache"].shape[-1]))
    shape = (q.shape[0], HEADS, q.shape[1]) if q.dim() == 4 else (HEADS, q.shape[0])
    return (*ops._flat(call), out, q.new_zeros(shape))


@pytest.mark.parametrize("example", ATTEND)
def test_opcheck_attend(example: str) -> None:
    opcheck(torch.ops.kvattn.attend.default, op_arguments(ATTEND[example]()))


@pytest.mark.parametrize("example", APPEND)
def test_opcheck_append_and_attend(example: str) -> None:
    opcheck(torch.ops.kvattn.append_attend.default, op_arguments(APPEND[example]()))


@pytest.mark.parametrize("example", APPEND)
def test_opcheck_append(example: str) -> None:
    call = {name: value for name, value in APPEND[example]().items() if name not in ATTEND_ONLY}
    opcheck(torch.ops.kvattn.append.default, ops._flat(call))


ATTEND_ONLY = ("q", "causal", "cu_seqlens_q", "max_seqlen_q", "q_norm_weight")


@pytest.mark.parametrize("example", [*ATTEND, *(f"append {name}" for name in APPEND)])
def test_compiled_calls_equal_eager_ones(example: str) -> None:
    """Every example through the public functions, out and lse and what it writes."""
    make = APPEND[example.removeprefix("append ")] if "append" in example else ATTEND[example]
    results = []
    for compiled in (False, True):
        torch.manual_seed(1)
        call = make()
        function: Any = kvattn.flash_attn_with_kvcache
        if "cu_seqlens_k" in call:
            function = kvattn.flash_attn_varlen_func
            call |= {"k": call.pop("k_cache"), "v": call.pop("v_cache")}
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        out, lse = function(**call, return_softmax_lse=True)
        results.append([out, lse, *(t for t in call.values() if isinstance(t, Tensor))])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


# Decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_decode_loop_compiles_once(compiler: str) -> None:
    """20 steps; lengths advance in place, so no step needs another graph."""
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    pool, tables = pools(), rotary_tables()
    twin, lengths = pool.clone(), ints(0, 3)
    for _ in range(20):
        x = torch.randn(2, 1, HEADS, DIM)
        expected = decode(twin, x, lengths, TABLE, *tables)
        with torch.no_grad():
            found = compiled(pool, x, lengths, TABLE, *tables)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        twin.copy_(pool)  # so that differences of rounding do not add up
        lengths += 1
    assert counter.frame_count <= 2


@pytest.mark.parametrize("compiler", COMPILERS)
def test_shapes_may_change(compiler: str) -> None:
    """Batch, queries, table width and number of pages: at most one more, dynamic graph."""
    counter = CompileCounterWithBackend(compiler)

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Any:
        return kvattn.flash_attn_with_kvcache(
            q, k, v, q[:, :, ::2], -q[:, :, ::2], cache_seqlens=lengths, page_table=table
        )

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for batch, rows, width in ((2, 1, 2), (3, 2, 3), (4, 3, 5), (5, 4, 4)):
        q = torch.randn(batch, rows, HEADS, DIM)
        k, v = torch.randn(2, batch * width + 1, PAGE, KV_HEADS, DIM)
        table = torch.arange(batch * width, dtype=torch.int32).reshape(batch, width)
        lengths = torch.arange(batch, dtype=torch.int32) % (width * PAGE - rows)
        twins = k.clone(), v.clone()
        expected = call(q, *twins, lengths, table)
        found = compiled(q, k.clone(), v.clone(), lengths, table)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_later_read_sees_the_append(compiler: str) -> None:
    def step(pool: Tensor, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = pool[0, 0, 7, 3].clone()
        out = decode(pool, x, lengths, TABLE, *tables)
        return before, out, pool[:, 1, 7, 3] * 2

    pool, x, tables = pools(), torch.randn(2, 1, HEADS, DIM), rotary_tables()
    twin = pool.clone()
    first, out, later = torch.compile(step, fullgraph=True, backend=compiler)(pool, x, ints(3, 9))
    before, expected, after = step(twin, x, ints(3, 9))
    assert torch.equal(first, before)
    torch.testing.assert_close((out, later, pool), (expected, after, twin), rtol=0, atol=2e-5)
    assert torch.equal(later[0, 0], x[0, 0, 0])  # layer 0 stores half of x, and the read doubles it


@pytest.mark.parametrize("compiler", COMPILERS)
def test_caches_that_are_views_of_one_buffer(compiler: str) -> None:
    """Views made outside the graph, values that are a part of the keys among them."""
    if compiler == "inductor" and RELEASE < (2, 13):
        pytest.skip("Inductor before 2.13 loses what is written to one of two such views")

    def step(q: Tensor, k: Tensor, v: Tensor, new: Tensor, lengths: Tensor) -> Any:
        call: dict[str, Any] = {"cache_seqlens": lengths, "page_table": TABLE}
        call["softmax_scale"] = 0.2
        return kvattn.flash_attn_with_kvcache(q, k, v, new, new[..., : v.shape[-1]], **call)

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for width in (24, 16):
        memory = torch.randn(2, PAGES, PAGE, 1, 24)
        twin = memory.clone()
        q, new = torch.randn(2, 1, HEADS, 24), torch.randn(2, 1, 1, 24)
        pair = [(m[0], m[1] if width == 24 else m[0][..., :16]) for m in (memory, twin)]
        found = compiled(q, *pair[0], new, ints(3, 9))
        torch.testing.assert_close(found, step(q, *pair[1], new, ints(3, 9)), rtol=0, atol=1e-6)
        assert torch.equal(memory, twin)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_callers_out_is_written_and_returned(compiler: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor) -> tuple[Any, Tensor]:
        found = kvattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, out=out)
        return found, out + 1

    q, (k, v) = torch.randn(2, 3, HEADS, DIM), torch.randn(2, 2, 9, KV_HEADS, DIM)
    memory = torch.full((2, 3, HEADS, 2 * DIM), 7.0)
    out = memory[..., :DIM]
    found, later = torch.compile(call, fullgraph=True, backend=compiler)(q, k, v, ints(3, 9), out)
    expected = kvattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(3, 9))
    assert found.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert torch.equal(later, out + 1) and (memory[..., DIM:] == 7.0).all()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_bad_length_in_a_compiled_step_writes_nothing(compiler: str) -> None:
    pool, x, tables = pools(), torch.randn(2, 1, HEADS, DIM), rotary_tables()
    before = pool.clone()
    compiled = torch.compile(decode, fullgraph=True, backend=compiler)
    with pytest.raises(E.AppendOverflowError, match=r"cache_seqlens\[1\].*24 cached"):
        compiled(pool, x, ints(3, 24), TABLE, *tables)
    assert torch.equal(pool, before)
    compiled(pool, x, ints(3, 23), TABLE, *tables)
    assert not torch.equal(pool, before)


# The parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [4, ints(4, 9)], ids=["int", "tensor"])
def test_append_kv_compiles(lengths: Any) -> None:
    def call(k: Tensor, caches: Tensor) -> Tensor:
        kvattn.append_kv(k, -k, *caches, cache_seqlens=lengths, page_table=TABLE)
        return caches[:, 5, 0]

    k, caches = torch.randn(2, 1, KV_HEADS, DIM), torch.zeros(2, PAGES, PAGE, KV_HEADS, DIM)
    twin = caches.clone()
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(k, caches)
    assert torch.equal(found, call(k, twin)) and torch.equal(caches, twin)
    assert caches.any()


def test_rotary_and_merging_compile() -> None:
    def call(x: Tensor, y: Tensor, edges: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        a = kvattn.apply_rotary(x, cos, sin, positions=offsets[:, None])
        b = kvattn.apply_rotary(x, cos, sin, seqlen_offsets=offsets, interleaved=False)
        c = kvattn.apply_rotary(y, cos, sin, seqlen_offsets=offsets, cu_seqlens=edges)
        return c, *kvattn.merge_states([a, b], [a[..., 0].mT, b[..., 0].mT])

    cos, sin = rotary_tables()
    given = torch.randn(2, 1, 3, DIM), torch.randn(5, 3, DIM), ints(0, 1, 5), ints(4, 9)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    for a, b in zip(found, call(*given), strict=True):
        assert torch.equal(a, b)


# What cannot cross an operator ----------------------------------------------------------------


def compiled_call(fullgraph: bool = True, **call: Any) -> Any:
    given = query() | dense() | call
    function = torch.compile(kvattn.flash_attn_with_kvcache, fullgraph=fullgraph, backend="eager")
    return function(**given)


MISTAKES: list[tuple[dict[str, Any], type[E.KvattnError]]] = [
    ({"sm_margin": -1}, E.SmMarginError),
    ({"num_splits": -1}, E.NumSplitsError),
    ({"softcap": -1.0}, E.SoftcapError),
    ({"window_size": (-2, 0)}, E.WindowSizeError),
    ({"softmax_scale": float("nan")}, E.SoftmaxScaleError),
    ({"attention_chunk": -1}, E.AttentionChunkError),
    ({"backend": "gpu"}, E.UnknownBackendError),
    ({"cache_seqlens": ints(3, 25)}, E.LengthOverCapacityError),
    ({"sinks": torch.zeros(HEADS + 1)}, E.SinksError),
    ({"v": torch.randn(2, 1, KV_HEADS, DIM)}, E.ValueWithoutKeyError),
]


@pytest.mark.parametrize(("call", "kind"), MISTAKES, ids=[next(iter(c)) for c, _ in MISTAKES])
def test_a_graph_raises_what_the_call_raises(call: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(call))):
        compiled_call(**call)


BROKEN: list[tuple[dict[str, Any], type[E.KvattnError]]] = [
    ({"aux_tensors": [torch.zeros(1)]}, E.ModCallableError),
    ({"cache_seqlens": True}, E.LengthsScalarError),
    ({"rel_bias_prep_cache": 3}, E.RelBiasError),
    ({"q": torch.randn(2, 1, HEADS, DIM, requires_grad=True)}, E.RequiresGradError),
    ({"q": None}, E.NotATensorError),
    ({"page_table": [[0, 1], [2, 3]]}, E.NotATensorError),
    ({"causal": 1}, E.FlagError),
    ({"pack_gqa": 1}, E.FlagError),
    ({"return_softmax_lse": 1}, E.FlagError),
    ({"attention_chunk": 2.0}, E.AttentionChunkError),
    ({"num_splits": True}, E.NumSplitsError),
    ({"sm_margin": False}, E.SmMarginError),
    ({"softmax_scale": "1"}, E.SoftmaxScaleError),
    ({"window_size": (True, 0)}, E.WindowSizeError),
    ({"window_size": (1.5, 0)}, E.WindowSizeError),
    ({"cache_seqlens": 1 << 40}, E.LengthsScalarError),
    ({"q_descale": float("nan")}, E.DescaleError),
    ({"backend": 5}, E.UnknownBackendError),
]


@pytest.mark.parametrize(("call", "kind"), BROKEN, ids=[next(iter(c)) for c, _ in BROKEN])
def test_what_no_schema_carries_runs_eagerly(call: dict[str, Any], kind: type[Exception]) -> None:
    """A graph break with the call's own error; never a silent success as one graph."""
    with pytest.raises(kind, match=next(iter(call))):
        compiled_call(fullgraph=False, **call)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled_call(**call)


def test_dropout_is_refused_in_a_graph() -> None:
    call = {"q": torch.randn(2, 1, HEADS, DIM), "k": torch.randn(2, 5, KV_HEADS, DIM)}
    function = torch.compile(kvattn.flash_attn_varlen_func, fullgraph=True, backend="eager")
    with pytest.raises(E.DropoutError):
        function(call["q"], call["k"], call["k"], dropout_p=0.1)


def test_mods_break_the_graph_and_still_count() -> None:
    def double(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * 2

    given = query() | dense()
    attend: Any = kvattn.flash_attn_with_kvcache
    found = torch.compile(attend, backend="eager")(**given, score_mod=double)
    assert torch.equal(found, attend(**given, score_mod=double))
    assert not torch.equal(found, attend(**given))
