"""Time and memory of one step against the length of sequences and the vocabulary.

Run as ``python benchmarks/long.py``. A small Llama of transformers with random weights
is trained on next tokens: not privately (the model's own loss, and the same noise), in
"ghost", "ghost_bk" and "scan".

Every cell is a process of its own. It prints

- MiB: the peak above the process before the model was built, over all steps, the
  first, which looks at more, among them;
- ms: the fastest step after the second. With one thread on a CPU it is the process's
  CPU time, which other work on the machine disturbs less than the time on the wall;
- both as ratios to the non-private step, and how MiB grew
  over the row before: sequences twice as long should take twice the memory at most.

Options: ``--lengths``, ``--vocabularies``, ``--width``, ``--layers``, ``--batch``,
``--steps``, ``--device cuda``, ``--out FILE`` to write the tables to as well.
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import time
import warnings
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from opacus import PrivacyEngine
from step_time import GIVE_BACK, Step, noisy_sgd, peak_memory, synchronize
from torch.utils.data import DataLoader, TensorDataset

LR, SIGMA, MAX_GRAD_NORM = 1e-3, 1.0, 1.0
MODES = {"non-private": "", "ghost": "ghost", "ghost_bk": "ghost_bk", "scan": "scan"}


class Shape(NamedTuple):
    """Layers, width, vocabulary V, sequence length T and batch size B."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int


def build(mode: str, shape: Shape, device: str) -> Step:
    """A step of training, to be called again and again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from opacus_ext.losses import PerSample, model_losses

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.width // 64),
        max_position_embeddings=shape.length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train().to(device)
    ids = torch.randint(3, shape.vocabulary, (shape.batch, shape.length), device=device)
    batch = {"input_ids": ids, "labels": ids}
    if not mode:
        update = noisy_sgd(model, len(ids))

        def step() -> None:
            model(**batch).loss.backward()
            update()

        return step
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        criterion=PerSample(),
        data_loader=DataLoader(TensorDataset(ids), batch_size=len(ids)),
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )

    def private() -> None:
        criterion(model_losses(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return private


def measure(name: str, shape: Shape, device: str, steps: int) -> Dict[str, float]:
    """In a process of its own: MiB at the peak, and ms of the fastest step."""
    times: List[float] = []
    cpu = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if cpu else time.perf_counter

    def timed() -> Step:
        step = build(MODES[name], shape, device)

        def run() -> None:
            synchronize(device)
            start = clock()
            step()
            synchronize(device)
            times.append(clock() - start)

        return run

    tiny = Shape(1, 64, 50, 8, 2)
    first = functools.partial(build, MODES[name], tiny, device)
    peak = peak_memory(first, timed, device, steps)
    return {"mib": peak / 2**20, "ms": 1e3 * min(times[2:] or times)}


def in_child(name: str, shape: Shape, args: argparse.Namespace) -> Dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, "--device", args.device]
    command += ["--shape", json.dumps(shape), "--steps", str(args.steps)]
    env = dict(os.environ, **GIVE_BACK)
    child = subprocess.run(command, env=env, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{name} at {shape} failed:\n{child.stderr}")
    return json.loads(child.stdout.splitlines()[-1])


def table(title: str, shapes: List[Shape], args: argparse.Namespace) -> None:
    """One row a shape and mode."""
    say = functools.partial(_say, args.out)
    say(f"\n{title}\n")
    columns = ["layers, width, V, T, B", "step", "MiB", "ratio", "growth"]
    say("| " + " | ".join([*columns, "ms", "ratio"]) + " |")
    say("|" + " --- |" * (len(columns) + 2))
    before: Dict[str, float] = {}
    for shape in shapes:
        base: Dict[str, float] = {}
        for name in args.modes:
            found = in_child(name, shape, args)
            base = base or found
            growth = found["mib"] / before.get(name, math.nan)
            before[name] = found["mib"]
            cells = [", ".join(map(str, shape)), name, f"{found['mib']:.0f}"]
            cells += [f"{found['mib'] / base['mib']:.2f}"]
            cells += ["" if math.isnan(growth) else f"{growth:.2f}"]
            cells += [f"{found['ms']:.0f}", f"{found['ms'] / base['ms']:.2f}"]
            say("| " + " | ".join(cells) + " |")


def _say(path: Optional[str], line: str) -> None:
    print(line, flush=True)
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    several: Dict[str, Any] = dict(type=int, nargs="*")
    lengths, vocabularies = [1024, 2048, 4096, 8192], [10_000, 50_000, 200_000]
    parser.add_argument("--lengths", default=lengths, **several)
    parser.add_argument("--vocabularies", default=vocabularies, **several)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if args.measure:
        shape = Shape(*args.shape)
        print(json.dumps(measure(args.measure, shape, args.device, args.steps)))
        return
    if args.out:
        open(args.out, "w").close()
    small = args.layers, args.width
    _say(
        args.out,
        f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} "
        f"thread(s), tied embedding, {args.steps} steps",
    )
    rows = [Shape(*small, 1000, length, args.batch) for length in args.lengths]
    table("Length of the sequences", rows, args)
    rows = [Shape(*small, size, 256, args.batch) for size in args.vocabularies]
    table("Vocabulary", rows, args)


if __name__ == "__main__":
    main()
