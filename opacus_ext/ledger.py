"""The steps that were taken, and what voids the guarantee, beside any accountant."""

from __future__ import annotations

import copy
import secrets
import weakref
from typing import Any, Dict, Iterable, List, Mapping, Tuple

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.refused import warn_once

#: Key of an entry of ``runs``: sentences on why the guarantee does not hold.
BROKEN = "broken"
#: Key of a checkpoint for what :meth:`Ledger.state_dict` returns.
LEDGER = "opacus_ext_ledger"

#: Noise multiplier, sampling rate and number of steps, as accountants have them.
History = List[Tuple[float, float, int]]


class _Made(List[weakref.ref]):
    """What an engine has made; a file of the engine has none of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Made, ()

    def __deepcopy__(self, memo: Any) -> _Made:
        return _Made(self)


class Ledger:
    """
    The steps of an engine, in this process and in a checkpoint that was loaded. It only
    grows.

    Attributes:
        history: as accountants have it
        others: the ledgers of engines that have trained the same parameters
        beside: sentences on what its statements do not cover
        runs: the settings of the engine's runs (:func:`opacus_ext.runs.runs_of`)
        unrecorded: True if it has steps of a checkpoint that does not say how batches
            were drawn and gradients clipped
        goes_on: True if a checkpoint was loaded, from which other runs may go on, too
        repeats: True if a run that goes on is to draw what the run before would have
            drawn. The caller is then responsible for its noise
    """

    unrecorded = goes_on = repeats = False

    def __init__(self) -> None:
        self.history: History = []
        self.others: List[Ledger] = []
        self.beside: List[str] = []
        self.runs: List[Dict[str, Any]] = []
        self._made = _Made()  # optimizers, and samplers of loaders

    def made(self, accountant: Any, *parts: Any) -> None:
        """
        Adds what draws random numbers: an optimizer, and the sampler of a loader. If
        the accountant has the steps of an earlier run, none of its numbers come back.
        It may have releases as well, which are not on records that were drawn.
        """
        self._made += [weakref.ref(x) for x in parts if draws_numbers(x)]
        earlier = difference(accountant.history, self.history)
        self.history += earlier
        # Rounds of noise that is not banded read as releases.
        correlated = any(getattr(x, "correlated", None) is not None for x in parts)
        drawn = any(is_drawn(noise, rate) for noise, rate, _ in earlier)
        if drawn or correlated and earlier:
            self.draw_afresh()
        elif self.goes_on:
            draw_afresh(parts)

    def go_back(self, *others: Any) -> None:
        """
        Called before a checkpoint is loaded, with optimizers that the engine may not
        have made: correlated noise of theirs goes back with the accountant.
        """
        for part in (*others, *(made() for made in self._made)):
            noise = getattr(part, "correlated", None)
            if noise is not None:
                noise.go_back()

    def go_on(self, history: Iterable[Any]) -> None:
        """
        Called when a checkpoint was loaded: steps are those of ``history``, and all
        later random numbers are new, unless it ``repeats``.
        """
        self.history = [(*step,) for step in history]  # type: ignore[misc]
        for part in self._made:
            begun = getattr(part(), "begun_epochs", None)
            if begun is not None:
                begun.forget()
        self.draw_afresh()

    def draw_afresh(self) -> None:
        """
        Gives all that the engine has made, and makes later, random numbers that no run
        has had, unless it ``repeats``.
        """
        self.goes_on = not self.repeats
        if self.goes_on:
            draw_afresh(part() for part in self._made)

    def state_dict(self, history: Iterable[Any]) -> Dict[str, Any]:
        """Returns what a checkpoint holds beside an accountant with this history."""
        return {
            "others": self.missing(history, others=True),
            "beside": [*self.beside],
            "runs": self.runs_of_others(),
            "unrecorded": self.unrecorded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds what a checkpoint holds."""
        self.unrecorded = self.unrecorded or state.get("unrecorded", False)
        if state.get("others"):
            other = Ledger()
            other.history = [(*step,) for step in state["others"]]
            other.runs = [*state.get("runs", ())]
            self.others.append(other)
        self.beside += [x for x in state.get("beside", ()) if x not in self.beside]

    def runs_of_others(self) -> List[Dict[str, Any]]:
        """Returns the settings of other engines' runs on the same parameters."""
        return [run for other in self.others if other.history for run in other.runs]

    def add(self, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Adds steps."""
        kind = noise_multiplier, sample_rate
        if self.history and self.history[-1][:2] == kind:
            self.history[-1] = (*kind, self.history[-1][2] + steps)
        else:
            self.history.append((*kind, steps))

    def missing(self, history: Iterable[Any], others: bool = False) -> History:
        """
        Returns the steps that an accountant's history does not have, of this ledger or,
        with ``others``, of those of the same parameters, too.
        """
        ledgers = (self, *self.others) if others else (self,)
        return difference([x for each in ledgers for x in each.history], history)


def is_drawn(noise_multiplier: float, sample_rate: float) -> bool:
    """
    Returns True for steps on records that were drawn at random: of a sampling rate, or
    of a :class:`~opacus_ext.accountants.mechanisms.Mechanism`.
    """
    return getattr(noise_multiplier, "is_drawn", sample_rate < 1)


def difference(history: Iterable[Any], known: Iterable[Any]) -> History:
    """Returns the steps of a history that are not in the other one."""
    left: Dict[Tuple[float, float], int] = {}
    for noise, rate, steps in history:
        left[noise, rate] = left.get((noise, rate), 0) + steps
    for noise, rate, steps in known:
        left[noise, rate] = left.get((noise, rate), 0) - steps
    return [(*kind, steps) for kind, steps in left.items() if steps > 0]


def draws_numbers(part: Any) -> bool:
    """Returns True for what :func:`draw_afresh` knows."""
    sampler = isinstance(part, UniformWithReplacementSampler)
    return sampler or hasattr(part, "mix_noise")


def draw_afresh(parts: Iterable[Any]) -> None:
    """Gives optimizers and samplers random numbers that no run has had."""
    for part in filter(draws_numbers, parts):
        if hasattr(part, "mix_noise"):
            part.mix_noise()
        elif part.generator is None or isinstance(part.generator, torch.Generator):
            part.generator = torch.Generator().manual_seed(secrets.randbits(63))
            part.allocation = None  # see data/draws.py


def with_steps(accountant: Any, steps: History) -> Any:
    """Returns a copy of an accountant with more steps; itself if there are none."""
    if not steps:
        return accountant
    copied = copy.copy(accountant)
    copied.history = [*accountant.history, *steps]
    return copied


_of_parameter = WeakIdKeyDictionary()  # the ledgers of engines that have trained it


def ledger_of(engine: Any) -> Ledger:
    """Returns the ledger of an engine."""
    return engine.__dict__.setdefault(LEDGER, Ledger())


def note_trained(engine: Any, params: Iterable[Tensor]) -> None:
    """Notes that an engine trains parameters."""
    own = ledger_of(engine)
    for p in params:
        known = _of_parameter.setdefault(p, [])
        if own not in known:
            for other in known:
                own.others += [other] * (other not in own.others)
                other.others += [own] * (own not in other.others)
            known.append(own)


def note_broken(optimizer: Any, key: str, reason: str) -> None:
    """Tells once why the guarantee of a run does not hold; its statements do, too."""
    run = getattr(optimizer, "run", None)
    if run is not None and reason not in run.setdefault(BROKEN, []):
        run[BROKEN].append(reason)
    warn_once(optimizer, key, reason)


def note_beside(optimizer: Any, key: str, reason: str) -> None:
    """Tells once what the guarantee of a run does not cover; its statements do, too."""
    ledger = getattr(optimizer, "ledger", None)
    if ledger is not None and reason not in ledger.beside:
        ledger.beside.append(reason)
    warn_once(optimizer, key, f"Not covered by the epsilon of this run: {reason}")
