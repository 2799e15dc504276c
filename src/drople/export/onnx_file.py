"""The classifier as an ONNX file that says in its metadata how to feed it and what its numbers mean."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drople import __version__
from drople.backbone import Backbone
from drople.errors import DropleError
from drople.export.check import Runner
from drople.export.classifier import describe, quiet, trace
from drople.learner import PromptLearner

if TYPE_CHECKING:
    from onnx import ModelProto

LARGEST = 2_000_000_000  # bytes of one protobuf message


def onnx_bytes(learner: PromptLearner, dtype: str) -> bytes:
    """The file's content; fp16 has its tower in half precision, int8 its matrices, both a float32 head."""
    _need()
    with _precision(learner, torch.float16 if dtype == "fp16" else torch.float32):
        program = trace(learner)
        with quiet():
            made: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=["images"],
                output_names=["probabilities", "logits"],
                verbose=False,
            )
        model: ModelProto = made.model_proto
    if model.ByteSize() > LARGEST:
        raise DropleError("this image tower is over 2 GB, more than an ONNX file can hold: try --dtype fp16.")
    _tidy(model)
    if dtype == "int8":
        model = _quantised(model)
    del model.metadata_props[:]
    for key, value in describe(learner, dtype).items():
        model.metadata_props.add(key=key, value=value)
    model.producer_name, model.producer_version = "drople", __version__
    return bytes(model.SerializeToString())


def onnx_runner(content: bytes) -> Runner:
    """The file in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])


def _need() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise DropleError(
            f"exporting to ONNX needs {error.name}, which is not installed: pip install drople[export]"
        ) from None


@contextmanager
def _precision(learner: PromptLearner, dtype: torch.dtype) -> Iterator[None]:
    """The backbone in another number format for a while; its own weights come back unrounded."""
    backbone: Backbone = learner.backbone_
    learner.class_weights(learner.words_)  # made in float32 and kept, before the format changes
    own = backbone.dtype
    if dtype == own:
        yield
        return
    kept = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    try:
        backbone.to(backbone.device, dtype)
        yield
    finally:
        backbone.to(backbone.device, own)
        backbone.model.load_state_dict(kept)


def _tidy(model: "ModelProto") -> None:
    """Names for people; none of the exporter's notes, which hold paths of this machine."""
    for value in (*model.graph.input, *model.graph.output):
        first = value.type.tensor_type.shape.dim[0]
        first.dim_param = "batch"
        del value.metadata_props[:]
    del model.graph.value_info[:]
    del model.graph.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""


def _quantised(model: "ModelProto") -> "ModelProto":
    """Matrices of the tower in int8, activations rounded as they come."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    nodes = list(model.graph.node)
    # The features are made unit vectors where the tower ends; a cosine times 100 needs all its digits.
    head = next((n for n, node in enumerate(nodes) if node.op_type == "ReduceL2"), len(nodes))
    exact = [node.name for node in nodes[head:] if node.op_type in ("MatMul", "Gemm")]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rounded = Path(folder) / "int8.onnx"
            quantize_dynamic(
                model,
                rounded,
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=exact,
            )
            return onnx.load(rounded)
    finally:
        root.setLevel(level)
