"""A frozen CLIP: sentences and images in, features out, prompts and token dropout on the way.

Every dimension is read from the checkpoint's config. Text is encoded at the length its longest sentence
needs, classes in chunks whose activations fit a budget and are recomputed for the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import QuickGELUActivation

from drople.backbone.layer import Layer
from drople.backbone.loading import Checkpoint, load_checkpoint
from drople.backbone.tokens import Tokens, itself, places
from drople.backbone.walk import Adapt, LayerDropout, Updates, walk
from drople.errors import DropleError

# Activations kept for the gradient, in units of one [tokens, width] tensor a layer: the inputs of two
# layer norms, query, key, value, attention output and the four-fold hidden layer of the MLP.
SAVED_UNITS = 10
# Classes of like length are encoded together, apart from longer ones, where that saves so many tokens of
# padding: fewer are not worth a walk of their own.
WORTH_A_GROUP = 4096


@dataclass(frozen=True)
class Sentences:
    """K token sequences ready for the text tower, with places for prompts.

    `base` [K, L, D] holds what is frozen (words and positions, computed once; at a prompt's place its position
    alone), `slots` [K, L, M] where prompt m enters.
    """

    base: Tensor
    anchor: Tensor
    real: Tensor
    words: Tensor  # tokens of the class name: never targets in the released code
    slots: Tensor | None
    ids: Tensor  # [K, L], the tokens' numbers in the vocabulary
    numbers: Tensor  # [K], which of the classes these are
    first: int = 0  # how many were encoded before these, where they are a part
    lengths: tuple[int, ...] | None = None  # of each sentence, where they may be grouped by it

    def __len__(self) -> int:
        return len(self.base)

    def rows(self, start: int, stop: int) -> "Sentences":
        return self._part(slice(start, stop), start, self.base.shape[1])

    def _part(self, which: slice | Tensor, before: int, length: int) -> "Sentences":
        """Some of them, cut to a length; `before` were encoded before these."""
        return replace(
            self,
            base=self.base[which, :length],
            anchor=self.anchor[which],
            real=self.real[which, :length],
            words=self.words[which, :length],
            slots=None if self.slots is None else self.slots[which, :length],
            ids=self.ids[which, :length],
            numbers=self.numbers[which],
            first=self.first + before,
            lengths=None,
        )

    @cached_property
    def groups(self) -> tuple["Sentences", ...]:
        """The sentences by length, each group no longer than its longest; laid out once, for every step."""
        if self.lengths is None:
            return (self,)
        order = sorted(range(len(self)), key=self.lengths.__getitem__)
        cuts = group_cuts([self.lengths[n] for n in order], WORTH_A_GROUP)
        if len(cuts) == 1:
            return (self,)
        found = []
        for start, stop in zip([0, *cuts], cuts, strict=False):
            picked = torch.tensor(order[start:stop], device=self.real.device)
            length = self.lengths[order[stop - 1]]
            found.append(self._part(picked, start, length))
        return tuple(found)

    @cached_property
    def places(self) -> Tensor:
        """Where each sentence is found among those of the groups."""
        return torch.cat([group.numbers for group in self.groups]).argsort()

    def repeated(self, times: int) -> "Sentences":
        """The K sentences over and over, [times * K] of them: for prompts that differ from image to image."""
        return replace(
            self,
            base=self.base.repeat(times, 1, 1),
            anchor=self.anchor.repeat(times),
            real=self.real.repeat(times, 1),
            words=self.words.repeat(times, 1),
            slots=None if self.slots is None else self.slots.repeat(times, 1, 1),
            ids=self.ids.repeat(times, 1),
            numbers=torch.arange(times * len(self), device=self.numbers.device),
            lengths=None,
        )

    def tokens(self, prompts: Tensor | None, class_words_drop: bool) -> Tokens:
        """The sequence that layer 0 sees."""
        states, slots, stays = self.base, None, None
        if prompts is not None and self.slots is not None:
            slots, stays = self._entrances
            states = states + slots @ prompts[0]
        target = self.real & (places(self.real.shape[1], self.real.device) != self.anchor[:, None])
        if not class_words_drop:
            target = target & ~self.words
        return Tokens(
            states,
            self.anchor,
            self.real,
            target,
            numbers=self.numbers,
            first=self.first,
            slots=slots,
            stays=stays,
        )

    @cached_property
    def _entrances(self) -> tuple[Tensor, Tensor]:
        """The slots as numbers, and 1 where no prompt enters."""
        assert self.slots is not None
        slots, stays = self.slots, ~self.slots.any(-1, keepdim=True)
        return slots.to(self.base.dtype), stays.to(self.base.dtype)


def group_cuts(lengths: Sequence[int], worth: int) -> list[int]:
    """Where lengths in rising order are cut into groups: each cut, the best first, saves at least `worth`
    tokens of padding. The last cut is the end."""
    cuts = [len(lengths)]
    while True:
        best = 0, 0
        for start, stop in zip([0, *cuts], cuts, strict=False):
            longest = lengths[stop - 1]
            best = max(
                [best, *(((c - start) * (longest - lengths[c - 1]), c) for c in range(start + 1, stop))]
            )
        if best[0] < worth:
            return cuts
        cuts = sorted([*cuts, best[1]])


class Backbone:
    """The frozen towers of a CLIP checkpoint."""

    def __init__(self, source: Checkpoint) -> None:
        self.name = source.name
        self.tokenizer = source.tokenizer
        self.pixels = source.pixels
        self.model = source.model.eval().requires_grad_(False)
        self._fold()
        self.vision: list[Layer] = []
        self.text: list[Layer] = []
        self._join()
        config = self.model.config
        self.embed_dim: int = config.projection_dim
        self.text_width: int = config.text_config.hidden_size
        self.vision_width: int = config.vision_config.hidden_size
        self.text_layers: int = config.text_config.num_hidden_layers
        self.vision_layers: int = config.vision_config.num_hidden_layers
        self.positions: int = config.text_config.max_position_embeddings
        self.patch_grid: int = config.vision_config.image_size // config.vision_config.patch_size
        self.logit_scale: float = float(self.model.logit_scale.exp())
        self.activation_bytes = 1 << 29

    def _fold(self) -> None:
        """`x sigmoid(1.702 x)` = silu(1.702 x) / 1.702: with both factors in the frozen weights around it, the
        activation is one kernel that keeps one tensor for the gradient, instead of three that keep two."""
        for tower in (self.model.vision_model, self.model.text_model):
            for mlp in (layer.mlp for layer in tower.encoder.layers):
                if isinstance(mlp.activation_fn, QuickGELUActivation):
                    mlp.fc1.weight.mul_(1.702)
                    mlp.fc1.bias.mul_(1.702)
                    mlp.fc2.weight.div_(1.702)
                    mlp.activation_fn = nn.SiLU()

    def _join(self) -> None:
        """The layers; they are made anew only where moving the model parted their weights."""
        if self.vision and self.vision[0].joined:
            return
        self.vision, self.text = (
            [Layer(module) for module in tower.encoder.layers]
            for tower in (self.model.vision_model, self.model.text_model)
        )

    @classmethod
    def load(cls, name: str | Path) -> "Backbone":
        return cls(load_checkpoint(name))

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.logit_scale.dtype

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Backbone":
        self.model.to(device=device, dtype=dtype)
        self._join()
        if self.device.type == "cuda":
            # Graphed steps need all classes at once; beyond this, memory counts for more.
            self.activation_bytes = 4 << 30
        return self

    # Text ------------------------------------------------------------------------------------------

    def sentences(self, texts: Sequence[str]) -> Sentences:
        """Plain sentences, for the frozen branch."""
        rows = [(self.tokenizer.words(text), 0, 0, text) for text in texts]
        return self._lay_out(rows, context=0, supplementary=0)

    def prompted(
        self, names: Sequence[str], *, context: int, supplementary: int = 0, before: str = "", after: str = ""
    ) -> Sentences:
        """`{bos, context, class words, supplementary, eos}`: prompts 0 to context-1 enter before the
        class words, the supplementary ones after them. Words `before` and `after` a class stand next to it."""
        rows = []
        for name in names:
            text = f"{before}{name}{after}"
            first, last = self.tokenizer.span(text, len(before), len(before) + len(name))
            rows.append((self.tokenizer.words(text), first, last, text))
        return self._lay_out(rows, context, supplementary)

    def _lay_out(
        self, rows: list[tuple[list[int], int, int, str]], context: int, supplementary: int
    ) -> Sentences:
        tokenizer, prompts = self.tokenizer, context + supplementary
        lengths = [1 + prompts + len(ids) + 1 for ids, *_ in rows]
        longest = max(lengths)
        if longest > self.positions:
            ids, *_, text = rows[lengths.index(longest)]
            raise DropleError(
                f"{text!r} has {len(ids)} tokens; with {prompts} prompt tokens that is {longest}, and "
                f"{self.name} has {self.positions} positions. Shorten the name or the template, or use fewer "
                "prompts."
            )
        count = len(rows)
        table = torch.full((count, longest), tokenizer.eos)
        words = torch.zeros(count, longest, dtype=torch.bool)
        slots = torch.zeros(count, longest, prompts, dtype=torch.bool)
        table[:, 0] = tokenizer.bos
        for n, (ids, first, last, _) in enumerate(rows):
            start = 1 + context
            table[n, start : start + len(ids)] = torch.tensor(ids, dtype=torch.long)
            words[n, start + first : start + last] = True
            slots[n, 1:start, :context] = torch.eye(context, dtype=torch.bool)
            after = start + len(ids)
            slots[n, after : after + supplementary, context:] = torch.eye(supplementary, dtype=torch.bool)
        anchor = torch.tensor(lengths) - 1
        real = torch.arange(longest) <= anchor[:, None]
        device, embeddings = self.device, self.model.text_model.embeddings
        with torch.no_grad():
            position = embeddings.position_embedding.weight[:longest]
            table, entered = table.to(device), slots.any(-1, keepdim=True).to(device)
            base = torch.where(entered, position, embeddings(input_ids=table))
        return Sentences(
            base=base,
            anchor=anchor.to(device),
            real=real.to(device),
            words=words.to(device),
            slots=slots.to(device) if prompts else None,
            ids=table,
            numbers=torch.arange(count, device=device),
            lengths=tuple(lengths),
        )

    def word_embeddings(self, text: str) -> Tensor:
        """The token embeddings of some words, without positions: where prompts start from."""
        ids = torch.tensor(self.tokenizer.words(text), dtype=torch.long, device=self.device)
        return self.model.text_model.embeddings.token_embedding(ids).float().clone()

    def encode_text(
        self,
        sentences: Sentences,
        *,
        prompts: Tensor | None = None,
        dropout: LayerDropout | None = None,
        class_words_drop: bool = True,
        updates: Updates | None = None,
        adapt: Adapt | None = None,
    ) -> Tensor:
        """Features [K, E], not normalised; `prompts` [depth, M, D] for all sentences or [depth, K, M, D]."""
        prompts = None if prompts is None else prompts.to(self.dtype)
        tower = self.model.text_model

        def encode(rows: Sentences) -> Tensor:
            entering = prompts
            if prompts is not None and prompts.ndim == 4:
                entering = prompts[:, rows.numbers]
            tokens = walk(
                self.text,
                rows.tokens(entering, class_words_drop),
                causal=True,
                prompts=entering,
                dropout=dropout,
                updates=updates,
                adapt=adapt,
            )
            eos = tokens.states[places(len(rows), self.device), tokens.anchor]
            return self.model.text_projection(tower.final_layer_norm(eos)).float()

        groups = sentences.groups
        if self.fits_at_once(sentences):
            features = [encode(group) for group in groups]
        else:
            parts = [part for group in groups for part in self._chunks(group)]
            recompute = torch.is_grad_enabled()
            # A tensor among what is given tells torch on which GPU draws are to be repeated.
            again = partial(checkpoint, lambda rows, _: encode(rows), use_reentrant=False)
            features = [again(p, p.base) if recompute else encode(p) for p in parts]
        joined = torch.cat(features)
        return joined if len(groups) == 1 else joined[sentences.places]

    def fits_at_once(self, sentences: Sentences) -> bool:
        """Whether the activations of all classes fit the budget together."""
        return (
            sum(len(group) * self._bytes_a_class(group) for group in sentences.groups)
            <= self.activation_bytes
        )

    def _chunks(self, sentences: Sentences) -> list[Sentences]:
        size = max(1, self.activation_bytes // self._bytes_a_class(sentences))
        return [sentences.rows(n, n + size) for n in range(0, len(sentences), size)]

    def _bytes_a_class(self, sentences: Sentences) -> int:
        numbers = SAVED_UNITS * self.text_width * self.text_layers * sentences.base.shape[1]
        return numbers * self.dtype.itemsize

    # Images ----------------------------------------------------------------------------------------

    def encode_images(
        self,
        pixels: Tensor,
        *,
        prompts: Tensor | None = None,
        dropout: LayerDropout | None = None,
        updates: Updates | None = None,
        adapt: Adapt | None = None,
        tokens: Callable[..., Tokens] = Tokens,
    ) -> Tensor:
        """Features [B, E] of normalised pixels [B, 3, S, S], not normalised; `tokens` makes the sequence, for a
        method that masks some of it."""
        tower, states = self.model.vision_model, self._patches(pixels)
        count, frozen = states.shape[:2]
        slots = stays = None
        if prompts is not None:
            prompts = prompts.to(self.dtype)
            length = prompts.shape[1]
            # Without positions and before the first layer norm, as MaPLe and PromptSRC place them.
            states = torch.cat([states, prompts[0].expand(count, -1, -1)], dim=1)
            slots = F.pad(itself(length, self.device), (0, 0, frozen, 0)).to(self.dtype)
            stays = (places(frozen + length, self.device)[:, None] < frozen).to(self.dtype)
        real = torch.ones(states.shape[:2], dtype=torch.bool, device=self.device)
        target = real.clone()
        target[:, 0] = False
        sequence = tokens(
            states=tower.pre_layrnorm(states),
            anchor=torch.zeros(count, dtype=torch.long, device=self.device),
            real=real,
            target=target,
            slots=slots,
            stays=stays,
        )
        walked = walk(
            self.vision,
            sequence,
            causal=False,
            prompts=prompts,
            dropout=dropout,
            updates=updates,
            adapt=adapt,
        )
        # cls is the first token and never drops, so it stays the first.
        return self.model.visual_projection(tower.post_layernorm(walked.states[:, 0])).float()

    @torch.no_grad()
    def _patches(self, pixels: Tensor) -> Tensor:
        """What enters the tower, [B, 1 + patches, D]: its embeddings with the convolution as the one product that it
        is, at a tenth of its time on a GPU."""
        embeddings = self.model.vision_model.embeddings
        weight, grid, side = embeddings.patch_embedding.weight, self.patch_grid, embeddings.patch_size
        cut = pixels.to(self.dtype).unflatten(3, (grid, side)).unflatten(2, (grid, side))
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2) @ weight.flatten(1).T
        first = embeddings.class_embedding.expand(len(pixels), 1, -1)
        return torch.cat([first, patches], 1) + embeddings.position_embedding.weight
