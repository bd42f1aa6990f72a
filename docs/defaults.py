"""Writes docs/reference/defaults.md from the signatures of the package.

``python docs/defaults.py`` prints it; tests/stable_test.py holds the page to it.
"""

from __future__ import annotations

import inspect
from typing import Callable, Dict, Iterator

import opacus

import opacus_ext
from opacus_ext.lightning import PrivacyCallback
from opacus_ext.planner.commands.options import build_parser
from opacus_ext.trainer import PrivacyArguments

INTRO = """# Defaults

What holds where you say nothing. Each column is a way to train privately, or to plan
it; a cell has the argument of that setting there, with its default. An empty cell
means that there is no such argument. `opacus.PrivacyEngine` is Opacus's own class,
with the defaults that Opacus gives it; it takes the arguments of
`opacus_ext.PrivacyEngine`, too. The page is made from the signatures: `python
docs/defaults.py`.
"""
NOTES = """
- **A budget**: `PrivacyArguments` and `PrivacyCallback` take one of `target_epsilon`
  and `noise_multiplier`. How long a run is, `num_train_epochs` or `max_steps` of
  `TrainingArguments` say, and `max_epochs` or `max_steps` of Lightning's `Trainer`.
- **delta** has no default where a model is trained, since one made from the number of
  records would tell of it: choose it well below one over that number. Without it
  `PrivateTrainer` ends in an error that offers one. `PrivateTrainer.get_epsilon()` and
  `PrivacyCallback.get_epsilon()` take the target, `engine.privacy_statement()` that
  of `make_private_with_epsilon`.
- **The accountant** "prv_bounds" gives an upper bound. "prv" is Opacus's name, history
  and checkpoints with the same upper bound
  ([accountants](../explanation/accountants.md)).
- **The bound** of `clipped_grads` is in `clipping`: `find_clipping("flat").at(1.0)`.
- **The mode** "hooks" keeps a gradient of each sample, as in Opacus; "auto" chooses
  what fits the model ([modes](modes.md)).
- **Batches** are Poisson samples everywhere, unless `sampling` says otherwise
  ([drawing batches](../how-to/sampling.md)), or `poisson_sampling=False` is given.
- **The seed**: None is a secret one. With `secure_mode=True` there is none ([secure
  mode](../how-to/secure-mode.md)).
- **Memory**: None is the whole batch at once. For `PrivateTrainer` it is
  `per_device_train_batch_size` of `TrainingArguments`, in a loop of `make_private`
  that of `BatchMemoryManager`.
"""

#: A setting, and its names.
SETTINGS = {
    "epsilon of the run": "target_epsilon epsilon",
    "delta": "target_delta delta",
    "noise multiplier": "noise_multiplier",
    "length of the run": "epochs steps",
    "accountant": "accountant",
    "clipping": "clipping",
    "bound": "max_grad_norm per_sample_max_grad_norm",
    "mode": "grad_sample_mode",
    "loss of a batch": "loss_reduction",
    "gradients that are not finite": "on_nonfinite",
    "batches": "poisson_sampling sampling amplification",
    "correlated noise": "noise",
    "secure random numbers": "secure_mode",
    "seed": "noise_generator privacy_seed seed",
    "noise of a run that goes on": "repeat_noise",
    "memory": "max_physical_batch_size physical_batch_size microbatch",
    "inputs that all samples share": "shared",
    "logs": "log_loss log_draws monitor",
}
REQUIRED = inspect.Parameter.empty
#: What PrivacyCallback passes on to make_private.
PASSED_ON = "clipping", "loss_reduction", "on_nonfinite", "shared"
Defaults = Dict[str, str]  # by argument, as they are shown


def of_functions(*functions: Callable) -> Defaults:
    """Returns the parameters of functions, with their defaults."""
    found: Defaults = {}
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            default = parameter.default
            shown = repr(default).replace("'", '"')
            is_required = default is REQUIRED
            found[name] = f"`{name}`, required" if is_required else f"`{name}={shown}`"
    return found


def of_command(name: str) -> Defaults:
    """Returns the options of a command, with their defaults."""
    (commands,) = build_parser()._subparsers._group_actions
    found: Defaults = {}
    for action in commands.choices[name]._actions:
        option = action.option_strings[0]
        if action.required:
            found[action.dest] = f"`{option}`, required"
        elif action.default is None:
            found[action.dest] = f"`{option}`, none"
        else:
            found[action.dest] = f"`{option} {action.default}`"
    return found


def front_ends() -> Dict[str, Defaults]:
    """Returns the columns of the page."""
    ours, stock = opacus_ext.PrivacyEngine, opacus.PrivacyEngine
    private = of_functions(ours.__init__, ours.make_private)
    with_epsilon = {**private, **of_functions(ours.make_private_with_epsilon)}
    del with_epsilon["noise_multiplier"]  # which it chooses
    planned = of_command("plan")
    del planned["noise"]  # which asks for what noise to take
    callback = {name: private[name] for name in PASSED_ON}
    callback.update(of_functions(PrivacyCallback))
    return {
        "`opacus.PrivacyEngine`": of_functions(stock.__init__, stock.make_private),
        "`opacus_ext.PrivacyEngine`": private,
        "its `make_private_with_epsilon`": with_epsilon,
        "`PrivacyArguments`": of_functions(PrivacyArguments),
        "`PrivacyCallback`": callback,
        "`clipped_grads`": of_functions(opacus_ext.clipped_grads),
        "`opacus-ext plan`": planned,
        "`opacus-ext calibrate`": of_command("calibrate"),
    }


def cell(defaults: Defaults, names: str) -> str:
    """Returns the arguments of a setting and their defaults."""
    return "<br>".join(defaults[name] for name in names.split() if name in defaults)


def rows() -> Iterator[str]:
    """Yields the lines of the page."""
    columns = front_ends()
    yield INTRO
    yield f"| | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for setting, names in SETTINGS.items():
        cells = [cell(defaults, names) for defaults in columns.values()]
        yield f"| {setting} | {' | '.join(cells)} |"
    yield NOTES.rstrip("\n")


def page() -> str:
    """Returns the page."""
    return "\n".join(rows()) + "\n"


if __name__ == "__main__":
    print(page(), end="")
