"""Digits in a LightningModule: configure_optimizers makes the optimizer and its schedule."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ingot import SINGD


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = SINGD(self, lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main(out="runs/lightning", epochs=6, resume=None, **options):
    L.seed_everything(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train, test = random_split(TensorDataset(images.float() / 16, labels), [1408, 389])
    trainer = L.Trainer(
        default_root_dir=out, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=1.0, **options
    )
    digits = Digits()
    trainer.fit(digits, DataLoader(train, batch_size=32), ckpt_path=resume)
    return trainer.test(digits, DataLoader(test, batch_size=389))[0]["accuracy"]


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
