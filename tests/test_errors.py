"""Every mistake has an error of its own that says what is wrong, before anything is written."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_inputs import ALWAYS, BAD, DENSE, MODS, PAGED, ROTARY, ROWS, Bad, bad_call, ints
from cases import BF16, F16, F32

import kvattn
from kvattn import errors as E
from kvattn.checks import BACKENDS
from kvattn.testing import Case, Inputs, make_inputs
from kvattn.testing.expected import storage_bytes


def snapshot(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The memory behind every tensor."""
    return {
        name: storage_bytes(x).clone()
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor) and type(x) is torch.Tensor and x.device.type == "cpu"
        if x.layout == torch.strided and not x.is_nested
    }


CALLING = (None, "reference")  # backends that call mods on the CPU
WRONG = [
    *((bad, backend) for bad in ALWAYS for backend in (None, *BACKENDS)),
    *((bad, backend) for bad in MODS for backend in CALLING),
]


@pytest.mark.parametrize(
    ("bad", "backend"),
    WRONG,
    ids=[f"{bad.number}-{bad.kind.__name__}-{backend}" for bad, backend in WRONG],
)
def test_t70_bad_input(bad: Bad, backend: str | None) -> None:
    inputs = bad_call(bad)
    inputs.setdefault("backend", backend)
    before = snapshot(inputs)
    with pytest.raises(bad.kind) as caught:
        bad.function(**inputs)
    error, text = caught.value, str(caught.value)
    assert type(error) is bad.kind
    assert error.argument == bad.argument
    assert bad.shows in str(error.got)
    assert text.startswith(f"[{error.code}] {error.argument}: {error.problem}")
    for part in (error.got, error.allowed, error.fix):
        assert str(part)
        assert str(part) in text
    for name, memory in snapshot(inputs).items():
        assert torch.equal(memory, before[name]), f"{name} was written"


X = torch.zeros(1, 2, 2, 8)
NUMBERS: Any = [1.0]
TABLE = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("kind", "argument", "call"),
    [
        (E.MergeStatesError, "outs", lambda: kvattn.merge_states([], [])),
        (E.MergeStatesError, "outs", lambda: kvattn.merge_states([X], [])),
        (E.MergeStatesError, "outs", lambda: kvattn.merge_states([X, X[:, :1]], [X[..., 0]] * 2)),
        (E.MergeStatesError, "lses", lambda: kvattn.merge_states([X], [torch.zeros(1, 2, 3)])),
        (E.NotATensorError, "outs", lambda: kvattn.merge_states(NUMBERS, [X])),
        (E.NotATensorError, "lses", lambda: kvattn.merge_states([X], NUMBERS)),
        (E.RotaryArgumentsError, "positions", lambda: kvattn.apply_rotary(X, TABLE, TABLE)),
        (E.RotaryArgumentsError, "positions",
         lambda: kvattn.apply_rotary(X, TABLE, TABLE, positions=torch.zeros(1, 2))),
        (E.RotaryArgumentsError, "cu_seqlens",
         lambda: kvattn.apply_rotary(X[0], TABLE, TABLE, seqlen_offsets=0)),
        (E.RotaryArgumentsError, "x",
         lambda: kvattn.apply_rotary(X[0, 0], TABLE, TABLE, seqlen_offsets=0)),
        (E.RotaryArgumentsError, "seqlen_offsets",
         lambda: kvattn.apply_rotary(X, TABLE, TABLE, seqlen_offsets=ints(0, 1))),
        (E.RotaryTableShortError, "cos",
         lambda: kvattn.apply_rotary(X, TABLE, TABLE, seqlen_offsets=3)),
        (E.RotaryTableShortError, "cos",
         lambda: kvattn.apply_rotary(X, TABLE, TABLE, seqlen_offsets=-1)),
        (E.RotaryShapeError, "cos", lambda: kvattn.apply_rotary(X, TABLE, TABLE[:1],
            seqlen_offsets=0)),
        (E.RotaryDtypeError, "cos",
         lambda: kvattn.apply_rotary(X, TABLE.half(), TABLE.half(), seqlen_offsets=0)),
        (E.CuSeqlensError, "cu_seqlens",
         lambda: kvattn.apply_rotary(X[0], TABLE, TABLE, seqlen_offsets=0, cu_seqlens=ints(0, 3))),
        (E.NotATensorError, "x", lambda: kvattn.apply_rotary(NUMBERS, TABLE, TABLE,
            seqlen_offsets=0)),
    ],
)  # fmt: skip
def test_mistakes_in_the_smaller_functions(
    kind: type[E.KvattnError], argument: str, call: Any
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.argument == argument
    assert X.any().item() is False


@pytest.mark.parametrize(
    ("change", "got", "allowed"),
    [
        ({"q": torch.zeros(2, 1, 4, 8)}, "head dim 8", "32, as in k"),
        ({"v": torch.zeros(2, 5, 2, 32, dtype=F16)}, "torch.float16", "torch.float32, as k"),
        ({"q": torch.zeros(2, 1, 4, 32, device="meta"), "sinks": torch.zeros(4)}, "cpu",
         "meta, where q is"),
        ({"v": torch.zeros(2, 5, 2, 32, device="meta")}, "meta", "cpu, where q is"),
    ],
)  # fmt: skip
def test_errors_of_the_ragged_call_speak_of_its_arguments(
    change: Inputs, got: str, allowed: str
) -> None:
    inputs = {"q": torch.zeros(2, 1, 4, 32), **dict.fromkeys("kv", torch.zeros(2, 5, 2, 32))}
    call: Any = kvattn.flash_attn_varlen_func
    with pytest.raises(E.KvattnError) as caught:
        call(**inputs | change)
    assert (caught.value.got, caught.value.allowed) == (got, allowed)


def test_an_out_in_the_keys_of_a_ragged_call() -> None:
    k = torch.zeros(2, 5, 2, 32)
    with pytest.raises(E.OutTensorError) as caught:
        kvattn.flash_attn_varlen_func(k[:, :1], k, k.clone(), out=k[:, :1])
    assert caught.value.got == "memory shared with q"
    with pytest.raises(E.OutTensorError) as caught:
        kvattn.flash_attn_varlen_func(k[:, :1].clone(), k, k.clone(), out=k[:, :1])
    assert caught.value.got == "memory shared with k"


def duplicates() -> list[Inputs]:
    """Appends in which two new tokens go to one slot: by row, by page, by slot."""
    rows = make_inputs(ROWS) | {"cache_batch_idx": ints(1, 1), "cache_seqlens": ints(3, 4)}
    pages = make_inputs(PAGED) | {"cache_seqlens": ints(3, 3)}
    pages["page_table"] = pages["page_table"].clone()
    pages["page_table"][1] = pages["page_table"][0]
    slots = make_inputs(PAGED) | {"slot_mapping": torch.tensor([0, 5, 5, -1])}
    return [rows, pages, slots]


@pytest.mark.parametrize("which", range(3), ids=("rows", "pages", "slots"))
def test_t70_duplicate_writes_raise_in_checked_mode_only(which: int) -> None:
    argument = ("cache_batch_idx", "page_table", "slot_mapping")[which]
    inputs = duplicates()[which]
    before = snapshot(inputs)
    with kvattn.checked(), pytest.raises(E.DuplicateWriteError) as caught:
        kvattn.flash_attn_with_kvcache(**inputs)
    assert caught.value.argument == argument
    assert all(torch.equal(memory, before[name]) for name, memory in snapshot(inputs).items())
    kvattn.flash_attn_with_kvcache(**inputs)


def test_values_are_checked_on_the_cpu_without_being_asked_to() -> None:
    late = make_inputs(DENSE) | {"cache_seqlens": ints(3, 9)}
    for context in (nullcontext(), kvattn.checked(), kvattn.checked(False)):
        with context, pytest.raises(E.LengthOverCapacityError):
            kvattn.flash_attn_with_kvcache(**late)


def classes(*modules: Any) -> dict[str, type[E.KvattnError]]:
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }


