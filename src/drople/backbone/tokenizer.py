"""From text to the ids a CLIP checkpoint was trained on, checked against its embedding table.

A wrong tokenizer does not crash: it gives wrong ids and quietly poor features. With its files missing,
transformers even makes up a tokenizer of two tokens. So everything is compared with the config here.
"""

import json
from pathlib import Path

import tokenizers
from transformers import CLIPTextConfig, CLIPTokenizer

from drople.errors import DropleError

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
# What OpenAI's first configs say; transformers then pools the largest id instead of looking for eos.
WRONG_EOS = 2


class Tokenizer:
    """A checkpoint's tokenizer: `bos`, `eos` and `vocab_size`."""

    def __init__(self, folder: Path, config: CLIPTextConfig) -> None:
        self._backend = _backend(folder)
        # A saved tokenizer may carry its last user's settings; lengths are this class's business.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = config.vocab_size
        found = self._backend.get_vocab_size(with_added_tokens=True)
        if found != self.vocab_size:
            raise DropleError(
                f"the tokenizer in {folder} knows {found} tokens, but config.json gives the text tower "
                f"{self.vocab_size} (text_config.vocab_size): they are not of the same checkpoint, or a "
                "file is incomplete. Copy tokenizer.json from where the weights came from."
            )
        self.bos, self.eos = self._ends(folder, config)

    def _ends(self, folder: Path, config: CLIPTextConfig) -> tuple[int, int]:
        bos, eos = self._backend.token_to_id(BOS), self._backend.token_to_id(EOS)
        if config.eos_token_id == WRONG_EOS:
            if bos is None or eos != self.vocab_size - 1:
                raise DropleError(
                    f"the tokenizer in {folder} must have {BOS!r}, and {EOS!r} as its last token "
                    f"({self.vocab_size - 1}), because with eos_token_id {WRONG_EOS} in config.json the "
                    f"text tower reads its feature at the largest id; it has {bos} and {eos}. Take the "
                    "tokenizer of the same checkpoint, or correct text_config.eos_token_id in config.json."
                )
            return bos, eos
        named = (
            ("bos_token_id", config.bos_token_id, BOS, bos),
            ("eos_token_id", config.eos_token_id, EOS, eos),
        )
        for field, given, token, own in named:
            if given is None or not 0 <= given < self.vocab_size or (own is not None and own != given):
                raise DropleError(
                    f"config.json in {folder} gives text_config.{field} {given}, but the tokenizer has "
                    f"{token!r} as {own} among {self.vocab_size} tokens: the text tower would read its "
                    f"feature at the wrong word. Correct text_config.{field}, or take the tokenizer of the "
                    "same checkpoint."
                )
        return config.bos_token_id, config.eos_token_id

    def words(self, text: str) -> list[int]:
        """The ids of a text without bos and eos, however long."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def span(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Which of the text's ids are of its characters from `start` to `stop`: from the first to before the second."""
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        inside = [n for n, (begun, ended) in enumerate(offsets) if begun < stop and ended > start]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    pair = folder / "vocab.json", folder / "merges.txt"
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        if all(part.is_file() for part in pair):
            vocab = json.loads(pair[0].read_text(encoding="utf-8"))
            lines = pair[1].read_text(encoding="utf-8").splitlines()
            merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
            return CLIPTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    except Exception as error:  # the Rust library raises bare Exceptions
        raise DropleError(
            f"the tokenizer in {folder} cannot be read ({error}): the file is probably incomplete. "
            "Download it again."
        ) from error
    raise DropleError(
        f"{folder} has no tokenizer: it needs tokenizer.json (or both vocab.json and merges.txt). Copy it "
        "from where the weights came from; transformers writes it with `tokenizer.save_pretrained(folder)`."
    )
