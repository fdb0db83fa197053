"""Programs that end without `close()`: as Python ends, with its exit status, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.checkpoint.reader import resolve

# Imports once; then a child for each ending goes through the whole exit of an interpreter.
PROGRAM = """
import atexit, gc, json, os, signal, sys, threading, time
import torch, penstock
from torch import nn

torch.set_num_threads(1)
WIDTH = 128

def prepare(disk):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    placement = penstock.Placement(params="nvme", grads="cpu", optimizer="nvme", nvme_path=disk)
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        units=(nn.Linear,),
        precision="bf16",
        placement=placement if disk else penstock.Placement(),
        options=penstock.Options(tile_bytes=16384, update_threads=2 if disk else 1),
    )
    return model, optimizer

def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, WIDTH)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

model, optimizer = prepare(None)
train(model, optimizer)  # what torch imports late
optimizer.close()
gc.collect()
gc.freeze()  # what the children share, or the last collection of each would walk through it and copy it
running, rows = {}, json.loads(sys.argv[1])
while rows or running:
    if rows and len(running) < 3:
        folder, ending = rows.pop()
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            os.dup2(os.open("complaints", os.O_WRONLY | os.O_CREAT), 2)
            break
        running[child] = folder
        continue
    child, status = os.wait()
    with open(os.path.join(running.pop(child), "status"), "w") as said:
        said.write(str(os.waitstatus_to_exitcode(status)))
else:
    os._exit(0)
model, optimizer = prepare("disk")
train(model, optimizer)
exec(ending)
"""

ENDINGS = {
    "none": ("", 0, ""),
    # One that outlived the interpreter would abort the process (134) as it comes back from native code.
    "thread at work": (
        "from penstock.runtime.streams import HostWorker\n"
        "worker = HostWorker('busy'); values = torch.randn(1 << 18); [worker.submit(values.sort) for _ in range(1000)]",
        0,
        "",
    ),
    "exit": ("sys.exit(3)", 3, ""),
    "exception": ("raise ValueError('unhandled')", 1, "ValueError: unhandled"),
    "interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT, "KeyboardInterrupt"),
    "termination": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ""),
    "in forward": ("model(torch.ones(2, 9))", 1, "shapes cannot be multiplied"),
    "another thread": ("threading.Thread(target=lambda: train(*prepare('disk'))).start()", 0, ""),
    "dropped": ("del model, optimizer", 0, ""),
    "closed at the exit": ("atexit.register(optimizer.close)", 0, ""),
    "saving": ("optimizer.save('saved', blocking=False); train(model, optimizer, 1)", 0, ""),
    "saving fails": (
        "from penstock.checkpoint.save import Save; Save._commit = lambda *_: 'no room'\n"
        "optimizer.save('unsaved', blocking=False)",
        0,
        "Saving unsaved failed: no room\n",
    ),
    # Handlers that were registered before Penstock's run after it.
    "used after its end": (
        "from penstock.runtime import finalizers; atexit.unregister(finalizers._at_exit)\n"
        "atexit.register(lambda: train(model, optimizer)); atexit.register(finalizers._at_exit)",
        0,
        "penstock.errors.EngineError: ",
    ),
}

# Of a child of the program above, which looks after the child's end.
FORKED = """
def files():
    return sorted(os.path.join(at, name) for at, _, names in os.walk('disk') for name in names)
before = files()
child = os.fork()
if child == 0:
    {}
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {}
    assert files() == before
    train(model, optimizer)
    optimizer.save('saved')
    optimizer.close()
"""
CHILDREN = {
    "child without end": ("pass", 0),
    "child drops all": ("del model, optimizer; gc.collect(); sys.exit(7)", 7),
    "child trains by itself": ("train(*prepare('disk')); sys.exit(7)", 7),
}
ENDINGS |= {name: (FORKED.format(*row), 0, "") for name, row in CHILDREN.items()}


def run_endings(names: list[str], top: Path) -> None:
    """Make a folder for each ending: its `status`, `complaints`, and the `disk` that it had."""
    for name in names:
        (top / name / "disk").mkdir(parents=True)
    rows = [(str(top / name), ENDINGS[name][0]) for name in names]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(rows)],
        check=True,
        timeout=240,
        # Python 3.12 warns of a fork beside threads, which is what some of these programs are.
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:This process:DeprecationWarning"},
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an ending. All run at once."""
    top = tmp_path_factory.mktemp("endings")
    run_endings(list(ENDINGS), top)
    return top.joinpath


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_does_not_close_exits_as_any_other(ended: Callable[[str], Path], name: str) -> None:
    _, status, complaint = ENDINGS[name]
    complaints = (ended(name) / "complaints").read_text()
    assert (ended(name) / "status").read_text() == str(int(status)), complaints
    assert complaint in complaints
    assert bool(complaint) == bool(complaints), complaints
    assert list((ended(name) / "disk").iterdir()) == []


def test_a_save_beside_training_is_finished_at_the_exit(ended: Callable[[str], Path]) -> None:
    assert resolve(ended("saving") / "saved") == ended("saving") / "saved"
    assert not (ended("saving fails") / "unsaved").exists()  # a save that failed takes its folder away
