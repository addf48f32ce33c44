"""Supervised fine-tuning of a chat model with the Hugging Face Trainer under FSDP."""
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

MODEL = "mistralai/Mistral-7B-v0.1"
LENGTH = 2048


def main():
    args = TrainingArguments(
        output_dir="mistral-sft",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        num_train_epochs=2,
        learning_rate=1e-5,
        bf16=True,
        logging_steps=10,
        save_strategy="no",
        fsdp="full_shard auto_wrap",
        fsdp_config={"transformer_layer_cls_to_wrap": ["MistralDecoderLayer"]},
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16)
    with args.main_process_first(desc="load and tokenize"):
        data = load_dataset("json", data_files="conversations.jsonl", split="train")
        data = data.map(
            lambda row: tokenizer(row["text"], truncation=True, max_length=LENGTH), remove_columns=data.column_names
        )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model("mistral-sft/final")
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained("mistral-sft/final")


if __name__ == "__main__":
    main()
