"""A short list of calls for compute-sanitizer, which is slow: `make gpu-sanitize`.

Every allocation is its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a read past a tensor is
one past its memory.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from cases import BF16, E4M3

from kvattn import errors as E
from kvattn.backends import prefix
from kvattn.testing import Case, attend, make_inputs

STEP = Case(batch=3, lengths=(33, 1, 70), capacity=96, page_size=16, new=1, rotary=64, dim=64,
            heads=8, kv_heads=2, causal=True, dtype=BF16)  # fmt: skip
CASES = {
    "decode, paged, append, rotary": STEP,
    "draft of 4": replace(STEP, seqlen_q=4, new=4),
    "pages of 3, odd dims": replace(STEP, page_size=3, dim=59, rotary=0),
    "dense, split": replace(STEP, page_size=None, lengths=(900, 700, 3), capacity=905),
    "fp8": replace(STEP, cache_dtype=E4M3, descale="heads"),
    "window, sinks": replace(STEP, window=(16, 0), sinks=BF16),
    "left padding": replace(STEP, leftpad=(3, 0, 17), page_size=None),
    "inactive and empty rows": replace(STEP, lengths=(-1, 0, 5)),
    "prefill": replace(STEP, seqlen_q=40, new=40, lengths=(0, 3, 50)),
    "ragged prefill": replace(STEP, seqlen_q=(40, 1, 7), new=(40, 1, 7)),
    "by slot": replace(STEP, by_slot=True),
    "varlen": Case(batch=2, seqlen_q=(33, 65), lengths=(33, 65), packed=(33, 65), varlen=True,
                   causal=True, dtype=BF16, dim=64),
    "common prefix": replace(STEP, lengths=(290, 256, 300), capacity=304, common=256),
    "longer than some": replace(STEP, new=None, rotary=0, lengths=(3, 140, 300), capacity=304,
                                common=290),
    "common prefix, ragged": replace(STEP, seqlen_q=(2, 0, 1), new=(2, 0, 1), capacity=304,
                                     lengths=(290, 256, 300), common=256,
                                     options={"max_seqlen_q": 2}),
    "latent": Case(batch=2, lengths=(33, 65), qv=True, dim=64, dim_v=128, heads=8, kv_heads=1,
                   dtype=BF16, page_size=16),
}  # fmt: skip


def main(backends: list[str]) -> None:
    prefix.LEAST = prefix.EACH = 0  # a common prefix is read once however short it is
    for backend in backends:
        for name, case in CASES.items():
            try:
                attend(case, make_inputs(case, device="cuda"), backend)
            except E.BackendRefusesError:
                continue
            torch.cuda.synchronize()
            print(f"{backend}: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["triton"])
