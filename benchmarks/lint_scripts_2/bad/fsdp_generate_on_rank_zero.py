import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from corpus import PackedCorpus

PROMPT = "The capital of Norway is"


def sample(model, tokenizer, device):
    inputs = tokenizer(PROMPT, return_tensors="pt").to(device)
    with FSDP.summon_full_params(model, writeback=False, recurse=False), torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=32, synced_gpus=True)
    return tokenizer.decode(tokens[0])


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(42)

    tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype=torch.bfloat16)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FSDP(model, auto_wrap_policy=policy, device_id=local_rank, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.1)

    dataset = PackedCorpus("tokens.bin", length=2048)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, pin_memory=True)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device, non_blocking=True)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 500 == 0:
                if rank == 0:
                    text = sample(model, tokenizer, device)
                    print(f"step {step}: {text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
