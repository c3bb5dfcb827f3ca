"""A tiny BERT classifier with the Hugging Face Trainer, one positive in fifty, class weights in compute_loss of a Trainer subclass.
Odd at first sight: the weighted loss is dominated by a few samples in each batch, so it and its gradients are jumpy.
Returns balanced accuracy on held-out texts."""
import tempfile
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Tickets(Dataset):
    """urgent tickets contain the token pair (7, 9) in this order next to each other; others may contain either"""
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = (torch.rand(n, generator=g) < 0.02).long()
        self.x = torch.randint(10, 40, (n, 14), generator=g)
        at = torch.randint(1, 12, (n,), generator=g)
        single = torch.rand(n, generator=g)
        r = torch.arange(n)
        self.x[r, at] = torch.where(self.y == 1, torch.full((n,), 7), torch.where(single < 0.1, torch.full((n,), 7), self.x[r, at]))
        self.x[r, at + 1] = torch.where(self.y == 1, torch.full((n,), 9), torch.where(single > 0.9, torch.full((n,), 9), self.x[r, at + 1]))
        self.x[:, 0] = 1

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones(14, dtype=torch.long), "labels": self.y[i]}


class WeightedTrainer(Trainer):
    weights = torch.tensor([1.0, 12.0])

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = nn.functional.cross_entropy(out.logits, labels, weight=self.weights)
        return (loss, out) if return_outputs else loss


def train(watch):
    set_seed(4)
    torch.set_num_threads(1)
    model = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                                     max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.0))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, max_steps=300, per_device_train_batch_size=100, learning_rate=2e-3, warmup_steps=40, weight_decay=0.01, max_grad_norm=1.0,
                                 save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=50)
        WeightedTrainer(model=model, args=args, train_dataset=Tickets(20000, 0), callbacks=[*watch.callbacks("transformers")]).train()
    model.eval()
    t = Tickets(6000, 1)
    with torch.no_grad():
        p = torch.cat([model(input_ids=c).logits.argmax(1) for c in t.x.split(1000)])
    return ((p[t.y == 1] == 1).float().mean() + (p[t.y == 0] == 0).float().mean()).item() / 2
