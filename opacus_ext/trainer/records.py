"""Trainer for models whose records are several sequences."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

from transformers import Trainer
from transformers.utils import find_labels

from opacus_ext.losses import PerRecord


class RecordTrainer(Trainer):
    """
    Trainer for a model that may be in a :class:`~opacus_ext.losses.PerRecord`: which
    columns of the data set it takes, and what is saved and loaded, is the model itself.
    """

    model: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if isinstance(self.model, PerRecord):
            self.model_accepts_loss_kwargs = False
            with self._inner_model():
                self._set_signature_columns_if_needed()
                if self.args.label_names is None:
                    self.label_names = find_labels(type(self.model))
                    self._signature_columns += self.label_names

    @contextmanager
    def _inner_model(self) -> Iterator[None]:
        """Within it ``self.model`` is the model in a PerRecord."""
        model = self.model
        try:
            if isinstance(model, PerRecord):
                self.model = model.model
            yield
        finally:
            self.model = model

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._inner_model():
            super()._save(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._inner_model():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._inner_model():
            super()._load_best_model()
