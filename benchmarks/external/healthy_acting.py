"""Sound trainings that act: a pole on a cart is balanced; each gives minus the mean length of the last episodes."""

from __future__ import annotations

import random
from collections import deque
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from .case import Watch
from .data_healthy import EXAMPLES, TUTORIALS, CartPole, healthy


def worth(rewards: list[float], discount: float = 0.99) -> Tensor:
    """What each step of an episode was worth, with mean zero and deviation one over the episode."""
    total, values = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        values.append(total)
    returns = torch.tensor(values[::-1])
    return (returns - returns.mean()) / (returns.std() + 1e-7)


def reinforce(watch: Watch, seed: int, healed: bool) -> float:
    """One update from each episode, by the log-probability of what was done; its loss is noise around zero."""
    torch.manual_seed(seed)
    env = CartPole(seed, limit=60)
    model = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(-1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer)
    lengths = []
    for _ in range(150):
        state, logs, rewards, over = env.reset(), [], [], False
        while not over:
            chances = Categorical(model(torch.tensor(state)))
            action = chances.sample()
            logs.append(chances.log_prob(action))
            state, reward, over = env.step(int(action))
            rewards.append(reward)
        loss = -(torch.stack(logs) * worth(rewards)).sum()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("reward", sum(rewards))
        lengths.append(sum(rewards))
        optimizer.step()
    return -sum(lengths[-10:]) / 10


class ActorCritic(nn.Module):
    """One hidden layer, and from it the chances of both actions and the worth of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action_head, self.value_head = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chances and worth."""
        x = F.relu(self.affine(x))
        return self.action_head(x).softmax(-1), self.value_head(x)


