"""The three vector operations that the scan is made of, written as LLVM IR through numba, since Python has no words for them.

masked_dots: bits select bytes of a quantised query, and the selected bytes are summed: three instructions per 64 bits where the CPU has AVX-512 VNNI, and
what LLVM makes of the same sum elsewhere. exact_dot: bits select float64 numbers. half: float16 to float32.
All take addresses, as a mapped file's codes may start anywhere and blocks end anywhere; all may read up to a group (8 * words bytes) past a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import numba
import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

F = TypeVar("F", bound=Callable[..., Any])


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's decorator, typed: compiled code calls it without the typing context."""
    return numba.extending.intrinsic(function)


def jit(function: F) -> F:
    """Compiled without the interpreter lock; division follows IEEE."""
    return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
MASK, BYTES, INTS, FLOATS = ir.VectorType(I1, 64), ir.VectorType(I8, 64), ir.VectorType(I32, 16), ir.VectorType(F32, 16)
MASK8, DOUBLES = ir.VectorType(I1, 8), ir.VectorType(F64, 8)


def has_vnni() -> bool:
    """Whether this CPU sums products of bytes in one instruction."""
    features = f",{get_host_cpu_features()},"
    return ",+avx512vnni," in features and ",+avx512bw," in features


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _at(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, I64(size)))


def _loop(builder: Any, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """for i in range(count): carried = body(i, carried)."""
    before = builder.block
    head, inside, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(I64)
    values = [builder.phi(v.type) for v in carried]
    for phi, start in zip([i, *values], [I64(0), *carried], strict=True):
        phi.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", i, count), inside, after)
    builder.position_at_end(inside)
    new = body(i, values)
    for phi, value in zip([i, *values], [builder.add(i, I64(1)), *new], strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _total(builder: Any, vector: Any, name: str) -> Any:
    """Sum of a vector's lanes, in any order."""
    scalar = vector.type.element
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(scalar, [scalar, vector.type]), f"llvm.vector.reduce.fadd.{name}")
    return builder.call(function, [scalar(0.0), vector], fastmath=("reassoc",))


def _add_selected(builder: Any, total: Any, selected: Any, numbers: Any, vnni: bool) -> Any:
    """total (16 x i32) + sums of four of the 64 products of selected (0 or 1) with numbers (i8)."""
    if vnni:
        kind = ir.FunctionType(INTS, [INTS, INTS, INTS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return builder.call(function, [total, builder.bitcast(selected, INTS), builder.bitcast(numbers, INTS)])
    kept = builder.mul(selected, numbers)
    for part in range(4):  # which bytes share a lane does not matter: lanes are summed in the end
        lanes = ir.Constant(ir.VectorType(I32, 16), [I32(16 * part + lane) for lane in range(16)])
        total = builder.add(total, builder.sext(builder.shuffle_vector(kept, kept, lanes), INTS))
    return total


@cache
def masked_dots(words: int, vnni: bool) -> Any:
    """(rows, n_rows, byte, numbers, deltas, n_queries, s, sums): for each row r and query q
    sums[r, q] (16 floats) += s[r] * deltas[q] * (sum of numbers[q] where the row's bits are 1), spread over 16 partial sums.

    All are addresses or counts. rows: n_rows int64 addresses; the group's 64 * words bits start `byte` bytes behind each; numbers (n_queries, 64 * words)
    int8; deltas (n_queries,) float32; s (n_rows,) float32; sums (n_rows, n_queries, 16) float32.
    """

    @intrinsic
    def group(typingctx: Any, rows: Any, n: Any, byte: Any, numbers: Any, deltas: Any, m: Any, s: Any, sums: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            rows, n, byte, numbers, deltas, m, s, sums = args

            def each_row(r: Any, _: list[Any]) -> list[Any]:
                address = b.add(_load(b, _at(b, rows, r, 8), I64), byte)
                selected = [b.zext(b.bitcast(_load(b, b.add(address, I64(8 * w)), I64), MASK), BYTES) for w in range(words)]
                scale = _load(b, _at(b, s, r, 4), F32)
                first = _at(b, sums, b.mul(r, m), 64)

                def each_query(q: Any, _: list[Any]) -> list[Any]:
                    own = _at(b, numbers, q, 64 * words)
                    total: Any = INTS([0] * 16)
                    for w in range(words):
                        total = _add_selected(b, total, selected[w], _load(b, b.add(own, I64(64 * w)), BYTES), vnni)
                    weight = b.fmul(scale, _load(b, _at(b, deltas, q, 4), F32))
                    lane0 = b.insert_element(ir.Constant(FLOATS, ir.Undefined), weight, I32(0))
                    spread = b.shuffle_vector(lane0, lane0, INTS([0] * 16))
                    where = b.inttoptr(_at(b, first, q, 64), FLOATS.as_pointer())
                    term = b.fmul(b.sitofp(total, FLOATS), spread, flags=("contract",))
                    b.store(b.fadd(b.load(where, align=4), term, flags=("contract",)), where, align=4)
                    return []

                _loop(b, m, [], each_query)
                return []

            _loop(b, n, [], each_row)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return group


@intrinsic
def lane_sum(typingctx: Any, address: Any) -> Any:
    """Sum of 16 float32 numbers."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return _total(b, _load(b, args[0], FLOATS), "v16f32")

    return types.float32(types.intp), codegen


@intrinsic
def exact_dot(typingctx: Any, address: Any, y: Any, n_bytes: Any) -> Any:
    """Sum of the float64 numbers y (8 * n_bytes of them) where the bits are 1. n_bytes is a multiple of 4; the order of the sum is always the same."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address, y, n_bytes = args

        def four_bytes(i: Any, totals: list[Any]) -> list[Any]:
            new = []
            for j, total in enumerate(totals):
                bits = b.bitcast(_load(b, b.add(_at(b, address, i, 4), I64(j)), I8), MASK8)
                numbers = _load(b, b.add(_at(b, y, i, 256), I64(64 * j)), DOUBLES)
                new.append(b.fadd(total, b.select(bits, numbers, DOUBLES([0.0] * 8))))
            return new

        totals = _loop(b, b.sdiv(n_bytes, I64(4)), [DOUBLES([0.0] * 8)] * 4, four_bytes)
        return _total(b, b.fadd(b.fadd(totals[0], totals[1]), b.fadd(totals[2], totals[3])), "v8f64")

    return types.float64(types.intp, types.intp, types.intp), codegen


@intrinsic
def half(typingctx: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fpext(_load(b, args[0], ir.HalfType()), F32)

    return types.float32(types.intp), codegen


@intrinsic
def byte(typingctx: Any, address: Any) -> Any:
    """The byte at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return _load(b, args[0], I8)

    return types.uint8(types.intp), codegen
