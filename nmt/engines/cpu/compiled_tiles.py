"""Parts of compiled code that are written for LLVM directly: tiles of matrix products that stay in vector registers.

numba's own loops would store and load a tile again for every input, and reach half the speed. A tile has some
rows of x, and one or several vectors of neighbouring columns of the matrix. It is a sum of products in one
order, whatever the number of rows.

The functions take addresses of fp32 numbers (`point_at`), and strides counted in numbers.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# Those of the processor that numba compiles for: its NUMBA_... variables can leave some out.
FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
HAS_BF16_PAIRS = "+avx512bf16" in FEATURES
# Of the vector registers, 16 hold a tile where there are 32 of 512 bits, and 8 where there are 16 of 256.
HAS_LARGE_REGISTERS = "+avx512f" in FEATURES
LANES = 16 if HAS_LARGE_REGISTERS else 8
VECTORS = 4 if HAS_LARGE_REGISTERS else 2
PANEL = LANES * VECTORS  # columns
TILE_ROWS = 4
NARROW_TILE_ROWS = 8  # of a tile that is one vector wide

generate_code: Any = intrinsic
INT64, INT32, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(INT32, LANES)
SHORT_INTEGERS = ir.VectorType(ir.IntType(16), LANES)


class Bf16(ir.types.Type):
    """The type that llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(Bf16(), 2 * LANES)


@generate_code
def point_at(_context: Any, array: Any, index: Any) -> Any:
    """Return the address of an element of a contiguous array, counted from its beginning."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.gep(data, [arguments[1]])

    return types.CPointer(array.dtype)(array, index), generate


@generate_code
def read_bits(_context: Any, number: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], INT32)

    return types.uint32(types.float32), generate


@generate_code
def reinterpret_bits(_context: Any, bits: Any) -> Any:
    """Return the number of type float32 that has the bits of this int32."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


