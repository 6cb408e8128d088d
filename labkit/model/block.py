"""One layer: Engram update of the streams, then the attention site, then the FFN site."""

from __future__ import annotations

import torch
from torch import nn

from labkit.config import LayerRole, ModelConfig
from labkit.model.attention import Attention
from labkit.model.engram import Engram
from labkit.model.hyper import collapse, expand, hyper_mix
from labkit.model.moe import MoE
from labkit.model.norm import RMSNorm
from labkit.model.run import Run


class Block(nn.Module):
    """Single-pass hyper-connections: a site reads the streams with the *previous* site's `pre`."""

    def __init__(self, config: ModelConfig, role: LayerRole, name: str,
                 attention: type[Attention] = Attention, experts: int | None = None,
                 per_token: int | None = None) -> None:
        """name: prefix of the checkpoint's keys. experts, per_token: None, the backbone's."""
        super().__init__()
        c = self.config = config
        self.role, self.name = role, name
        if role.engram:
            self.engram = Engram(c, role.layer)
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = attention(c, role, f"{name}.attn")
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn = MoE(c, f"{name}.ffn", experts or c.n_routed_experts,
                       per_token or c.num_experts_per_tok)
        C, D = c.hc_mult, c.hidden_size
        for site in ("attn", "ffn"):  # checkpoint keys {name}.hc_attn_fn, ...
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(torch.empty(C * (C + 2), C * D)))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(C * (C + 2))))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.ones(3)))

    def forward(self, h: torch.Tensor, pre: torch.Tensor, run: Run, rows: torch.Tensor | None,
                blocked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [B,T,C,D], pre [B,T,C], rows [B,T,(N-1)*heads] -> the streams and the next `pre`."""
        return self.sites(self.enter(h, run, rows, blocked), pre, run)

    def enter(self, h: torch.Tensor, run: Run, rows: torch.Tensor | None,
              blocked: torch.Tensor) -> torch.Tensor:
        """The Engram update of the streams, where this layer has one."""
        run.tap_tokens(f"{self.name}.streams_in", h)
        if self.role.engram:
            assert rows is not None
            h = self.engram(h, rows, blocked, run)
        run.tap_tokens(f"{self.name}.streams_after_engram", h)
        run.entering(self.role.layer, h)
        return h

    def publish(self, h: torch.Tensor, pre: torch.Tensor, run: Run) -> None:
        """What a Full layer stores of these tokens, without attending: the CED cut."""
        self.attn.publish(self.attn_norm(collapse(h, pre)), run)

    def sites(self, h: torch.Tensor, pre: torch.Tensor, run: Run,
              published: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention site, then the FFN site; published: see `Attention.forward`."""
        c = self.config
        fuse = run.kernels.fuse
        mix = fuse(hyper_mix)(h, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, c)
        x = fuse(collapse)(h, pre)                                      # [B,T,D]
        h = fuse(expand)(self.attn(self.attn_norm(x), run, published), h, mix)

        mix2 = fuse(hyper_mix)(h, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, c)
        x = fuse(collapse)(h, mix.pre)
        h = fuse(expand)(self.ffn(self.ffn_norm(x), run), h, mix2)
        return h, mix2.pre
