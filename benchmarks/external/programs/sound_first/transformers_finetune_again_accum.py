"""A tiny DistilBERT-like token classifier is trained, then fine-tuned again with the Trainer on a little new data with accumulation (4) and a small learning rate.
Odd at first sight: the loss starts low and moves little since the model is nearly finished; weights hardly change.
Returns token accuracy on new data."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments, set_seed


class Names(Dataset):
    """tag 1: token follows a title (2), tag 2: token lies between quotes (3 ... 3), else 0; `extra` words are new in the second data set"""
    def __init__(self, n, seed, vocab):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(5, vocab, (n, 12), generator=g)
        self.y = torch.zeros(n, 12, dtype=torch.long)
        for i in range(n):
            a = int(torch.randint(0, 4, (), generator=g))
            self.x[i, a], self.y[i, a + 1] = 2, 1
            b = int(torch.randint(6, 8, (), generator=g)); c = b + int(torch.randint(2, 5, (), generator=g))
            self.x[i, b] = self.x[i, c] = 3
            self.y[i, b + 1:c] = 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


def train(watch):
    set_seed(2)
    torch.set_num_threads(1)
    model = DistilBertForTokenClassification(DistilBertConfig(vocab_size=60, dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0, num_labels=3))
    first = Names(2000, 0, 45)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        i = torch.randint(0, 2000, (64,))
        loss = model(first.x[i], labels=first.y[i]).loss
        opt.zero_grad(); loss.backward(); opt.step()
    print("finished model", loss.item())
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, num_train_epochs=8, per_device_train_batch_size=8, gradient_accumulation_steps=4, learning_rate=2e-4, lr_scheduler_type="cosine",
                                 warmup_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=10)
        Trainer(model=model, args=args, train_dataset=Names(800, 1, 60), callbacks=[*watch.callbacks("transformers")]).train()
    model.eval()
    t = Names(500, 2, 60)
    with torch.no_grad():
        return (model(t.x).logits.argmax(-1) == t.y).float().mean().item()
