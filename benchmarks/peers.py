"""Steps of other libraries for DP-SGD, as rows of ``step_time.py --peers``.

Each takes the weights and the data of ``step_time.py``'s model and does the same work:
forward, backward, clipping by ``MAX_GRAD_NORM``, noise and SGD, on one core with one
thread, by process time. Before a peer is timed, a step of it free of noise is compared
with clipped per-sample gradients of plain autograd; one that deviates is refused.
``python benchmarks/peers.py`` prints the deviations.

- fastDP: book-keeping in its hybrid mode MixOpt; "origin" is its ghost differentiation,
  which leaves out most of the gradients that are not private.
- private-transformers: with gradients of each sample, and with ghost clipping. The
  process has one mode of its hooks, so each step sets its own.
- JAX-Privacy: the same transformer in ``jax.numpy``, jitted, with microbatches of one
  (a loop over the samples) and with vmap; "JAX non-private" is what to compare them
  with, as the time of JAX's own kernels is in it. All three draw their noise by
  ``jax_privacy.noise_addition``. To compile one takes up to half a minute.

What is not installed has a row that says so. JAX-Privacy is on PyPI. Install it into an
environment of its own, with torch constrained::

    pip install -c constraints.txt . jax-privacy==2.0.0

This takes jax 0.10.2. On a CPU, its XLA needs seconds to scale and add some stacks of
gradients (12 s for 8 of [8192, 256], as vmap has them with tied weights; 10 ms with jax
and jaxlib 0.9.0, whose other steps are slower at long T), so say the version beside a
ratio.

fastDP (awslabs/fast-differential-privacy, version 2.0.0) and private-transformers
(lxuechen/private-transformers, version 0.2.3) are not on PyPI: put a checkout of each
on PYTHONPATH. The second imports two helpers from a package that requires much else;
they work without it::

    pip install --no-deps ml-swissknife
    pip install requests six opt_einsum

Opake is on PyPI, for Python 3.11 and torch 2.9 or later::

    pip install -c constraints.txt . opake==0.16.0
"""

import functools
import importlib
import io
import math
import os
import warnings
from contextlib import redirect_stdout
from statistics import median
from types import ModuleType
from typing import Any, Callable, Dict, List, Tuple
from unittest.mock import patch

import _baselines
import step_time
import torch
from fast_clipping import deviation, print_cells
from step_time import (
    LanguageModel,
    Mode,
    Row,
    Shape,
    Step,
    TokenLoss,
    print_header,
    print_rows,
    refusal,
)
from torch import nn
from torch.func import functional_call
from torch.nn.utils import get_total_norm
from torch.utils.data import TensorDataset

Builder = Callable[[nn.Module, TensorDataset, str], Step]

CHECKED = Shape(1, 32, 64, 8, 4)
LIMIT, FLOOR = 1e-3, 1e-3  # of a deviation in float32; the bias of a key has none
UNCLIPPED = 1e9
SAMPLES = 50_000  # in the data set; for the engines' accountants, unused here


class Deviates(Exception):
    """A peer's step is not that of clipped per-sample gradients."""


def require(name: str) -> ModuleType:
    """Import a peer; the error's first line is its cell in the table."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"not installed ({error})") from error


def use_one_core() -> None:
    """One core and one thread for all. Call it before JAX is imported."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Using a non-full backward hook")


# -- fastDP ------------------------------------------------------------------------


