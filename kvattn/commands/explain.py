"""`kvattn explain`: which backend and kernel a call gets, by its shapes alone."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvattn.commands.terminal import (
    BACKENDS,
    TORCH_DTYPES,
    Dtype,
    KvDtype,
    backend_name,
    facts,
    outcomes,
    print_json,
)
from kvattn.commands.verdicts import add_verdicts, verdict_table
from kvattn.explanation import Explanation
from kvattn.explanation import explain as plan_of


def _window(value: str) -> tuple[int, int]:
    try:
        left, right = (int(side) for side in value.split(","))
    except ValueError:
        problem = f"{value!r} is not LEFT,RIGHT, such as 1023,0."
        raise typer.BadParameter(problem, param_hint="--window") from None
    return left, right


_SHAPES, _MASKS, _EXTRAS = "Shapes", "Masks", "Further arguments"


def explain(
    batch: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_SHAPES, help="Sequences.")
    ] = 1,
    seqlen_q: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=_SHAPES, help="Queries of each.")
    ] = 1,
    seqlen_k: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=_SHAPES, help="Cached keys of each.")
    ] = 4096,
    append: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=_SHAPES, help="New keys of each.")
    ] = 0,
    heads: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_SHAPES, help="Query heads.")
    ] = 32,
    kv_heads: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_SHAPES, help="Key and value heads.")
    ] = 8,
    head_dim: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_SHAPES, help="Of queries and keys.")
    ] = 128,
    head_dim_v: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            rich_help_panel=_SHAPES,
            help="Of values; by default the same.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(rich_help_panel=_SHAPES, help="Of queries and new keys.")
    ] = Dtype.bf16,
    kv_dtype: Annotated[
        KvDtype,
        typer.Option(
            metavar="DTYPE",
            rich_help_panel=_SHAPES,
            help=f"Of the cache: {', '.join(KvDtype)}.",
        ),
    ] = KvDtype.auto,
    page_size: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=_SHAPES,
            help="Tokens per page; 0 is a dense cache.",
        ),
    ] = 16,
    ragged: Annotated[
        bool, typer.Option("--ragged", rich_help_panel=_SHAPES, help="Queries packed.")
    ] = False,
    causal: Annotated[bool, typer.Option(rich_help_panel=_MASKS, help="Hide later keys.")] = True,
    window: Annotated[
        str,
        typer.Option(
            metavar="L,R", rich_help_panel=_MASKS, help="Keys seen to the left and right; -1: all."
        ),
    ] = "-1,-1",
    chunk: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=_MASKS, help="0 is off.")
    ] = 0,
    softcap: Annotated[
        float, typer.Option(min=0.0, metavar="C", rich_help_panel=_MASKS, help="0 is off.")
    ] = 0.0,
    rotary: Annotated[
        bool, typer.Option("--rotary", rich_help_panel=_EXTRAS, help="Rotate; needs --append.")
    ] = False,
    norm: Annotated[
        bool, typer.Option("--norm", rich_help_panel=_EXTRAS, help="RMS norm of q and new k.")
    ] = False,
    leftpad: Annotated[
        bool, typer.Option("--leftpad", rich_help_panel=_EXTRAS, help="cache_leftpad.")
    ] = False,
    sinks: Annotated[
        bool, typer.Option("--sinks", rich_help_panel=_EXTRAS, help="A sink per head.")
    ] = False,
    alibi: Annotated[
        bool, typer.Option("--alibi", rich_help_panel=_EXTRAS, help="ALiBi slopes.")
    ] = False,
    qv: Annotated[
        bool, typer.Option("--qv", rich_help_panel=_EXTRAS, help="qv, as absorbed MLA has it.")
    ] = False,
    descale: Annotated[
        bool, typer.Option("--descale", rich_help_panel=_EXTRAS, help="k_descale and v_descale.")
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Kind of device to plan for: cpu, cuda.")
    ] = "cpu",
    backend: Annotated[
        str | None,
        typer.Option(
            callback=backend_name,
            metavar="NAME",
            show_default=False,
            help=f"The only one to use: {', '.join(BACKENDS)}.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and no more.")
    ] = False,
) -> None:
    """Print the plan of a flash_attn_with_kvcache call, and why no other library; computes nothing.

    Shapes stand for tensors, so any size can be asked for, and any kind of device.
    """
    stored = TORCH_DTYPES[dtype.value if kv_dtype is KvDtype.auto else kv_dtype.value]
    shapes = _Shapes(
        batch, heads, kv_heads, head_dim, head_dim_v or head_dim, TORCH_DTYPES[dtype.value]
    )
    call = shapes.cache(seqlen_k + append, page_size, stored) | shapes.query(seqlen_q, ragged)
    if append:
        call |= shapes.new(append)
    if rotary:
        call |= shapes.rotary(seqlen_k + append)
    if norm:
        call |= shapes.norms(appending=append > 0)
    given = {"leftpad": leftpad, "sinks": sinks, "alibi": alibi, "qv": qv, "descale": descale}
    for name, wanted in given.items():
        if wanted:
            call |= shapes.extra(name, call["q"])
    left, right = _window(window)
    with outcomes(as_json):
        found = plan_of(
            **call,
            causal=causal,
            window_size=(left, right),
            attention_chunk=chunk,
            softcap=softcap,
            backend=backend,
            device=device,
        )
    if as_json:
        print_json({"device": found.facts.device, **found.to_dict()})
    else:
        console = Console(highlight=False)
        console.print(facts(_rows(found)))
        console.print(Text("\nOther libraries", "bold"))
        console.print(_peers(found))


class _Shapes:
    """Meta tensors of the sizes that a call's arguments have in common."""

    def __init__(
        self, batch: int, heads: int, kv_heads: int, dim: int, dim_v: int, dtype: torch.dtype
    ) -> None:
        self.batch, self.heads, self.kv_heads = batch, heads, kv_heads
        self.dim, self.dim_v, self.dtype = dim, dim_v, dtype

    def query(self, length: int, ragged: bool) -> dict[str, Any]:
        if not ragged:
            return {"q": _meta(self.batch, length, self.heads, self.dim, dtype=self.dtype)}
        q = _meta(self.batch * length, self.heads, self.dim, dtype=self.dtype)
        return {"q": q, "cu_seqlens_q": _ints(self.batch + 1), "max_seqlen_q": length}

    def cache(self, length: int, page_size: int, dtype: torch.dtype) -> dict[str, Any]:
        lead, call = (self.batch, length), {"cache_seqlens": _ints(self.batch)}
        if page_size:
            pages = -(-length // page_size)
            lead = (self.batch * pages, page_size)
            call["page_table"] = _ints(self.batch, pages)
        k_cache = _meta(*lead, self.kv_heads, self.dim, dtype=dtype)
        v_cache = _meta(*lead, self.kv_heads, self.dim_v, dtype=dtype)
        return call | {"k_cache": k_cache, "v_cache": v_cache}

    def new(self, length: int) -> dict[str, Any]:
        shape = self.batch, length, self.kv_heads
        k, v = (_meta(*shape, dim, dtype=self.dtype) for dim in (self.dim, self.dim_v))
        return {"k": k, "v": v}

    def rotary(self, positions: int) -> dict[str, Any]:
        table = _meta(positions, self.dim // 2, dtype=torch.float32)
        return {"rotary_cos": table, "rotary_sin": table}

    def norms(self, appending: bool) -> dict[str, Any]:
        weight = _meta(self.dim, dtype=torch.float32)
        return dict.fromkeys(("q_norm_weight", "k_norm_weight")[: 1 + appending], weight)

    def extra(self, name: str, q: Tensor) -> dict[str, Any]:
        if name == "leftpad":
            return {"cache_leftpad": _ints(self.batch)}
        if name == "sinks":
            return {"sinks": _meta(self.heads, dtype=torch.float32)}
        if name == "alibi":
            return {"alibi_slopes": _meta(self.heads, dtype=torch.float32)}
        if name == "qv":
            return {"qv": _meta(*q.shape[:-1], self.dim_v, dtype=self.dtype)}
        scale = _meta(self.batch, self.kv_heads, dtype=torch.float32)
        return {"k_descale": scale, "v_descale": scale}


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError):  # beyond 64 bits: in one size, in their product
        said = " x ".join(map(str, shape))
        raise typer.BadParameter(f"no tensor can be of {said} elements.") from None


def _ints(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _rows(found: Explanation) -> list[tuple[str, RenderableType]]:
    """The plan, the verdicts on the other backends, and the tensors."""
    rows: list[tuple[str, RenderableType]] = [
        (
            "backend",
            Text.assemble(
                (found.plan.backend, "bold green"), f", for tensors on {found.facts.device}"
            ),
        ),
        ("plan", Text(found.plan.kernel)),
    ]
    for name, reason in found.verdicts:
        if name != found.plan.backend:
            rows.append((f"not {name}" if reason else name, Text(reason or "takes it too")))
    for name, tensor in found.facts.tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, f"{' x '.join(map(str, tensor.shape))} {dtype}"))
    return rows


def _peers(found: Explanation) -> Table:
    """Every other library: what is installed of it, and why it would not do."""
    table = verdict_table()
    for answer in found.peers:
        installed = f"{answer.version} installed" if answer.version else "not installed"
        takes = "" if answer.verdicts else ": could take the call"
        about = Text.assemble(answer.peer.title, (f", {installed}{takes}", "dim"))
        table.add_row(Text(answer.peer.name, "bold"), "", about)
        add_verdicts(table, answer.verdicts, name="")
    return table
