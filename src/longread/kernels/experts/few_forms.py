"""What the kernels for experts of few tokens share: FP4 words as float16, and hidden activations' scale in it."""

import triton.language as tl

PAIRS = 8  # of one expert a program: the tensor core's least

# Hidden activations are kept in float16 as this part of their value: 2^20 still fits, 2^-20 is the finest step.
HIDDEN = tl.constexpr(1 / 16)
LARGEST = tl.constexpr(65504.0)

# Word (ref.prepare) -> float16 of columns 4q..4q+3 and 64+4q..64+4q+3, by way of e4m3 (see grouped_triton.DECODE).
# $8: word; $9, $10 and $11, $12: tables of the first half's block and of the second's.
DECODE = tl.constexpr("""{
.reg .b32 m, p, n, s;
.reg .b16 a, b;
and.b32 m, $8, 0x77777777;
prmt.b32 p, $9, $10, m;
lop3.b32 p, $8, 0x80808080, p, 0xEA;
mov.b32 {a, b}, p;
cvt.rn.f16x2.e4m3x2 s, a;
mov.b32 {$0, $1}, s;
cvt.rn.f16x2.e4m3x2 s, b;
mov.b32 {$2, $3}, s;
shr.b32 m, m, 16;
prmt.b32 p, $11, $12, m;
shl.b32 n, $8, 4;
lop3.b32 p, n, 0x80808080, p, 0xEA;
mov.b32 {a, b}, p;
cvt.rn.f16x2.e4m3x2 s, a;
mov.b32 {$4, $5}, s;
cvt.rn.f16x2.e4m3x2 s, b;
mov.b32 {$6, $7}, s;
}""")
