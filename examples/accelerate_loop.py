"""Digits with Accelerate: accumulate, clip_grad_norm_, a schedule, save_state and load_state."""

from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import manual_seed, nn, optim, tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from ingot import SINGD


def main(out="runs/accelerate", epochs=6, epochs_done=0, mixed_precision="no"):
    manual_seed(0)
    images, labels = map(tensor, load_digits(return_X_y=True))
    train, test = random_split(TensorDataset(images.float() / 16, labels), [1408, 389])
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    optimizer, loader = SINGD(model, lr=3e-3), DataLoader(train, batch_size=32)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader) // 2)
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if epochs_done:
        accelerator.load_state(f"{out}/epoch_{epochs_done}")
    for epoch in range(epochs_done, epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(f"{out}/epoch_{epoch + 1}")
    accelerator.end_training()  # which several processes must not leave out
    return sum(model.cpu()(x).argmax() == y for x, y in test) / len(test)


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
