"""A trained model with the names of its items."""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Sequence

import torch

from opacus_ext import checkpoints
from opacus_ext.models import leave_out
from opacus_ext.re_attention import track_errors
from opacus_ext.recommend.releasing import blank, build
from opacus_ext.refused import Refused

_SETTINGS = "model prior shares max_len width depth heads dropout top where cap"


def settings_of(args: argparse.Namespace, once: bool) -> Dict[str, Any]:
    """What builds a model again, and whether a user's own items come last."""
    settings = {name: getattr(args, name) for name in _SETTINGS.split()}
    return {**settings, "once": once}


class Recommender:
    """
    Recommends items, by their names, to whoever has a history.

    Its file has the weights, the names of all items and the privacy statement, and
    nothing else of the run: other than a checkpoint, it may be published. The names are
    taken as public.

    Args:
        model: has a method ``score``, see :class:`~opacus_ext.models.NextItemModel`
        items: the names of items 1, 2 and so on
        settings: of :func:`settings_of`
        statement: what may be said of its privacy

    Example:
        >>> recommender = Recommender.load("model.pt")  # doctest: +SKIP
        >>> recommender.recommend(["Alien", "Blade Runner"], count=2)  # doctest: +SKIP
        ['Aliens', 'The Terminator']
    """

    def __init__(
        self,
        model: Any,
        items: Sequence[str],
        settings: Dict[str, Any],
        statement: str,
    ):
        self.model, self.settings, self.statement = model.eval(), settings, statement
        self.items = list(items)
        self._ids = {name: i for i, name in enumerate(self.items, 1)}

    @torch.no_grad()
    def recommend(self, history: Sequence[str], count: int = 10) -> List[str]:
        """
        The most likely next items, the best first.

        Items that the model does not know are left out. For data in which nobody has an
        item twice (``settings["once"]``), those of the history are not recommended.

        Args:
            history: names of items, the latest last
            count: how many to recommend, at most

        Raises:
            Refused: if the model knows no item of the history
        """
        known = [self._ids[name] for name in history if name in self._ids]
        if not known:
            raise Refused(
                f"The model knows none of these items: {list(history)[:5]}.",
                parameter="history",
                remedy="recommender.items has the names of those that it knows.",
            )
        device = next(self.model.parameters()).device
        ids = torch.tensor([known], device=device)
        scores = self.model.score(ids[:, -self.settings["max_len"] :])
        if self.settings["once"]:
            scores = leave_out(scores, ids)
        best = scores[0, 1:].sort(descending=True, stable=True)
        chosen = best.indices[best.values > -torch.inf][:count]
        return [self.items[i] for i in chosen.tolist()]

    def save(self, path: Any) -> None:
        """Writes the file, in place of an older one."""
        content = {
            "recommender": self.settings,
            "items": self.items,
            "statement": self.statement,
            "weights": self.model.state_dict(),
        }
        checkpoints.write(path, content)

    @classmethod
    def load(cls, path: Any, device: str = "cpu") -> Recommender:
        """
        Reads a file of :meth:`save`. No code in it is run.

        Raises:
            OSError: if there is no such file
            Refused: for a file of another kind
        """
        content = checkpoints.read(path, map_location=device)
        if not isinstance(content, dict) or "recommender" not in content:
            raise Refused(
                f"{path} is no file of Recommender.save.",
                parameter="path",
                remedy="Write one with opacus-ext recommend --save; a checkpoint of "
                "--checkpoint is none.",
            )
        settings, state = content["recommender"], content["weights"]
        args, items = argparse.Namespace(**settings), content["items"]
        model = build(args, len(items), *blank(args, len(items), state))
        if settings["model"] == "dpformer":
            track_errors(model, where=settings["where"], cap=settings["cap"] or None)
        model.load_state_dict(state)
        return cls(model.to(device), items, settings, content["statement"])
