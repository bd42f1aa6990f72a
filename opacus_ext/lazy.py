"""What is done once another package is imported, and not before."""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any, Callable, Optional


def when_imported(name: str, action: Callable[[], Any]) -> None:
    """
    Runs an action after a module is imported; at once if it has been.

    Args:
        name: of the module, with its packages
        action: called without arguments, once

    Example:
        >>> when_imported("sys", lambda: print("here"))
        here
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(name, action))


class _Watch(MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], Any]):
        self.name, self.action = name, action

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
            self.action()

        spec.loader.exec_module = run_and_act
        return spec