def fast_dp(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """Book-keeping; ``mode`` is "" or "origin"."""
    engine = require("fastDP").PrivacyEngine
    ids, targets = data.tensors
    criterion = TokenLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=step_time.LR)
    with redirect_stdout(io.StringIO()):
        engine(
            model,
            batch_size=len(ids),
            sample_size=SAMPLES,
            epochs=1,
            noise_multiplier=step_time.SIGMA,
            max_grad_norm=step_time.MAX_GRAD_NORM,
            clipping_fn="Abadi",
            clipping_mode="MixOpt",
            origin_params=["tokens", "positions"] if mode == "origin" else None,
        ).attach(optimizer)

    def step() -> None:
        criterion(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- private-transformers ----------------------------------------------------------


def private_transformers(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """Clipping with stored gradients ("default") or without ("ghost")."""
    engine = require("private_transformers").PrivacyEngine
    hooks = importlib.import_module("private_transformers.autograd_grad_sample")
    hooks_mode = "ghost_norm" if mode == "ghost" else "default"
    ids, targets = data.tensors
    criterion = TokenLoss("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=step_time.LR)
    engine(
        model,
        batch_size=len(ids),
        sample_size=SAMPLES,
        epochs=1,
        noise_multiplier=step_time.SIGMA,
        max_grad_norm=step_time.MAX_GRAD_NORM,
        clipping_mode=mode,
        record_snr=False,
        skip_checks=True,  # of the model's class
    ).attach(optimizer)

    def step() -> None:
        hooks.set_hooks_mode(hooks_mode)
        optimizer.step(loss=criterion(model(ids), targets))
        optimizer.zero_grad()

    return step


# -- Opake -------------------------------------------------------------------------


def opake(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """Gradients of each sample by vmap; ``mode`` is "vmap" or "1" (a microbatch)."""
    clipping = require("opake.dpsgd.clipping")
    noise = importlib.import_module("opake.dpsgd.noise")
    random = importlib.import_module("opake.random")
    ids, targets = data.tensors
    criterion = TokenLoss()
    params = {name: p.detach() for name, p in model.named_parameters()}
    rate = step_time.LR

    def loss(params: Dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(functional_call(model, params, (x[None],)), y[None])

    gradient, clip_state = clipping.clipped_grad(
        loss,
        clipping_norm=step_time.MAX_GRAD_NORM,
        batch_argnums=(1, 2),
        normalize_by=len(ids),
        microbatch_size=None if mode == "vmap" else int(mode),
    )
    add_noise, noise_state = noise.gaussian_noise(
        noise_multiplier=step_time.SIGMA, key=random.key(0)
    )

    def step() -> None:
        nonlocal clip_state, noise_state
        grads, clip_state = gradient(params, ids, targets, state=clip_state)
        noisy, noise_state = add_noise(grads, noise_state)
        for name, p in params.items():  # in place: the model's own memory
            p.sub_(noisy.pytree[name], alpha=rate)

    return step


# -- JAX-Privacy -------------------------------------------------------------------


def jax_logits(params: Dict[str, Any], ids: Any, layers: int, heads: int) -> Any:
    """step_time's LanguageModel in JAX, with its parameters by their names."""
    import jax
    import jax.numpy as jnp

    def linear(x: Any, name: str) -> Any:
        y = x @ params[f"{name}.weight"].T
        return y + params[f"{name}.bias"] if f"{name}.bias" in params else y

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    batch, length = ids.shape
    x = params["tokens.weight"][ids] + params["positions.weight"][:length]
    for block in (f"blocks.{i}" for i in range(layers)):
        y = norm(x, f"{block}.norm1")
        q, k, v = (
            linear(y, f"{block}.{name}").reshape(batch, length, heads, -1)
            for name in ("query", "key", "value")
        )
        x = x + linear(attention(q, k, v).reshape(x.shape), f"{block}.out")
        y = linear(norm(x, f"{block}.norm2"), f"{block}.up")
        x = x + linear(jax.nn.gelu(y, approximate=False), f"{block}.down")
    head = "head" if "head.weight" in params else "tokens"
    return linear(norm(x, "norm"), head)


class JaxStep:
    """A jitted step; ``mode`` is "non-private", "1" (a microbatch) or "vmap"."""

    def __init__(self, model: nn.Module, data: TensorDataset, mode: str):
        jax_privacy, jax = require("jax_privacy"), require("jax")
        optax = require("optax")
        rate, layers = step_time.LR, len(model.blocks)
        heads, batch = model.blocks[0].heads, len(data)
        self.model, self.wait = model, jax.block_until_ready
        self.data = [jax.numpy.array(tensor.numpy()) for tensor in data.tensors]
        named = model.named_parameters()
        self.params = {n: jax.numpy.array(p.detach().numpy()) for n, p in named}

        def loss(params: Dict[str, Any], ids: Any, targets: Any) -> Any:
            logits = jax_logits(params, ids, layers, heads)
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            return cross_entropy(logits, targets).mean()

        if mode == "non-private":
            gradient, sensitivity = jax.grad(loss), step_time.MAX_GRAD_NORM / batch
        else:
            gradient = jax_privacy.clipped_grad(
                loss,
                batch_argnums=(1, 2),
                l2_clip_norm=step_time.MAX_GRAD_NORM,
                normalize_by=batch,
                microbatch_size=None if mode == "vmap" else int(mode),
            )
            sensitivity = gradient.sensitivity()
        noise = jax_privacy.noise_addition.gaussian_privatizer(
            stddev=step_time.SIGMA * sensitivity, prng_key=0
        )
        self.noise = noise.init(self.params)

        def update(params: Dict[str, Any], state: Any, ids: Any, targets: Any) -> Any:
            grads, state = noise.update(gradient(params, ids, targets), state)
            return jax.tree.map(lambda p, g: p - rate * g, params, grads), state

        self.update = jax.jit(update, donate_argnums=(0, 1))

    def __call__(self) -> None:
        self.params, self.noise = self.update(self.params, self.noise, *self.data)
        self.wait(self.params)

    def write_back(self) -> None:
        """Copy the parameters to the torch model."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.from_dlpack(self.params[name]))


# -- is a step the right one? ------------------------------------------------------


def step_of(build: Builder, mode: str, tied: bool) -> Dict[str, torch.Tensor]:
    """What one step subtracts from each parameter of a small model."""
    torch.manual_seed(0)
    model = LanguageModel(CHECKED, tied)
    data = torch.randint(CHECKED.vocabulary, (2, CHECKED.batch, CHECKED.length))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    step = build(model, TensorDataset(*data), mode)
    step()
    if isinstance(step, JaxStep):
        step.write_back()
    return {name: before[name] - p for name, p in model.state_dict().items()}


@functools.lru_cache(maxsize=None)
def check(build: Builder, mode: str, tied: bool) -> float:
    """
    The deviation of a step from the sum of clipped per-sample gradients, about half of
    them clipped; a step that is not private clips none.
    """
    bounds: List[float] = []

    def norms(model: nn.Module, data: TensorDataset, mode: str) -> Step:
        gradients = _baselines.nx_bp_gradients(model, data)
        bounds.extend(float(get_total_norm(g)) for g in gradients)
        return lambda: None

    step_of(norms, "", tied)
    bound = UNCLIPPED if mode == "non-private" else median(bounds)
    with patch.multiple(step_time, SIGMA=0.0, LR=2.0**14, MAX_GRAD_NORM=bound):
        true = step_of(_baselines.nx_bp, "", tied)
        return deviation(step_of(build, mode, tied), true, floor=FLOOR)


def checked(build: Builder) -> Builder:
    """A builder that first compares its step on a small model."""

    def builder(model: nn.Module, data: TensorDataset, mode: str) -> Step:
        found = check(build, mode, model.head.weight is model.tokens.weight)
        if not found <= LIMIT:
            raise Deviates(f"by {found:.0e} from clipped per-sample gradients")
        return build(model, data, mode)

    return builder


# -- the rows ----------------------------------------------------------------------

JAX = "JAX non-private"
PEERS: Dict[str, Tuple[Builder, str]] = {
    "fastDP": (fast_dp, ""),
    "fastDP, origin": (fast_dp, "origin"),
    "private-transformers": (private_transformers, "default"),
    "private-transformers, ghost": (private_transformers, "ghost"),
    "Opake": (opake, "vmap"),
    "Opake, one by one": (opake, "1"),
    JAX: (JaxStep, "non-private"),
    "JAX-Privacy, one by one": (JaxStep, "1"),
    "JAX-Privacy, vmap": (JaxStep, "vmap"),
}
MODES = {name: Mode(checked(build), mode) for name, (build, mode) in PEERS.items()}


def print_own_ratios(rows: List[Row]) -> None:
    """The rows of JAX-Privacy again, as ratios to JAX's own non-private step."""
    if all("refused" in row for row in rows if row["mode"] == JAX):
        return
    columns = ["own_ratio", "own_ratio_median"]
    title = f"## Ratio to {JAX}, jax {require('jax').__version__}"
    print_header(title, ["layers,d,V,T,B", "tied", "mode", *columns])
    base: Row = {}
    for row in rows:
        if row["mode"] == JAX:
            base = row
        elif row["mode"].startswith("JAX") and "refused" not in {**base, **row}:
            row["own_ratio"] = row["min_ms"] / base["min_ms"]
            row["own_ratio_median"] = row["median_ms"] / base["median_ms"]
            print_rows([row], columns)


def main() -> None:
    use_one_core()
    columns = ["tied", "mode", "deviation"]
    print_header("## Deviation from clipped per-sample gradients", columns)
    for tied in (False, True):
        for name, (build, mode) in PEERS.items():
            try:
                cell = f"{check(build, mode, tied):.0e}"
            except Exception as error:
                cell = refusal(name, error)
            print_cells(["yes" if tied else "no", name, cell])


if __name__ == "__main__":
    main()
