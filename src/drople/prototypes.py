"""What the training images say of their classes, beside the text.

A class that was trained on has pictures as well as a name. Its weight becomes

    w_k = t_k / |t_k| + omega m_k,        m_k the mean of the unit features of its training images, made unit,

with the features of the learned image tower. It is folded like any class weight: prediction costs the same.
Pictures are nearer to pictures than to words, so a class without them could not stand beside one that has them: as
soon as one class that is asked for was not trained on, all are asked for by their text alone.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """`m` [K, E], zeros until the images have been shown."""

    means: Tensor

    def __init__(self, words: Sequence[str], dim: int, weight: float) -> None:
        super().__init__()
        self.places = {word: place for place, word in enumerate(words)}
        self.weight = weight
        self.register_buffer("means", torch.zeros(len(words), dim))

    @torch.no_grad()
    def hold(self, features: Tensor, labels: Tensor) -> None:
        """Take the training images' features [N, E]; with a class that has none, none are taken."""
        if len(labels.unique()) < len(self.means):
            return
        # Not on a GPU, which adds in another order each time.
        units = F.normalize(features.float(), dim=-1).cpu()
        sums = torch.zeros(self.means.shape).index_add_(0, labels.cpu(), units)
        self.means.copy_(F.normalize(sums, dim=-1))

    def join(self, words: Sequence[str], classes: Tensor) -> Tensor:
        """The classes' features [K, E] with what is known of their images."""
        if not all(word in self.places for word in words):
            return classes
        means = self.means[[self.places[word] for word in words]]
        return F.normalize(classes, dim=-1) + self.weight * means.to(classes.dtype)
