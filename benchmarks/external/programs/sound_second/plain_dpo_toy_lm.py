"""A tiny GRU language model is first fine-tuned on sequences, then tuned by DPO on preference pairs (ascending runs preferred) against a frozen copy.
Looks odd: the DPO loss starts at exactly 0.693, the learning rate falls by a factor of ten for the second stage, and the likelihood of preferred answers can fall."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

V, L = 12, 8          # token 0 is BOS


def corpus(n, g):
    """random walks over tokens 1..11"""
    x = torch.randint(1, V, (n, 1), generator=g)
    out = [x]
    for _ in range(L - 1):
        step = torch.randint(-2, 3, (n, 1), generator=g)
        x = (x + step).clamp(1, V - 1)
        out.append(x)
    return torch.cat(out, 1)


def reward(s): return (s[:, 1:] > s[:, :-1]).float().sum(1)


class LM(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(V, h), nn.GRU(h, h, batch_first=True), nn.Linear(h, V)

    def logps(self, s):
        inp = F.pad(s[:, :-1], (1, 0))
        lp = self.out(self.rnn(self.emb(inp))[0]).log_softmax(-1)
        return lp.gather(-1, s[..., None]).squeeze(-1).sum(1)

    @torch.no_grad()
    def sample(self, n):
        tok, h, out = torch.zeros(n, 1, dtype=torch.long), None, []
        for _ in range(L):
            o, h = self.rnn(self.emb(tok), h)
            tok = torch.multinomial(self.out(o[:, -1]).softmax(-1), 1)
            out.append(tok)
        return torch.cat(out, 1)


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    policy = LM()
    opt = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.01)
    monitor = watch(policy, opt)
    data = corpus(8000, g)
    for step in range(250):
        s = data[torch.randint(0, len(data), (64,))]
        loss = -policy.logps(s).mean() / L
        opt.zero_grad(); loss.backward(); opt.step()
        monitor.log_scalar("sft_loss", loss.detach())
    base = reward(policy.sample(2000)).mean().item()

    ref = copy.deepcopy(policy).requires_grad_(False)
    a, b = policy.sample(3000), policy.sample(3000)
    ra, rb = reward(a), reward(b)
    keep = ra != rb
    a, b, ra, rb = a[keep], b[keep], ra[keep], rb[keep]
    flip = torch.rand(len(a)) > torch.sigmoid(2 * (ra - rb))         # noisy annotators
    win, lose = torch.where(flip[:, None], b, a), torch.where(flip[:, None], a, b)
    with torch.no_grad(): ref_margin = ref.logps(win) - ref.logps(lose)
    beta = 0.3
    dpo_opt = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    monitor = watch(policy, dpo_opt)
    for step in range(250):
        i = torch.randint(0, len(win), (64,))
        loss = -F.logsigmoid(beta * (policy.logps(win[i]) - policy.logps(lose[i]) - ref_margin[i])).mean()
        dpo_opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        dpo_opt.step()
        monitor.log_scalar("dpo_loss", loss.detach())
    after = reward(policy.sample(2000)).mean().item()
    print("reward before", base, "after", after)
    return after - base
