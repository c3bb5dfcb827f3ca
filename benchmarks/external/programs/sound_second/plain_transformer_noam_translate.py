"""nn.Transformer translates a toy language (swap pairs, map words) with label smoothing and the Noam schedule of the original paper.
Looks odd: Adam's lr is 1.0 and a LambdaLR scales it to about 2e-3 at the top, and eps is 1e-9; the smoothed loss has a floor near 0.65."""
import torch
import torch.nn as nn
import torch.nn.functional as F

V, PAD, BOS, EOS = 30, 0, 1, 2


def batch(n, g, perm):
    """source words 3..29; the target is the source read in swapped pairs and mapped by a fixed permutation"""
    L = 8
    src = torch.randint(3, V, (n, L), generator=g)
    tgt = perm[src].view(n, L // 2, 2).flip(2).reshape(n, L)
    short = torch.rand(n, generator=g) < .5                      # half of the sentences have six words
    src[short, 6:] = PAD; tgt[short, 6:] = PAD
    tgt = F.pad(tgt, (0, 1))
    tgt[torch.arange(n), torch.where(short, 6, 8)] = EOS
    return src, torch.cat([torch.full((n, 1), BOS), tgt[:, :-1]], 1), tgt


class Translator(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.d = d
        self.src, self.tgt = nn.Embedding(V, d, padding_idx=PAD), nn.Embedding(V, d, padding_idx=PAD)
        for e in (self.src, self.tgt): nn.init.normal_(e.weight, std=d ** -.5)
        pos, i = torch.arange(12.)[:, None], torch.arange(0, d, 2)
        pe = torch.zeros(12, d)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos / 10000 ** (i / d)), torch.cos(pos / 10000 ** (i / d))
        self.register_buffer("pe", pe)
        self.tr = nn.Transformer(d, 4, 1, 1, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, V)

    def forward(self, s, t):
        mask = torch.triu(torch.ones(t.shape[1], t.shape[1], dtype=torch.bool), 1)
        e = lambda emb, x: emb(x) * self.d ** .5 + self.pe[:x.shape[1]]
        return self.out(self.tr(e(self.src, s), e(self.tgt, t), tgt_mask=mask, src_key_padding_mask=s.eq(PAD), memory_key_padding_mask=s.eq(PAD)))


def train(watch):
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(0)
    perm = torch.cat([torch.arange(3), torch.randperm(V - 3, generator=g) + 3])
    model = Translator()
    warm = 80
    opt = torch.optim.Adam(model.parameters(), lr=1.0, betas=(.9, .98), eps=1e-9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.25 * 48 ** -.5 * min((s + 1) ** -.5, (s + 1) * warm ** -1.5))
    monitor = watch(model, opt)
    for step in range(500):
        s, ti, to = batch(48, g, perm)
        loss = F.cross_entropy(model(s, ti).flatten(0, 1), to.flatten(), ignore_index=PAD, label_smoothing=.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    model.eval()
    s, ti, to = batch(500, torch.Generator().manual_seed(9), perm)
    with torch.no_grad(): ok = (model(s, ti).argmax(-1) == to) | to.eq(PAD)
    return ok.all(1).float().mean().item()
