"""Recorded calls on a stand-in for the GPU: what is launched again, with which addresses."""

from __future__ import annotations

import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvattn
from kvattn import api, forms
from kvattn.plan import Prepared
from kvattn.request import Request

pytest.importorskip("triton")

from kvattn.backends import triton_replay as replay


class Kernel:
    """Notes its launches; its parameters are q, keys, values, out, scratch, number, SIZE."""

    arg_names = ("q", "keys", "values", "out", "scratch", "number", "SIZE")

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Kernel:
        assert constants["SIZE"] == 3 and constants["num_warps"] == 4
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.launched.append((grid, stream, *args))


def request(**changes: Any) -> Request:
    given = {
        "q": torch.randn(2, 1, 4, 8),
        "k_cache": torch.randn(2, 16, 2, 8),
        "v_cache": torch.randn(2, 16, 2, 8),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
    } | changes
    bound = inspect.signature(kvattn.flash_attn_with_kvcache).bind(**given)
    bound.apply_defaults()
    return Request.of(**api.arguments(bound.arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_device=lambda: None, get_current_stream=lambda i: 17)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=active))
    return Kernel()


def run(kernel: Any, copies: bool = False) -> Any:
    def launch(r: Request) -> None:
        target = replay.target()
        out, _ = target.outputs(r)
        scratch = target.scratch("part", 10, r.lead.device)
        k = r.k_cache.clone() if copies and r.k_cache is not None else r.k_cache
        args = (r.q, k, r.v_cache, out, scratch, 5)
        target.launch(kernel, (7,), args, {"SIZE": 3}, num_warps=4)

    return launch


def again(recorded: Prepared | None, r: Request, **changes: Tensor) -> Any:
    """The prepared rest of a call with the tensors of a request, some of them changed."""
    assert recorded is not None
    return recorded.run(*[changes.get(name, getattr(r, name)) for name in recorded.names])


def test_a_tensor_under_two_names_is_not_recorded(kernel: Kernel) -> None:
    """The next call of the form may have two tensors."""
    both = torch.randn(2, 16, 2, 8)
    assert replay.record(request(k_cache=both, v_cache=both), run(kernel)) is None


def test_a_replay_launches_with_the_next_calls_addresses(kernel: Kernel) -> None:
    recorded = replay.record(request(), run(kernel))
    assert recorded is not None and kernel.launched == []
    for _ in range(2):
        r = request()
        result = again(recorded, r)
        assert result is not None and result[0].shape == (2, 1, 4, 8)
        grid, stream, q, k, v, out, scratch, number, size = kernel.launched.pop()
        assert (grid, stream, number, size) == ((7, 1, 1), 17, 5, 3)
        assert [q, k, v] == [t.data_ptr() for t in (r.q, r.k_cache, r.v_cache) if t is not None]
        assert out == result[0].data_ptr() and scratch not in (q, k, v, out, 0)


