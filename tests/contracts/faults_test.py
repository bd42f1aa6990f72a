"""Faults: interrupts in a step, failed and killed writes, files that were cut short."""

import errno
import io
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import opacus
import pytest
import torch
from torch._C import _functorch

import opacus_ext
from opacus_ext import Refused, checkpoints
from opacus_ext.data import Poisson
from opacus_ext.monitor import Monitor
from opacus_ext.optimizers import Banded
from tests.common import assert_same

from .loop import RECORDS, Loop

OURS = os.path.dirname(opacus_ext.__file__)
OF_OPACUS = tuple(
    os.path.join(os.path.dirname(opacus.__file__), part)
    for part in ("optimizers", "accountants")
)
OF_STEPS = tuple(
    os.path.join(OURS, part) for part in ("optimizers", "accountants", "data", "engine")
)


class Interrupt:
    """
    Inside this context, Ctrl-C comes before a line is run.

    Args:
        number: of the line, counted from 0 in the order in which lines run; None to
            let all of them pass, and count them
        files: beginnings of the paths of the files whose lines count
    """

    def __init__(self, number=None, files=OF_STEPS + OF_OPACUS):
        self.number, self.files, self.lines = number, files, 0
        self.raised = False

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind, *error):
        sys.settrace(self.before)
        return kind is KeyboardInterrupt

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if event == "line" and not self.raised:
            if self.lines == self.number:
                self.raised = True
                raise KeyboardInterrupt
            self.lines += 1
        return self.trace


def interrupted(act, files=OF_STEPS + OF_OPACUS, every=7):
    """
    Calls ``act(interrupt)`` until each of its lines was interrupted, or one line in
    ``every``, beginning with a random one.
    """
    number = random.SystemRandom().randrange(every)
    while True:
        interrupt = Interrupt(number, files)
        act(interrupt)
        if not interrupt.raised:
            assert interrupt.lines > 10
            return
        number += every


sparse = pytest.mark.parametrize(
    "every", [16, pytest.param(4, marks=pytest.mark.thorough)], ids=["some", "more"]
)


# -- steps -----------------------------------------------------------------------------


def monitored(**kwargs):
    loop = Loop(**kwargs)
    Monitor(loop.private.engine, loop.optimizer)
    return loop


QUIET = {"noise_multiplier": 1e-12}  # so that sums can be seen
RUNS = {
    "ghost_bk": lambda: Loop(**QUIET),
    "hooks": lambda: Loop("hooks", accountant="rdp", **QUIET),
    "Poisson": lambda: Loop(
        sampling=Poisson(expected_batch_size=3), accountant="prv_bounds", **QUIET
    ),
    "monitor": lambda: monitored(**QUIET),
}


def part(size, scale=1.0):
    return torch.randn(size, 3, dtype=torch.float64) * scale


def stepped(steps, **kwargs):
    loop = Loop(**kwargs)
    for _ in range(steps):
        loop.step(part(3))
    return loop


