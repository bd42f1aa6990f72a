"""
The command ``opacus-ext``, which pip installs by this file's function :func:`main`.

Importing opacus_ext imports torch and Opacus, which takes seconds. Therefore this
module stands beside the package, loads the parser by its path, and runs what needs no
torch without the packages' own imports.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def load_parser():
    """Returns the module of the command's arguments, without importing its package."""
    package = find_spec("opacus_ext")
    if package is None:
        sys.exit(f"opacus-ext: error: no opacus_ext is installed for {sys.executable}")
    folder = Path(list(package.submodule_search_locations)[0])
    path = folder / "planner" / "commands" / "options.py"
    spec = spec_from_file_location("_opacus_ext_parser", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_bare(*packages):
    """Imports packages as folders of modules, without what they import themselves."""
    for name in packages:
        sys.modules[name] = module_from_spec(find_spec(name))


def main():
    """Runs ``opacus-ext`` with the arguments of the process; returns its status."""
    parser = load_parser()
    return parser.until_nobody_reads(lambda: _run(parser))


def _run(parser):
    arguments = parser.parse()
    if not parser.needs_torch(arguments):
        subpackages = (f"opacus_ext.{x}" for x in ("accountants", "data", "planner"))
        import_bare("opacus_ext", *subpackages)
    from opacus_ext.planner.commands.main import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
