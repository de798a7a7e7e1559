"""Small models of every kind of layer, batches for them, and losses, the same in each process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ingot.lab.torchvision_ops import make_torchvision_importable
from ingot.model import unwrapped


class Convolutional(nn.Module):
    """Plain, grouped and transposed convolutions, a norm, and a head with fewer rows than processes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 2, bias=True),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((-2, -1)))


class Bypassed(Convolutional):
    """With a layer that is used without its forward pass."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Embedding(4, 3)

    def forward(self, x):
        return super().forward(x + self.shift.weight[:1].view(3, 1, 1))


class Attentive(nn.Module):
    """Embedding, packed attention, and a head that the embedding is tied to."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.block(self.tokens(x)))


class Heads(nn.Module):
    """Attention whose heads any number of processes can share out."""

    def __init__(self, width, head):
        super().__init__()
        self.head = head
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """Embedding, attention, a perceptron and a head, of linear layers each."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attention = Heads(16, 4)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, x):
        x = self.tokens(x)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return self.head(x)


class Branches(nn.Module):
    """A layer that is used or not."""

    def __init__(self):
        super().__init__()
        self.first, self.extra = nn.Linear(75, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, with_extra):
        x = torch.relu(self.first(x.flatten(1)))
        return self.head(self.extra(x) if with_extra else x)


def gpt2():
    """GPT-2 itself, in small: transposed linear layers, tied embeddings."""
    make_torchvision_importable()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=37,
        n_positions=8,
        n_embd=12,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


MODELS = {
    "cnn": Convolutional,
    "bypassed": Bypassed,
    "attention": Attentive,
    "branches": Branches,
    "transformer": Transformer,
    "gpt2": gpt2,
}
"""Makers by name."""


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


def blocks(model):
    """What fully_shard is called on, before the model itself."""
    if hasattr(model, "transformer"):
        return list(model.transformer.h)
    return [getattr(model, name) for name in ("block", "body", "attention") if hasattr(model, name)]


def batch(name, step, size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + step)
    if name in ("cnn", "bypassed"):
        x = torch.randn(size, 3, 5, 5, generator=generator, dtype=dtype)
        return x, torch.randint(0, 3, (size,), generator=generator)
    vocabulary = 37 if name == "gpt2" else 11
    places = 8 if name == "transformer" else 6  # which sequence parallelism must divide evenly
    x = torch.randint(0, vocabulary, (size, places), generator=generator)
    return x, torch.randint(0, vocabulary, (size, places), generator=generator)


def loss_of(model, x, y, reduction="mean"):
    # Positions for each sample, as tokens are: GPT-2 looks its own up once for all samples of a batch, so
    # that their gradients come as one sum over the batch, of which each process has another.
    places = {}
    if hasattr(unwrapped(model), "transformer"):
        places = {"position_ids": torch.arange(x.shape[1]).expand_as(x)}
    output = model(x, **places)
    output = getattr(output, "logits", output)
    return cross_entropy(output.flatten(0, -2), y.flatten(), reduction=reduction)
