"""Narrow caches read two channels at a time, 16 bits, and multiplied as fp16.

Units of 16 bits are what the matrix units' loads can transpose, and fp16 holds every e4m3, e5m2
and int8 number: products of even channels and of odd ones are added up apart.
"""

import triton
import triton.language as tl

from kvattn.kernels import tile

# Bytes 0 and 2 of a register, then 1 and 3, are the even and odd channels of two keys.
_E4M3 = tl.constexpr("""
{
    .reg .b32 x;
    .reg .b16 even, odd;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {even, odd}, x;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}
""")
_E5M2 = tl.constexpr("""
{
    prmt.b32 $0, $2, 0, 0x2404;
    prmt.b32 $1, $2, 0, 0x3414;
}
""")
# 1024 + (x + 128), as fp16 writes it, less 1152
_INT8 = tl.constexpr("""
{
    .reg .b32 x, even, odd, less;
    mov.b32 less, 0xe480e480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 even, x, 0x64646464, 0x4240;
    prmt.b32 odd, x, 0x64646464, 0x4341;
    add.rn.f16x2 $0, even, less;
    add.rn.f16x2 $1, odd, less;
}
""")


@triton.jit
def halves(x, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Pairs of channels, 16 bits each, as fp16: (even channels, odd channels)."""
    if NATIVE:
        CODE: tl.constexpr = _E4M3 if KIND == 1 else (_E5M2 if KIND == 2 else _INT8)
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif KIND == 2:
        return (x << 8).to(tl.float16, bitcast=True), (x & -256).to(tl.float16, bitcast=True)
    elif KIND == 3:
        return ((x << 8) >> 8).to(tl.float16), (x >> 8).to(tl.float16)
    else:
        return tile.widen(x & 255, 1, tl.float16), tile.widen((x >> 8) & 255, 1, tl.float16)


@triton.jit
def query(q):
    """Rows of q as fp16, each times a power of two, and the factors that undo it.

    The largest element lands just below 2 ** 16: all others down to 2 ** -29 of it keep every bit.
    """
    wide = q.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 16), 254)
    grown = wide * ((269 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    return grown.to(tl.float16), ((exponent - 15) << 23).to(tl.float32, bitcast=True)


@triton.jit
def first(x, R: tl.constexpr):
    """The first R of R or 2 R rows."""
    if x.shape[0] == R:
        return x
    else:
        upper, _lower = tl.split(tl.trans(tl.reshape(x, (2, R))))
        return upper
