"""The classifier as a `torch.export` program: a .pt2 archive that `torch.export.load` opens without drople.

A .pt2 is a zip: the graph as JSON, the weights as raw bytes, and here what an ONNX file says of itself. The example
input, which torch would add as a pickle, is left out, so nothing in the file is one.
"""

import io
import json

import torch

from drople.export.check import Runner
from drople.export.classifier import describe, quiet, trace
from drople.learner import PromptLearner

ABOUT = "about.json"


def program_bytes(learner: PromptLearner) -> bytes:
    program = trace(learner)
    program.example_inputs = None
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file, extra_files={ABOUT: json.dumps(describe(learner, "float32"))})
    return file.getvalue()


def program_runner(content: bytes) -> Runner:
    """The program as anyone would load it."""
    with quiet():
        module = torch.export.load(io.BytesIO(content)).module()
    return lambda images: module(images)[0]
