"""How docstrings of the package are read for the site: an extension of griffe.

"Example:" is a section of examples, and ``:func:`name``` is code; of ``~a.b.name`` the
last part is shown, as Sphinx does.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example:$", re.M)
ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|data|exc):`(?:~[\w.]*\.)?")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = ROLE.sub("`", text)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self.on_object(obj=pkg)
