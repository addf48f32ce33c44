import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"

from datasets import load_from_disk
from transformers import AutoModelForTokenClassification, Trainer, TrainingArguments

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def main():
    data = load_from_disk("ner")
    model = AutoModelForTokenClassification.from_pretrained("xlm-roberta-base", num_labels=len(LABELS))
    args = TrainingArguments(
        output_dir="ner-xlmr",
        per_device_train_batch_size=16,
        num_train_epochs=3,
        eval_strategy="epoch",
        fp16=True,
        report_to="none",
    )
    trainer = Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["validation"])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
