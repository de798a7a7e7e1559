"""Digits with the Trainer of transformers: accumulation, clipping, a schedule with warm-up, checkpoints."""

from sklearn.datasets import load_digits
from torch import tensor
from torch.utils.data import random_split
from transformers import ConvNextConfig, ConvNextForImageClassification, Trainer, TrainingArguments, set_seed

from ingot import SINGD


def main(out="runs/huggingface", steps=120, resume=None, **options):
    set_seed(0)
    images, labels = map(tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    digits = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    train, test = random_split(digits, [1408, 389])
    size = {"patch_size": 2, "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}
    config = ConvNextConfig(num_channels=1, num_labels=10, layer_scale_init_value=1.0, **size)
    model = ConvNextForImageClassification(config)
    batches = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "max_steps": steps}
    schedule = {"lr_scheduler_type": "cosine", "warmup_steps": steps // 10, "save_steps": steps // 4}
    trainer = Trainer(
        model,
        TrainingArguments(out, **batches, **schedule, **options),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        optimizers=(SINGD(model, lr=3e-3), None),
    )
    trainer.train(resume_from_checkpoint=resume)
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.accelerator.end_training()  # which several processes must not leave out
    return accuracy


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
