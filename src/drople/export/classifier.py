"""What is exported: pictures as bytes in, calibrated probabilities and logits out.

The image tower with what was learned in it, the class weights (the text tower has done its work), the logit
scale, the temperature and the normalisation of pixels, all in one module that can be traced.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from drople import __version__
from drople.errors import DropleError
from drople.learner import PromptLearner
from drople.methods import Method, TowerMethod
from drople.methods.adapter import FeatureAdapter


class Classifier(nn.Module):
    """uint8 squares [B, S, S, 3], as Pillow gives them, to probabilities [B, K] and logits [B, K].

    The logits are divided by the temperature: their softmax is the probabilities.
    """

    mean: Tensor
    std: Tensor
    class_weights: Tensor

    def __init__(self, learner: PromptLearner) -> None:
        super().__init__()
        method = learner.method_.eval()
        # A method with logits of its own needs more than an image and weights: CoCoOp runs the text tower.
        if type(method).logits not in (Method.logits, FeatureAdapter.logits):
            raise DropleError(
                f"{learner.method} makes the features of its classes anew for every image, so there are no "
                "class weights to fold into a file: export a run of another method, or use --to hub, whose "
                "folder drople loads with the text tower."
            )
        self.method = method = folded(method)
        backbone = method.backbone
        # Known to the module, so that tracing finds the frozen weights under their names.
        self.vision, self.projection = backbone.model.vision_model, backbone.model.visual_projection
        self.temperature, self.size = learner.temperature_, backbone.pixels.size
        self.register_buffer("mean", 255 * torch.tensor(backbone.pixels.mean))
        self.register_buffer("std", 255 * torch.tensor(backbone.pixels.std))
        self.register_buffer("class_weights", learner.class_weights(learner.words_).clone())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = ((images.float() - self.mean) / self.std).permute(0, 3, 1, 2)
        logits = self.method.logits(pixels, self.class_weights) / self.temperature
        return logits.softmax(-1), logits


def describe(learner: PromptLearner, dtype: str) -> dict[str, str]:
    """The file's metadata: everything a reader needs that is not in the graph."""
    pixels = learner.backbone_.pixels
    resample = Image.Resampling(pixels.resample)
    return {
        "drople": __version__,
        "method": str(learner.config_["method"]),
        # A folder's place on this machine says nothing elsewhere.
        "backbone": Path(str(learner.config_["backbone"])).name
        if Path(str(learner.config_["backbone"])).is_dir()
        else str(learner.config_["backbone"]),
        "dtype": dtype,
        "classes": json.dumps(learner.classes_),
        "size": str(pixels.size),
        "resample": str(int(resample)),
        "mean": json.dumps(pixels.mean),
        "std": json.dumps(pixels.std),
        "temperature": repr(learner.temperature_),
        "input": f"images: uint8 [batch, {pixels.size}, {pixels.size}, 3], RGB. Resize the shorter side to "
        f"{pixels.size} ({resample.name.lower()}), crop the centre. Scaling to 0..1 and normalising by mean "
        "and std are in the graph.",
        "output": "probabilities: float32 [batch, classes], calibrated. logits: the same before the softmax, "
        "logit scale and temperature applied.",
    }


def folded(method: Method) -> Method:
    """The method with low-rank updates as a part of the frozen weights, so that a file holds one weight, not the sum
    of two. Of a backbone of its own: the learner's stays as it is."""
    if not any(part.vision_updates() for part in _in_towers(method)):
        return method
    own = copy.deepcopy(method)
    for part in _in_towers(own):
        part.fold()
    return own


def _in_towers(method: Method) -> list[TowerMethod]:
    """The method, or what it stands on."""
    return [part for part in method.modules() if isinstance(part, TowerMethod)]


def trace(learner: PromptLearner) -> ExportedProgram:
    """The classifier as a graph, for batches of any size."""
    classifier = Classifier(learner).eval()
    example = torch.zeros(2, classifier.size, classifier.size, 3, dtype=torch.uint8)
    with quiet(), torch.no_grad():
        # Strict, because a plain trace takes `len(tensor)` for a constant and the batch would be fixed.
        program = torch.export.export(
            classifier, (example,), dynamic_shapes=({0: Dim("batch", min=1)},), strict=True
        )
    # What the graph does not read: projections that are parts of a joined weight, prompts of the text tower.
    signature = program.graph_signature
    used = {*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()}
    for name in program.state_dict.keys() - used:
        del program.state_dict[name]
    # A part of a joined weight would take the whole of it into the file.
    for held in (program.state_dict, program.constants):
        held.update({name: _own(value) for name, value in held.items() if isinstance(value, Tensor)})
    for node in program.graph.nodes:
        # Where in whose home directory the code lay is nobody's business.
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            node.meta.pop(key, None)
    return program


def _own(weight: Tensor) -> Tensor:
    copied = weight.detach().clone()
    return nn.Parameter(copied, requires_grad=False) if isinstance(weight, nn.Parameter) else copied


@contextmanager
def quiet() -> Iterator[None]:
    """No notes of the exporters: what matters of them shows in the check."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
