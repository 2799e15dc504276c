"""Files that are whole or not there: every file is written beside its place and moved into it."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from drople.errors import DropleError

METADATA = "drople"
# What new files of this process must not allow; it can only be asked by setting it.
FORBIDDEN = os.umask(0o077)
os.umask(FORBIDDEN)


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic: a reader, or a run that was killed, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~FORBIDDEN)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # A file name that is no UTF-8 holds lone surrogates: with backslashes they are what JSON has for them.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a run; what is wrong with the file is said in words."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DropleError(
            f"{path.parent} has no {path.name}: it is not a finished run of drople fit."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DropleError(f"{path} cannot be read ({error}): copy the run again, or train anew.") from None
    if not isinstance(content, dict):
        raise DropleError(f"{path} holds no JSON object: it was not written by drople.")
    return content


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: safetensors writes several in an order that differs from process to process.
    packed = {METADATA: json.dumps(dict(metadata), sort_keys=True)} if metadata else None
    write_bytes(path, to_bytes(plain, packed))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            packed = (file.metadata() or {}).get(METADATA, "{}")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(packed)  # noqa: SIM118
    except FileNotFoundError:
        raise DropleError(
            f"{path.parent} has no {path.name}: it is not a finished run of drople fit."
        ) from None
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise DropleError(f"{path} is damaged ({error}): copy the run again, or train anew.") from None
