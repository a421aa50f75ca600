"""PTX instructions of kernels, for targets with inline assembly (`Target.assembly`)."""

from __future__ import annotations

import triton.language as tl

# Computes nibble - zero point, exactly, for the 8 nibbles of the 4 bytes in $4, and writes 16-bit floats to $0 … $3. A
# nibble in the lowest mantissa bits of C (128 in bfloat16, 1024 in float16) is the float C + nibble; $5 and $6 have
# -C - zero point. {one}: 1.0 twice; {top}: the upper byte of C, four times.
_NIBBLES = """{{
.reg .b32 low, high, one;
mov.b32 one, {one};
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, {top}, 0x4140;
prmt.b32 $1, low, {top}, 0x4342;
prmt.b32 $2, high, {top}, 0x4140;
prmt.b32 $3, high, {top}, 0x4342;
fma.rn.{kind} $0, $0, one, $5;
fma.rn.{kind} $1, $1, one, $6;
fma.rn.{kind} $2, $2, one, $5;
fma.rn.{kind} $3, $3, one, $6;
}}"""
NIBBLES_BF16 = tl.constexpr(_NIBBLES.format(one="0x3F803F80", top="0x43434343", kind="bf16x2"))
NIBBLES_FP16 = tl.constexpr(_NIBBLES.format(one="0x3C003C00", top="0x64646464", kind="f16x2"))
# Like NIBBLES_BF16, with other zero points for the high nibbles: $7 and $8.
_HALVES = NIBBLES_BF16.value.replace("$2, $2, one, $5", "$2, $2, one, $7").replace("$3, $3, one, $6", "$3, $3, one, $8")
HALVES = tl.constexpr(_HALVES)
# Then times the scales of the low nibbles, $9 and $10, and of the high ones, $11 and $12. Adds -0.0.
SCALED_HALVES = tl.constexpr(
    _HALVES.removesuffix("}")
    + """mov.b32 one, 0x80008000;
fma.rn.bf16x2 $0, $0, $9, one;
fma.rn.bf16x2 $1, $1, $10, one;
fma.rn.bf16x2 $2, $2, $11, one;
fma.rn.bf16x2 $3, $3, $12, one;
}"""
)
# Converts the 4 e4m3 values in $2 to 16-bit floats in $0 and $1. It shifts their bits to the positions of sign,
# exponent and mantissa, then multiplies by 2^120 (bfloat16) or 2^8 (float16), which corrects the exponent bias.
_E4M3 = """{{
.reg .b32 a, b, c, d, factor, sign;
mov.b32 factor, {factor};
mov.b32 sign, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, {shift};
shr.u32 d, b, {shift};
and.b32 c, c, {mask};
and.b32 d, d, {mask};
lop3.b32 a, a, sign, c, 0xEA;
lop3.b32 b, b, sign, d, 0xEA;
fma.rn.{kind} $0, a, factor, sign;
fma.rn.{kind} $1, b, factor, sign;
}}"""
E4M3_BF16 = tl.constexpr(_E4M3.format(factor="0x7B807B80", shift=4, mask="0x07F007F0", kind="bf16x2"))
E4M3_FP16 = tl.constexpr(_E4M3.format(factor="0x5C005C00", shift=1, mask="0x3F803F80", kind="f16x2"))
# A kernel that was launched early waits for the results of the previous kernel.
WAIT = tl.constexpr("griddepcontrol.wait; // $0")
# It permits the start of the next kernel.
LAUNCH = tl.constexpr("griddepcontrol.launch_dependents; // $0")
