"""Whether writing a value is worth its bytes: it is compared with reading what the value is computed from."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from loka.compiler.edges.aten_steps import computed_from, is_pointwise, operands, passes_on
from loka.compiler.edges.matrix import Cone
from loka.compiler.nodes import args_of, in_backward, value_of
from loka.kernels.edge.program import Kind


def is_given(node: Node, cone: Cone, absorbed: set[Node], given: Sequence[Node] = ()) -> bool:
    """Whether the program should hand `node` to other readers: they read fewer bytes so than if they computed it from
    the matrices, or from other values that the program hands out.
    """
    if not _is_asked(node) or not (others := _others(node, cone, absorbed)):
        return False
    kind = cone.matrix.kind(node)
    if kind is not Kind.FULL:
        return kind in (Kind.COLUMN, Kind.BLOCK)
    needed = matrices_above(node, cone, given=given)
    if len(needed) <= 1:
        return False
    return not _cheaper_anew(node, {user: needed - _beside(user, node) for user in others}, others)


def better_read(node: Node, root: Node, cone: Cone, absorbed: set[Node]) -> bool:
    if not _is_asked(node) or cone.matrix.kind(node) is not Kind.FULL:
        return False
    if not in_backward(node):
        return len(matrices_above(node, cone)) > 1
    # Others are asked for first: they are few, and above a node of a deep model all its layers may lie.
    others = _others(node, cone, absorbed)
    if not others or len(needed := matrices_above(node, cone)) <= 1:
        return False
    further = needed - matrices_above(root, cone, without=node)
    return not _cheaper_anew(node, {node: further}, others)


def _is_asked(node: Node) -> bool:
    """Whether the question is put to this node. A view or a wider copy is not asked: the node that it is made of is."""
    if value_of(node).dtype == torch.bool:
        return False
    return not passes_on(node) or _bytes(node) < _bytes(args_of(node)[0])


def _others(node: Node, cone: Cone, absorbed: set[Node]) -> set[Node]:
    """The nodes outside the program that read its values."""
    return readers(node, cone) - cone.inside - absorbed


def _cheaper_anew(node: Node, more: Mapping[Node, set[Node]], others: set[Node]) -> bool:
    """Whether each of `more` does better to read its further matrices and to compute `node` from them.

    Else `node` is written once, and read by each. `others` read it besides: they can do the same where they
    are pointwise code of the same half of the graph; what forward keeps for backward has to be written.
    """
    if any(not is_pointwise(user) or in_backward(user) != in_backward(node) for user in others):
        return False
    anew = sum(_bytes(matrix) for further in more.values() for matrix in further)
    return anew < (1 + len(more)) * _bytes(node)


def _bytes(node: Node) -> int:
    return value_of(node).dtype.itemsize  # full values have one number of elements


def _beside(user: Node, node: Node) -> set[Node]:
    """The matrices that the code above the other operands of `user` reads."""
    found: set[Node] = set()
    waiting, seen = [user], {node}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_pointwise(current):
            waiting += [a for a in operands(current) if isinstance(a, Node)]
        else:
            found.add(current)
    return found


def readers(node: Node, cone: Cone | None = None) -> set[Node]:
    """The nodes that read the values of `node`, through any views. Narrower copies inside `cone` are not followed: they
    are asked by themselves.
    """
    found: set[Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if not passes_on(user):
            found.add(user)
        elif cone is None or user not in cone.inside or not _is_asked(user):
            waiting += list(user.users)
    return found


def matrices_above(node: Node, cone: Cone, *, given: Sequence[Node] = (), without: Node | None = None) -> set[Node]:
    """The matrices that `node` is computed from, or `given`; not those of the value `without` alone."""
    found: set[Node] = set()
    waiting, seen = [node], {without}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in given:
            found |= {current} if cone.matrix.kind(current) is Kind.FULL else set()
        elif current in cone.low_leaves:
            found.add(cone.low_leaves[current])
        elif current in cone.leaves:
            if cone.leaves[current] is Kind.FULL:
                found.add(current)
        else:
            waiting += [a for a in computed_from(current) if isinstance(a, Node)]
    return found
