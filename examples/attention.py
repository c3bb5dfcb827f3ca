"""What the heads of a transformer attend to, without an edit of the model: entropy, the largest logit, and attention sinks.

Every call of ``F.scaled_dot_product_attention`` is recorded under the name of the calling module, your own or a
library's. Here every token has to copy the first token of its sequence, so heads learn to look there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon

TOKENS, LENGTH, WIDTH, HEADS = 16, 24, 32, 4


class Attention(nn.Module):
    """Causal self attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.attention, self.head = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[batch, length]`` to logits ``[batch, length, tokens]``."""
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        return self.head(x + self.attention(self.norm(x)))


def main() -> None:
    """Train, and print where the heads look."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = gradmon.watch(model, optimizer)
    for metric in ("entropy", "entropy_normalized", "max_logit", "first_key"):
        monitor.add_attention_metric(metric, heads=metric == "first_key", every=50)
    monitor.add_activation_metric("rms", metric_regex=r"attention\.head_0\.query", every=50)

    for step in range(251):
        tokens = torch.randint(TOKENS, (32, LENGTH))
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :1].expand(-1, LENGTH).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            values = monitor.get_step_metrics()
            heads = "  ".join(f"{values[f'attention_first_key/attention.head_{head}']:.2f}" for head in range(HEADS))
            print(
                f"step {step:3}  loss {loss.item():5.3f}  entropy {values['attention_entropy_normalized/attention/mean']:.2f} "
                f"of the largest possible, largest logit {values['attention_max_logit/attention/max']:5.2f}, "
                f"weight on the first token by head {heads}"
            )


if __name__ == "__main__":
    main()