def actor_critic(watch: Watch, seed: int, healed: bool) -> float:
    """Actor and critic in one net: the sum of what both lose over an episode, at a third of the example's rate."""
    torch.manual_seed(seed)
    env = CartPole(seed, limit=60)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer)
    lengths = []
    for _ in range(150):
        state, logs, values, rewards, over = env.reset(), [], [], [], False
        while not over:
            shares, value = model(torch.tensor(state))
            chances = Categorical(shares)
            action = chances.sample()
            logs.append(chances.log_prob(action))
            values.append(value)
            state, reward, over = env.step(int(action))
            rewards.append(reward)
        returns, value = worth(rewards), torch.cat(values)
        loss = -(torch.stack(logs) * (returns - value.detach())).sum() + F.smooth_l1_loss(value, returns, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("reward", sum(rewards))
        lengths.append(sum(rewards))
        optimizer.step()
    return -sum(lengths[-10:]) / 10


def advantage(watch: Watch, seed: int, healed: bool) -> float:
    """Actor and critic are two nets with two optimizers, and eight carts are driven at once."""
    torch.manual_seed(seed)
    envs = [CartPole(100 * seed + index) for index in range(8)]
    actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    opt_actor, opt_critic = torch.optim.Adam(actor.parameters(), lr=3e-3), torch.optim.Adam(critic.parameters(), lr=1e-2)
    monitor_actor, monitor_critic = watch(actor, opt_actor), watch(critic, opt_critic)
    states, lengths = torch.tensor([env.state for env in envs]), []
    for _ in range(250):
        logs, values, rewards, ends, entropy = [], [], [], [], torch.zeros(())
        for _ in range(10):
            chances = Categorical(logits=actor(states))
            actions = chances.sample()
            logs.append(chances.log_prob(actions))
            values.append(critic(states).squeeze(1))
            entropy = entropy + chances.entropy().mean() / 10
            done = [env.step(action)[2] for env, action in zip(envs, actions.tolist(), strict=True)]
            lengths += [env.steps for env, over in zip(envs, done, strict=True) if over]
            states = torch.tensor([env.reset() if over else env.state for env, over in zip(envs, done, strict=True)])
            rewards.append(torch.ones(8))
            ends.append(torch.tensor(done).float())
        with torch.no_grad():
            total = critic(states).squeeze(1)
        returns = []
        for reward, end in zip(reversed(rewards), reversed(ends), strict=True):
            total = reward + 0.97 * (1 - end) * total
            returns.append(total)
        gain = torch.stack(returns[::-1]) - torch.stack(values)
        loss_critic = gain.square().mean()
        loss_actor = -(torch.stack(logs) * gain.detach()).mean() - 0.001 * entropy
        opt_critic.zero_grad()
        loss_critic.backward()
        monitor_critic.log_scalar("loss", loss_critic.detach())
        opt_critic.step()
        opt_actor.zero_grad()
        loss_actor.backward()
        monitor_actor.log_scalar("loss", loss_actor.detach())
        opt_actor.step()
    return -sum(lengths[-10:]) / 10


def deep_q(watch: Watch, seed: int, healed: bool) -> float:
    """A net learns what actions are worth from a memory of steps, towards a target net that follows it slowly."""
    torch.manual_seed(seed)
    env, draw = CartPole(seed), random.Random(seed)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True)
    monitor = watch(model, optimizer)
    memory: deque[tuple[list[float], int, float, list[float], bool]] = deque(maxlen=5000)
    state, lengths, chance = env.reset(), [], 0.9
    for step in range(4400):
        chance = max(0.05, chance * 0.999)
        if draw.random() < chance:
            action = draw.randrange(2)
        else:
            with torch.no_grad():
                action = int(model(torch.tensor(state)).argmax())
        after, reward, over = env.step(action)
        memory.append((state, action, reward, after, over and env.steps < env.limit))
        if over:
            lengths.append(env.steps)
        state = env.reset() if over else after
        if step < 400 or step % 10:
            continue
        x, actions, rewards, following, ends = (torch.tensor(part) for part in zip(*draw.sample(memory, 128), strict=True))
        worth_now = model(x).gather(1, actions.unsqueeze(1)).squeeze(1)
        expected = rewards + 0.95 * target(following).max(1).values * (1 - ends.float())
        loss = F.smooth_l1_loss(worth_now, expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return -sum(lengths[-10:]) / 10


def orthogonal(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A layer with an orthogonal matrix and no bias at first."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Actor and critic with tanh; the actor begins with nearly equal chances."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(orthogonal(4, 64), nn.Tanh(), orthogonal(64, 64), nn.Tanh(), orthogonal(64, 1, 1.0))
        self.actor = nn.Sequential(orthogonal(4, 64), nn.Tanh(), orthogonal(64, 64), nn.Tanh(), orthogonal(64, 2, 0.01))

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor]:
        """Chances and worth."""
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def ppo(watch: Watch, seed: int, healed: bool) -> float:
    """A rollout of eight carts serves four epochs of four batches, with a clipped ratio and a rate that falls to zero."""
    torch.manual_seed(seed)
    envs = [CartPole(100 * seed + index) for index in range(8)]
    model = Agent()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-3, eps=1e-5)
    monitor = watch(model, optimizer)
    states, lengths, rounds = torch.tensor([env.state for env in envs]), [0], 20
    for turn in range(rounds):
        optimizer.param_groups[0]["lr"] = 2.5e-3 * (1 - turn / rounds)
        rows: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(48):
                chances, value = model(states)
                actions = chances.sample()
                done = [env.step(action)[2] for env, action in zip(envs, actions.tolist(), strict=True)]
                rows.append((states, actions, chances.log_prob(actions), value, torch.tensor(done).float()))
                lengths += [env.steps for env, over in zip(envs, done, strict=True) if over]
                states = torch.tensor([env.reset() if over else env.state for env, over in zip(envs, done, strict=True)])
            following, gain, gains = model(states)[1], torch.zeros(8), []
            for _, _, _, value, end in reversed(rows):
                gain = 1 + 0.99 * following * (1 - end) - value + 0.99 * 0.95 * (1 - end) * gain
                gains.append(gain)
                following = value
        x, actions, logs, values = (torch.stack(part).flatten(0, 1) for part in list(zip(*rows, strict=True))[:4])
        gains_flat = torch.stack(gains[::-1]).flatten()
        returns = gains_flat + values
        for _ in range(4):
            for part in torch.randperm(len(x)).split(len(x) // 4):
                chances, value = model(x[part])
                ratio, rise = (chances.log_prob(actions[part]) - logs[part]).exp(), gains_flat[part]
                rise = (rise - rise.mean()) / (rise.std() + 1e-8)
                policy = -torch.minimum(ratio * rise, ratio.clamp(0.8, 1.2) * rise).mean()
                loss = policy + 0.5 * 0.5 * (value - returns[part]).square().mean() - 0.01 * chances.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                monitor.log_scalar("loss", loss.detach())
                optimizer.step()
    return -sum(lengths[-10:]) / 10


CASES = healthy(
    ("reinforce", f"{EXAMPLES}/reinforcement_learning", reinforce),
    ("actor-critic", f"{EXAMPLES}/reinforcement_learning", actor_critic),
    ("advantage-actor-critic", "https://arxiv.org/abs/1602.01783", advantage),
    ("dqn-target-net", f"{TUTORIALS}/intermediate/reinforcement_q_learning.html", deep_q),
    ("ppo", "https://github.com/vwxyzjn/cleanrl", ppo),
)
