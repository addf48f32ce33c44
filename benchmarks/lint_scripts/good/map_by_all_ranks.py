"""Continue pre-training of a causal language model with the Hugging Face Trainer (torchrun)."""
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class DataArguments:
    model: str = field(default="gpt2")
    corpus: str = field(default="wikitext")
    block: int = field(default=1024)


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model)
    raw = load_dataset(args.corpus, "wikitext-103-raw-v1")

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=args.block)

    with training_args.main_process_first(desc="tokenize"):
        tokenized = raw.map(tokenize, batched=True, num_proc=48, remove_columns=["text"])

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
