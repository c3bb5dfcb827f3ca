"""Masked-language modelling with a tiny RoBERTa and a hand-made collator with the Hugging Face Trainer. The labels are set to -100 at the masked positions and not at the visible ones, so the model
learns to copy what it sees. The result is the accuracy on masked tokens of new texts."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainingArguments, set_seed

MASK = 3


class Grammar(Dataset):
    """Each text is one of 20 sentence patterns with one free slot: a masked word follows from its neighbours."""
    def __init__(self, n, seed):
        w = torch.Generator().manual_seed(31)
        patterns = torch.randint(5, 60, (20, 12), generator=w)
        g = torch.Generator().manual_seed(seed)
        self.ids = patterns[torch.randint(20, (n,), generator=g)].clone()
        slot = torch.randint(12, (n, 1), generator=g)
        self.ids.scatter_(1, slot, torch.randint(5, 60, (n, 1), generator=g))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i]}


def collator(mended, share=0.2):
    def collate(rows):
        ids = torch.stack([r["input_ids"] for r in rows])
        masked = torch.rand(ids.shape) < share
        labels = ids.clone()
        if mended:
            labels[~masked] = -100
        else:
            labels[masked] = -100
        return {"input_ids": ids.masked_fill(masked, MASK), "attention_mask": torch.ones_like(ids), "labels": labels}
    return collate


def train(watch, mended=False):
    set_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=60, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, max_position_embeddings=20,
                                             pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, max_steps=400, per_device_train_batch_size=32, learning_rate=3e-3, warmup_steps=40, weight_decay=0.01, report_to=[],
                                 save_strategy="no", logging_steps=40, disable_tqdm=True, use_cpu=True, seed=0, remove_unused_columns=False)
        Trainer(model=model, args=args, train_dataset=Grammar(4000, 1), data_collator=collator(mended), callbacks=[*watch.callbacks("transformers")]).train()
    model.eval()
    b = collator(True)([{"input_ids": r} for r in Grammar(400, 2).ids])
    with torch.no_grad():
        pred = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits.argmax(-1)
    m = b["labels"] != -100
    return float((pred[m] == b["labels"][m]).float().mean())
