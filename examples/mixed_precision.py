"""Digits in float16 with a GradScaler, each batch in parts of whatever size the memory has room for."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ingot import SINGD


def main(epochs=6):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, labels = images.to(device, torch.float32) / 16, labels.to(device)
    train, test = torch.randperm(len(labels)).split([1408, 389])
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)).to(device)
    optimizer, scaler = SINGD(model, lr=3e-3), torch.amp.GradScaler(device)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            for part in batch.split(24):  # 24, 24 and 16 images: factors are those of all 64
                with torch.autocast(device, torch.float16):
                    loss = cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return (model(images[test]).argmax(1) == labels[test]).float().mean()


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
