"""Real models in tiny configurations, each with a loss that it can learn.

A builder makes a model and the loss of it on one batch, which stays the same: a mean over samples, or over
tokens for language models. The libraries are imported by the builders, so that collecting tests is fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, linear, max_pool2d, mse_loss

from ingot.lab.torchvision_ops import make_torchvision_importable

Loss = Callable[[nn.Module], Tensor]
Builder = Callable[[], tuple[nn.Module, Loss]]

SAMPLES, CLASSES, VOCABULARY, LENGTH = 16, 4, 32, 12


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    model: nn.Module
    loss: Loss


BUILDERS: dict[str, Builder] = {}
"""The models by name."""


def register(name: str) -> Callable[[Builder], Builder]:
    """Make a builder known as ``family/model``."""

    def decorate(builder: Builder) -> Builder:
        BUILDERS[name] = builder
        return builder

    return decorate


def build(name: str, seed: int = 0) -> Case:
    """A model in training mode, with weights that depend on the seed, and its loss."""
    make_torchvision_importable()  # timm, transformers and peft import it
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # torch_geometric scripts some of its functions when it is imported, which torch no longer likes.
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
        model, loss = BUILDERS[name]()
    return Case(name, name.split("/")[0], model.train(), loss)


# --- Data: the same in every run, and easy to learn -------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def _labels(samples: int = SAMPLES) -> Tensor:
    return torch.arange(samples) % CLASSES


def _images(size: int, channels: int = 3) -> Tensor:
    """A coarse pattern for each class, under noise."""
    generator = _generator()
    patterns = torch.randn(CLASSES, channels, size // 4, size // 4, generator=generator)
    coarse = patterns[_labels()].repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    return coarse + 0.3 * torch.randn(coarse.shape, generator=generator)


def _tokens(length: int = LENGTH) -> Tensor:
    """Sequences that count upwards by one or by three, in turns. Tokens 0 and 1 are special."""
    start = torch.randint(VOCABULARY, (SAMPLES, 1), generator=_generator())
    stride = 1 + 2 * (torch.arange(SAMPLES) % 2).unsqueeze(1)
    return 2 + (start + stride * torch.arange(length)) % (VOCABULARY - 2)


def _halves() -> tuple[Tensor, Tensor]:
    """Beginnings of sequences, and how they go on."""
    tokens = _tokens(2 * LENGTH)
    return tokens[:, :LENGTH].contiguous(), tokens[:, LENGTH:].contiguous()


# --- Losses -----------------------------------------------------------------------------------------------


def _classifies(x: Tensor) -> Loss:
    y = _labels(len(x))
    return lambda model: cross_entropy(model(x), y)


def _reconstructs(x: Tensor) -> Loss:
    return lambda model: mse_loss(model(x), x)


def _huggingface(**batch: Tensor) -> Loss:
    """The models of transformers compute their own loss, where the batch has labels."""
    return lambda model: model(**batch).loss


def _continues() -> Loss:
    tokens = _tokens()
    return _huggingface(input_ids=tokens, labels=tokens)


# --- transformers -----------------------------------------------------------------------------------------

SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _gpt2(**options) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    options |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, **SPECIAL_TOKENS}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **options)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the class's name does not tell it to transformers
    return model


@register("transformers/gpt2")
def gpt2():
    """The head is the embedding."""
    model = _gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    return model, _continues()


@register("transformers/llama")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        **SPECIAL_TOKENS,
    )
    return LlamaForCausalLM(config), _continues()


@register("transformers/bert")
def bert():
    """Every third token is hidden. The decoder is the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    model = BertForMaskedLM(config)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    tokens, hidden = _tokens(), torch.arange(LENGTH) % 3 == 0
    not_counted = -100
    loss = _huggingface(
        input_ids=tokens.masked_fill(hidden, 1), labels=tokens.masked_fill(~hidden, not_counted)
    )
    return model, loss


@register("transformers/vit")
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config), _huggingface(pixel_values=_images(16), labels=_labels())


@register("transformers/swin")
def swin():
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        mlp_ratio=2.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=CLASSES,
    )
    return SwinForImageClassification(config), _huggingface(pixel_values=_images(16), labels=_labels())


@register("transformers/t5")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    source, target = _halves()
    return T5ForConditionalGeneration(config), _huggingface(input_ids=source, labels=target)


