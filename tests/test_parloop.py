"""What a description of a loop accepts, and how it refuses the rest."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import one_cell_periodic, random_map, triangles

from pyop3_mlir.errors import InvalidLoopError
from pyop3_mlir.kernels.program import Dim, IndexOf, KernelArgument, LocalKernel, Output, Temporary
from pyop3_mlir.parloop import (
    DTYPES,
    INC,
    MAX,
    MIN,
    READ,
    RW,
    WRITE,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Kind,
    Parloop,
)


def kernel_of(*arguments, name="kernel"):
    """A kernel that takes these arguments and does nothing."""
    formals = (
        KernelArgument(f"formal{n}", (a.slots,), a.buffer.dtype) for n, a in enumerate(arguments)
    )
    return LocalKernel(name, tuple(formals), (), ())


def loop_of(*arguments, size=2, entities=None, name="assemble"):
    return Parloop(kernel_of(*arguments), IterationSet(size, entities=entities), arguments, name)


def table(values=((0, 1), (1, 2)), bound=3, allow_negative=False, name="cell_node"):
    return IndexTable(np.array(values), bound, allow_negative, name)


def refused(message):
    return pytest.raises(InvalidLoopError, match=re.escape(message))


# ---------------------------------------------------------------------------------------------
# Iteration sets


def test_core_and_owned_default_to_the_size():
    iterations = IterationSet(5)
    assert (iterations.core, iterations.owned) == (5, 5)
    assert IterationSet(5, owned=3).core == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": -1}, "iteration set cells: size: -1 is not within 0 to"),
        ({"size": 2**40}, f"iteration set cells: size: {2**40} is not within 0 to"),
        ({"size": 2.0}, "iteration set cells: size: 2.0 is not an integer"),
        ({"size": 3, "core": 3, "owned": 2}, "core=3, owned=2, size=3"),
        ({"size": 3, "owned": 4}, "core=4, owned=4, size=3"),
        ({"size": 3, "core": -1}, "iteration set cells: core: -1"),
        ({"size": 3, "entities": [0, 1]}, "entities has shape (2,), expected (3,)"),
        ({"size": 3, "entities": [[0, 1, 2]]}, "entities has shape (1, 3), expected (3,)"),
        ({"size": 3, "entities": [0, -4, 1]}, "iteration 1 visits entity -4"),
        ({"size": 2, "entities": [0, 2**31]}, f"iteration 1 visits entity {2**31}"),
        ({"size": 2, "entities": [0.0, 1.0]}, "dtype float64 is not an integer type"),
        ({"size": 2, "entities": [False, True]}, "dtype bool is not an integer type"),
        ({"size": 2, "entities": [[0], [1, 2]]}, "cannot be made an array"),
        ({"size": 2, "entities": [0, 10**30]}, "dtype object is not an integer type"),
        ({"size": 1, "entities": np.ma.array([0], mask=[True])}, "masked arrays"),
    ],
)
def test_iteration_sets_that_are_refused(arguments, message):
    with refused(message):
        IterationSet(**arguments)


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", "u1", ">u8"])
def test_entities_are_int32_whatever_they_were(dtype):
    entities = IterationSet(3, entities=np.array([4, 0, 4], dtype)).entities
    assert entities.dtype == np.int32
    assert entities.tolist() == [4, 0, 4]


def test_extent_is_one_more_than_the_largest_entity():
    assert IterationSet(3, entities=[4, 0, 4]).extent == 5
    assert IterationSet(3).extent == 3
    assert IterationSet(0, entities=[]).extent == 0


def test_repeated_visits_are_noticed():
    assert IterationSet(3, entities=[4, 0, 4]).repeats
    assert not IterationSet(3, entities=[4, 0, 3]).repeats
    assert not IterationSet(3).repeats


def test_fingerprints_tell_what_is_visited():
    sets = [
        IterationSet(3), IterationSet(2), IterationSet(3, entities=[0, 1, 2]),
        IterationSet(3, entities=[2, 1, 0]),
    ]  # fmt: skip
    assert len({s.fingerprint for s in sets}) == 4
    assert sets[2].fingerprint == IterationSet(3, entities=[0, 1, 2]).fingerprint


# ---------------------------------------------------------------------------------------------
# Tables


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0, 1], [2, 3]], 3), "map m: entity 1, position 1 holds 3, allowed are 0 to 2"),
        (([[0, -1]], 3), "map m: entity 0, position 1 holds -1, allowed are 0 to 2"),
        (([[0, 5]], 3, True), "holds 5, allowed are negative values and 0 to 2"),
        (([[0]], 0), "entity 0, position 0 holds 0, allowed are no values"),
        (([[2**60]], 2**31), f"entity 0, position 0 holds {2**60}"),
        ((np.array([[2**63]], np.uint64), 2**62), f"value {2**63} does not fit into int64"),
        (([0, 1], 3), "expected an array [entities, arity], got shape (2,)"),
        ((3, 4), "expected an array [entities, arity], got shape ()"),
        (([[0.0]], 3), "map m: dtype float64 is not an integer type"),
        (([[True]], 3), "map m: dtype bool is not an integer type"),
        (([["a"]], 3), "is not an integer type"),
        ((None, 3), "dtype object is not an integer type"),
        (([[0], [1, 2]], 3), "map m: cannot be made an array"),
        (([[0]], 1.5), "map m: bound: 1.5 is not an integer"),
        (([[0]], -1), "map m: bound: -1 is not within"),
        (([[0]], 2**70), f"map m: bound: {2**70} is not within"),
        (([[0]], 1, "yes"), "allow_negative is 'yes', expected a bool"),
    ],
)
def test_tables_that_are_refused(arguments, message):
    with refused(message):
        IndexTable(*arguments, name="m")


def test_contiguous_tables_are_not_copied():
    values = np.zeros((5, 3), np.int32)
    assert IndexTable(values, 1).values is values


@pytest.mark.parametrize("layout", ["transposed", "strided", "byte-swapped", "unaligned", "uint8"])
def test_tables_of_any_layout_are_brought_into_shape(layout):
    values = random_map(6, 4, 20, seed=3)
    raw = np.zeros(values.nbytes + 1, np.uint8)
    given_as = {
        "transposed": np.asfortranarray(values),
        "strided": np.repeat(values, 2, axis=0)[::2],
        "byte-swapped": values.astype(">i4"),
        "unaligned": raw[1:].view(np.int32).reshape(values.shape),
        "uint8": values.astype(np.uint8),
    }[layout]
    given_as[...] = values
    found = IndexTable(given_as, 20).values
    assert found.dtype == np.int32
    assert found.flags.c_contiguous
    assert found.flags.aligned
    assert (found == values).all()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 0)])
def test_empty_tables(shape):
    found = IndexTable(np.zeros(shape, np.int32), 0)
    assert (found.size, found.arity) == shape
    assert not found.has_negative
    assert not found.shares_targets()
    assert found.fingerprint


def test_fingerprints_tell_tables_apart():
    tables = [table(), table([[0, 1], [1, 1]]), IndexTable(table().values.astype(np.int32), 3)]
    assert len({t.fingerprint for t in tables}) == 3
    assert table().fingerprint == table().fingerprint


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_sharing_is_what_a_loop_over_all_pairs_finds(data):
    size, arity = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 4))
    bound = data.draw(st.sampled_from([3, 40, 10**6, 10**15]))
    values = random_map(size, arity, bound, data.draw(st.integers(0, 999)), 0.3, np.int64)
    entities = None
    if size and data.draw(st.booleans()):
        entities = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    iterations = IterationSet(size if entities is None else len(entities), entities=entities)
    visited = [set(values[e][values[e] >= 0].tolist()) for e in (entities or [])]
    if entities is None:
        visited = [set(row[row >= 0].tolist()) for row in values]
    expected = any(visited[i] & visited[j] for i in range(len(visited)) for j in range(i))
    assert IndexTable(values, bound, True).shares_targets(iterations) == expected


def test_a_target_twice_in_one_cell_is_not_shared():
    assert not IndexTable(one_cell_periodic(3), 1).shares_targets()


# ---------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_buffers(dtype):
    assert Argument.direct(np.zeros((4, 2), dtype), INC).components == 2


def unaligned():
    return np.zeros(8 * 4 + 1, np.uint8)[1:].view(np.float64)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        ([0.0, 1.0], "argument u: expected a numpy array, got list"),
        (None, "argument u: expected a numpy array, got NoneType"),
        (np.zeros(3, bool), "argument u: dtype |b1 (bool) is not one of float64"),
        (np.zeros(3, object), "argument u: dtype |O (object) is not one of"),
        (np.zeros(3, np.float16), "argument u: dtype <f2 (float16) is not one of"),
        (np.zeros(3, ">f8"), "argument u: dtype >f8 (>f8) is not one of"),
        (np.zeros((3, 4)).T, "argument u: the array is not C-contiguous"),
        (np.zeros(6)[::2], "argument u: the array is not C-contiguous"),
        (unaligned(), "argument u: the array is not aligned to its item size"),
        (np.ma.zeros(3), "argument u: masked arrays are not supported"),
        (np.array(1.0), "argument u: the array has no axis of rows; use Argument.glob"),
    ],
)
def test_buffers_that_are_refused(buffer, message):
    with refused(message):
        Argument.direct(buffer, READ, name="u")


def test_read_only_arrays_can_only_be_read():
    buffer = np.zeros(3)
    buffer.flags.writeable = False
    Argument.direct(buffer, READ)
    with refused("argument u: access INC but the array is read-only"):
        Argument.direct(buffer, INC, name="u")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"access": "INC"}, "argument u: 'INC' is not an access mode"),
        ({"kind": "direct"}, "argument u: 'direct' is not a kind of argument"),
        ({"kind": Kind.INDIRECT}, "argument u: indirect arguments need table"),
        ({"table": table()}, "argument u: direct arguments take no table"),
        ({"table": [[0]], "kind": Kind.INDIRECT}, "argument u: expected an IndexTable, got list"),
        ({"components": -1}, "argument u: components: -1 is not within"),
        ({"components": 1.5}, "argument u: components: 1.5 is not an integer"),
        ({"stride": -1}, "argument u: stride: -1 is not within"),
        ({"offset": "a"}, "argument u: offset: 'a' is not an integer"),
        ({"kind": Kind.GLOBAL, "access": RW}, "a global cannot be accessed with RW"),
        ({"kind": Kind.GLOBAL, "access": WRITE}, "a global cannot be accessed with WRITE"),
        ({"kind": Kind.GLOBAL, "components": 7}, "argument u: the buffer holds 6 scalars but rows"),
        (
            {"kind": Kind.INDIRECT, "table": table(bound=7)},
            "argument u: the buffer holds 6 scalars but map bound 7 with 1 components, stride 1 "
            "and offset 0 needs 7",
        ),
        (
            {"kind": Kind.INDIRECT, "table": table(bound=3), "stride": 2, "offset": 2},
            "stride 2 and offset 2 needs 7",
        ),
        (
            {"kind": Kind.INDIRECT, "table": table(), "stride": 0, "access": INC},
            "argument u: stride 0 puts all rows at one place",
        ),
        (
            {"kind": Kind.INDIRECT, "table": table(), "cover": table([[0]], 1)},
            "map cell_node for planning has 1 rows, expected 2",
        ),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    given_as = {"buffer": np.zeros(6), "access": READ, "kind": Kind.DIRECT, "name": "u"}
    with refused(message):
        Argument(**{**given_as, **arguments})


def test_the_last_row_may_end_at_the_end_of_the_buffer():
    Argument(np.zeros(6), READ, Kind.INDIRECT, table(bound=3), 1, 2, 1)


@pytest.mark.parametrize("access", [MIN, MAX])
def test_complex_numbers_have_no_order(access):
    with refused(f"argument z: {access.name} has no meaning for complex128"):
        Argument.direct(np.zeros(3, complex), access, name="z")


@pytest.mark.parametrize("access", [READ, RW, MIN, MAX, "INC", None, np.zeros(3)])
def test_a_matrix_is_added_to_or_inserted_into(access):
    with pytest.raises(InvalidLoopError, match="argument A: a matrix takes INC or WRITE"):
        Argument.matrix(np.zeros(9), access, table(), name="A")


def test_a_matrix_argument_holds_one_entry_a_position():
    rows = table([[0], [1]], 2)
    argument = Argument.matrix(np.zeros((3, 1, 1)), WRITE, table(), rows)
    assert (argument.slots, argument.stride, argument.cover) == (2, 1, rows)


# ---------------------------------------------------------------------------------------------
# Loops


def test_the_parts_of_a_loop_are_checked():
    argument = Argument.direct(np.zeros(2), READ)
    kernel, iterations = kernel_of(argument), IterationSet(2)
    with refused("loop l: expected a LocalKernel, got str"):
        Parloop("kernel", iterations, [argument], "l")
    with refused("loop l: expected an IterationSet, got int"):
        Parloop(kernel, 2, [argument], "l")
    with refused("loop l, argument 0: expected an Argument, got ndarray"):
        Parloop(kernel, iterations, [np.zeros(2)], "l")
    with refused("loop l: arguments must be a sequence"):
        Parloop(kernel, iterations, argument, "l")
    with refused("loop kernel: the kernel takes 1 arguments, 2 were given"):
        Parloop(kernel, iterations, [argument, argument])


def test_shapes_and_dtypes_follow_the_kernel():
    argument = Argument.indirect(np.zeros(3), READ, table(), name="u")
    with refused(
        "loop l, argument 0 (u): the kernel's f has shape (3,), the pack of an entity has 2 entries"
    ):
        Parloop(
            LocalKernel("k", (KernelArgument("f", (3,), np.dtype(float)),), (), ()),
            IterationSet(2), [argument], "l",
        )  # fmt: skip
    with refused("loop l, argument 0 (u): the kernel's f is float32, the buffer float64"):
        Parloop(
            LocalKernel("k", (KernelArgument("f", (2,), np.dtype(np.float32)),), (), ()),
            IterationSet(2), [argument], "l",
        )  # fmt: skip


def kernel_that_changes_its_argument(size, pieces=1):
    formal = KernelArgument("f", (size,), np.dtype(float))
    dim = Dim("i", size)
    value = Temporary("t", (size,), np.dtype(float))
    output = Output(formal, (dim,), IndexOf(dim), value)
    return LocalKernel("k", (formal,), (), (output,) * pieces)


def test_what_the_kernel_changes_cannot_be_read_only():
    argument = Argument.direct(np.zeros(2), READ, name="u")
    with refused("loop l, argument 0 (u): access READ, but the kernel changes it"):
        Parloop(kernel_that_changes_its_argument(1), IterationSet(2), [argument], "l")


def test_only_increments_come_in_pieces():
    kernel = kernel_that_changes_its_argument(1, pieces=2)
    Parloop(kernel, IterationSet(2), [Argument.direct(np.zeros(2), INC)])
    with refused("argument 0 (u): access WRITE, but the kernel gives 2 values for it"):
        Parloop(kernel, IterationSet(2), [Argument.direct(np.zeros(2), WRITE, "u")])


def test_tables_and_buffers_have_a_row_for_each_entity():
    with refused("argument 0 (dat): map cell_node has 2 rows, iteration set cells visits entity 2"):
        loop_of(Argument.indirect(np.zeros(3), READ, table()), size=3)
    with refused("map cell_node has 2 rows, iteration set cells visits entity 7"):
        loop_of(Argument.indirect(np.zeros(3), READ, table()), size=1, entities=[7])
    with refused("loop assemble, argument 0 (u): argument u: the buffer holds 3 scalars"):
        loop_of(Argument.direct(np.zeros(3), READ, "u"), size=4)
    with refused("entities 6 with 1 components"):
        loop_of(Argument.direct(np.zeros(3), READ, "u"), size=1, entities=[5])


def test_rows_that_overlap_are_not_changed_directly():
    def argument(access):
        return Argument(np.zeros(9), access, Kind.DIRECT, None, 2, 1, name="u")

    loop_of(argument(READ), size=4)
    with refused("argument 0 (u): rows overlap (stride 1, 2 components)"):
        loop_of(argument(INC), size=4)


@pytest.mark.parametrize("access", [WRITE, RW, INC, MIN, MAX])
def test_indices_in_use_are_not_changed(access):
    values = np.zeros((4, 1), np.int32)
    with refused("its memory holds the indices of map cell_node"):
        loop_of(
            Argument.indirect(np.zeros(1), READ, IndexTable(values, 1, name="cell_node")),
            Argument.direct(values, access),
            size=4,
        )
    with refused("its memory holds the indices of iteration set cells"):
        loop_of(Argument.direct(values, access), size=4, entities=values[:, 0])


def test_indices_can_be_read_as_data():
    values = np.zeros((4, 1), np.int32)
    loop_of(
        Argument.indirect(np.zeros(1), READ, IndexTable(values, 1)), Argument.direct(values, READ)
    )


# ---------------------------------------------------------------------------------------------
# Arguments that share memory


@pytest.mark.parametrize("second", list(Access))
@pytest.mark.parametrize("first", list(Access))
def test_accesses_that_may_share_an_array(first, second):
    buffer = np.zeros(3)
    arguments = [
        Argument.indirect(buffer, access, table(), f"u{n}")
        for n, access in enumerate((first, second))
    ]
    if first is second and first is not RW:
        loop = loop_of(*arguments)
        assert [spec.buffer for spec in loop.spec.arguments] == [0, 0]
        return
    with refused(
        f"loop assemble: arguments 0 (u0, {first.name}) and 1 (u1, {second.name}) are the same"
    ):
        loop_of(*arguments)


def test_components_of_one_array_can_be_read_and_changed():
    buffer = np.zeros((3, 3))
    read = Argument(buffer, READ, Kind.INDIRECT, table(), 1, 3, 0)
    changed = Argument(buffer, RW, Kind.INDIRECT, table(), 2, 3, 1)
    loop = loop_of(read, changed)
    assert len(loop.buffers) == 1
    shifted = Argument(buffer, WRITE, Kind.INDIRECT, table(), 1, 3, 0)
    with refused("are the same array"):
        loop_of(read, shifted)


def test_components_apart_by_another_stride_are_not_apart():
    buffer = np.zeros(12)
    read = Argument(buffer, READ, Kind.INDIRECT, table(), 1, 2, 0)
    changed = Argument(buffer, INC, Kind.INDIRECT, table(), 1, 3, 1)
    with refused("are the same array"):
        loop_of(read, changed)


def test_arrays_that_overlap_in_part_are_refused_where_one_changes():
    buffer = np.zeros(6)
    loop_of(Argument.direct(buffer[:4], READ), Argument.direct(buffer[2:], READ))
    loop_of(Argument.direct(buffer[:3], READ), Argument.direct(buffer[3:], INC))
    for other in (buffer[2:], buffer[:3], buffer.view(np.int64)):
        with refused("overlap in memory without being the same array"):
            loop_of(Argument.direct(buffer[:4], READ), Argument.direct(other, INC))


def test_arrays_with_a_common_start_are_different_operands():
    buffer = np.zeros(6)
    loop = loop_of(Argument.direct(buffer[:2], READ), Argument.direct(buffer, READ))
    assert [b.size for b in loop.buffers] == [2, 6]


def test_empty_arrays_share_nothing():
    first, second = np.zeros((0, 2)), np.zeros((0, 2))
    loop = loop_of(Argument.direct(first, RW), Argument.direct(second, WRITE), size=0)
    assert len(loop.buffers) == 2
    buffer = np.zeros(6)
    loop_of(Argument.direct(buffer, RW), Argument.glob(buffer[3:3], READ), size=6)


def test_a_global_is_not_reduced_into_an_array_that_entities_change():
    buffer = np.zeros(3)
    with refused("changed as a global and entity by entity"):
        loop_of(Argument.glob(buffer, INC), Argument.direct(buffer, INC))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("reach", "kind"), [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, None)]
)
def test_tables_are_compact_where_entries_of_a_group_are_near(reach, kind, dtype):
    rng = np.random.default_rng(2)
    first = rng.integers(0, 10**9, (3000, 2, 1))
    values = first + rng.integers(0, reach, (3000, 2, 7))
    values[0, 0] = first[0, 0] + np.array([0, reach - 1, 1, 2, 3, 4, 5])
    values = np.where(rng.random(values.shape) < 0.1, -1, values)
    values[0, 0, :2] = first[0, 0, 0], first[0, 0, 0] + reach - 1
    values[1, 1] = -5
    table = IndexTable(values.reshape(3000, 14).astype(dtype), 2 * 10**9, True, group=7)
    if kind is None:
        assert table.compact is None
        return
    bases, offsets = table.compact.bases, table.compact.offsets
    assert (bases.dtype, bases.shape) == (np.dtype(dtype), (3000, 2))
    assert (offsets.dtype, offsets.shape) == (np.dtype(kind), (3000, 14))
    found = np.where(
        offsets == np.iinfo(kind).max, -1, bases.repeat(7, axis=1) + offsets.astype(dtype)
    )
    np.testing.assert_array_equal(found, np.maximum(table.values, -1))


def test_tables_of_short_groups_are_not_compact():
    values = np.arange(12, dtype=np.int32).reshape(2, 6)
    assert IndexTable(values, 12, group=6).compact is not None
    assert IndexTable(values, 12, group=3).compact is None
    assert IndexTable(values, 12).compact is None
    # a process without entities is to need the same module as the others
    assert IndexTable(values[:0], 12, group=6).compact.offsets.dtype == np.uint8
    assert IndexTable(np.full((2, 6), -1), 12, True, group=6).compact is not None
    with refused("6 entries of an entity are no groups of 4"):
        IndexTable(values, 12, group=4)
    with refused("no groups of 0"):
        IndexTable(values, 12, group=0)


def test_compiled_code_depends_on_whether_a_table_is_compact():
    values = np.arange(12, dtype=np.int32).reshape(2, 6)
    near, far = IndexTable(values, 10**6, group=6), IndexTable(values * 70_000, 10**6, group=6)
    for_one, for_other = (Argument(np.zeros(10**6), READ, Kind.INDIRECT, t) for t in (near, far))
    kernel = LocalKernel("k", (KernelArgument("x", (6,), np.dtype(float)),), (), ())
    one, other = (Parloop(kernel, IterationSet(2), [a]) for a in (for_one, for_other))
    assert one.spec != other.spec
    assert [a.dtype for a in one.index_arrays] == [np.dtype(np.int32), np.dtype(np.uint8)]
    assert [a.dtype for a in other.index_arrays] == [np.dtype(np.int32)]


def test_what_a_loop_has_to_move_is_counted():
    """A map of 3 x 2 int32, a vector that is read, one that is changed."""
    values = np.arange(6, dtype=np.int32).reshape(3, 2)
    map_ = IndexTable(values, 6)
    kernel = LocalKernel("k", tuple(KernelArgument(n, (2,), np.dtype(float)) for n in "yx"), (), ())
    arguments = [
        Argument.indirect(np.zeros(6), INC, map_),
        Argument.indirect(np.zeros(6), READ, map_),
    ]
    loop = Parloop(kernel, IterationSet(3), arguments)
    assert loop.compulsory_bytes == 4 * 6 + 8 * 6 + 2 * 8 * 6


def test_operands_are_numbered_by_identity():
    shared, other = table(), table()
    buffer = np.zeros(3)
    loop = loop_of(
        Argument.indirect(buffer, READ, shared),
        Argument.indirect(np.zeros(3), READ, other),
        Argument.indirect(buffer, READ, shared),
    )
    assert [s.buffer for s in loop.spec.arguments] == [0, 1, 0]
    assert [s.table for s in loop.spec.arguments] == [0, 1, 0]
    assert loop.tables == (shared, other)


def test_loops_over_different_meshes_have_one_spec():
    def loop(n):
        _, _, nodes, count = triangles(n)
        return loop_of(Argument.indirect(np.zeros(count), INC, IndexTable(nodes, count)), size=2)

    assert loop(2).spec == loop(5).spec
    assert hash(loop(2).spec) == hash(loop(5).spec)


# ---------------------------------------------------------------------------------------------
# Dependence on order


@pytest.mark.parametrize("access", list(Access))
def test_only_reading_what_was_stored_depends_on_order(access):
    loop = loop_of(Argument.indirect(np.zeros(3), access, table()))
    assert loop.order_dependent == (access is RW)


def test_targets_that_no_two_visited_entities_share_may_be_read_and_stored():
    buffer, cells = np.zeros(4), table([[0, 1], [2, 3], [1, 2]], 4)
    argument = Argument.indirect(buffer, RW, cells)
    assert loop_of(argument, size=3).order_dependent
    assert not loop_of(argument, size=2).order_dependent
    assert not loop_of(argument, size=2, entities=[1, 0]).order_dependent
    assert loop_of(argument, size=2, entities=[1, 2]).order_dependent


def test_one_cell_cannot_depend_on_order():
    argument = Argument.indirect(np.zeros(1), RW, IndexTable(one_cell_periodic(3), 1))
    assert not loop_of(argument, size=1).order_dependent


def test_direct_arguments_depend_on_order_where_an_entity_is_visited_twice():
    argument = Argument.direct(np.zeros(4), RW)
    assert not loop_of(argument, size=3).order_dependent
    assert loop_of(argument, size=3, entities=[0, 3, 0]).order_dependent


def test_rows_that_overlap_depend_on_order():
    argument = Argument(np.zeros(4), RW, Kind.INDIRECT, table([[0], [1]], 3), 2, 1)
    assert loop_of(argument).order_dependent


# ---------------------------------------------------------------------------------------------
# Garbage

ARRAYS = st.sampled_from(
    [
        np.zeros((3, 2)), np.zeros(6, np.float32), np.zeros((0, 4)), np.zeros((4, 0)),
        np.array(1.0), np.zeros((3, 2), np.int32), np.zeros((2, 3), np.int64), np.zeros(3, bool),
        np.zeros(3, object), np.zeros((4, 4)).T[1:], np.zeros(3, ">f8"), np.zeros(3, "U4"),
        np.zeros((3, 2), np.uint64) + np.uint64(2**63), np.full((2, 2), -(2**63)),
        np.full((2, 1), 2**62), np.array([[0, 1], [2, 0], [1, 1]]), np.array([[0, 1]], np.int8),
        np.array([2, 0, 1]), np.ma.zeros((2, 2), int), np.full((2, 2), np.nan),
        np.zeros(2, "datetime64[s]"), np.zeros(2, [("a", int)]), np.lib.stride_tricks.as_strided(
            np.zeros(1), (3, 2), (0, 0)
        ), np.zeros((2, 2, 2), np.int32),
    ]
)  # fmt: skip
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-3, 5), max_size=4),
    st.lists(st.lists(st.integers(-3, 5), max_size=3), max_size=3),
    st.sampled_from([*Access, *Kind, {}, object(), b"x", 10**40, -(10**40), np.int8(2), 1j]),
    ARRAYS,
)


def mostly(sensible, junk=JUNK):
    """Junk in about one of eight draws: a loop of several parts should often get through."""
    return st.integers(0, 7).flatmap(lambda n: sensible if n else junk)


def build(make, fallback, *strategies):
    """A strategy for what ``make`` returns, ``fallback()`` where it refuses."""

    def attempt(values):
        try:
            return make(*values)
        except InvalidLoopError:
            return fallback()

    return st.tuples(*strategies).map(attempt)


SMALL = mostly(st.integers(0, 4))
MATRICES = st.tuples(st.integers(0, 4), st.integers(0, 2)).flatmap(
    lambda shape: st.lists(
        st.integers(-1, 4), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    ).map(lambda values: np.array(values, np.int64).reshape(shape))
)
SHARED = np.zeros((8, 2))
BUFFERS = st.one_of(
    st.sampled_from([SHARED, SHARED[:4], SHARED.reshape(-1), np.zeros(20, np.int32)]), ARRAYS
)
TABLES = build(
    IndexTable, table, mostly(MATRICES), mostly(st.integers(4, 8)), mostly(st.booleans())
)
SETS = build(
    IterationSet, lambda: IterationSet(2), SMALL, mostly(st.none(), SMALL),
    mostly(st.none(), SMALL),
    st.one_of(st.none(), ARRAYS, st.lists(st.integers(0, 4), min_size=2, max_size=2), JUNK),
)  # fmt: skip
ACCESSES = mostly(st.sampled_from(list(Access)))
MAPS = mostly(TABLES)
ARGUMENTS = st.one_of(
    build(method, lambda: Argument.direct(np.zeros(9), INC), mostly(BUFFERS), ACCESSES, *more)
    for method, more in [
        (Argument.direct, ()),
        (Argument.glob, ()),
        (Argument.indirect, (MAPS,)),
        (Argument.matrix, (MAPS, mostly(st.none(), MAPS))),
        (
            lambda buffer, access, *rest: Argument(buffer, access, Kind.INDIRECT, *rest),
            (MAPS, SMALL, SMALL, SMALL),
        ),
        (
            Argument,
            (mostly(st.sampled_from(list(Kind))), st.one_of(st.none(), MAPS), SMALL, SMALL, SMALL),
        ),
    ]
)


def reached(argument, iterations):
    """Flat indices that a valid loop reaches, by Python's unlimited integers."""
    entities = range(iterations.size) if iterations.entities is None else iterations.entities
    for entity in entities:
        if argument.kind is Kind.GLOBAL:
            rows = [0]
        elif argument.table is None:
            rows = [int(entity)]
        else:
            rows = [r for r in argument.table.values[entity].tolist() if r >= 0]
        for row in rows:
            for c in range(argument.components):
                yield row * argument.stride + argument.offset + c


@settings(max_examples=600, deadline=None)
@given(mostly(SETS), st.lists(mostly(ARGUMENTS), min_size=1, max_size=3), JUNK)
def test_garbage_gives_a_loop_within_bounds_or_an_invalid_loop_error(iterations, arguments, name):
    try:
        kernel = kernel_of(*(a for a in arguments if isinstance(a, Argument)))
        loop = Parloop(kernel, iterations, arguments, str(name))
    except InvalidLoopError:
        return
    assert hash(loop.spec) is not None
    assert loop.order_dependent in (True, False)
    assert len(loop.buffers) <= len(loop.arguments)
    for argument in loop.arguments:
        assert all(0 <= i < argument.buffer.size for i in reached(argument, loop.iteration_set))
