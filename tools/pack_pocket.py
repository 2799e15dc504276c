#!/usr/bin/env python3
"""Packs a CLIP folder (Hugging Face layout) as the model embedded in the package.

  pack_pocket.py SRC_DIR OUT_DIR

OUT_DIR, src/drople/assets/pocket for the package itself, gets the weights as int8 and the small files as they
are. It takes the place of whatever was packed there before.
"""

import pathlib
import shutil
import sys

from safetensors.torch import load_file, save_file

from drople.backbone.int8 import quantise

SMALL = ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")


def pack(source: pathlib.Path, out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in SMALL:
        shutil.copyfile(source / name, out / name)
    weights = out / "model.int8.safetensors"
    save_file(quantise(load_file(source / "model.safetensors")), weights)
    # safetensors writes for the owner alone, and a wheel keeps the mode: others could not read it.
    weights.chmod(0o644)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[2])
    pack(pathlib.Path(sys.argv[1]), folder)
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB")
