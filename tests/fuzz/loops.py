"""Random training loops; each step is compared with every sample alone.

Other events of a loop (evaluation, an abandoned batch, an exception, a second run, a
checkpoint) must not change the next clipped sum.
"""

import copy
import random
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Dict, List, Optional, Tuple
from unittest.mock import patch

import torch
from torch import nn

from opacus_ext import Refused
from opacus_ext.grad_sample.core import clip, gradients
from tests import events
from tests.common import (
    CLIPPINGS,
    Private,
    assert_same,
    clipped_sum,
    half_clipped,
    make_private,
    norms_of,
    oracle,
    trainable,
)
from tests.events import copied
from tests.fuzz.programs import Batch, Program, batch_of, batched, loss_of
from tests.zoo import EVERY_MODE

HUGE, TINY = 1e6, 1e-9  # norms beyond which no digits are left to compare


class Unfit(Exception):
    """A program that nobody would train."""


@dataclass
class Failure:
    """A case that fails: its seed, "wrong", "crash" or "refused", it, the message."""

    seed: int
    kind: str
    what: str
    error: str


class Case:
    """A program, a mode and a loop, all made from one number."""

    def __init__(self, seed: int):
        self.seed, self.rng = seed, random.Random(seed)
        torch.manual_seed(seed)
        rng = self.rng
        self.clean = Program(rng)
        # Batches and weights of sums that are yet to be looked at.
        self.asked: List[Tuple[Batch, Dict[str, Any]]] = []
        self.size = rng.randint(1, 5)  # expected samples of a batch
        self.mode, self.wrap = rng.choice(EVERY_MODE), rng.random() < 0.7
        self.clipping = rng.choice(CLIPPINGS)
        self.shared = "table" in self.clean.inputs
        self.compiled = rng.random() < 0.04
        self.events = ["step"] + rng.choices(
            list(EVENTS), [weight for _, weight in EVENTS.values()], k=rng.randint(2, 6)
        )
        # Gradients of this many entries are handled together: few models exceed it.
        self.small = rng.choice((0, gradients.SMALL))
        self.bound = self._bound()

    def describe(self) -> str:
        return (
            f"{self.clean.describe()}; mode {self.mode}, wrap {self.wrap}, "
            f"{self.clipping}, expected batch {self.size}, compiled {self.compiled}, "
            f"small {self.small}, loop {self.events}"
        )

    @property
    def refusable(self) -> bool:
        """True if it may be refused, for state."""
        return self.clean.refusable

    @property
    def uses_nothing(self) -> bool:
        """True if no sample of the last batch has a gradient: torch refuses that."""
        grads = self.grads(*self.asked[-1]) if self.asked else {}
        return not any(bool((g != 0).any()) for g in grads.values())

    def batch(self, size: Optional[int] = None) -> Batch:
        size = self.rng.randint(1, 5) if size is None else size
        batch = batch_of(self.clean, self.rng, size)
        return copied(batch) if self.compiled else batch

    def grads(
        self, batch: Batch, weights: Optional[Dict[str, Any]] = None, scale: float = 1.0
    ) -> Dict[str, Any]:
        """The oracle's gradients, of losses times ``scale``, divided by it."""

        def scaled(*args: Any) -> torch.Tensor:
            return loss_of(*args) * scale

        fresh, batch = copy.deepcopy(self.clean), copied(batch)
        if weights is not None:
            fresh.load_state_dict(weights)
        try:
            grads = oracle(fresh, batch, scaled, batched(self.clean))
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {error}") from error
        norms = norms_of(grads)
        if not bool((norms < HUGE).all()):
            raise Unfit("large or not finite")
        found = {n: g if g.is_complex() else g.double() for n, g in grads.items()}
        return {n: g / scale for n, g in found.items()}

    def _bound(self) -> Any:
        grads = self.grads(self.batch(max(self.size, 2)))
        if not grads or not any(bool((g != 0).any()) for g in grads.values()):
            raise Unfit("nothing is trained")
        bounds = [half_clipped({n: g}) for n, g in grads.items()]
        if min(bounds) < TINY:
            raise Unfit("gradients that are zero but for rounding")
        return bounds if self.clipping == "per_layer" else half_clipped(grads)

    def _private(self, model: nn.Module) -> Private:
        shared = ["table"] * self.shared + ["note"] * ("note" in self.clean.inputs)
        given = dict(shared=shared) if shared else {}
        private = make_private(
            model,
            self.mode,
            self.wrap,
            batch_size=self.size,
            max_grad_norm=self.bound,
            clipping=self.clipping,
            lr=0.05,
            **given,
        )
        self.model = model
        if self.compiled:
            private.module = torch.compile(private.module, backend="eager")
        return private

    def run(self) -> None:
        self.private = self._private(copy.deepcopy(self.clean))
        small = dict(SMALL=self.small)
        with patch.multiple(gradients, **small), patch.multiple(clip, **small):
            for number, name in enumerate(self.events):
                try:
                    EVENTS[name][0](self)
                except AssertionError as error:
                    raise AssertionError(f"event {number}, {name}: {error}") from error
                except RuntimeError as error:
                    own = self.mode in ("hooks", "functorch")  # as plain torch says
                    if own and "does not require grad" in str(error):
                        raise Unfit("no sample uses a parameter") from error
                    raise

    def look(self, expected: Dict[str, torch.Tensor]) -> None:
        """
        Raises:
            AssertionError: if the gradients are not those that are expected
            Unfit: if they differ by no more than rounding: as much as those of a third
                of the loss, times three
        """
        asked, self.asked = self.asked, []
        found = {n: p.grad * self.size for n, p in trainable(self.model).items()}
        try:
            assert_same(found, expected, self.clean.tolerance)
        except AssertionError:
            moved = [self.clipped(*each, scale=1 / 3) for each in asked]
            for n, e in expected.items():
                rounding = (sum(m[n] for m in moved) - e).abs().max()
                if not (found[n] - e).abs().max() <= 30 * rounding:
                    raise
            raise Unfit("gradients of few digits") from None

    def clipped(self, *args: Any, **kwargs: Any) -> Dict[str, torch.Tensor]:
        return clipped_sum(self.grads(*args, **kwargs), self.clipping, self.bound)

    def expect(self, batch: Batch) -> Dict[str, torch.Tensor]:
        """The clipped sum with the current weights."""
        weights = copy.deepcopy(self.model.state_dict())
        self.asked.append((batch, weights))
        return self.clipped(batch, weights)


