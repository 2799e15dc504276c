"""A training step as one CUDA graph over the same step launched kernel by kernel, on a GPU.

    python benchmarks/graph.py [--method drople] [--classes 50] [--batch 32] [--backbone pocket]

Both train the same prompts on the same random images from the same seed; the claim is the ratio of the times a
step, and that the learned parameters are the same to the bit.
"""

import argparse
import time

import torch
from step import words

from drople.backbone import Backbone
from drople.methods import Task, make
from drople.methods.base import TrainingData
from drople.training import Training, TrainingOptions


def train(given: argparse.Namespace, graphed: bool) -> tuple[torch.Tensor, float]:
    """The parameters after training, and the seconds a step of a second round (capture is in the first)."""
    backbone = Backbone.load(given.backbone).to("cuda", torch.bfloat16)
    torch.manual_seed(0)
    method = make(given.method, backbone, Task(words(given.classes), ("a photo of a {}.",)), {}).cuda()
    side, count = round(backbone.pixels.size * 8 / 7), given.batch * 6
    data = TrainingData(
        torch.randint(0, 255, (count, 3, side, side), dtype=torch.uint8, device="cuda"),
        torch.randint(given.classes, (count,), device="cuda"),
        torch.randn(count, backbone.embed_dim, device="cuda"),
    )
    options = TrainingOptions(epochs=4, batch_size=given.batch)
    training = Training(method, data, options, seed=1, precision="bf16")
    if not graphed:
        training.graphed = None
    training.run()
    learned = torch.cat([p.detach().flatten() for p in method.parameters()])
    training.step = 0
    torch.cuda.synchronize()
    begun = time.perf_counter()
    training.run()
    torch.cuda.synchronize()
    return learned, (time.perf_counter() - begun) / training.steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="drople")
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--backbone", default="pocket")
    given = parser.parse_args()
    (eager, slow), (graph, fast) = train(given, False), train(given, True)
    same = "the same to the bit"
    if not torch.equal(eager, graph):
        # Some kernels (a gradient of a gradient has them) give other bits each time.
        again, _ = train(given, False)
        apart, own = ((a - eager).abs().max().item() for a in (graph, again))
        same = f"differ by up to {apart:.1e}, and by {own:.1e} from one plain training to the next"
    print(f"{given.method}, {given.classes} classes, batch {given.batch}, {torch.cuda.get_device_name()}")
    print(f"  kernel by kernel {1000 * slow:7.1f} ms a step\n  CUDA graph       {1000 * fast:7.1f} ms a step")
    print(f"  ratio            {slow / fast:7.1f}; parameters {same}")


if __name__ == "__main__":
    main()
