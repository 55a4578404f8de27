"""Seconds and memory of the neighbor search: `python benchmarks/neighbors.py --images 1280000 --dim 384`."""

import argparse
import time

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tcore.data.neighbors import BUDGET, COPY, DEMOTED, search
from tcore.device import peak_memory_gib
from tcore.evaluation.neighbors import GPU_BUDGET


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1_280_000 if cuda else 20_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--copies", type=int, default=100, help="images per 10,000 that are there twice")
    args = parser.parse_args()

    device = torch.device("cuda" if cuda else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    features = torch.randn(args.images, args.dim, generator=generator, device=device)
    # Features of real images share a large part, so that cosines are high.
    features = F.normalize(features + 1.0, dim=1)
    copies = args.images * args.copies // 20_000
    features[-copies or args.images :] = features[:copies]

    search(features[:5000].clone(), args.k)  # warm up
    started = _now(device)
    found = search(features, args.k, budget=GPU_BUDGET if cuda else BUDGET)
    seconds = _now(device) - started
    memory = peak_memory_gib(device)

    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    speed = 2 * args.images**2 * args.dim / seconds / 1e12
    print(f"{args.images:,} features of {args.dim}, k = {args.k}, on {name}:")
    print(f"{seconds:.1f} s ({speed:.2f} TFLOP/s), peak memory {memory:.2f} GiB")
    print(f"{int((found.copies > 0).sum()):,} images have copies, made: {2 * copies:,}")
    rows = torch.randperm(args.images, generator=generator, device=device)[:200]
    deviation = (found.cosines[rows] - in_double_precision(features, rows, args.k)).abs().max()
    print(f"largest deviation of a cosine from double precision, 200 rows: {deviation:.1e}")


def _now(device: torch.device) -> float:
    """Seconds, once everything before is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def in_double_precision(
    features: Float[Tensor, "n d"], rows: Int64[Tensor, " r"], k: int
) -> Float64[Tensor, "r k"]:
    """Cosines of the k nearest of some images, by whole rows of the matrix."""
    cosines = features[rows].double() @ features.double().T
    cosines.scatter_(1, rows[:, None], -torch.inf)
    return torch.where(cosines > COPY, cosines - DEMOTED, cosines).topk(k).values


if __name__ == "__main__":
    main()
