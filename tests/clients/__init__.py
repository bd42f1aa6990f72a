"""Programs written for Opacus alone, which train the same with the package imported.

``python -m tests.clients NAME [--with-opacus-ext] --out weights.pt`` runs one; the
test runs each twice, in two processes, and compares the weights. "make test-clients".
"""

from importlib import import_module

# Of each module, the programs; a program returns its weights before and after training.
PROGRAMS = {
    "loops": ("mnist", "char_lstm", "imdb", "dcgan", "ctgan"),
    "mostly": ("tabular", "sequential", "language_lstm", "language_llama"),
    "trainers": ("safe_synthesizer", "dptrainer", "dptrainer_ghost"),
    "flower": ("flower",),
}


def program(module, name):
    def run():
        return getattr(import_module(f"tests.clients.{module}"), name)()

    return run


PROGRAMS_BY_NAME = {
    name: program(module, name) for module, names in PROGRAMS.items() for name in names
}