# -- events of a loop ------------------------------------------------------------------


def step(case: Case, size: Optional[int] = None) -> None:
    batch = case.batch(size)
    expected = case.expect(batch)
    case.private.step(batch, loss_of)
    case.look(expected)


def parts(case: Case) -> None:
    """A logical batch in several physical ones."""
    batches = [case.batch() for _ in range(case.rng.randint(2, 3))]
    every = [case.expect(b) for b in batches]
    events.physical(case.private, batches, lambda b: case.private.step(b, loss_of))
    case.look({n: sum(e[n] for e in every) for n in every[0]})


def silent(name: str, case: Case) -> None:
    """What the next step may show nothing of."""
    if name != "passed_again" or not case.clean.overwrites:  # the batch is another then
        batch = case.batch(case.rng.randint(2, 5))
        events.SILENT[name](case.private, batch, loss_of)


def breaks_inside(case: Case) -> None:
    """User code raises in the model's forward."""

    def stop(*args):
        raise events.Stop

    handle = list(case.model.steps.values())[-1].register_forward_hook(stop)
    events.broken(case.private, case.batch(), loss_of)
    handle.remove()


def second_run(case: Case) -> None:
    """Another private model is trained in between."""
    first, model = case.private, case.model
    case.private = case._private(copy.deepcopy(case.clean))
    step(case)
    case.private, case.model = first, model


def between(case: Case) -> None:
    """The step of another model between a forward and its backward pass."""
    batch = case.batch()
    expected = case.expect(batch)
    first, model = case.private, case.model
    first.optimizer.zero_grad()

    def interrupted(module, given):
        found = loss_of(module, given)
        second_run(case)
        return found

    first.backward(batch, interrupted)
    first.optimizer.step()
    case.private, case.model = first, model
    case.look(expected)


def resumes(case: Case) -> None:
    """New objects resume from a checkpoint, maybe without the optimizer's state."""
    old, model = case.private, copy.deepcopy(case.clean)
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(1)
    case.private = events.resumed(old, case._private(model), case.rng.random() < 0.7)


def shrunk(state: Dict[str, Any]) -> Dict[str, Any]:
    """Weights from elsewhere."""
    return {n: 0.9 * x for n, x in state.items()}


EVENTS: Dict[str, Any] = {
    "step": (step, 8),
    "empty": (lambda case: step(case, 0), 1),
    "of one": (lambda case: step(case, 1), 1),
    "parts": (parts, 2),
    # A loader that has drawn would refuse larger batches.
    **{name: (partial(silent, name), 1) for name in events.SILENT if name != "left"},
    "breaks inside": (breaks_inside, 1),
    "second run": (second_run, 1),
    "between": (between, 1),
    "resumes": (resumes, 1),
    "keeps gradients": (lambda c: c.private.optimizer.zero_grad(set_to_none=False), 1),
    "loads": (lambda c: c.model.load_state_dict(shrunk(c.model.state_dict())), 1),
}


def attempt(seed: int, compiles: bool = True) -> Any:
    """A :class:`Failure`, None, or "unfit"; ``compiles=False`` is quicker."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        what = ""
        try:
            case = Case(seed)
            case.compiled &= compiles
            what = case.describe()
            case.run()
        except Unfit:
            return "unfit"
        except AssertionError as error:
            return Failure(seed, "wrong", what, str(error))
        except Refused as error:
            if "The loss of no sample" in str(error) and case.uses_nothing:
                return "unfit"
            if case.refusable:
                return None
            return Failure(seed, "refused", what, str(error)[:600])
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:600]
            return Failure(seed, "crash", what, text)
    return None
