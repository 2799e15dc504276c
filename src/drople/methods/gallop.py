"""Global and local prompts (GalLoP).

Lafon, Ramzi, Rambour, Audebert, Thome. "GalLoP: Learning Global and Local Prompts for Vision-Language Models."
ECCV 2024. Published, 16 shots a class, ViT-B/16 (from their repository): mean accuracy over 11 datasets 84.4;
trained on ImageNet, 75.1 there and 61.3 in the mean over its V2, Sketch, A and R.

m global prompts are compared with the image, n local ones each with the k_j patches that are nearest to the
class, k_j growing from prompt to prompt, so that they look at different scales. Patch x_i enters the last layer
of the image tower, where it for once sees only itself; W is learned and starts as the identity. In their code:

    u_i = x_i + W_o W_v norm_1(x_i),   f_i = W_proj W norm_post(u_i + MLP(norm_2(u_i)))        a patch's feature
    G_j(c) = cos(f, g_jc),   S_j(c) = mean of the k_j largest of cos(f_i, l_jc) over the patches i
    loss = CE(mean of G_j over kept j / tau) + mean_j CE(S_j / tau)
    logits = (mean_j G_j + mean_j S_j) / 2 tau

f: the image's feature; g_jc, l_jc: those of class c with prompt j before its words. Prompt dropout: each
image keeps m - int(0.75 m) of the global prompts, at least one, drawn anew every step.

Authors' defaults: m = n = 4, k = 5, 10, 15, 20, 4 tokens from "a photo of a" in every prompt, whatever the
dataset's own sentence; SGD 2e-3, weight decay 0.01, 200 epochs of batch 32 (ImageNet 50 of 128, SUN 128,
EuroSAT 10). Their code draws the kept prompts with replacement, so that one may count twice and a rate of
0 is not "no dropout": here each counts once. It is the same by default, where one is kept. Theirs reads
residual networks too, this does not.

An image's features here are f and all f_i, [B, (1 + L) E], a class's those of its m + n sentences, and
`scores` compares them: a class is encoded once, whatever the images, and any class can be asked for.

Checked against a slow reference in float64 (tests/test_gallop.py): logits differ by at most 3e-6. The authors'
model and loss beside it, on the same random weights, images and kept prompts: cosines differ by at most 7e-7,
probabilities by 5e-7, losses by 2e-6, gradients by 3e-6 of the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.backbone.tokens import Tokens
from drople.errors import DropleError
from drople.losses import cross_entropy
from drople.methods.adapter import FeatureAdapter
from drople.methods.base import Batch, Presets, Task, register
from drople.methods.context import ContextOptions
from drople.options import option
from drople.prompts import PROMPT_STD


@dataclass(frozen=True)
class GalLoPOptions(ContextOptions):
    global_prompts: int = option(4, "prompts compared with the whole image (GalLoP 4)", low=1)
    top_k: tuple[int, ...] = option(
        (5, 10, 15, 20),
        "a local prompt for each: the nearest patches it is compared with (GalLoP 5,10,15,20)",
    )
    prompt_dropout: float = option(
        0.75, "share of the global prompts that an image leaves out in a step (GalLoP 0.75)", low=0, high=1
    )


@dataclass
class LastValues:
    """Keeps what enters the last layer [B, 1 + L, D] and its attention's values [B, H, 1 + L, head].

    The walk shows them to what asks as token dropout does; nothing drops.
    """

    last: int
    kept: list[Tensor] = field(default_factory=list)

    def reaches(self, layer: int) -> bool:
        return True

    def watch(self, layer: int, tokens: Tokens) -> Any:
        if layer < self.last:
            return None

        def keep(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> None:
            self.kept += [tokens.states, value]

        return keep

    def drop(self, layer: int, tokens: Tokens) -> Tokens:
        return tokens


@register
class GalLoP(FeatureAdapter):
    name = "gallop"
    title = "Global and local prompts"
    kind = "prompt"
    citation = "Lafon et al., ECCV 2024"
    Options = GalLoPOptions
    options: GalLoPOptions
    presets: ClassVar[Presets] = {
        "authors": {
            "optimizer": "sgd",
            "lr": 2e-3,
            "weight_decay": 1e-2,
            "batch_size": 32,
            "epochs": 200,
            "warmup": 0.0,
            "clip_norm": 0.0,
        }
    }

    def __init__(self, backbone: Backbone, task: Task, options: GalLoPOptions) -> None:
        super().__init__(backbone, task, options)
        if not options.top_k or min(options.top_k) < 1:
            raise DropleError(
                f"option top_k is {','.join(map(str, options.top_k)) or 'empty'}: give a number of patches, at least "
                "1, for each local prompt."
            )
        patches = backbone.patch_grid**2
        if max(options.top_k) > patches:
            self.notes.append(f"top_k asks for {max(options.top_k)} patches; an image has {patches}.")
        self.top_k = [min(k, patches) for k in options.top_k]
        start = torch.randn(options.global_prompts + len(self.top_k), options.length, backbone.text_width)
        start *= PROMPT_STD
        words = backbone.word_embeddings(options.init)[: options.length].cpu()
        start[:, : len(words)] = words
        self.global_prompts = nn.Parameter(start[: options.global_prompts].clone())
        self.local_prompts = nn.Parameter(start[options.global_prompts :].clone())
        self.local_projection = nn.Parameter(torch.eye(backbone.vision_width))
        self._sentences = self.sentences(task.words)

    def sentences(self, words: Sequence[str]) -> Sentences:
        """All classes for the first prompt, for the second, and so on."""
        prompts = len(self.global_prompts) + len(self.local_prompts)
        return self.backbone.prompted(tuple(words) * prompts, context=self.options.length)

    @property
    def fixed_shapes(self) -> bool:
        return self.backbone.fits_at_once(self._sentences)

    def training_weights(self) -> Tensor:
        return self.encode_text(self._sentences)

    def class_features(self, words: Sequence[str]) -> Tensor:
        """[K, (m + n) E]: with the global prompts, then with the local ones."""
        return self.encode_text(self.sentences(words))

    def encode_text(self, sentences: Sentences) -> Tensor:
        prompts = torch.cat([self.global_prompts, self.local_prompts])
        classes = len(sentences) // len(prompts)
        features = self.backbone.encode_text(sentences, prompts=prompts.repeat_interleave(classes, 0)[None])
        return features.unflatten(0, (len(prompts), classes)).transpose(0, 1).flatten(1)

    def image_features(self, images: Tensor) -> Tensor:
        """[B, (1 + L) E]: the feature of the image and behind it those of its patches."""
        values = LastValues(self.backbone.vision_layers - 1)
        whole = self.backbone.encode_images(images, dropout=values)
        # Joined in float32: what W learns beside the identity is too small for bf16.
        projection = self.backbone.model.visual_projection.weight.float() @ self.local_projection
        patches = F.linear(self._patches(*values.kept).float(), projection)
        return torch.cat([whole[:, None], patches], dim=1).flatten(1)

    def _patches(self, states: Tensor, values: Tensor) -> Tensor:
        """norm_post of the patches [B, L, D], each of which has seen only itself in the last layer."""
        tower = self.backbone.model.vision_model
        last = tower.encoder.layers[-1]
        states = states[:, 1:] + last.self_attn.out_proj(values[:, :, 1:].transpose(1, 2).flatten(-2))
        return tower.post_layernorm(states + last.mlp(last.layer_norm2(states)))

    def cosines(self, features: Tensor, class_weights: Tensor) -> tuple[Tensor, Tensor]:
        """`G` [B, K, m] and `S` [B, K, n]."""
        images, classes = (
            F.normalize(x.unflatten(1, (-1, self.backbone.embed_dim)), dim=-1)
            for x in (features, class_weights)
        )
        count = len(self.global_prompts)
        whole = torch.einsum("be,kme->bkm", images[:, 0], classes[:, :count])
        local = [
            (images[:, 1:] @ classes[:, count + j].T).topk(k, dim=1).values.mean(1)
            for j, k in enumerate(self.top_k)
        ]
        return whole, torch.stack(local, dim=-1)

    def scores(self, features: Tensor, class_weights: Tensor) -> Tensor:
        return self._average(*self.cosines(features, class_weights))

    def _average(self, whole: Tensor, local: Tensor) -> Tensor:
        return self.backbone.logit_scale * (whole.mean(-1) + local.mean(-1)) / 2

    def losses(self, features: Tensor, class_weights: Tensor, batch: Batch) -> dict[str, Tensor]:
        labels, scale = batch.labels, self.backbone.logit_scale
        whole, local = self.cosines(features, class_weights)
        self.monitor["accuracy"] = (self._average(whole, local).detach().argmax(1) == labels).float().mean()
        kept = scale * (whole @ self._kept(labels)[..., None]).squeeze(-1)
        each = scale * local.transpose(1, 2).flatten(0, 1)
        return {
            "global_cross_entropy": cross_entropy(kept, labels, self.log_prior),
            "local_cross_entropy": cross_entropy(
                each, labels.repeat_interleave(len(self.top_k)), self.log_prior
            ),
        }

    def _kept(self, labels: Tensor) -> Tensor:
        """The weight of each global prompt in the mean of each image [B, m]."""
        count = len(self.global_prompts)
        keep = max(count - int(self.options.prompt_dropout * count), 1)
        order = torch.rand(len(labels), count, device=labels.device).argsort(1).argsort(1)
        return (order < keep).float() / keep
