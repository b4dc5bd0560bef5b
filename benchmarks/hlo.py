"""Read what XLA compiled: operations, how often they run, the compiler's own estimate, bytes."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ITEM_BITS = {"pred": 8, "token": 0, "bf16": 16} | {
    f"{kind}{bits}": bits for kind in ("s", "u", "f", "c") for bits in (2, 4, 8, 16, 32, 64, 128)
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
NO_KERNEL = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("while", "call", "conditional", "partition-id", "replica-id", "optimization-barrier"),
)
"""Operations of an optimised GPU program that launch nothing themselves."""

NO_WORK = (*NO_KERNEL, "copy-start", "copy-done", "slice-start", "slice-done", "reshape")
"""Operations of a TPU program whose missing estimate means nothing: transfers run beside others."""


class Operation(NamedTuple):
    """One line of a computation.

    cycles: the compiler's estimate; None without one (only TPU programs have them).
    calls:  computations that it names, by attribute: body, condition, calls, to_apply ...
    source: the path of the operation in the Python program, `op_name`.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    cycles: int | None
    calls: Mapping[str, str]
    source: str
    text: str

    @property
    def collective(self) -> str:
        """Return the name of the collective that this starts, or an empty string."""
        return next((c for c in COLLECTIVES if self.opcode in (c, f"{c}-start")), "")


class Program(NamedTuple):
    """The computations of a program by name, and the name of the first."""

    computations: dict[str, list[Operation]]
    entry: str


OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
CALL = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)


def parse(text: str) -> Program:
    """Return the program of `compiled.as_text()`."""
    computations, entry, name = {}, "", None
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = found[2]
            computations[name] = []
            entry = name if found[1] else entry
        elif line.startswith("}"):
            name = None
        elif name and (operation := _operation(line)):
            computations[name].append(operation)
    return Program(computations, entry)


def _operation(line: str) -> Operation | None:
    line = re.sub(r"/\*.*?\*/", "", line)
    found = OPERATION.match(line)
    if not found:
        return None
    name, shape, opcode, rest = found.groups()
    operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
    cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
    source = re.search(r'op_name="([^"]*)"', rest)
    return Operation(
        name,
        opcode,
        shape,
        tuple(operands),
        int(cycles[1]) if cycles else None,
        dict(CALL.findall(rest)),
        source[1] if source else "",
        line,
    )


def trips(program: Program, loop: Operation) -> int | None:
    """Return the turns of a `while`, or None if the data decide it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(known[1])
    condition = {each.name: each for each in program.computations[loop.calls["condition"]]}
    last = list(condition.values())[-1]
    if last.opcode != "compare" or "direction=LT" not in last.text:
        return None
    limit = condition.get(last.operands[1])
    value = re.search(r"constant\((\d+)\)", limit.text) if limit else None
    return int(value[1]) if value else None


def executed(
    program: Program, computation: str = "", times: int = 1, unknown: int = 1
) -> Iterator[tuple]:
    """Yield every operation that runs, and how often; loops of unknown length have `unknown` turns.

    The operations inside a fusion do not run on their own.
    """
    for operation in program.computations[computation or program.entry]:
        inner = times
        if operation.opcode == "while":
            turns = trips(program, operation)
            inner = times * (unknown if turns is None else turns)
            yield from executed(program, operation.calls["body"], inner, unknown)
        elif operation.opcode in ("call", "conditional"):
            for attribute in ("to_apply", "calls", "true_computation", "false_computation"):
                if attribute in operation.calls:
                    yield from executed(program, operation.calls[attribute], times, unknown)
        else:
            yield operation, times


def size_of(shape: str) -> int:
    """Return the bytes of an array or a tuple of arrays, without the padding of its layout.

    >>> size_of("(f32[10,640]{1,0:T(8,128)}, bf16[3], pred[])")
    25607
    """
    total = 0
    for kind, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += count * ITEM_BITS.get(kind, 8 if kind.startswith("f8") else 32) // 8
    return total


def bytes_moved(program: Program) -> int:
    """Return the bytes that all kernels read and write, if each reads its operands whole."""
    total = 0
    for name in program.computations:
        shapes = {each.name: each.shape for each in program.computations[name]}
        for operation, times in _of_one(program, name):
            read = sum(size_of(shapes.get(operand, "")) for operand in operation.operands)
            total += times * (read + size_of(operation.shape))
    return total


def _of_one(program: Program, name: str) -> list[tuple[Operation, int]]:
    """Return the kernels of one computation, and how often they run in the whole program."""
    own = {id(each) for each in program.computations[name]}
    return [(each, n) for each, n in executed(program) if id(each) in own and is_kernel(each)]


def is_kernel(operation: Operation) -> bool:
    """Return whether a GPU launches something for the operation."""
    return operation.opcode not in NO_KERNEL and not operation.opcode.endswith("-done")


def without_estimate(program: Program) -> list[str]:
    """Return the operations of a TPU program that run, but for which the compiler has no estimate.

    Transfers and the scalars' arithmetic are left out.
    """
    return [
        operation.name
        for operation, _ in executed(program)
        if operation.cycles is None
        and operation.opcode not in NO_WORK
        and size_of(operation.shape) > 1024
        and "AllocateBuffer" not in operation.text
        and "ConcatBitcast" not in operation.text
    ]


def group_of(source: str) -> str:
    """Return a short name for operations of one kind: module, primitive, direction.

    >>> group_of("jit(f)/transpose(jvp(Transformer))/decoder/layer_3/feed_forward/dot_general")
    'decoder feed_forward dot_general, backward'
    >>> group_of("")
    'without a name'
    """
    if not source:
        return "without a name"
    source = source.split(";")[0]
    backward = "transpose(" in source
    words = [part for part in source.split("/") if re.fullmatch(r"[\w.]+", part)]
    words = [word.split(".")[-1] if "Transformer" in word else word.split(".")[0] for word in words]
    skipped = {"shard_map", "while", "body", "closed_call", "checkpoint", "hidden_states", "logits"}
    kept: list[str] = []
    for word in words:
        if word not in skipped and not re.fullmatch(r"layer_\d+|_\w+", word) and word not in kept:
            kept.append(re.sub(r"\.?\d+$", "", word))
    return " ".join(kept[-4:]) + (", backward" if backward else "")


def cycles_by_group(program: Program) -> dict[str, int]:
    """Return the estimated cycles of each group, dearest first."""
    groups: dict[str, int] = {}
    for operation, times in executed(program):
        if operation.cycles:
            name = group_of(operation.source)
            groups[name] = groups.get(name, 0) + operation.cycles * times
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def collectives(program: Program) -> dict[str, tuple[int, int]]:
    """Return number and bytes of the results of each kind of collective."""
    found: dict[str, tuple[int, int]] = {}
    for operation, times in executed(program):
        if kind := operation.collective:
            count, size = found.get(kind, (0, 0))
            found[kind] = count + times, size + times * size_of(operation.shape)
    return found


def loops(program: Program) -> list[tuple[str, int | None, int]]:
    """Return name, turns and estimated cycles of a turn of every loop, dearest turn first.

    Of loops of unknown length inside another, a turn of that one has none.
    """
    found = []
    for operations in program.computations.values():
        for operation in operations:
            if operation.opcode == "while":
                body = executed(program, operation.calls["body"], unknown=0)
                cycles = sum((each.cycles or 0) * times for each, times in body)
                found.append((operation.name, trips(program, operation), cycles))
    return sorted(found, key=lambda loop: -loop[2])
