"""The Transformers Trainer with a plain nn.Module and an overridden compute_loss: class-weighted cross-entropy for a rare class, gradient accumulation over two batches.
Looks odd: the model is no language model at all, and the weighted loss stays higher than the unweighted one would be."""
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Fraud(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 12, generator=g)
        s = 2.5 * x[:, 0] * x[:, 1] + 1.5 * torch.relu(x[:, 2]) + x[:, 3] - 4.8 + .6 * torch.randn(n, generator=g)
        self.x, self.y = x, (s > 0).long()

    def __len__(self): return len(self.y)
    def __getitem__(self, i): return {"features": self.x[i], "labels": self.y[i]}


class FraudNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def forward(self, features, labels=None): return {"logits": self.net(features)}


class WeightedTrainer(Trainer):
    def __init__(self, *a, class_weight, **k):
        super().__init__(*a, **k)
        self.class_weight = class_weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = F.cross_entropy(out["logits"], labels, weight=self.class_weight)
        return (loss, out) if return_outputs else loss


def train(watch):
    set_seed(3)
    tr, te = Fraud(12000, 0), Fraud(4000, 1)
    freq = torch.bincount(tr.y).float() / len(tr)
    model = FraudNet()
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, num_train_epochs=4, per_device_train_batch_size=64, gradient_accumulation_steps=2, learning_rate=2e-3, warmup_steps=20,
                                 weight_decay=.01, report_to=[], save_strategy="no", logging_steps=40, disable_tqdm=True, use_cpu=True)
        WeightedTrainer(model=model, args=args, train_dataset=tr, class_weight=(1 / freq) ** .5 / ((1 / freq) ** .5).mean(),
                        callbacks=[*watch.callbacks("transformers")]).train()
    model.eval()
    with torch.no_grad(): s = model(te.x)["logits"].softmax(1)[:, 1]
    r = s.argsort().argsort().float() + 1
    p = te.y.sum()
    return float((r[te.y == 1].sum() - p * (p + 1) / 2) / (p * (len(te) - p)))      # AUC
