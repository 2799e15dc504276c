"""Context Optimization (CoOp).

Zhou, Yang, Loy, Liu. "Learning to Prompt for Vision-Language Models." IJCV 2022. Published average
over 11 datasets, base-to-novel, ViT-B/16 (from the DroPLe paper's table): 82.69 / 63.22 / 71.66.

M context vectors before the class words, shared by all classes, learned by cross-entropy:
t_k = [V]_1 ... [V]_M [CLASS_k]. The authors' defaults: 16 tokens drawn at random, or 4 from
"a photo of a" (base-to-novel, CoCoOp paper); SGD 2e-3. Here 4, from the words.
"""

from drople.methods.base import register
from drople.methods.context import ContextMethod, ContextOptions


@register
class CoOp(ContextMethod):
    name = "coop"
    title = "Context Optimization"
    citation = "Zhou et al., IJCV 2022"
    Options = ContextOptions
