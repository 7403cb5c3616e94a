"""Stand-ins for attention libraries that are not installed: their names, arguments and refusals.

A stand-in takes the arguments that the library's function takes, under their names, and raises
what a record says, where its guard holds.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kvattn.errors.record import Record

_FA3 = """q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
sm_margin=0"""
_SGLANG = f"""{_FA3}, sinks=None, score_mod=None, aux_tensors=None, sfq=None, sfk=None, sfv=None,
rel_bias=None, rel_bias_prep_cache=None, return_softmax_lse=False, out=None, **_"""
_FA4 = """learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None,
aux_scalars=None, return_lse=False"""

# The arguments of each function in the release that the records name.
SIGNATURES = {
    "flash_attn.flash_attn_with_kvcache": """q, k_cache, v_cache, k=None, v=None, rotary_cos=None,
        rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
        block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False""",
    "flash_attn_interface.flash_attn_with_kvcache": f"{_FA3}, return_softmax_lse=False",
    "flash_attn.cute.flash_attn_func": f"""q, k, v, qv=None, gather_kv_indices=None,
        softmax_scale=None, causal=False, window_size=(None, None), {_FA4}""",
    "flash_attn.cute.flash_attn_varlen_func": f"""q, k, v, qv=None, cu_seqlens_q=None,
        cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
        seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), {_FA4}""",
    "sglang.kernels.ops.attention.flash_attention.flash_attn_with_kvcache": f"""{_FA3},
        only_qv=False, return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None,
        sfq=None, sfk=None, sfv=None, rel_bias=None, rel_bias_prep_cache=None, ver=3, out=None,
        max_seqlen_k=None, mask_mod=None""",
    "sglang.kernels.ops.attention.flash_attention_v4.flash_attn_with_kvcache": _SGLANG,
    "sglang.kernels.ops.attention.flash_attention_v4_sm120.flash_attn_with_kvcache": _SGLANG,
    "flashinfer.apply_rope_with_cos_sin_cache": """positions, query, key, head_size,
        cos_sin_cache, is_neox=True""",
    "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func": """q, k, v, max_seqlen_q,
        cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False,
        out=None, scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None,
        num_splits=0, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0,
        cp_tot_seqused_k=None""",
}

INSTALLED = ("kvattn", "torch", "transformers")  # these are what they are


def imports(program: str) -> list[tuple[str, str]]:
    """Module and name of every ``from ... import`` of a program that is not installed here."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if node.module.partition(".")[0] not in INSTALLED
    ]


def stood_in(record: Record) -> bool:
    """Whether the record's program calls a function that has a stand-in."""
    assert record.example is not None
    return any(f"{path}.{name}" in SIGNATURES for path, name in imports(record.example.before))


def install(record: Record, monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """Puts a stand-in in place of what the record's program imports; the functions made."""
    assert record.example is not None
    made = []
    for path, name in imports(record.example.before):
        module = ModuleType(path)
        if f"{path}.{name}" in SIGNATURES:
            function = stand_in(record, f"{path}.{name}")
            setattr(module, name, function)
            made.append(function)
        monkeypatch.setitem(sys.modules, path, module)
    return made


def stand_in(record: Record, dotted: str) -> Callable[..., Any]:
    """A function of that name and those arguments, which raises what the record says."""
    (site,) = record.sites
    name = dotted.rpartition(".")[2]
    source = f"def {name}({' '.join(SIGNATURES[dotted].split())}):\n    refuse(locals())\n"
    scope: dict[str, Any] = {"refuse": lambda arguments: refuse(record, arguments)}
    exec(compile(source, f"/opt/venv/lib/python3.12/site-packages/{site.file}", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def refuse(record: Record, arguments: dict[str, Any]) -> None:
    """Raises the record's exception if its guard holds for these arguments."""
    (site,) = record.sites
    if eval(site.guard, {"torch": torch, **arguments}):
        exception = getattr(builtins, record.exception)
        raise exception(re.sub(r"\{(\w+)\}", lambda found: f"<{found[1]}>", record.message))


def meet(record: Record, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What the record's first program ends with."""
    assert record.example is not None
    install(record, monkeypatch)
    program = compile(record.example.before, "/home/me/project/step.py", "exec")
    with pytest.raises(BaseException) as caught:
        exec(program, {"__name__": "__main__"})
    return caught.value
