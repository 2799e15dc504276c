"""DroPLe written plainly, as the released code writes it: what the fast step is measured against.

The same method as `drople.methods.drople` with the options `drople.ablations.PAPER` (`tests/test_naive_drople.py` holds
loss and gradients to it), with the released code's way of working:

- every layer of both towers makes its attention map, with a graph;
- every class is encoded at once, at 77 tokens (the released code pads to its longest class plus 24: `length`);
- bridge tokens meet every token of every class, projected one by one, and gather features of all classes;
- tokens drop in a loop over samples, and the alignment loss is a loop over samples that asks for each label;
- the frozen image tower runs again at every step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.importance import Bridge, Modality
from drople.methods.drople import DroPLe
from drople.regulariser import Regulariser

# Uniform numbers for the places of one sample that may drop: (modality, layer, sample, places) -> [places].
Uniform = Callable[[Modality, int, int, Tensor], Tensor]


def fresh_uniform(modality: Modality, layer: int, sample: int, places: Tensor) -> Tensor:
    return torch.rand(len(places), device=places.device)


class NaiveDroPLe:
    """Shares weights, prompts and bridge with `method`, and nothing of what it does with them."""

    def __init__(self, method: DroPLe, length: int = 77) -> None:
        assert isinstance(method.regulariser, Regulariser) and isinstance(method.regulariser.bridge, Bridge)
        assert method.visual_prompts is not None and method.lora is None, (
            "made with the options ablations.PAPER"
        )
        self.method, self.backbone, self.model = method, method.backbone, method.backbone.model
        self.options, self.regulariser = method.regulariser.options, method.regulariser
        self.bridge, self.visual_prompts = method.regulariser.bridge, method.visual_prompts
        self.uniform: Uniform = fresh_uniform
        self._lay_out(length)

    def _lay_out(self, length: int) -> None:
        """`{bos, context, class words, supplementary, eos}` of every class, padded with eos to `length`."""
        tokenizer, prompts = self.backbone.tokenizer, self.method.options
        rows, eos, slots = [], [], []
        for name in self.method.task.words:
            words, context = tokenizer.words(name), prompts.text_length
            before, after = list(range(1, 1 + context)), 1 + context + len(words)
            ids = [tokenizer.bos] + [0] * context + words + [0] * prompts.supplementary
            rows.append(ids + [tokenizer.eos] * (length - len(ids)))
            eos.append(len(ids))
            slots.append(before + list(range(after, after + prompts.supplementary)))
        device = self.backbone.device
        self.ids = torch.tensor(rows, device=device)
        self.eos = torch.tensor(eos, device=device)
        self.slots = torch.tensor(slots, device=device)
        self.classes = torch.arange(len(rows), device=device)

    def loss(self, images: Tensor, plain_images: Tensor, labels: Tensor) -> Tensor:
        """Algorithm 1 on augmented and plain images."""
        with torch.no_grad():
            pooled = self.model.vision_model(pixel_values=plain_images).pooler_output
            z_v_o = self.model.visual_projection(pooled).float()
        z_t_o = self.method.frozen_classes
        z_v_d, seen = self.encode_images(images)
        z_t_d, said = self.encode_text()
        scale, lam, o = self.backbone.logit_scale, self.regulariser.lam, self.options

        def logits(one: Tensor, other: Tensor) -> Tensor:
            return scale * F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T

        loss = F.cross_entropy(logits(z_v_d, z_t_d), labels)
        z_v_r, z_t_r = (z_v_d - lam * z_v_o) / (1 - lam), (z_t_d - lam * z_t_o) / (1 - lam)
        loss = loss - o.residual_entropy_visual * entropy(logits(z_v_r, z_t_o))
        loss = loss - o.residual_entropy_text * entropy(logits(z_v_o, z_t_r))
        layers = [self.alignment(v, t, labels) for v, t in zip(seen, said, strict=False)]
        return loss + o.alignment * torch.stack(layers).mean()

    # Towers ----------------------------------------------------------------------------------------

    def encode_images(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        tower, prompts = self.model.vision_model, self.visual_prompts().to(images.dtype)
        count, length = len(images), prompts.shape[1]
        states = tower.embeddings(images)
        states = tower.pre_layrnorm(torch.cat([states, prompts[0].expand(count, -1, -1)], dim=1))
        cls = torch.zeros(count, dtype=torch.long, device=images.device)
        target = torch.ones(states.shape[:2], dtype=torch.bool, device=images.device)
        target[:, 0] = False
        hidden, features = None, []
        for i, layer in enumerate(tower.encoder.layers):
            if 0 < i < len(prompts):
                states = torch.cat([states[:, :-length], prompts[i].expand(count, -1, -1)], dim=1)
            states, attention = attend(layer, states, hidden, causal=False)
            hidden = None
            if i < self.regulariser.layers["vision"]:
                hidden, gathered = self.drop("vision", i, states, attention, cls, target)
                features.append(gathered)
        return self.model.visual_projection(tower.post_layernorm(states[:, 0])).float(), features

    def encode_text(self) -> tuple[Tensor, list[Tensor]]:
        tower, prompts = self.model.text_model, self.method.text_prompts().to(self.backbone.dtype)
        states = tower.embeddings.token_embedding(self.ids)
        states = (
            self.enter(states, prompts[0]) + tower.embeddings.position_embedding.weight[: states.shape[1]]
        )
        places = torch.arange(states.shape[1], device=states.device)
        target = places < self.eos[:, None]
        hidden, features = None, []
        for i, layer in enumerate(tower.encoder.layers):
            if 0 < i < len(prompts):
                states = self.enter(states, prompts[i])
            states, attention = attend(layer, states, hidden, causal=True)
            hidden = None
            if i < self.regulariser.layers["text"]:
                hidden, gathered = self.drop("text", i, states, attention, self.eos, target)
                features.append(gathered)
        eos = states[self.classes, self.eos]
        return self.model.text_projection(tower.final_layer_norm(eos)).float(), features

    def enter(self, states: Tensor, prompts: Tensor) -> Tensor:
        """A layer's prompts take their places in every class."""
        states = states.clone()
        states[self.classes[:, None], self.slots] = prompts.expand(len(states), -1, -1)
        return states

    # Dropping --------------------------------------------------------------------------------------

    def drop(
        self,
        modality: Modality,
        layer: int,
        states: Tensor,
        attention: Tensor,
        anchor: Tensor,
        target: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Which tokens the next layer cannot see [N, L], and what each bridge token gathers [N, xi, d].

        `target` is every real token but cls or eos: the tokens that have an importance, and may drop.
        """
        rows = torch.arange(len(states), device=states.device)
        own = torch.eye(states.shape[1], dtype=torch.bool, device=states.device)
        class_score = attention[rows, :, anchor].mean(1)
        self_score = attention.masked_fill(~target[:, None, None, :] | own, 0.0).amax(-1).mean(1)
        bridge_attention, gathered = self.bridge_features(modality, states, target, anchor)
        cross_score = bridge_attention.amax(1)
        score = (class_score + self_score + cross_score) / 3
        low = score.masked_fill(~target, torch.inf).amin(1, keepdim=True)
        high = score.masked_fill(~target, -torch.inf).amax(1, keepdim=True)
        importance = torch.where(high > low, (score - low) / (high - low), 0.5)
        hidden = torch.zeros_like(target)
        for n in range(len(states)):
            places = torch.where(target[n])[0]
            p = self.options.p_max - importance[n, places] * (self.options.p_max - self.options.p_min)
            chosen = places[self.uniform(modality, layer, n, places) < p]
            if chosen.numel() > 0:
                hidden[n, chosen] = True
        return hidden, gathered

    def bridge_features(
        self, modality: Modality, states: Tensor, target: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`A_cross` [N, xi, L] and `A_cross X'`, every token projected into the shared space."""
        if self.options.alignment_detached:
            states = states.detach()
        project, dtype = self.bridge.project[modality], states.dtype
        projected = F.linear(states, project.weight.to(dtype), project.bias.to(dtype))
        scores = (self.bridge.scale * self.bridge.tokens).to(dtype) @ projected.transpose(1, 2)
        real = target | (torch.arange(states.shape[1], device=states.device) == anchor[:, None])
        attention = scores.masked_fill(~real[:, None], -torch.inf).softmax(-1, dtype=torch.float32).to(dtype)
        return attention, (attention @ projected).float()

    def alignment(self, seen: Tensor, said: Tensor, labels: Tensor) -> Tensor:
        """(1 - cos)/2 between what each bridge token gathers of an image and of its class."""
        total = torch.zeros((), device=seen.device)
        for n in range(len(labels)):
            one, other = F.normalize(seen[n], dim=-1), F.normalize(said[int(labels[n].item())], dim=-1)
            middle = (one + other) / 2
            total = total + (1 - ((one * middle).sum(-1) + (other * middle).sum(-1)) / 2).mean()
        return total / len(labels)


def attend(layer: Any, states: Tensor, hidden: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """A layer with its attention map [N, H, L, L]; a token of `hidden` is seen by itself alone."""
    attn = layer.self_attn
    count, length, width = states.shape
    normed = layer.layer_norm1(states)

    def heads(projection: nn.Module) -> Tensor:
        return projection(normed).view(count, length, attn.num_heads, -1).transpose(1, 2)

    query, key, value = heads(attn.q_proj), heads(attn.k_proj), heads(attn.v_proj)
    logits = query @ key.transpose(-2, -1) * attn.scale
    may_look = torch.ones(length, length, dtype=torch.bool, device=states.device)
    if causal:
        may_look = may_look.tril()
    if hidden is not None:
        own = torch.eye(length, dtype=torch.bool, device=states.device)
        may_look = may_look & (~hidden[:, None, None, :] | own)
    attention = logits.masked_fill(~may_look, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    mixed = (attention @ value).transpose(1, 2).reshape(count, length, width)
    states = states + attn.out_proj(mixed)
    return states + layer.mlp(layer.layer_norm2(states)), attention


def entropy(logits: Tensor) -> Tensor:
    """Of softmax over the classes, mean over the samples."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()
