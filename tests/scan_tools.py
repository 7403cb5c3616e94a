"""What the tests of `kvattn.scan` share."""

from __future__ import annotations

from textwrap import dedent

from kvattn.errors import syntax
from kvattn.scan import CallSite, call_sites

K, V, P = "flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func"


def calls(text: str, module: str = "") -> list[CallSite]:
    return list(call_sites(syntax.parse(dedent(text), "a.py"), module))
