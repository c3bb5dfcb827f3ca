"""A tiny BERT from scratch classifies texts by whether topic words outnumber others. warmup_steps=10000 was copied from a large run while this run has 300 steps, so the rate never
gets above three percent of its peak. The result is the loss on held-out data."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Keywords(Dataset):
    """Label 1 when the 'topic' words outnumber the 'other' words."""
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 60, (n, 18), generator=g)
        self.ids[:, 0] = 1
        score = (self.ids[:, 1:] < 20).sum(1) - (self.ids[:, 1:] >= 45).sum(1)
        self.y = (score > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(18, dtype=torch.long), "labels": self.y[i]}


def train(watch, mended=False):
    set_seed(1)
    model = BertForSequenceClassification(BertConfig(vocab_size=60, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                                     max_position_embeddings=20, num_labels=2))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, max_steps=300, per_device_train_batch_size=32, learning_rate=1e-3, warmup_steps=30 if mended else 10000,
                                 report_to=[], save_strategy="no", logging_steps=25, disable_tqdm=True, use_cpu=True, seed=1)
        trainer = Trainer(model=model, args=args, train_dataset=Keywords(4000, 1), eval_dataset=Keywords(600, 2), callbacks=[*watch.callbacks("transformers")])
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])
