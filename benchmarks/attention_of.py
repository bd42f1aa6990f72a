"""Is attention distracted by rare items? A look into a checkpoint of a training run.

    python benchmarks/attention_of.py run.pt --data ml-1m.txt

The checkpoint is one of ``opacus-ext recommend``. Prints, a layer each, the standard
deviation of the attention logits that a query sees and the share of attention that goes
to the rarer half of the items, beside what it would be if every visible item got the
same; and the size of the embedding's rows, of rare items and of popular ones. Rows that
were only moved by noise all have the same.
"""

import argparse
import sys
from pathlib import Path
from typing import List, Optional

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.distraction import attention_mass  # noqa: E402
from opacus_ext.recommend import read_sequences  # noqa: E402
from opacus_ext.recommend import releasing  # noqa: E402


def logits_std(attention: nn.Module, qkv: Tensor, real: Tensor) -> float:
    """Within the keys that a query sees, over all queries."""
    q, k, _ = (
        z.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for z in qkv.chunk(3, dim=-1)
    )
    logits = q @ k.mT / q.size(-1) ** 0.5
    seen = real[:, None, None, :] & real[:, None, :, None]
    seen = (seen & seen.new_ones(seen.shape[-2:]).tril()).expand_as(logits)
    number = seen.sum(-1, keepdim=True).clamp(min=1)
    mean = (logits * seen).sum(-1, keepdim=True) / number
    return float((logits - mean)[seen].std())


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--data", required=True, help="what it was trained on")
    parser.add_argument("--users", type=int, default=400, help="to look at")
    args = parser.parse_args(argv)

    saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    config = argparse.Namespace(**saved["config"])
    data = read_sequences(args.data)
    state = saved["module_state_dict"]
    releases = releasing.blank(config, data.num_items, state)
    model = releasing.build(config, data.num_items, *releases).eval()
    kept = {n: x for n, x in state.items() if not n.startswith("re_attention")}
    model.load_state_dict(kept)

    ids = data.contexts(config.max_len)[: args.users]
    popularity = data.popularity()[1:].float()
    rare = torch.cat([torch.tensor([False]), popularity <= popularity.median()])
    real, stds = ids != 0, []

    def keep(attention: nn.Module) -> None:
        attention.qkv.register_forward_hook(
            lambda layer, x, out: stds.append(logits_std(attention, out, real))
        )

    for block in model.blocks:
        keep(block.attention)
    found: List[Tensor] = attention_mass(model, ids, rare[ids])
    even = (rare[ids] & real).cumsum(-1) / real.cumsum(-1).clamp(min=1)
    print(
        f"{config.model}, epsilon {config.epsilon:g}, seed {config.seed}, after "
        f"{saved['epoch']} of {config.epochs} epochs; even attention: rarer half "
        f"{float(even[real].mean()):.2%}"
    )
    for i, (mass, std) in enumerate(zip(found, stds)):
        share = float(mass[real].mean())
        print(f"layer {i + 1}: logits +-{std:.3f}, rarer half {share:.2%}")
    rows = model.embedding.weight[1:].detach()
    for name, which in (
        ("100 most popular items", popularity.topk(min(100, len(popularity))).indices),
        ("rarer half", rare[1:]),
    ):
        print(f"embedding of the {name}: std {float(rows[which].std()):.4f}")


if __name__ == "__main__":
    main()