def test_every_class_is_raised_by_a_test() -> None:
    elsewhere = {E.MergeStatesError, E.RotaryArgumentsError, E.DuplicateWriteError}  # above
    raised = {bad.kind for bad in BAD} | elsewhere
    assert set(classes(E.kinds, E.option_kinds).values()) == raised


def test_every_number_of_the_list_is_tried() -> None:
    tried = {bad.number for bad in BAD if bad.number} | {38, 68}  # duplicates, unknown keywords
    accepted = {13, 14, 15, 30, 31, 35, 39}  # see test_contract_arguments.py
    assert tried | accepted == set(range(1, 71))
    assert not tried & accepted


CODES = """
101 QueryDtype, 102 CacheDtype, 103 ValueCacheDtype, 104 NewTokenDtype, 105 DeviceMismatch,
106 DeviceIndexMismatch, 107 CacheLastStride, 108 OutLastStride, 109 QueryRank, 110 HeadRatio,
111 CacheHeadsDiffer, 112 HeadDim, 116 KeyWithoutValue, 117 ValueWithoutKey,
118 AppendWithoutLengths, 119 NewTokenCount, 120 NewTokenBatch, 121 AppendOverflow,
122 LengthOverCapacity, 123 NegativeLength, 124 LengthsDtype, 125 LengthsShape, 126 LengthsScalar,
127 LeftpadOverLength, 128 NegativeLeftpad, 129 LeftpadTensor, 132 PageTableTensor,
133 PageTableRows, 134 PageOutOfRange, 136 BatchIndexRange, 137 BatchIndexTensor,
138 DuplicateWrite, 140 CuSeqlens, 141 MaxSeqlenTooSmall, 142 CuSeqlensNew,
143 RotaryWithoutNewKeys, 144 RotaryIncomplete, 145 RotaryShape, 146 RotaryDtype,
147 RotaryTableShort, 148 RotarySeqlens, 149 Descale, 150 SoftmaxScale, 151 WindowSize,
152 AttentionChunk, 153 Softcap, 154 Sinks, 155 AlibiSlopes, 156 QueryValue, 157 KeyCacheMissing,
158 RotaryOnlyQv, 159 RelBias, 160 MxScale, 161 ModCallable, 162 BlockSparse, 163 NumSplits,
164 SmMargin, 165 SchedulerMetadata, 166 OutTensor, 167 RequiresGrad, 169 TwoKeyLayouts,
170 CacheExpanded, 171 NotATensor, 172 AliasConflict, 173 CacheRank, 174 DenseBatch,
175 SlotMapping, 176 SlotOutOfRange, 177 SeqUsed, 178 Dropout, 179 Flag, 180 UnknownBackend,
181 BackendRefuses, 182 MergeStates, 183 RotaryArguments, 184 IntArgument, 185 ModResult,
188 CommonPrefix, 189 CommonPrefixMemory, 190 NormWeight, 191 NormEps, 192 NormWithoutHeads,
193 InferenceTensor
"""


