import argparse

import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding


def loaders(accelerator, tokenizer, batch_size):
    raw = load_dataset("glue", "mnli")

    def tokenize(rows):
        return tokenizer(rows["premise"], rows["hypothesis"], truncation=True, max_length=256)

    with accelerator.main_process_first():
        tokens = raw.map(tokenize, batched=True, remove_columns=["premise", "hypothesis", "idx"])
    tokens = tokens.rename_column("label", "labels")
    collate = DataCollatorWithPadding(tokenizer)
    train = DataLoader(tokens["train"], shuffle=True, batch_size=batch_size, collate_fn=collate)
    val = DataLoader(tokens["validation_matched"], batch_size=batch_size, collate_fn=collate)
    return train, val


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="roberta-base")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision="bf16")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    train, val = loaders(accelerator, tokenizer, 32)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    accuracy = evaluate.load("accuracy")
    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in val:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            accuracy.add_batch(predictions=predictions, references=references)
        result = accuracy.compute()
        accelerator.print(f"epoch {epoch}: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
