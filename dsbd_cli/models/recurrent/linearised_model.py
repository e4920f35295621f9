"""The model of checkpoints that checkpoints/linearised.py describes: a LLaMA with linear attention.

Shape letters: B sequences, n tokens, H heads, P numbers of a head, C = H * P channels, J taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from dsbd_cli.models.recurrent.mixer_cache import MixerCache


class LinearAttention(LlamaAttention):
    """One attention layer. In a forest our scans take the place of the two functions that its forward calls by name
    (mixers.py)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, kernel = config.num_attention_heads, config.linear_kernel_size
        self.taps = kernel // 2 + 1
        if "dwconv" in config.linear_parts:
            # only its weights are used: the second half of each kernel would read later tokens
            self.dwconv = nn.Conv2d(heads, heads, (kernel, 1), groups=heads, bias=False)
        for part in ("global_factor", "local_factor"):
            if part in config.linear_parts:
                self.register_parameter(part, nn.Parameter(torch.ones(1)))

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert position_embeddings is not None
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        groups = self.num_key_value_groups
        q, k, v = (
            part.transpose(1, 2) for part in (_unit(q), _unit(repeat_kv(k, groups)), repeat_kv(v, groups))
        )  # [B, n, H, P]
        values = v.flatten(2).transpose(1, 2)  # [B, C, n]
        if isinstance(past_key_values, MixerCache):
            past_key_values.update_conv_state(values, self.layer_idx)
        near, far = (getattr(self, part, None) for part in ("local_factor", "global_factor"))
        y = grouped_linear_attention(q, k, v, self.config.linear_group_size, near, far).flatten(2)
        if "dwconv" in self.config.linear_parts:
            kernel = self.dwconv.weight[:, 0, : self.taps, 0].repeat_interleave(self.head_dim, 0)  # [C, J]
            y = y + causal_conv1d_fn(values, kernel).transpose(1, 2)
        return self.o_proj(y.to(hidden_states.dtype)), None


class LinearisedLlama(LlamaForCausalLM):
    """A LLaMA with linear attention in all layers. Its plain forward reads whole texts. Like the published code it
    handles neither a cache nor padding."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = LinearAttention(config, index)
        self.post_init()

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Generate as transformers does, every step a whole text. Raises ValueError for padded texts."""
        mask = options.get("attention_mask")
        if mask is not None and not mask.all():
            raise ValueError("linearised LLaMA counts its groups from the first place: give texts of one length")
        return super().generate(*arguments, **{**options, "use_cache": False})  # type: ignore[misc]


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def causal_conv1d_fn(x: Tensor, weight: Tensor) -> Tensor:
    """Return the depthwise convolution over each token and those before it: x [B, C, n], weight [C, J], whose last tap
    is the token's own."""
    padded = nn.functional.pad(x, (weight.shape[1] - 1, 0))
    return nn.functional.conv1d(padded, weight.unsqueeze(1), groups=x.shape[1])


def grouped_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, group: int, near: Tensor | None, far: Tensor | None
) -> Tensor:
    """Return attention [B, n, H, P] of q, k, v [B, n, H, P]. near, far: factors [1] of the parts within a token's group
    and before it, 1 where None."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    scores = q @ k.transpose(2, 3)
    position = torch.arange(q.shape[2], device=q.device)
    within = position.unsqueeze(1) // group == position // group
    own = scores.relu().square() * (1 if near is None else near)
    weight = torch.where(within, own, scores * (1 if far is None else far)).tril()
    return (weight @ v).transpose(1, 2)
