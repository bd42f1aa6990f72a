"""The samples of a batch, run in one part or in several.

In the order in which it is tried:

1. all samples under vmap (at_once.py);
2. split by what they say, where they take different branches on data;
3. one sample after the other by ordinary autograd (scan.py), for what vmap can't run.
"""

from __future__ import annotations

import traceback
import warnings
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch

from opacus_ext.grad_sample.parallel.group import ProcessFailure
from opacus_ext.grad_sample.samplewise.at_once import raw_at_once, run_at_once
from opacus_ext.grad_sample.samplewise.batch import BranchesDiffer
from opacus_ext.grad_sample.samplewise.compare import NewOutput
from opacus_ext.grad_sample.samplewise.hooks import HookCall, deliver, of_all
from opacus_ext.grad_sample.samplewise.kinds import InputKind
from opacus_ext.grad_sample.samplewise.scan import ScanRun
from opacus_ext.grad_sample.samplewise.states import States
from opacus_ext.grad_sample.samplewise.walk import tensors_in
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.inputs import Inputs, Part

Rows = Optional[torch.Tensor]  # which samples of the batch; None: all

_APART = (
    "Where experts are spread over processes all samples must run at once, as all "
    "processes must send tokens at the same time. Train it without expert_parallel."
)


class Parts:
    """
    One forward pass of all samples.

    Args:
        engine: of the model
        inputs: its arguments
        known: of their kind
        raw: whether outputs are asked for as samples give them
    """

    def __init__(
        self, engine: "Engine", inputs: "Inputs", known: InputKind, raw: bool = False
    ):
        self.engine, self.inputs, self.known, self.raw = engine, inputs, known, raw
        self.todo: List[Tuple[Rows, "Part"]] = list(inputs.parts())
        self.whole = len(self.todo) == 1 and self.todo[0][0] is None
        if engine.expert_group is not None and len(self.todo) > 1:
            raise Refused(
                f"{engine.describe()}: samples of several shapes.", remedy=_APART
            )
        self.done: List[Tuple[Rows, Any]] = []  # what each part gave
        self.runs: List[Any] = []
        engine.made_of_data.sweep()
        self.chooser = (
            None if raw or engine.expert_group is not None else engine.chooser
        )
        self.scan = known.scan or (
            self.chooser is not None and self.chooser.begin(inputs)
        )
        # Of a batch that is known to run in parts more has to be put back.
        values = self.scan or known.split or not self.whole
        self.states = States(engine, values=values)

    def run(self) -> Any:
        """
        The output of the batch. If it is asked for raw, its tensors as samples give
        them, and whether each sample has its own: ``[B, *shape]``, else without the
        first dim.
        """
        while self.todo:
            self._run_part(*self.todo.pop(0))
        if self.raw:
            return self.done[0][1] if self.whole else self.inputs.join_raw(self.done)
        return self._output()

    def _run_part(self, rows: Rows, part: "Part") -> None:
        # Hooks that have been shown a batch can't be shown it in parts.
        at_once = rows is None and not self.known.split
        if self.done:
            self.states.back()
        try:
            found = self._run(part, self.scan, at_once)
        except BranchesDiffer as diverge:
            self._split(rows, part, diverge.groups)
            return
        except (Refused, ProcessFailure, NewOutput):
            self.states.back()
            raise
        except Exception as error:
            self.states.back()
            if self.scan and not self.known.scan:  # a choice, and others are left
                self.chooser.give_up()
                self.scan = False
                self.todo.insert(0, (rows, part))
                return
            if self.scan:
                raise
            if self.engine.expert_group is not None:
                raise Refused(
                    f"{self.engine.describe()}: vmap can't run it ({error}).",
                    remedy=_APART,
                ) from error
            try:
                found = self._run(part, True, False)
            except Exception as own:
                raise own from None
            if part.size:  # else vmap may know the ops for some samples
                self.known.scan = self.scan = True
                _warn(self.engine, error)
        if not self.whole:
            self.states.end()
        self.done.append((rows, found))

    def _run(self, part: "Part", scan: bool, at_once: bool) -> Any:
        """What the samples of a part give, by one of the two ways."""
        engine, known, size = self.engine, self.known, self.inputs.size
        # Of no samples vmap gives other shapes (torch's rules for convolutions, ...).
        scan = scan or not part.size and engine.expert_group is None
        if not scan and self.raw:
            return raw_at_once(engine, part, known, at_once)
        if not scan:
            run, output = run_at_once(engine, part, known, size, at_once)
        else:
            run = ScanRun(engine, part.size)
            engine.current = run
            try:
                output = run.forward(part, known, self.raw, size)
            finally:
                engine.current = None
            if self.raw:
                return output
        self.runs.append(run)
        return output

    def _split(self, rows: Rows, part: "Part", groups: torch.Tensor) -> None:
        """Samples that take one branch run together, apart from the others."""
        if self.engine.expert_group is not None:
            raise Refused(
                f"{self.engine.describe()}: its samples take different branches on "
                "data.",
                remedy=_APART,
            ) from None
        self.known.split, self.whole = True, False
        self.states.back()
        for value in range(int(groups.max()) + 1):
            some = (groups == value).nonzero()[:, 0]
            if len(some):
                new = some if rows is None else rows[some]
                self.todo.append((new, part.select(some)))

    def _output(self) -> Any:
        engine = self.engine
        for run, (rows, _) in zip(self.runs, self.done):
            run.batch, run.rows = self.inputs.size, rows
            run.fed_by = self.inputs.made_by
        engine.add_runs(self.runs)
        seen = [run.hook_calls for run in self.runs]
        if self.whole:
            output, calls = self.done[0][1], seen[0]
        else:
            output, calls = self._put_together(seen)
        self.runs = []
        for x in tensors_in((output, [call.values for call in calls])):
            engine.made_of_data.add(x)
        self.states.check()
        deliver(engine, calls)
        if self.chooser is not None:
            self.chooser.end()
        return output

    def _put_together(self, seen: List[List[HookCall]]) -> Tuple[Any, List[HookCall]]:
        """Of what parts of the batch gave, left and showed to hooks, that of all."""
        left, seen = self.states.common(), of_all(self.engine, seen)
        all_ = [(r, (x, y, z)) for (r, x), y, z in zip(self.done, seen, left)]
        self.inputs.join(all_, self.runs[0].joins, self.engine)
        self.states.put(left[0])
        return self.done[0][1], seen[0]


def _warn(engine: "Engine", error: Exception) -> None:
    """That vmap can't run a model, with the op and the line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if "/torch/" not in f.filename and "opacus_ext/grad_s" not in f.filename
    ]
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    reason = str(error).strip().split("\n")[0]
    warnings.warn(
        f"{engine.describe()} is run one sample after the other: vmap can't run "
        f"{where or 'an op'} ({type(error).__name__}: {reason}). That is exact, and "
        "slower where samples are small. Replace that op by one that vmap knows, "
        "or declare its function or module with opacus_ext.register_native if it "
        "treats samples independently.",
        stacklevel=7,
    )
