#!/usr/bin/env python3
"""Writes the README's tree: every file of the package with the first sentence of its docstring.

tree.py            print it
tree.py --write    put it into README.md
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "drople"
WIDTH = 31
# What has no docstring to say it.
OTHERS = {
    "assets/pocket/": "the embedded model: int8 weights, config, tokenizer",
    "published.json": "the paper's numbers, table by table",
    "data/imagenet_classes.txt": "ImageNet's 1,000 curated class names, with their source",
    "data/flowers102_classes.txt": "the names of the 102 flowers, with their source",
    "report/templates/": "the pages and their style",
}


def first_sentence(file: pathlib.Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
    return sentence.rstrip(".")


def tree() -> str:
    lines = ["src/drople/"]
    files = sorted(PACKAGE.rglob("*.py"), key=lambda f: (len(f.relative_to(PACKAGE).parts) > 1, f))
    names = {f.relative_to(PACKAGE).as_posix(): first_sentence(f) for f in files} | OTHERS
    for name in sorted(names, key=lambda n: ("/" in n, n)):
        if names[name]:
            lines.append(f"  {name:{WIDTH}}{names[name]}")
    lines += [
        "tests/                           each equation against a slow reference, each promise against the real thing",
        "benchmarks/                      speed, memory and accuracy studies, run by hand",
        "docs/                            the method equation by equation, results with their commands, export",
    ]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        readme = ROOT / "README.md"
        text = readme.read_text()
        start = text.index("```\nsrc/drople/") if "```\nsrc/drople/" in text else text.index("```\nTREE")
        end = text.index("\n```", start + 4)
        readme.write_text(text[: start + 4] + tree() + text[end:])
    elif len(sys.argv) == 1:
        print(tree())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
