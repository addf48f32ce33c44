"""Fine-tune a text-to-image UNet with Accelerate and DeepSpeed ZeRO-2."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader
from transformers import CLIPTextModel

from captions import CaptionedImages


def main(args):
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=4)
    accelerator = Accelerator(mixed_precision="fp16", deepspeed_plugin=plugin)
    set_seed(42)
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae").requires_grad_(False)
    text = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet")
    noise_schedule = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    loader = DataLoader(CaptionedImages(args.data), batch_size=4, shuffle=True, num_workers=2)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    vae.to(accelerator.device, dtype=torch.float16)
    text.to(accelerator.device, dtype=torch.float16)

    step = 0
    for epoch in range(args.epochs):
        for pixels, ids in loader:
            with accelerator.accumulate(unet):
                latents = vae.encode(pixels.half()).latent_dist.sample() * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                t = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
                noisy = noise_schedule.add_noise(latents, noise, t)
                prediction = unet(noisy, t, text(ids)[0]).sample
                loss = F.mse_loss(prediction.float(), noise.float())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % 500 == 0:
                accelerator.save_state(f"{args.output}/checkpoint-{step}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="runwayml/stable-diffusion-v1-5")
    parser.add_argument("--data", default="captions.jsonl")
    parser.add_argument("--output", default="output")
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args())