def make_tile(n_rows: int) -> Any:
    """Make the function that computes y = x @ panel + bias for `n_rows` rows of one panel.

    It takes addresses: of x, the columns of x, of the panel, its inputs, of the bias, of y, the columns of y.
    """

    @generate_code
    def multiply_tile(
        _: Any, x: Any, x_stride: Any, panel: Any, n_inputs: Any, bias: Any, y: Any, y_stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, panel, n_inputs, bias, y, y_stride = arguments
            tile = Tile(builder, n_rows, VECTORS, kind=signature.args[2].dtype)
            tile.load_sums(bias)
            tile.add_products(
                x,
                x_stride,
                INT64(1),
                n_inputs,
                lambda i: builder.gep(panel, [builder.mul(i, INT64(PANEL))]),
            )
            tile.store_sums(y, y_stride)
            return context.get_dummy_value()

        return types.void(x, x_stride, panel, n_inputs, bias, y, y_stride), generate

    return multiply_tile


multiply_rows = make_tile(TILE_ROWS)
multiply_row = make_tile(1)


@generate_code
def add_weighted_rows(
    _: Any, weights: Any, row_numbers: Any, n_numbers: Any, table: Any, table_stride: Any, y: Any
) -> Any:
    """Add LANES columns of these rows of a table, each times its weight, to those at `y`."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        weights, row_numbers, n_numbers, table, table_stride, y = arguments

        def find_row(i: Any) -> Any:
            row_number = builder.load(builder.gep(row_numbers, [i]))
            return builder.gep(table, [builder.mul(row_number, table_stride)])

        tile = Tile(builder, n_rows=1, n_vectors=1, kind=types.float32)
        tile.load_sums(y)
        tile.add_products(weights, INT64(0), INT64(1), n_numbers, find_row)
        tile.store_sums(y, INT64(0))
        return context.get_dummy_value()

    return types.void(weights, row_numbers, n_numbers, table, table_stride, y), generate


@generate_code
def multiply_block(
    _: Any,
    x: Any,
    x_stride: Any,
    x_step: Any,
    n: Any,
    table: Any,
    table_stride: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """Multiply NARROW_TILE_ROWS rows of x by LANES columns of a table with n rows."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        x, x_stride, x_step, n, table, table_stride, y, y_stride = arguments
        tile = Tile(builder, NARROW_TILE_ROWS, n_vectors=1, kind=types.float32)
        tile.clear_sums()
        tile.add_products(
            x, x_stride, x_step, n, lambda i: builder.gep(table, [builder.mul(i, table_stride)])
        )
        tile.store_sums(y, y_stride)
        return context.get_dummy_value()

    return types.void(x, x_stride, x_step, n, table, table_stride, y, y_stride), generate


@generate_code
def transpose_block(_: Any, x: Any, x_stride: Any, y: Any, y_stride: Any) -> Any:
    """Write LANES rows and columns of x into the columns and rows of y."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        x, x_stride, y, y_stride = arguments

        def find_row(matrix: Any, stride: Any, row: int) -> Any:
            address = builder.gep(matrix, [builder.mul(stride, INT64(row))])
            return builder.bitcast(address, VECTOR.as_pointer())

        rows = [builder.load(find_row(x, x_stride, row), align=4) for row in range(LANES)]
        lanes = range(LANES)
        # In each square of 2 * size rows and columns, swap the upper right block with the lower left
        # one. In a pair of vectors, lane LANES + i is lane i of the second.
        size = 1
        while size < LANES:
            left = [i if not i & size else i - size + LANES for i in lanes]
            right = [i + size if not i & size else i + LANES for i in lanes]
            for row in lanes:
                if not row & size:
                    pair = rows[row], rows[row + size]
                    rows[row] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, left))
                    rows[row + size] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, right))
            size *= 2
        for row in lanes:
            builder.store(rows[row], find_row(y, y_stride, row), align=4)
        return context.get_dummy_value()

    return types.void(x, x_stride, y, y_stride), generate


class Tile:
    """Sums of products for some rows and vectors of columns, which LLVM keeps in registers."""

    def __init__(self, builder: Any, n_rows: int, n_vectors: int, kind: Any) -> None:
        """`kind`: the type of a weight, as in `Products`."""
        self.builder, self.kind = builder, kind
        self.rows, self.vectors = range(n_rows), range(n_vectors)
        self.sums: list[list[Any]] = []

    def load_sums(self, address: Any) -> None:
        """Begin each row with the vectors at this address."""
        start = [self._load(address, vector, VECTOR) for vector in self.vectors]
        self.sums = [start for _ in self.rows]

    def clear_sums(self) -> None:
        start = [ir.Constant(VECTOR, [0.0] * LANES) for _ in self.vectors]
        self.sums = [start for _ in self.rows]

    def add_products(
        self, x: Any, x_stride: Any, x_step: Any, n: Any, find_row: Callable[[Any], Any]
    ) -> None:
        """Add the number at x + row * x_stride + i * x_step times the vectors at the address `find_row(i)`,
        for all i below n, which is at least 1.
        """
        builder = self.builder
        before = builder.block
        loop = builder.append_basic_block("products")
        after = builder.append_basic_block("after_products")
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(INT64)
        sums = [[builder.phi(VECTOR) for _ in self.vectors] for _ in self.rows]
        address = find_row(i)
        weights = [self._load_weights(address, vector) for vector in self.vectors]
        results = []
        for row in self.rows:
            offset = builder.add(builder.mul(x_stride, INT64(row)), builder.mul(x_step, i))
            value = self._repeat(builder.load(builder.gep(x, [offset]), align=4))
            terms = zip(weights, sums[row], strict=True)
            results.append([self._multiply_add(value, weight, sum_) for weight, sum_ in terms])
        next_i = builder.add(i, INT64(1))
        i.add_incoming(INT64(0), before)
        i.add_incoming(next_i, loop)
        for row in self.rows:
            for vector in self.vectors:
                sums[row][vector].add_incoming(self.sums[row][vector], before)
                sums[row][vector].add_incoming(results[row][vector], loop)
        builder.cbranch(builder.icmp_signed("<", next_i, n), loop, after)
        builder.position_at_end(after)
        self.sums = results

    def store_sums(self, y: Any, y_stride: Any) -> None:
        for row in self.rows:
            address = self.builder.gep(y, [self.builder.mul(y_stride, INT64(row))])
            for vector in self.vectors:
                target = self._step_to(address, vector, VECTOR)
                self.builder.store(self.sums[row][vector], target, align=4)

    def _step_to(self, address: Any, vector: int, kind: Any) -> Any:
        stepped = self.builder.gep(address, [INT64(vector * LANES)])
        return self.builder.bitcast(stepped, kind.as_pointer())

    def _load(self, address: Any, vector: int, kind: Any) -> Any:
        return self.builder.load(self._step_to(address, vector, kind), align=2)

    def _load_weights(self, address: Any, vector: int) -> Any:
        if self.kind == types.uint32:
            return self._load(address, vector, INTEGERS)
        if self.kind == types.uint16:  # bf16 is the upper half of fp32
            halves = self.builder.zext(self._load(address, vector, SHORT_INTEGERS), INTEGERS)
            bits = self.builder.shl(halves, ir.Constant(INTEGERS, [16] * LANES))
            return self.builder.bitcast(bits, VECTOR)
        return self._load(address, vector, VECTOR)

    def _repeat(self, number: Any) -> Any:
        """Make a vector of this number alone."""
        undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, number, INT32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))

    def _multiply_add(self, value: Any, weight: Any, earlier: Any) -> Any:
        if self.kind == types.uint32:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            value, weight = (self.builder.bitcast(factor, PAIRS) for factor in (value, weight))
            arguments = [earlier, value, weight]
        else:
            name = f"llvm.fmuladd.v{LANES}f32"
            arguments = [value, weight, earlier]
        function_type = ir.FunctionType(VECTOR, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)
