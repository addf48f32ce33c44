import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    raw = load_dataset("glue", "mrpc")
    with accelerator.main_process_first():
        data = raw.map(
            lambda row: tokenizer(row["sentence1"], row["sentence2"], truncation=True),
            remove_columns=["idx", "sentence1", "sentence2"],
        ).rename_column("label", "labels")
    collate = DataCollatorWithPadding(tokenizer)
    train_loader = DataLoader(data["train"], shuffle=True, batch_size=16, collate_fn=collate)
    eval_loader = DataLoader(data["validation"], batch_size=32, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    optimizer = AdamW(model.parameters(), lr=2e-5)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    metric = evaluate.load("glue", "mrpc")

    for epoch in range(3):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            metric.add_batch(predictions=predictions, references=batch["labels"])
        score = metric.compute()
        accelerator.print(f"epoch {epoch}: {score}")


if __name__ == "__main__":
    main()