def test_codes_are_stable_and_unique() -> None:
    pairs = [entry.split() for entry in CODES.replace("\n", " ").split(",")]
    wanted = {f"KV{code}": f"{name}Error" for code, name in pairs}
    found = {kind.code: name for name, kind in classes(E.kinds, E.option_kinds).items()}
    assert found == wanted
    every = [kind for kind in subclasses(E.KvattnError) if "code" in vars(kind)]
    assert len({kind.code for kind in every}) == len(every)
    for kind in every:
        assert kind.code[:2] == "KV"
        assert kind.code[2:].isdigit()
        assert kind.__name__.endswith("Error")
        assert "problem" in vars(kind)
        assert "fix" in vars(kind)


def subclasses(kind: type[E.KvattnError]) -> set[type[E.KvattnError]]:
    direct = kind.__subclasses__()
    return set(direct).union(*(subclasses(sub) for sub in direct)) if direct else set()


def test_the_documented_table_agrees_with_the_classes() -> None:
    page = (Path(__file__).parent.parent / "docs" / "contract.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| KV")]
    wanted = []
    for name, kind in classes(E.kinds, E.option_kinds).items():
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        wanted.append([kind.code, f"`{name}`", builtin.__name__, kind.problem])
    assert rows == sorted(wanted)


def test_errors_pickle() -> None:
    for kind in subclasses(E.KvattnError):
        for error in (kind("q", 3, "4"), kind("q", "x", ("y", 1), "write y")):
            again = pickle.loads(pickle.dumps(error))
            assert type(again) is kind
            assert str(again) == str(error)
            for name in ("argument", "got", "allowed", "fix", "code"):
                assert getattr(again, name) == getattr(error, name)


def test_errors_are_builtin_errors_too() -> None:
    """Old code that catches TypeError, ValueError, IndexError or NotImplementedError still does."""
    for name, kind in classes(E.kinds, E.option_kinds).items():
        assert issubclass(kind, (TypeError, ValueError, NotImplementedError)), name
        assert getattr(E, name) is kind
    assert issubclass(E.PageOutOfRangeError, IndexError)
    assert issubclass(E.BackendRefusesError, NotImplementedError)


@pytest.mark.parametrize("value", [5, np.int64(5), np.array(5), torch.tensor(5)], ids=repr)
def test_scalar_lengths_of_any_integer_kind(value: Any) -> None:
    inputs = make_inputs(Case(lengths=(5, 5), capacity=8))
    wanted: Any = kvattn.flash_attn_with_kvcache(**inputs)
    if isinstance(value, torch.Tensor):
        with pytest.raises(E.LengthsDtypeError):
            kvattn.flash_attn_with_kvcache(**inputs | {"cache_seqlens": value})
        return
    out: Any = kvattn.flash_attn_with_kvcache(**inputs | {"cache_seqlens": value})
    assert torch.equal(out, wanted)


def test_messages_teach_by_example() -> None:
    """One message in full, as a user sees it."""
    inputs = make_inputs(DENSE) | {"cache_seqlens": ints(5, 9)}
    with pytest.raises(E.LengthOverCapacityError) as caught:
        kvattn.flash_attn_with_kvcache(**inputs)
    assert str(caught.value) == (
        "[KV122] cache_seqlens[1]: a length exceeds the capacity of its row. Got 9; allowed: <= 8. "
        "Fix: pass the true lengths, or a larger cache or page table. "
        "Explain: kvattn errors show KV122"
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_grad_mode_off_accepts_parameters(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(lengths=(5, 3), dtype=dtype))
    inputs["q"].requires_grad_()
    with torch.no_grad():
        kvattn.flash_attn_with_kvcache(**inputs)
    with torch.inference_mode():
        kvattn.flash_attn_with_kvcache(**inputs)
    with pytest.raises(E.RequiresGradError):  # the same form of call, now with grad mode on
        kvattn.flash_attn_with_kvcache(**inputs)


def test_rotary_tables_may_be_shorter_than_the_cache() -> None:
    """Only the positions that are used must be there."""
    inputs = make_inputs(ROTARY)
    assert inputs["rotary_cos"].shape[0] == 7 < ROTARY.capacity + 2  # type: ignore[operator]
    kvattn.flash_attn_with_kvcache(**inputs)
