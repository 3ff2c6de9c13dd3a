"""Writes a cone down as a program, and emits the op that runs it."""

import torch
from torch.fx import Node

from loka.compiler.edges.aten_steps import SUMS, Value, computed_from, operands, steps_of, variance_of
from loka.compiler.edges.cones import reduction_of, variance_along
from loka.compiler.edges.matrix import Cone, Matrix
from loka.compiler.emit import Emitter
from loka.compiler.nodes import args_of, value_of
from loka.core.problem import dtype_name
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import Kind, Program, Step

aten, prims = torch.ops.aten, torch.ops.prims


class Writer:
    """Collects steps over known leaves: those of `cone`, and `more` leaves for steps that the caller pushes."""

    def __init__(self, cone: Cone, more: dict[Node, Kind]) -> None:
        self.cone = cone
        kinds = {**cone.leaves, **dict.fromkeys(cone.low_leaves.values(), Kind.FULL), **more}
        self.leaves = list(kinds)
        self._kinds = tuple(kinds.values())
        self._steps: list[Step] = []
        self._values: dict[Node, Value] = {node: index for index, node in enumerate(self.leaves)}
        self._block = cone.matrix.features

    def push(self, step: Step) -> int:
        if step in self._steps:
            return len(self.leaves) + self._steps.index(step)
        self._steps.append(step)
        return len(self.leaves) + len(self._steps) - 1

    def index_of(self, node: Node) -> int:
        """The index of a leaf, or of a node inside the cone."""
        value = self._value(node)
        return value if isinstance(value, int) else self.push(Step("copy", (value,)))

    def _value(self, node: Node) -> Value:
        waiting = [node]
        while waiting:
            current = waiting[-1]
            if current in self._values:
                waiting.pop()
                continue
            needed = [n for n in self._read_by(current) if n not in self._values]
            if needed:
                waiting += needed
            else:
                self._values[current] = self._computed(current)
                waiting.pop()
        return self._values[node]

    def _read_by(self, node: Node) -> list[Node]:
        if node in self.cone.low_leaves:
            return []
        return [a for a in computed_from(node) if isinstance(a, Node)]

    def _computed(self, node: Node) -> Value:
        if node in self.cone.low_leaves:
            return steps_of(node, [self._values[self.cone.low_leaves[node]], 0.0], self.push)
        if node.target in SUMS:
            found = reduction_of(node, self.cone.matrix)
            assert found is not None
            mean = node.target is aten.mean.dim
            return self._reduced(self._values[args_of(node)[0]], *found, mean=mean)
        if (made := variance_of(node)) is not None:
            found = variance_along(made, self.cone.matrix)
            value = self._values[args_of(made)[0]]
            mean_value = self._reduced(value, *found, mean=True)
            if args_of(node)[1] == 1:
                return mean_value
            centered = self.push(Step("sub", (value, mean_value)))
            return self._reduced(self.push(Step("square", (centered,))), *found, mean=True)
        values = [self._values[a] if isinstance(a, Node) else a for a in operands(node)]
        return steps_of(node, values, self.push)

    def _reduced(self, value: Value, op: str, over: int, *, mean: bool) -> int:
        if op == "block_sum":
            self._block = over
        total = self.push(Step(op, (value,)))
        return self.push(Step("mul", (total, 1.0 / over))) if mean else total

    def program(
        self,
        *,
        gradient: int | None = None,
        row: bool = False,
        column: bool = False,
        integers: bool = False,
        transposed: int | None = None,
        sums: tuple[int, ...] = (),
    ) -> Program:
        """The program of what has been written, with the values that the cone hands to other readers."""
        given = self.cone.given
        values = tuple(map(self.index_of, given))
        return Program(
            features=self.cone.matrix.features,
            block=self._blocks(),
            leaves=self._kinds,
            steps=tuple(self._steps),
            gradient=gradient,
            row=row,
            column=column,
            integers=integers,
            transposed=transposed,
            sums=sums,
            values=values,
            value_dtypes=tuple(dtype_name(self._given_dtype(node)) for node in given),
        )

    def run(
        self,
        emitter: Emitter,
        program: Program,
        rows: int | torch.SymInt,
        input_scale: Node | None = None,
        gradient_scale: Node | None = None,
        tops: Node | None = None,
    ) -> dict[str, Node]:
        """Emits the op, redirects those who read what the cone hands out, and returns all outputs by name."""
        leaves, side = [emitter.now(leaf) for leaf in self.leaves], emitter.side(rows)
        wide = self.cone.matrix.features
        kinds = zip(leaves, self._kinds, strict=True)
        leaves = [emitter.in_rows(leaf, wide) if kind is Kind.FULL else leaf for leaf, kind in kinds]
        op = emitter.call(edge, leaves, side, input_scale, gradient_scale, tops, program.to_text())
        outputs = {name: emitter.item(op, index) for index, name in enumerate(program.outputs)}
        for index, node in enumerate(self.cone.given):
            like, value = value_of(node), outputs[f"value{index}"]
            if value_of(value).shape != like.shape:
                value = emitter.call(aten.view.default, value, [emitter.side(each) for each in like.shape])
            if value_of(value).dtype != like.dtype:
                value = emitter.call(prims.convert_element_type.default, value, like.dtype)
            emitter.replace(node, value)
        return outputs

    def _given_dtype(self, node: Node) -> torch.dtype:
        return value_of(node).dtype if self.cone.matrix.kind(node) is Kind.FULL else torch.float32

    def _blocks(self) -> int:
        """The block of leaves where no step says it."""
        for node, kind in zip(self.leaves, self._kinds, strict=True):
            if kind is Kind.BLOCK:
                return self.cone.matrix.features // int(node.meta["val"].shape[-2])
        return self._block


def written(matrix: Matrix, low_leaves: dict[Node, Kind]) -> Writer:
    """A writer over leaves alone, without a cone."""
    return Writer(Cone(matrix=matrix, low={}), low_leaves)
