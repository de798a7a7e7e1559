"""Digits in plain PyTorch: bfloat16 autocast, gradient accumulation, clipping, a schedule, checkpoints."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ingot import SINGD


def main(checkpoint="plain_loop.pt", epochs=6, resume=False, bf16=True):
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train, test = random_split(TensorDataset(images.float() / 16, labels), [1408, 389])
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    optimizer = SINGD(model, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name, saved in torch.load(checkpoint, weights_only=True).items() if resume else ():
        parts[name].load_state_dict(saved)
    for _ in range(scheduler.last_epoch, epochs):
        for i, (x, y) in enumerate(DataLoader(train, batch_size=32)):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            if i % 2:  # two micro-batches make a batch
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    return sum(model(x).argmax() == y for x, y in test) / len(test)


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
