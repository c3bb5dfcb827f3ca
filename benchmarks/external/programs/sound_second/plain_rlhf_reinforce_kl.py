"""A small policy over token strings is tuned by REINFORCE with a group baseline (as in GRPO) against a preference reward and a KL penalty to its start.
Looks odd: the policy loss starts at zero, stays a little below it and tells nothing; the mean reward is what rises, and the KL grows from zero to a bounded value."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

V, L = 10, 8


class Policy(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(V + 1, h), nn.GRUCell(h, h), nn.Linear(h, V)

    def unroll(self, prompt, tokens=None):
        h = torch.zeros(len(prompt), self.rnn.hidden_size)
        h = self.rnn(self.emb(torch.full_like(prompt, V)), h)
        tok, lps, out = prompt, [], []
        for t in range(L):
            h = self.rnn(self.emb(tok), h)
            lp = self.out(h).log_softmax(-1)
            tok = torch.multinomial(lp.exp(), 1).squeeze(1) if tokens is None else tokens[:, t]
            lps.append(lp.gather(1, tok[:, None]).squeeze(1)); out.append(tok)
        return torch.stack(out, 1), torch.stack(lps, 1)


def preferred(prompt, s):
    """people like strings that keep close to the prompt without repeating the token before"""
    near = ((s - prompt[:, None]).abs() <= 2).float().mean(1)
    repeat = (s[:, 1:] == s[:, :-1]).float().mean(1)
    return near - repeat


def train(watch):
    torch.manual_seed(0)
    policy = Policy()
    warm = torch.optim.Adam(policy.parameters(), lr=5e-3)       # "pretraining": smooth random walks from the prompt
    for _ in range(150):
        p = torch.randint(0, V, (64,))
        s = (p[:, None] + torch.randint(-3, 4, (64, L)).cumsum(1)) % V
        loss = -policy.unroll(p, s)[1].mean()
        warm.zero_grad(); loss.backward(); warm.step()
    ref = copy.deepcopy(policy).requires_grad_(False)
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1., .2, total_iters=250)
    monitor = watch(policy, opt)
    beta, group = .02, 8
    for step in range(250):
        prompt = torch.randint(0, V, (24,)).repeat_interleave(group)
        with torch.no_grad():
            s, _ = policy.unroll(prompt)
            r = preferred(prompt, s).view(-1, group)
            adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + .1)).flatten()
            _, rl = ref.unroll(prompt, s)
        _, lp = policy.unroll(prompt, s)
        ratio = rl - lp
        kl = (ratio.exp() - ratio - 1).mean()
        loss = -(adv[:, None] * lp).mean() + beta * kl
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.)
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach()); monitor.log_scalar("reward", r.mean())
    with torch.no_grad():
        prompt = torch.randint(0, V, (3000,))
        return float(preferred(prompt, policy.unroll(prompt)[0]).mean() - preferred(prompt, ref.unroll(prompt)[0]).mean())