def sums(loop):
    return {n: 3 * p.grad for n, p in loop.net.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
@sparse
def test_a_step_that_is_interrupted(name, every):
    """Nothing uncounted is released, and the batch can be computed again."""
    loop = RUNS[name]()
    steps = 0

    def act(interrupt):
        nonlocal steps
        x = part(3)
        loop.optimizer.zero_grad()
        loop.private.backward(x, loop.loss)
        counted = loop.counted
        with interrupt:
            loop.optimizer.step()
        assert counted <= loop.counted <= counted + 1
        loop.look()
        expected = loop.sum_of(x)
        loop.step(x)
        assert_same(sums(loop), expected)
        loop.look()
        steps += 1
        assert loop.changed >= steps

    interrupted(act, every=every)


@pytest.mark.parametrize("again", [True, False], ids=["again", "goes on"])
@sparse
def test_an_interrupt_in_the_middle_of_a_logical_batch(again, every):
    """No sample is in a sum twice, and none in that of another logical batch."""
    loop = Loop(**QUIET)
    signal_skip = loop.optimizer.signal_skip_step

    def act(interrupt):
        parts = [part(n) for n in (2, 3, 1)]
        loop.optimizer.drop_logical_batch()
        signal_skip(True)
        loop.step(parts[0])
        loop.optimizer.zero_grad()
        signal_skip(False)
        loop.private.backward(parts[1], loop.loss)
        with interrupt:
            loop.optimizer.step()
        loop.look()
        if not interrupt.raised:
            return
        if again:
            allowed = [loop.sum_of(parts[1]), loop.sum_of(torch.cat(parts[:2]))]
        else:
            signal_skip(False)
            parts[1] = parts[2]
            allowed = [loop.sum_of(parts[1])]
        counted = loop.counted
        try:
            loop.step(parts[1])
        except Refused:
            assert loop.counted == counted
            return
        finally:
            loop.look()
        got = sums(loop)
        gaps = [max(float((got[n] - x[n]).abs().max()) for n in got) for x in allowed]
        assert min(gaps) < 1e-8

    interrupted(act, every=every)


@sparse
def test_an_interrupt_in_correlated_noise(every):
    """Every round in which a step has moved the weights is counted."""
    loop = Loop(noise=Banded(2, 50), batch_size=2)
    rounds = set()

    def act(interrupt):
        for now in (interrupt, None):
            taken = loop.optimizer.correlated.taken
            loop.optimizer.zero_grad()
            loop.private.backward(part(2), loop.loss)
            before = loop.weights()
            if now is None:
                loop.optimizer.step()
            else:
                with now:
                    loop.optimizer.step()
            if not torch.equal(before, loop.weights()):
                rounds.add(taken // 2)
            assert loop.counted >= len(rounds)

    interrupted(act, every=every)


def leave_all():
    """Leaves the transforms and modes of torch that an interrupt left entered."""
    torch.set_grad_enabled(True)
    while _functorch.peek_interpreter_stack() is not None:
        _functorch._vmap_decrement_nesting()
    while torch.overrides._get_current_function_mode_stack():
        torch._C._pop_torch_function_stack()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ghost_bk", "hooks"])
def test_an_interrupt_anywhere(name):
    """In the forward and backward pass, too: the next step is right, or refused."""
    loop = RUNS[name]()

    def act(interrupt):
        nonlocal loop
        x = part(3)
        with interrupt:
            loop.step(x)
        leave_all()
        loop.look()
        expected, before = loop.sum_of(x), loop.weights()
        try:
            loop.step(x)
        except (Refused, RuntimeError, ValueError):
            assert torch.equal(before, loop.weights())
            loop = RUNS[name]()
        else:
            assert_same(sums(loop), expected)
        loop.look()

    interrupted(act, (OURS, *OF_OPACUS), every=14)


# -- writing checkpoints ---------------------------------------------------------------


def of(loop, path):
    private = loop.private
    return dict(path=path, module=private.handle, optimizer=loop.optimizer)


def saved(loop, path, **content):
    content = {"weights": loop.weights(), **content}
    loop.private.engine.save_checkpoint(checkpoint_dict=content, **of(loop, path))


def loaded(path, loop=None, **kwargs):
    loop = loop or Loop()
    content = loop.private.engine.load_checkpoint(**of(loop, path), **kwargs)
    assert torch.equal(content["weights"], loop.weights())
    return loop


class FullDisk(io.FileIO):
    """A file on a disk that is full after some writes."""

    left = 0

    def write(self, data):
        FullDisk.left -= 1
        if FullDisk.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    path, loop, failed = tmp_path / "run.pt", Loop(), 0
    saved(loop, path)
    monkeypatch.setattr(checkpoints, "open", FullDisk, raising=False)
    while loaded(path).counted == 0:
        loop.step(part(3))
        FullDisk.left = failed
        try:
            saved(loop, path)
        except (OSError, RuntimeError):
            failed += 1
            assert os.listdir(tmp_path) == ["run.pt"]
    assert failed > 3 and loaded(path).counted == loop.counted == failed + 1


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_write_that_fails_at_its_end(place, tmp_path, monkeypatch):
    path, loop = tmp_path / "run.pt", Loop()
    saved(loop, path)
    loop.step(part(3))
    error = OSError(errno.EIO, place)
    monkeypatch.setattr(os, place, lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match=place):
        saved(loop, path)
    assert loaded(path).counted == 0


def test_a_write_that_is_interrupted(tmp_path):
    path, loop = tmp_path / "run.pt", Loop()
    saved(loop, path)
    known = [loop.counted]

    def act(interrupt):
        loop.step(part(3))
        with interrupt:
            saved(loop, path)
        found = loaded(path).counted
        assert found in (known[-1], loop.counted)
        known.append(found)

    interrupted(act, (OURS + "/checkpoints",))


def test_a_process_that_is_killed_while_it_writes(tmp_path):
    """The file is complete: that of one of its steps, and the next run goes on."""
    path, loop = tmp_path / "run.pt", Loop()
    saved(loop, path)
    counted = []
    for _ in range(8):
        child = os.fork()
        if not child:  # it never returns to the tests
            while True:
                loop.step(part(3))
                saved(loop, path)
        before, end = os.stat(path).st_mtime_ns, time.time() + 60
        while os.stat(path).st_mtime_ns == before and time.time() < end:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))  # somewhere in a later step or write
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loop = loaded(path)
        counted.append(loop.counted)
    assert counted == sorted(set(counted)) and counted[0] > 0


