"""Masked language modelling with a small tied BERT: 15 percent of the tokens are masked anew in each batch (80/10/10).
Looks odd: most positions have label -100, the loss starts at the logarithm of the vocabulary and has a floor far above zero, as a tenth of the tokens is random."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

VOCAB, MASK, L = 40, 39, 12


def language(n, seed):
    """a first-order pattern: the token is a function of the one before it, with a tenth noise"""
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 36, (36,), generator=torch.Generator().manual_seed(3))
    x = torch.randint(0, 36, (n, L), generator=g)
    for t in range(1, L):
        det = table[x[:, t - 1]]
        x[:, t] = torch.where(torch.rand(n, generator=g) < .9, det, x[:, t])
    return x


class Text(Dataset):
    def __init__(self, n, seed): self.x = language(n, seed)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i]


class MlmCollator:
    def __call__(self, rows):
        x = torch.stack(rows)
        labels = x.clone()
        pick = torch.rand(x.shape) < .15
        labels[~pick] = -100
        u = torch.rand(x.shape)
        x = torch.where(pick & (u < .8), MASK, x)
        x = torch.where(pick & (u >= .9), torch.randint(0, 36, x.shape), x)
        return {"input_ids": x, "labels": labels}


def train(watch):
    set_seed(2)
    model = BertForMaskedLM(BertConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                       max_position_embeddings=L, hidden_dropout_prob=0.0, initializer_range=0.05, attention_probs_dropout_prob=0.0))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, max_steps=400, per_device_train_batch_size=32, per_device_eval_batch_size=200, learning_rate=3e-3, warmup_steps=50, adam_beta2=.98,
                                 weight_decay=.01, lr_scheduler_type="cosine", report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True, use_cpu=True, remove_unused_columns=False)
        t = Trainer(model=model, args=args, train_dataset=Text(10000, 0), eval_dataset=Text(1000, 1), data_collator=MlmCollator(),
                    callbacks=[*watch.callbacks("transformers")])
        t.train()
        return float(t.evaluate()["eval_loss"])
