"""What is done once another package is imported, and not before.

Users import opacus_ext before transformers as often as after it, and
``set_attn_implementation("re_attention")`` has to work in both orders without
opacus_ext importing transformers itself. So a finder at the head of ``sys.meta_path``
waits for the import; it takes itself away when it has seen it.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any, Callable, Optional


def when_imported(name: str, action: Callable[[], Any]) -> Callable[[], None]:
    """
    Runs an action after a module is imported; at once if it has been.

    Args:
        name: of the module, with its packages
        action: called without arguments, at most once; it may return a function that
            undoes what it did

    Returns:
        A function that ends the wait for the import, or undoes the action if it has
        been run.

    Example:
        >>> undo = when_imported("sys", lambda: print("here"))
        here
    """
    watch = _Watch(name, action)
    if name in sys.modules:
        watch.act()
    else:
        sys.meta_path.insert(0, watch)
    return watch.undo


class _Watch(MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], Any]):
        self.name = name
        self._action: Optional[Callable[[], Any]] = action
        self._undo: Any = None

    def act(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            self._undo = action()

    def undo(self) -> None:
        """Ends the wait, or undoes the action."""
        self._action = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Optional[Any]:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: Any) -> None:
            run(module)
            self.act()

        spec.loader.exec_module = run_and_act
        return spec