# -- reading checkpoints ---------------------------------------------------------------


def test_files_that_were_cut_short(tmp_path):
    """They are refused, and nothing is changed."""
    path = tmp_path / "run.pt"
    saved(stepped(1), path)
    whole, other = path.read_bytes(), stepped(2)
    before = other.weights()
    for length in {0, 1, 4, *(int(len(whole) * k / 20) for k in range(20))}:
        path.write_bytes(whole[:length])
        with pytest.raises(Refused, match="cut short.*Take the checkpoint before it"):
            loaded(path, other)
        assert torch.equal(before, other.weights()) and other.counted == 2


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.putenv, ("OPACUS_EXT_WAS_HERE", "1")


def test_files_with_code_in_them(tmp_path):
    path = tmp_path / "run.pt"
    saved(Loop(), path, x=Code())
    with pytest.raises(Refused, match="other objects .*add_safe_globals"):
        loaded(path)
    with pytest.raises(Refused, match="runs whatever code is in the file"):
        loaded(path, torch_load_kwargs={"weights_only": False})
    torch.save({"weights": 1}, path)
    with pytest.raises(Refused, match="no checkpoint of PrivacyEngine"):
        loaded(path)


def test_a_checkpoint_of_another_accountant_changes_nothing(tmp_path):
    path, other = tmp_path / "run.pt", Loop()
    saved(stepped(1, accountant="rdp"), path)
    before = other.weights()
    with pytest.raises(ValueError, match='Load it by .*accountant="rdp"'):
        loaded(path, other)
    assert torch.equal(before, other.weights()) and not other.counted


@sparse
def test_loading_that_is_interrupted(tmp_path, every):
    """If weights may come from two runs, the steps of both are counted."""
    path, first = tmp_path / "run.pt", stepped(3)
    saved(first, path)
    seen = set()

    def act(interrupt):
        other = stepped(2)
        before = other.weights()
        try:
            with interrupt:
                loaded(path, other)
        except AssertionError:  # what was loaded is compared after an interrupt, too
            pass
        old = torch.equal(before, other.weights())
        new = torch.equal(first.weights(), other.weights())
        seen.add((old, new, other.counted))
        assert other.counted >= (2 if old else 3 if new else 5)
        assert not old or other.counted >= 2

    interrupted(act, (OURS + "/checkpoints", OURS + "/optimizers", *OF_OPACUS), every)
    assert {(True, False, 2), (False, True, 3)} <= seen


def test_weights_that_do_not_fit_count_for_both(tmp_path):
    """torch has already loaded the other ones."""
    path, other = tmp_path / "run.pt", stepped(1)
    saved(stepped(1), path)
    other.net.layer.bias = torch.nn.Parameter(torch.zeros(RECORDS).double())
    with pytest.raises(RuntimeError, match="size mismatch"):
        loaded(path, other)
    assert other.counted == 2


# -- one file reads and writes ---------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
ALONE = "opacus_ext/checkpoints.py"
FORBIDDEN = {
    r"\btorch\.load\(": "checkpoints.read",
    r"\btorch\.save\(": "checkpoints.write",
    r"\bpickle\.(loads?|dumps?|Unpickler|Pickler)\b": "checkpoints.write",
    r"\bimport (dill|cloudpickle|joblib|shelve)\b": "checkpoints.write",
    r"weights_only=False": "weights_only=True",
    r"allow_pickle=True": "plain arrays",
}


@pytest.mark.parametrize("folder", ["opacus_ext", "examples"])
def test_nothing_else_reads_or_writes_state(folder):
    """Or a file could run code when it is read, or be left half written."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, instead in FORBIDDEN.items():
                if name != ALONE and re.search(pattern, line):
                    found.append(f"{name}:{number}: use {instead}")
    assert not found, found
    assert "weights_only=True" in (ROOT / ALONE).read_text()