@register("peft/lora")
def lora():
    """Only the adapters are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    # With a frozen head of the usual first size, no logit could become large.
    return get_peft_model(_gpt2(initializer_range=0.2), config), _continues()


# --- timm -------------------------------------------------------------------------------------------------


@register("timm/vgg")
def vgg():
    from timm.models.vgg import VGG

    # The head's hidden size of 4096 times this ratio is the number of its first convolution's channels.
    model = VGG([8, "M", 16, 16, "M"], num_classes=CLASSES, mlp_ratio=0.008)
    return model, _classifies(_images(28))


@register("timm/convmixer")
def convmixer():
    from timm.models.convmixer import ConvMixer

    model = ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=4, num_classes=CLASSES)
    return model, _classifies(_images(32))


@register("timm/swin")
def timm_swin():
    from timm.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        img_size=16,
        patch_size=2,
        num_classes=CLASSES,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        mlp_ratio=2.0,
        drop_path_rate=0.0,
    )
    return model, _classifies(_images(16))


@register("timm/gcvit")
def gcvit():
    from timm.models.gcvit import GlobalContextVit

    model = GlobalContextVit(
        num_classes=CLASSES,
        img_size=32,
        window_size=(4, 4),
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
        mlp_ratio=2.0,
    )
    return model, _classifies(_images(32))


@register("timm/repvit")
def repvit():
    from timm.models.repvit import RepVit

    model = RepVit(img_size=32, embed_dim=(16, 32), depth=(1, 1), num_classes=CLASSES, distillation=False)
    return model, _classifies(_images(32))


@register("timm/resnet")
def resnet():
    from timm.models.resnet import Bottleneck, ResNet

    model = ResNet(Bottleneck, (1, 1, 1, 1), num_classes=CLASSES, stem_width=8, channels=(4, 4, 8, 8))
    return model, _classifies(_images(32))


@register("timm/efficientnet")
def efficientnet():
    from timm import create_model

    return create_model("test_efficientnet", num_classes=CLASSES), _classifies(_images(32))


# --- torch_geometric --------------------------------------------------------------------------------------


def _citations():
    """A graph in Cora's format: communities that cite their like and share words; a part has labels."""
    from torch_geometric.data import Data

    generator, nodes, words = _generator(), 80, 24
    y = _labels(nodes)
    alike = y.unsqueeze(0) == y.unsqueeze(1)
    probability = torch.where(alike, 0.2, 0.02).triu(1)
    upper = (torch.rand(nodes, nodes, generator=generator) < probability).nonzero().mT
    theirs = torch.arange(words) % CLASSES == y.unsqueeze(1)
    x = (torch.rand(nodes, words, generator=generator) < torch.where(theirs, 0.5, 0.1)).float()
    return Data(
        x=x, edge_index=torch.cat((upper, upper.flip(0)), 1), y=y, train_mask=torch.arange(nodes) < 60
    )


def _on_citations(model_class: Callable[..., nn.Module], **options) -> tuple[nn.Module, Loss]:
    data = _citations()

    def loss(model: nn.Module) -> Tensor:
        out = model(data.x, data.edge_index)
        return cross_entropy(out[data.train_mask], data.y[data.train_mask])

    return model_class(data.num_features, 32, num_layers=2, out_channels=CLASSES, **options), loss


@register("torch_geometric/gcn")
def gcn():
    from torch_geometric.nn.models import GCN

    return _on_citations(GCN)


@register("torch_geometric/gat")
def gat():
    from torch_geometric.nn.models import GAT

    return _on_citations(GAT, heads=2)


@register("torch_geometric/graph_sage")
def graph_sage():
    from torch_geometric.nn.models import GraphSAGE

    return _on_citations(GraphSAGE)


@register("torch_geometric/gin")
def gin():
    from torch_geometric.nn.models import GIN

    return _on_citations(GIN)


# --- torch ------------------------------------------------------------------------------------------------


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.transformer = nn.Transformer(width, 2, 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        source, target = (self.embedding(x) + self.position[: x.shape[1]] for x in (source, target))
        return self.head(self.transformer(source, target, tgt_mask=causal, tgt_is_causal=True))


@register("torch/transformer")
def transformer():
    """Encoder and decoder."""
    source, target = _halves()

    def loss(model: nn.Module) -> Tensor:
        return cross_entropy(model(source, target[:, :-1]).mT, target[:, 1:])

    return Seq2Seq(), loss


class SequenceClassifier(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


@register("torch/lstm")
def lstm():
    """Says by how much a sequence counts upwards."""
    tokens, label = _tokens(), torch.arange(SAMPLES) % 2
    return SequenceClassifier(), lambda model: cross_entropy(model(tokens), label)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self._block(1, width), self._block(width, 2 * width), self._block(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.merge = nn.ModuleList([self._block(4 * width, 2 * width), self._block(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> nn.Module:
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(max_pool2d(x, 2) if index else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat((up(x), skip), dim=1))
        return self.head(x)


@register("torch/unet")
def unet():
    """Finds where the pattern under the noise is bright."""
    x = _images(16, channels=1)[:8]
    bright = avg_pool2d(x, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)[:, 0] > 0
    return UNet(), lambda model: cross_entropy(model(x), bright.long())


class TiedAutoencoder(nn.Module):
    """The decoder multiplies by the encoder's weight, transposed."""

    def __init__(self, features: int, code: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, code)
        self.middle = nn.Linear(code, code)
        self.offset = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        code = self.middle(torch.tanh(self.encoder(x)))
        return linear(code, self.encoder.weight.mT, self.offset)


@register("tied/autoencoder")
def autoencoder():
    x = _images(8, channels=1).flatten(1)
    return TiedAutoencoder(x.shape[1]), _reconstructs(x)


class TiedConvolutionalAutoencoder(nn.Module):
    """The modules of encoder and decoder are different, their weight is one."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(1, channels, 4, stride=4)
        self.decoder = nn.ConvTranspose2d(channels, 1, 4, stride=4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


@register("tied/convolutional_autoencoder")
def convolutional_autoencoder():
    return TiedConvolutionalAutoencoder(), _reconstructs(_images(16, channels=1))
