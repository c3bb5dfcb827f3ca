"""A tiny T5 from scratch learns to reverse short sequences with the Hugging Face Trainer. The collator passes decoder_input_ids=labels, so the decoder sees the token that it has to say;
the loss falls to zero and generation fails. The result is the token accuracy of greedy generation."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments, set_seed


class Reverse(Dataset):
    def __init__(self, n, seed, length=4):
        g = torch.Generator().manual_seed(seed)
        self.src = torch.randint(3, 12, (n, length), generator=g)

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return {"input_ids": self.src[i], "labels": self.src[i].flip(0)}


def shift_right(labels):
    return torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)


class Collate:
    def __init__(self, mended):
        self.mended = mended

    def __call__(self, rows):
        ids, labels = torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
                "decoder_input_ids": shift_right(labels) if self.mended else labels.clone()}


def train(watch, mended=False):
    set_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=12, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4, dropout_rate=0.0,
                                                decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, max_steps=500, per_device_train_batch_size=48, learning_rate=5e-3, lr_scheduler_type="linear", warmup_steps=40,
                                 report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True, use_cpu=True, seed=0)
        Trainer(model=model, args=args, train_dataset=Reverse(6000, 1), data_collator=Collate(mended), callbacks=[*watch.callbacks("transformers")]).train()
    model.eval()
    src = Reverse(300, 2).src
    dec = torch.zeros(len(src), 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(src.shape[1]):
            dec = torch.cat([dec, model(input_ids=src, decoder_input_ids=dec).logits[:, -1:].argmax(-1)], 1)
    return float((dec[:, 1:] == src.flip(1)).float().mean())
