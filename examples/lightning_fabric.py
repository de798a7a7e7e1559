"""Digits with Lightning Fabric: setup, backward, clip_gradients, a schedule, save and load."""

from lightning import Fabric
from sklearn.datasets import load_digits
from torch import nn, optim, tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from ingot import SINGD


def main(checkpoint="runs/fabric.ckpt", epochs=6, resume=False, **options):
    fabric = Fabric(**options)
    fabric.launch()
    fabric.seed_everything(0)
    images, labels = map(tensor, load_digits(return_X_y=True))
    train, test = random_split(TensorDataset(images.float() / 16, labels), [1408, 389])
    loader = fabric.setup_dataloaders(DataLoader(train, batch_size=32))
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, SINGD(model, lr=3e-3))
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume:
        fabric.load(checkpoint, parts)
    for _ in range(scheduler.last_epoch, epochs):
        for i, (x, y) in enumerate(loader):
            fabric.backward(nn.functional.cross_entropy(model(x), y) / 2)
            if i % 2:  # two micro-batches make a batch
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        fabric.save(checkpoint, parts)
    return sum(model.cpu()(x).argmax() == y for x, y in test) / len(test)


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