def test_a_prefix_of_unknown_length_is_read_where_the_next_call_has_it(kernel: Kernel) -> None:
    def launch(r: Request) -> None:
        out, _ = replay.target().outputs(r)
        args = (r.q, r.k_cache, r.v_cache, out, r.common_prefix_len, 5)
        replay.target().launch(kernel, (7,), args, {"SIZE": 3}, num_warps=4)

    def prefixed() -> Request:
        table, length = torch.zeros(2, 2, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
        return request(page_table=table, common_prefix_len=length)

    recorded, r = replay.record(prefixed(), launch), prefixed()
    assert again(recorded, r) is not None
    assert isinstance(r.common_prefix_len, Tensor)
    assert kernel.launched[0][6] == r.common_prefix_len.data_ptr()


def test_a_call_without_query_rows_launches_its_append_alone(kernel: Kernel) -> None:
    """No kernel takes q then; the next call still gets an out of its shape."""

    def append(r: Request) -> None:
        replay.target().outputs(r)
        args = (None, r.k_cache, r.v_cache, None, None, 5)
        replay.target().launch(kernel, (7,), args, {"SIZE": 3}, num_warps=4)

    empty = torch.empty(2, 0, 4, 8)
    recorded = replay.record(request(q=empty), append)
    result = again(recorded, r := request(q=empty))
    assert result is not None and result[0].shape == (2, 0, 4, 8)
    assert r.k_cache is not None and kernel.launched[0][3] == r.k_cache.data_ptr()


def test_a_recording_keeps_no_tensor_of_its_call_alive(kernel: Kernel) -> None:
    r = request()
    recorded = replay.record(r, run(kernel))
    assert recorded is not None and r.k_cache is not None and r.q is not None
    gone = [weakref.ref(r.k_cache), weakref.ref(r.q)]
    del r
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_workspaces_of_a_stream_are_looked_up_once(kernel: Kernel) -> None:
    recorded, r = replay.record(request(), run(kernel)), request()
    again(recorded, r)
    again(recorded, r)
    first, second = (launched[6] for launched in kernel.launched)
    assert first == second


def test_what_passes_between_two_launches_is_of_one_call(kernel: Kernel) -> None:
    """Not kept by a stream, as it may be as large as the queries."""

    def launch(r: Request) -> None:
        target = replay.target()
        assert r.q is not None
        out, _ = target.outputs(r)
        ready = target.passing(r.q.shape, r.q.dtype, r.q.device)
        for args in (
            (r.q, None, None, ready, None, 5),
            (ready, r.k_cache, r.v_cache, out, None, 5),
        ):
            target.launch(kernel, (7,), args, {"SIZE": 3}, num_warps=4)

    recorded, r = replay.record(request(), launch), request()
    result = again(recorded, r)
    (_, _, q, _, _, made, *_), (_, _, read, k, _, out, *_) = kernel.launched
    assert made == read and made not in (q, k, out)
    assert r.q is not None and r.k_cache is not None
    assert [q, k, out] == [x.data_ptr() for x in (r.q, r.k_cache, result[0])]
    assert recorded is not None and not vars(recorded.run)["kept"]


def test_copies_of_the_launch_code_cannot_be_replayed(kernel: Kernel) -> None:
    assert replay.record(request(), run(kernel, copies=True)) is None


def test_views_at_one_address_cannot_be_told_apart(kernel: Kernel) -> None:
    both = torch.randn(2, 16, 2, 8)
    r = request(k_cache=both, v_cache=both[...])
    recorded = replay.record(r, run(kernel))
    assert recorded is not None, "the tensors themselves can"

    def launch(r: Request) -> None:
        assert r.k_cache is not None
        args = (r.q, r.k_cache.view(torch.int32), r.v_cache, r.q, r.q, 5)
        replay.target().launch(kernel, (7,), args, {"SIZE": 3}, num_warps=4)

    assert replay.record(r, launch) is None
    assert replay.record(request(), launch) is not None


def reads(kernel: Any, tensor: Tensor) -> Any:
    """Launch code whose kernel reads a tensor on behalf of a mod."""

    def launch(r: Request) -> None:
        target = replay.target()
        out, _ = target.outputs(r)
        args = (r.q, r.k_cache, r.v_cache, out, (tensor, 7), 5)
        target.launch(kernel, (7,), args, {"SIZE": 3}, num_warps=4)

    return launch


def test_what_a_mod_captures_is_read_where_it_lies(kernel: Kernel) -> None:
    bias, hidden = torch.randn(4), torch.randn(4)
    r = request(score_mod=lambda s, b, h, i, j: s + bias[h])
    recorded = replay.record(r, reads(kernel, bias))
    assert again(recorded, request()) is not None
    assert kernel.launched.pop()[6] == (bias.data_ptr(), 7)
    assert replay.record(r, reads(kernel, hidden)) is None, "not seen to be captured"


def test_mods_that_compute_the_same_on_the_same_memory_are_one_form() -> None:
    memory = torch.randn(8)
    bias = memory[:4]

    def call(bias: Tensor, factor: float = 2.0, **more: Any) -> int:
        r = request()
        given: Any = {"q": r.q, "k_cache": r.k_cache, "v_cache": r.v_cache} | more
        mod = lambda s, b, h, i, j: s * factor + bias[h]  # noqa: E731
        kvattn.flash_attn_with_kvcache(**given, score_mod=mod)
        return len(forms.known())

    first = call(bias)
    bias += 1
    assert call(bias) == first, "its numbers may change"
    assert call(bias.clone()) == first + 1
    assert call(bias, 3.0) == first + 2
    assert call(bias, mask_mod=lambda b, h, i, j: j < 3) == first + 3
    assert call(memory[::2]) == first + 4, "another stride"
    assert call(bias) == first + 4


def test_a_known_form_calls_the_mod_of_its_own_call() -> None:
    r = request()
    given: Any = {"q": r.q, "k_cache": r.k_cache, "v_cache": r.v_cache}
    called = []

    class Mod:
        def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            called.append(self)
            return s

    mods = [Mod() for _ in range(3)]
    before = len(forms.known())
    for mod in mods:
        called.clear()
        kvattn.flash_attn_with_kvcache(**given, score_mod=mod, backend="reference")
        assert called and all(x is mod for x in called)
    assert len(forms.known()) == before + 1


def test_other_alignment_is_left_to_the_long_way(kernel: Kernel) -> None:
    recorded = replay.record(request(), run(kernel))
    assert recorded is not None
    odd = torch.randn(2 * 4 * 8 + 1)[1:].view(2, 1, 4, 8)
    assert again(recorded, request(), q=odd) is None and kernel.launched == []


@pytest.mark.parametrize("recorded_at, odd", [(2, 1), (4, 2), (8, 4), (16, 8)])
def test_less_alignment_than_recorded_is_left_to_the_long_way(
    kernel: Kernel, recorded_at: int, odd: int
) -> None:
    """Pairs of narrow channels are read from even addresses, though not from multiples of 16."""

    def cache(offset: int) -> Tensor:
        memory = torch.zeros(2 * 16 * 2 * 8 + 64, dtype=torch.uint8)
        first = -memory.data_ptr() % 32 + offset
        return memory[first : first + 2 * 16 * 2 * 8].view(torch.float8_e4m3fn).view(2, 16, 2, 8)

    recorded = replay.record(request(k_cache=cache(recorded_at), v_cache=cache(0)), run(kernel))
    assert again(recorded, request(k_cache=cache(odd), v_cache=cache(0))) is None
    assert kernel.launched == []
    assert again(recorded, request(k_cache=cache(recorded_at), v_cache=cache(0))) is not None
    assert again(recorded, request(k_cache=cache(0), v_cache=cache(0))) is not None


def test_checked_mode_is_left_to_the_long_way(kernel: Kernel) -> None:
    recorded = replay.record(request(), run(kernel))
    assert recorded is not None
    with kvattn.checked():
        assert again(recorded, request()) is None
    assert again(recorded, request()) is not None


def test_the_callers_out(kernel: Kernel) -> None:
    r = request(out=torch.zeros(2, 1, 4, 8))
    recorded = replay.record(r, run(kernel))
    out, q = torch.zeros(2, 1, 4, 8), torch.randn(2, 1, 4, 8)
    result = again(recorded, r, q=q, out=out)
    assert result is not None and result[0] is out
    assert kernel.launched.pop()[5] == out.data_ptr()
    assert again(recorded, r, q=q, out=q) is None and kernel.launched == []


def test_scratch_is_shared_by_the_calls_of_a_stream(kernel: Kernel) -> None:
    device = torch.device("cpu")
    spaces = replay.Workspaces()
    small = spaces.scratch("part", 10, device, 0)
    assert spaces.scratch("part", 20, device, 0) is small
    assert spaces.scratch("stats", 20, device, 0) is not small
    large = spaces.scratch("part", small.numel() + 1, device, 0)
    assert large.numel() > small.numel() and spaces.scratch("part", 1, device, 0) is large
    counters = spaces.counters(10, device, 0)
    assert not counters.any() and spaces.counters(100, device, 0) is counters


def test_an_out_in_what_a_mod_captures_is_looked_at_again(kernel: Kernel) -> None:
    table = torch.ones(2, 1, 4, 8)
    mod = {"score_mod": lambda s, b, h, q, k: s + table.view(-1)[k]}
    recorded = replay.record(request(out=torch.zeros(2, 1, 4, 8), **mod), reads(kernel, table))
    r = request(out=torch.zeros(2, 1, 4, 8), **mod)
    assert again(recorded, r) is not None and len(kernel.launched) == 1
    assert again(recorded, r, out=table) is None and len(kernel.launched) == 1
