"""Which kernels forward and backward of a training step are made of, and how long each takes.

    python benchmarks/profile_step.py [--method drople] [--classes 500] [--batch 32] [--rows 40]

ViT-B/16 shapes with random weights, without a CUDA graph, so that every kernel has its name. The gap between the
sum of the kernels and the step's time is launching, which a graph takes away (benchmarks/graph.py).
"""

import argparse
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from drople.backbone.shapes import shape_backbone
from drople.cost import _training_step, class_names
from drople.methods import Task, make

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="drople")
    parser.add_argument("--shape", default="vit-b-16")
    parser.add_argument("--classes", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", type=int, default=40, help="so many kernels, the longest first")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    backbone = shape_backbone(given.shape).to(device, torch.bfloat16 if cuda else torch.float32)
    task = Task(class_names(given.classes), ("a photo of a {}.",))
    method = make(given.method, backbone, task, {}).to(device)
    # The second is never a CUDA graph.
    _, gradients = _training_step(method.train(), given.classes, given.batch)
    for _ in range(STEPS):
        gradients()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as seen:
        for _ in range(STEPS):
            gradients()
        if cuda:
            torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    for event in seen.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == cuda:
            spent[event.name] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1000
            times[event.name] += 1
    total = sum(spent.values()) / STEPS
    print(f"{given.method}, {given.classes} classes, batch {given.batch}: {total:.2f} ms in "
          f"{sum(times.values()) // STEPS} kernels a step")  # fmt: skip
    for name, value in sorted(spent.items(), key=lambda item: -item[1])[: given.rows]:
        print(f"{value / STEPS:8.3f} ms {times[name] // STEPS:5d} times  {name[:110]}")


if __name__ == "__main__":
    main()
