"""A two-layer T5 from scratch learns to reverse short digit strings with the Seq2SeqTrainer and Adafactor.
Looks odd: Adafactor without a first moment (its default here), and padded labels of -100 take no part in the loss."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed


class Reverse(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(2, 10, (int(torch.randint(3, 7, (1,), generator=g)),), generator=g) for _ in range(n)]

    def __len__(self): return len(self.rows)

    def __getitem__(self, i):
        s = self.rows[i]
        pad = 7 - len(s)
        eos = torch.tensor([1])
        return {"input_ids": torch.cat([s, eos, torch.zeros(pad - 1, dtype=torch.long)]),
                "attention_mask": torch.cat([torch.ones(len(s) + 1, dtype=torch.long), torch.zeros(pad - 1, dtype=torch.long)]),
                "labels": torch.cat([s.flip(0), eos, torch.full((pad - 1,), -100)])}


def train(watch):
    set_seed(5)
    cfg = T5Config(vocab_size=10, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0, eos_token_id=1,
                   decoder_start_token_id=0, relative_attention_num_buckets=16, relative_attention_max_distance=16)
    model = T5ForConditionalGeneration(cfg)
    with tempfile.TemporaryDirectory() as out:
        args = Seq2SeqTrainingArguments(out, max_steps=450, per_device_train_batch_size=32, per_device_eval_batch_size=250, optim="adafactor", learning_rate=3e-3,
                                        lr_scheduler_type="linear", warmup_steps=50, report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True, use_cpu=True)
        tr = Seq2SeqTrainer(model=model, args=args, train_dataset=Reverse(20000, 0), callbacks=[*watch.callbacks("transformers")])
        tr.train()
    model.eval()
    test = Reverse(300, 1)
    hit = n = 0
    with torch.no_grad():
        b = {k: torch.stack([test[i][k] for i in range(300)]) for k in ("input_ids", "attention_mask", "labels")}
        pred = model(**b).logits.argmax(-1)
        m = b["labels"] != -100
        return float(((pred == b["labels"]) | ~m).all(1).float().mean())
