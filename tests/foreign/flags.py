"""What torch does with each unmodified model: `python -m foreign.flags [PART OF A NAME ...]`, in `tests/`.

A flag is set if the step under it has the loss of the eager one, and its gradients under torch.compile.
"""

import copy
import pickle
import sys

import torch

from .registry import FOREIGN
from .spec import call, train_step

TOLERANCE = 1e-4  # float32, other orders of the same sums


def _compiled(foreign):
    eager, model = foreign.build(), foreign.build()
    expected = train_step(foreign, eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = foreign.loss(call(compiled, foreign.inputs(32)))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=TOLERANCE, atol=TOLERANCE)


def _exported(foreign, *, strict):
    inputs = foreign.inputs(32)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    program = torch.export.export(foreign.build(), args, kwargs, strict=strict)
    loss = foreign.loss(call(program.module(), inputs))
    _assert_trained(foreign, loss.detach())


def _remade(foreign, remake):
    _assert_trained(foreign, train_step(foreign, remake(foreign.build())))


def _assert_trained(foreign, loss):
    expected = train_step(foreign, foreign.build())
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)


CHECKS = {
    "fullgraph": _compiled,
    "export_strict": lambda foreign: _exported(foreign, strict=True),
    "export_non_strict": lambda foreign: _exported(foreign, strict=False),
    "deepcopies": lambda foreign: _remade(foreign, copy.deepcopy),
    "pickles": lambda foreign: _remade(foreign, lambda model: pickle.loads(pickle.dumps(model))),
}


def why_not(foreign, flag):
    torch._dynamo.reset()
    try:
        CHECKS[flag](foreign)
    except Exception as error:  # any failure of torch or of the comparison clears a flag
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None


def main(parts):
    for foreign in FOREIGN.values():
        if parts and not any(part in foreign.name for part in parts):
            continue
        for flag in CHECKS:
            error = why_not(foreign, flag)
            wrong = "" if getattr(foreign, flag) == (error is None) else "WRONG "
            print(f"{wrong}{foreign.name:32} {flag:18} {error or 'yes'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
