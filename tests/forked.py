"""Processes that find torch and loka imported: forks, each made in a tenth of a fresh interpreter's time.

What they are forks of has imported `loka`, what its first optimizer, plan, checkpoint or compilation would,
torchrec, and pytest, which files with tests need where a child runs a function in them. Of all that it ran
`warmed` alone.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import types
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest import mock

import torch

SERVER = multiprocessing.get_context("forkserver")
LATE = ["torch._dynamo", "safetensors.torch", "torch.distributed.checkpoint", "loka.compiler.joint_pass"]
LATE += ["torch._dynamo.repro.after_dynamo", "torchrec", "pytest", "warmed"]
SERVER.set_forkserver_preload(LATE)
_SHARED = "LOKA_TESTS_FORKED"  # the server of the process that starts pytest's workers


def share():
    """Starts the server for this process and for those that it starts, which call `join`."""
    here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=here):  # it finds `warmed`, which other servers do without
        forkserver.ensure_running()
    held = forkserver._forkserver
    os.environ[_SHARED] = f"{os.getpid()} {held._forkserver_alive_fd} {held._forkserver_address}"


def join():
    """Workers of pytest fork from one server: its imports take ten seconds. Without one, from their own."""
    if _SHARED in os.environ and Path("/proc/self/fd").exists():
        pid, descriptor, address = os.environ[_SHARED].split(" ", 2)
        held = forkserver._forkserver
        held._forkserver_address = address
        held._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY)
        held.ensure_running = resource_tracker.ensure_running  # it would wait for it as for its own child


def run_script(code, *, name, cwd, output):
    """What `code` prints, to both streams, as a script in the folder `cwd`; asserts that it ends well."""
    process = _start(_script, code, name, cwd=cwd, output=output)
    process.join()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


def start_loka(*arguments, cwd, output, **replaced):
    """The `loka` command at work in `cwd`; `replaced`: "loka.cli.app.NAME" and so on, in that process."""
    return _start(_loka, [str(argument) for argument in arguments], replaced, cwd=cwd, output=output)


def _start(work, *arguments, cwd, output):
    process = SERVER.Process(target=_work, args=(work, arguments, cwd, output))
    process.start()
    return process


def _work(work, arguments, cwd, output):
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    gc.freeze()
    torch.set_num_threads(1)
    work(*arguments)


def _script(code, name):
    main = types.ModuleType("__main__")
    with mock.patch.object(sys, "argv", [name]), mock.patch.dict(sys.modules, {"__main__": main}):
        exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


def _loka(arguments, replaced):
    from loka.cli import main

    for path, value in replaced.items():
        module, _, name = path.rpartition(".")
        place = importlib.import_module(module)
        assert hasattr(place, name), path
        setattr(place, name, value)
    sys.argv = ["loka", *arguments]
    main()
