"""A tiny BERT from scratch for sentence classification with negation, with evaluation each epoch and the best model loaded at the end.
Ordinary; padding is dynamic and about a third of the tokens are padding."""
import random
import tempfile
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

GOOD, BAD, NEUTRAL, NOT = range(10, 25), range(25, 40), range(40, 75), 5
CLS, SEP, PAD = 1, 2, 0


def sentence(r):
    n = r.randint(6, 11)
    words, score = [], 0
    while len(words) < n:
        sign = 1
        if r.random() < .05 and len(words) < n - 1:
            words.append(NOT)                      # turns the next word round
            sign, u = -1, r.random() * .5
        else: u = r.random()
        if u < .25: words.append(r.choice(GOOD)); score += sign
        elif u < .5: words.append(r.choice(BAD)); score -= sign
        else: words.append(r.choice(NEUTRAL))
    return [CLS, *words, SEP], int(score > 0) if abs(score) > 1 else None      # clear cases only


class Reviews(Dataset):
    def __init__(self, n, seed):
        r = random.Random(seed)
        self.items = []
        while len(self.items) < n:
            ids, y = sentence(r)
            if y is not None: self.items.append((ids, y))

    def __len__(self): return len(self.items)
    def __getitem__(self, i): return {"input_ids": self.items[i][0], "label": self.items[i][1]}


def collate(batch):
    L = max(len(b["input_ids"]) for b in batch)
    ids = torch.tensor([b["input_ids"] + [PAD] * (L - len(b["input_ids"])) for b in batch])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.tensor([b["label"] for b in batch])}


def metrics(p): return {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())}


def train(watch):
    set_seed(1)
    model = BertForSequenceClassification(BertConfig(vocab_size=80, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                                     max_position_embeddings=32, num_labels=2, hidden_dropout_prob=.05, attention_probs_dropout_prob=0.0, initializer_range=.08))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, num_train_epochs=3, per_device_train_batch_size=32, per_device_eval_batch_size=250, learning_rate=1e-3, warmup_steps=40,
                                 weight_decay=.01, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
                                 save_total_limit=1, report_to=[], logging_strategy="epoch", disable_tqdm=True, use_cpu=True, remove_unused_columns=False)
        trainer = Trainer(model=model, args=args, train_dataset=Reviews(5000, 0), eval_dataset=Reviews(500, 1), data_collator=collate,
                          compute_metrics=metrics, callbacks=[*watch.callbacks("transformers")])
        trainer.train()
        return float(trainer.evaluate(Reviews(1000, 2))["eval_accuracy"])
